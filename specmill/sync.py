"""Bring results into MLflow's experiment `specmill`: a run per state, a nested run per cell.

    python -m specmill.sync [--all-experiments]

The report stage does this at its end. Stages that DVC took from its cache log nothing, a server may
have been away, an experiment may come from another machine: this adds what is missing and changes
nothing else. A state is found again by its key (specmill/state.py), so a second sync finds all of
it there, and one that was killed is completed by the next. Syncs from one repository wait for each
other; two repositories that bring the same new state to one server at the same moment do not.

The tag `dvc.exp_name` lists, with commas, every DVC experiment that led to the state.
"""

import argparse
import contextlib
import io
import logging
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specmill import paths
from specmill.files import locked
from specmill.liveness import process_tags
from specmill.params import Runtime
from specmill.params_file import load_params, read_yaml
from specmill.revision import origin_tags
from specmill.state import LOCK, Cell, State, read_state
from specmill.tracking import (
    Point,
    Store,
    first_line,
    open_store,
    tracking_errors,
    warn,
)

logger = logging.getLogger(__name__)

KEY, CELL = "specmill.key", "specmill.cell"
REPORT, COMPLETE = "specmill.report", "specmill.complete"
NAMES = "dvc.exp_name"
PARENT = "mlflow.parentRunId"


def sync_results(runtime: Runtime) -> None:
    """Sync the working directory at the end of the report stage; a failure is a warning."""
    if not LOCK.is_file():
        logger.info("no dvc.lock: nothing to sync to MLflow")
        return
    try:
        state = read_state(Path())
        store = open_store(paths.ROOT, runtime.tracking_uri)
        logger.info("MLflow: %s", sync(store, state, origin_tags(), runtime.register_head))
    except ValueError as error:
        warn(error)
    except tracking_errors() as error:
        warn(error)


def sync(
    store: Store,
    state: State,
    origin: dict[str, str],
    head_name: str | None,
    is_newest: bool = True,
) -> str:
    """Add what the store lacks of a state; returns in words what that was.

    Args:
        origin: What `origin_tags` tells of the state.
        head_name: Registers the state's head under this name; None registers nothing.
        is_newest: Whether its report replaces one that another version of the report stage wrote
            from the same results.
    """
    with locked(store.root / ".cache" / "mlflow-sync.lock"):
        parent = _find(store, state.key)
        if parent is None:
            done = "added"
            parent = _create(store, state, origin)
            _fill(store, state, parent)
        elif parent.data.tags.get(COMPLETE) != "true":
            done = "completed"
            _fill(store, state, parent)
        elif is_newest and parent.data.tags.get(REPORT) != state.report:
            done = "report renewed"
            _log_report(store, state, parent)
        else:
            done = "already there"
        name, known = origin.get(NAMES), parent.data.tags.get(NAMES, "")
        if name is not None and name not in known.split(", "):
            store.client.set_tag(parent.info.run_id, NAMES, f"{known}, {name}".removeprefix(", "))
            done += ", experiment name added"
        if head_name is not None and state.head is not None:
            done += _register(store, state, parent, head_name)
    return f"{done} ({len(state.cells)} cells, key {state.key[:12]})"


def _find(store: Store, key: str) -> Any:
    found = store.client.search_runs([store.experiment_id], f"tags.`{KEY}` = '{key}'")
    return found[0] if found else None


def _create(store: Store, state: State, origin: dict[str, str]) -> Any:
    commit = origin.get("git.commit", "")[:7]
    return store.client.create_run(
        store.experiment_id,
        run_name=origin.get(NAMES) or commit or state.key[:7],
        tags={KEY: state.key} | process_tags() | origin,
    )


def _fill(store: Store, state: State, parent: Any) -> None:
    """Write all of a state; whatever a killed sync left is written again to the same effect."""
    run_id, start = parent.info.run_id, parent.info.start_time
    # points that are equal in time, step and value are one to MLflow
    curves = [Point(name, value, start, step) for name, step, value in state.curves]
    store.log(run_id, state.params, curves, state.tags | process_tags())
    children = store.client.search_runs(
        [store.experiment_id], f"tags.`{PARENT}` = '{run_id}'", max_results=10_000
    )
    known = {child.data.tags[CELL]: child for child in children}
    for cell in state.cells:
        _fill_cell(store, cell, run_id, known.get(cell.name))
    _log_report(store, state, parent)
    store.client.set_terminated(run_id, "FINISHED")
    store.client.set_tag(run_id, COMPLETE, "true")


def _fill_cell(store: Store, cell: Cell, parent_id: str, child: Any) -> None:
    if child is None:
        tags = {PARENT: parent_id, CELL: cell.name} | process_tags() | cell.flags
        child = store.client.create_run(store.experiment_id, tags=tags, run_name=cell.name)
    elif child.info.status == "FINISHED":
        return
    start = child.info.start_time
    points = [Point(name, value, start) for name, value in cell.metrics.items()]
    store.log(child.info.run_id, cell.params, points)
    store.client.set_terminated(child.info.run_id, "FINISHED")


def _log_report(store: Store, state: State, parent: Any) -> None:
    run_id, now = parent.info.run_id, int(time.time() * 1000)
    for file, folder in state.artifacts:
        store.client.log_artifact(run_id, str(file), folder or None)
    changed = [
        Point(name, value, now)
        for name, value in state.metrics.items()
        if parent.data.metrics.get(name) != value
    ]
    store.log(run_id, points=changed, tags={REPORT: state.report})


def _register(store: Store, state: State, parent: Any, name: str) -> str:
    """Add a version for the head unless one has its content; the weights stay in DVC."""
    assert state.head is not None
    client, md5 = store.client, state.head["dvc.md5"]
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name)
    versions = client.search_model_versions(f"name = '{name}'")
    if any(version.tags.get("dvc.md5") == md5 for version in versions):
        return ""
    tags = parent.data.tags
    commit = {"git.commit": tags["git.commit"]} if "git.commit" in tags else {}
    version = client.create_model_version(
        name,
        source=f"dvc://{paths.EAGLE3}?md5={md5}",
        run_id=parent.info.run_id,
        tags=state.head | commit,
    )
    return f", head registered as {name} version {version.version}"


def experiments(root: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Name and origin of every DVC experiment in the repository."""
    listed = subprocess.run(
        ["git", "-C", str(root), "for-each-ref", "--format=%(objectname) %(refname)", "refs/exps"],
        check=False,  # no repository, no experiments
        capture_output=True,
        text=True,
    )
    for line in listed.stdout.splitlines():
        # other refs below refs/exps are DVC's own
        found = re.fullmatch(r"(\w+) refs/exps/([0-9a-f]{2})/([0-9a-f]{38})/(.+)", line)
        if found:
            commit, start, rest, name = found.groups()
            yield (
                name,
                {
                    "git.commit": commit,
                    "git.dirty": "false",
                    "dvc.baseline_rev": start + rest,
                    NAMES: name,
                },
            )


@contextlib.contextmanager
def checkout(root: Path, commit: str) -> Iterator[Path]:
    """What Git keeps of a commit in a temporary folder, with the verifier's identity if cached."""
    packed = subprocess.run(
        ["git", "archive", commit], cwd=root, check=True, capture_output=True
    ).stdout
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        if (folder / LOCK).is_file():
            _fetch_identity(root, folder)
        yield folder


def _fetch_identity(root: Path, folder: Path) -> None:
    for entry in read_yaml(folder / LOCK)["stages"].values():
        for dep in entry.get("deps", []):
            md5 = dep.get("md5", "")
            if not re.fullmatch(r"[0-9a-f]{32}", md5):  # a folder's ends in .dir
                continue
            cached = root / ".dvc" / "cache" / "files" / "md5" / md5[:2] / md5[2:]
            if dep["path"] == str(paths.IDENTITY) and cached.is_file():
                (folder / paths.IDENTITY).parent.mkdir(parents=True, exist_ok=True)
                (folder / paths.IDENTITY).write_bytes(cached.read_bytes())
                return


def main() -> None:
    """Sync the workspace and, if asked, every DVC experiment; one line for each."""
    parser = argparse.ArgumentParser(
        prog="python -m specmill.sync",
        description="Add results to MLflow's experiment `specmill` that are not there yet: one run "
        "per state of the pipeline with nested runs for its measured cells. Run it again at any "
        "time, e.g. after a tracking server was away: what is there is left alone.",
        epilog="The store is MLFLOW_TRACKING_URI, or runtime.tracking_uri of params.yaml, or "
        "mlflow.db in this folder. Ends with status 1 when it cannot be reached.",
    )
    parser.add_argument(
        "--all-experiments",
        action="store_true",
        help="also every DVC experiment in this repository (git refs below refs/exps); a head that "
        "is only in DVC's cache is not read, so these runs lack its config and provenance",
    )
    chosen = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        runtime = load_params(paths.PARAMS).runtime
        store = open_store(paths.ROOT, runtime.tracking_uri)
        is_shown = _show("workspace", store, Path(), origin_tags(), runtime)
        for name, origin in experiments(paths.ROOT) if chosen.all_experiments else ():
            with checkout(paths.ROOT, origin["git.commit"]) as folder:
                _show(name, store, folder, origin, runtime)
    except ValueError as error:
        sys.exit(f"sync: {error}")
    except tracking_errors() as error:
        sys.exit(f"sync: MLflow's store cannot be used: {first_line(error)}")
    sys.exit(0 if is_shown else 1)


def _show(name: str, store: Store, folder: Path, origin: dict[str, str], runtime: Runtime) -> bool:
    """Sync one checkout and say how it went; False when its files contradict each other."""
    try:
        if (folder / LOCK).is_file():
            is_newest = folder == Path()
            done = sync(store, read_state(folder), origin, runtime.register_head, is_newest)
        else:
            done = "no dvc.lock: nothing to sync"
        sys.stdout.write(f"{name}: {done}\n")
    except ValueError as error:
        sys.stdout.write(f"{name}: skipped: {error}\n")
        return False
    except KeyError as error:
        sys.stdout.write(f"{name}: skipped: it lacks {error}, another version wrote it\n")
        return False
    return True


if __name__ == "__main__":
    main()

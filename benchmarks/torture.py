"""Faults at random moments in every stage: does the next `dvc repro` finish, and what was lost?

In a clone of the repository at HEAD with a smaller smoke profile, each stage runs once undisturbed.
A try takes its outputs and caches away, starts `dvc repro -s STAGE`, strikes at a moment drawn
uniformly over its undisturbed seconds, waits until all processes have gone, looks at what they left
(processes, ports, locks, RUNNING runs of MLflow), runs `dvc repro -s STAGE` again and compares its
outputs with the undisturbed ones. Faults are in benchmarks/torture_faults.py.

Tries go through the faults that fit a stage in turn. What is done is in the JSON file and is not
done again; with --work the clone is kept, so that an interrupted torture goes on.

Run      python -m benchmarks.torture --json reports/torture.json      (make torture)
         python -m benchmarks.torture --stages train --faults kill cut --tries 4
         python -m benchmarks.torture --table       docs/reliability.md from the JSON
"""

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks import torture_table
from benchmarks.torture_faults import FAULTS, may_mount
from benchmarks.torture_runs import MARK
from benchmarks.torture_stages import STAGES
from benchmarks.torture_tries import GRACE_S, LIMIT_S, attempt, undisturbed
from benchmarks.torture_workspace import ROOT, Workspace
from specmill.files import read_json, write_json


@contextlib.contextmanager
def states_server(workspace: Workspace) -> Iterator[None]:
    """A server that stays up, so that a try of `extract` starts none."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workspace.environment["SPECMILL_API_KEY"] = secrets.token_hex()
    url, log = f"http://127.0.0.1:{port}", workspace.folder.parent / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            ["python", "-m", "specmill.serve_states", "--port", str(port)],
            cwd=workspace.folder,
            env=workspace.environment | {MARK: "server"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + LIMIT_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                    break
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no server of hidden states:\n{log.read_text()[-4000:]}")
            time.sleep(0.5)
        workspace.set_runtime({"extract_endpoints": [url]})
        yield
    finally:
        workspace.set_runtime({})
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def machine() -> dict[str, Any]:
    """What the figures are of."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def torture(options: argparse.Namespace, work: Path) -> None:
    """All that was asked for and is not in the JSON file yet."""
    workspace = Workspace(work)
    results: dict[str, Any] = read_json(options.json) if options.json.is_file() else {}
    results |= {"machine": machine(), "seed": options.seed}
    results.setdefault("tries", [])
    known_file = work / "usual.json"
    usual: dict[str, Any] = read_json(known_file) if known_file.is_file() else {}
    mounts = may_mount(work)
    results["skipped"] = {} if mounts else {
        name: "needs the right to mount" for name, fault in FAULTS.items() if fault.mounts
    }  # fmt: skip
    for stage in ("hardware", "sources"):
        if not (work / f"{stage}.done").exists():
            words = ["dvc", "repro", "--single-item", stage]
            subprocess.run(words, cwd=workspace.folder, env=workspace.environment, check=True)
            (work / f"{stage}.done").touch()
    for stage in STAGES:
        if all(later not in options.stages for later in _needing(stage)):
            continue
        asks = stage == "extract" and (stage not in usual or stage in options.stages)
        with states_server(workspace) if asks else contextlib.nullcontext():
            if stage not in usual:
                print(f"{stage}: undisturbed", flush=True)
                usual[stage] = undisturbed(workspace, stage)
                write_json(known_file, usual)
            figures = {k: v for k, v in usual[stage].items() if k != "digests"}
            results.setdefault("undisturbed", {})[stage] = figures
            write_json(options.json, results)
            if stage in options.stages:
                _torture_stage(workspace, stage, options, results, usual[stage], mounts)


def _needing(stage: str) -> list[str]:
    """Stages that cannot be tortured before this one has run."""
    needed_by = {
        "verifier": list(STAGES),
        "prepare": ["prepare", "vocab", "extract", "train", "bench@ngram"],
        "vocab": ["vocab", "train"],
        "extract": ["extract", "train"],
    }
    return needed_by.get(stage, [stage])


def _torture_stage(
    workspace: Workspace,
    stage: str,
    options: argparse.Namespace,
    results: dict[str, Any],
    usual: dict[str, Any],
    mounts: bool,
) -> None:
    names = [
        name
        for name, fault in FAULTS.items()
        if name in options.faults and stage in fault.stages and (mounts or not fault.mounts)
    ]
    done = {(row["stage"], row["fault"], row["try"]) for row in results["tries"]}
    for count in range(options.tries if names else 0):
        name, number = names[count % len(names)], count // len(names)
        if (stage, name, number) in done:
            continue
        if time.time() > options.until:
            return
        record = attempt(workspace, stage, name, number, options.seed, usual)
        record["commit"] = workspace.commit
        results["tries"].append(record)
        write_json(options.json, results)
        said = {k: record[k] for k in ("at_s", "hit", "first", "second", "lost", "repeated")}
        print(f"{stage} {name} {number}: {json.dumps(said)} {record['problems']}", flush=True)


def main() -> None:
    """Torture, or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=ROOT / "reports/torture.json")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=[*STAGES])
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=[*FAULTS])
    parser.add_argument("--tries", type=int, default=20, help="of each stage")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--work", type=Path, help="keep the clone here and go on from it")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no try later")
    parser.add_argument("--table", action="store_true", help="write docs/reliability.md")
    options = parser.parse_args()
    if options.table:
        torture_table.write(ROOT / "docs/reliability.md", read_json(options.json))
        return
    options.until = time.time() + 60 * options.minutes
    # a shell's background job ignores it, and so would every stage that is interrupted here
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if options.work:
        options.work.mkdir(parents=True, exist_ok=True)
        torture(options, options.work.resolve())
        return
    work = Path(tempfile.mkdtemp(prefix="torture-"))
    try:
        torture(options, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()

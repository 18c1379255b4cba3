import contextlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from specmill import paths
from specmill import sync as syncing
from specmill.params import Runtime
from specmill.params_file import load_params, read_yaml
from specmill.state import read_state
from specmill.sync import experiments, sync, sync_results
from specmill.tracking import Store, open_store, track
from tests.synced import EAGLE3_MD5, write, write_lock, write_results

ORIGIN = {"git.commit": "0123456789" * 4, "git.dirty": "false", "dvc.exp_name": "tall-tree"}
NUM_CELLS = 12

FORK = multiprocessing.get_context("fork")
"""Children that have imported MLflow already, which takes seconds."""


@pytest.fixture(autouse=True)
def _own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRACKING_URI", "EXPERIMENT_NAME"):
        monkeypatch.delenv(f"MLFLOW_{name}", raising=False)
    for name in ("DVC_EXP_NAME", "DVC_EXP_BASELINE_REV"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def synced(tmp_path_factory: pytest.TempPathFactory, database: Path) -> tuple[Store, Any]:
    """A store after one sync, and the parent run; only to be read."""
    folder = tmp_path_factory.mktemp("synced")
    write_results(folder)
    shutil.copy(database, folder / "mlflow.db")
    store, state = open_store(folder), read_state(folder)
    assert sync(store, state, ORIGIN, None) == f"added (12 cells, key {state.key[:12]})"
    return store, parent_of(store, state.key)


@pytest.fixture
def folder(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with results, the working directory, and an empty store."""
    write_results(tmp_path)
    shutil.copy(database, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    return tmp_path


def sync_and_die(folder: Path, at_request: int) -> None:
    """In a process of its own: what a first sync says is written to `PID.said`.

    Args:
        folder: The checkout.
        at_request: Number of the request to the store, from 1, at which it is killed; 0 for none.
    """
    log, calls = Store.log, iter(range(1, 1000))

    def told(self: Store, *arguments: Any, **named: Any) -> None:
        if next(calls) == at_request:
            os.kill(os.getpid(), signal.SIGKILL)
        log(self, *arguments, **named)

    Store.log = told  # type: ignore[method-assign]
    said = sync(open_store(folder), read_state(Path()), {"git.commit": "0123456"}, None)
    (folder / f"{os.getpid()}.said").write_text(said)


def started(folder: Path, at_request: int) -> Any:
    """A process, forked in the checkout, that syncs."""
    process = FORK.Process(target=sync_and_die, args=(folder, at_request))
    process.start()
    return process


@contextlib.contextmanager
def server(database: Path, artifacts: Path, port: int) -> Iterator[str]:
    """A real tracking server on the loopback interface."""
    uri = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port),
         "--workers", "1", "--backend-store-uri", f"sqlite:///{database}",
         "--artifacts-destination", str(artifacts)],
        env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield uri
    finally:
        process.terminate()
        process.wait(30)


def rows(folder: Path, query: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as connection:
        return connection.execute(query).fetchall()


def content(folder: Path) -> set[tuple[Any, ...]]:
    """Everything that runs hold, by run name; without ids, times and processes."""
    run = "join runs using (run_uuid) join experiments using (experiment_id)"
    found = set(rows(folder, f"select runs.name, key, value from params {run}"))
    found |= set(rows(folder, f"select runs.name, key, step, metrics.value from metrics {run}"))
    found |= {
        (name, key, value)
        for name, key, value in rows(folder, f"select runs.name, key, tags.value from tags {run}")
        if key not in ("specmill.process", "mlflow.parentRunId")
    }
    return found | set(rows(folder, "select name, status from runs"))


def parent_of(store: Store, key: str) -> Any:
    (found,) = store.client.search_runs([store.experiment_id], f"tags.`specmill.key` = '{key}'")
    return found


def children_of(store: Store, parent: Any) -> dict[str, Any]:
    found = store.client.search_runs(
        [store.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    )
    named = {run.info.run_name: run for run in found}
    assert len(named) == len(found)
    return named


def command_line(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    """Run the command in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["sync", *arguments])
    with pytest.raises(SystemExit) as caught:
        syncing.main()
    return caught.value.code


def test_a_state_is_one_run_with_its_params_metrics_tags_and_files(
    synced: tuple[Store, Any],
) -> None:
    store, parent = synced
    assert (parent.info.run_name, parent.info.status) == ("tall-tree", "FINISHED")
    assert parent.data.params["train.lr"] == "0.002"
    assert parent.data.params["spec.tokens"] == "3"
    assert parent.data.params["methods.eagle3.head"] == "models/eagle3"
    assert not any(name.startswith("runtime.") for name in parent.data.params)
    assert not any(name.startswith("methods.ngram") for name in parent.data.params)
    assert parent.data.metrics == {
        "prepare.train.num_kept": 7,
        "train.best_epoch": 1,
        "train.num_epochs": 2,
        "eagle3.c1.speedup": 1.5,
        "heldout_accuracy_pos_0": 0.5,
        "heldout_accuracy_pos_1": 0.125,
        "heldout_loss_pos_0": 3.5,
        "heldout_loss_pos_1": 3.875,
        "acceptance_rate.eagle3.c1": 0.25,
        "acceptance_rate.eagle3.r2.5_ctx512": 0.25,
    }
    expected = ORIGIN | {
        "verifier.name": "Tiny",
        "verifier.fingerprint": "f00",
        "hardware": "Abacus, 2 cores",
        "vllm.version": "0.32.0",
        "dvc.lock.train.models/eagle3": EAGLE3_MD5,
        "specmill.complete": "true",
    }
    assert expected.items() <= parent.data.tags.items()
    assert "dvc.lock.bench_eagle3.reports/bench/eagle3.json" in parent.data.tags
    place = store.root / "mlartifacts" / parent.info.run_id / "artifacts"
    assert {str(p.relative_to(place)) for p in place.rglob("*") if p.is_file()} == {
        "params.yaml", "dvc.lock", "dvc.yaml", "comparison.md", "speedup.svg",
        "plots/train.json", "head/config.json", "head/provenance.json",
    }  # fmt: skip
    assert (place / "comparison.md").read_text() == "# table\n"


def test_curves_run_over_epochs_and_over_positions(synced: tuple[Store, Any]) -> None:
    store, parent = synced

    def curve(name: str) -> list[tuple[int, float]]:
        points = store.client.get_metric_history(parent.info.run_id, name)
        return sorted((point.step, point.value) for point in points)

    assert curve("heldout_accuracy_pos_0") == [(0, 0.25), (1, 0.5)]
    assert curve("heldout_loss_pos_1") == [(0, 4.0), (1, 3.875)]
    assert curve("acceptance_rate.eagle3.r2.5_ctx512") == [(0, 0.5), (1, 0.25)]


def test_every_measured_cell_is_a_nested_run(synced: tuple[Store, Any]) -> None:
    children = children_of(*synced)
    assert set(children) == {
        f"{method} K={k} {load} {category}"
        for method, k in [("none", 0), ("eagle3", 2), ("eagle3", 4)]
        for load in ("c1", "r2.5_ctx512")
        for category in ("all", "type1")
    }
    cell = children["eagle3 K=4 r2.5_ctx512 type1"]
    assert cell.info.status == "FINISHED"
    assert cell.data.params == {
        "method": "eagle3", "num_speculative_tokens": "4", "rate": "2.5", "context": "512",
        "category": "type1",
    }  # fmt: skip
    assert cell.data.metrics == {
        "output_tokens_per_s": 84.0,
        "speedup": 1.5,
        "acceptance_length": 1.75,
        "acceptance_rate_pos_0": 0.5,
        "acceptance_rate_pos_1": 0.25,
    }
    assert (cell.data.tags["one_execution"], cell.data.tags["verdict"]) == ("true", "faster")
    alone = children["none K=0 c1 all"]
    assert alone.data.params == {
        "method": "none", "num_speculative_tokens": "0", "concurrency": "1", "context": "0",
        "category": "all",
    }  # fmt: skip
    assert alone.data.metrics == {"output_tokens_per_s": 10.0, "speedup": 1.0}
    assert "verdict" not in alone.data.tags


def test_a_second_sync_changes_nothing_in_the_database(folder: Path) -> None:
    store, state = open_store(folder), read_state(Path())
    sync(store, state, ORIGIN, "head")
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as connection:
        before = list(connection.iterdump())
    again = sync(open_store(folder), read_state(Path()), ORIGIN, "head")
    assert again.startswith("already there (12 cells")
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as connection:
        assert list(connection.iterdump()) == before


# the first request fills the parent, 12 fill its cells, the last one writes the report's metrics
@pytest.mark.parametrize("request_number", [7, 14])
def test_a_sync_that_was_killed_is_completed_by_the_next(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, request_number: int
) -> None:
    process = started(folder, request_number)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    state, origin = read_state(Path()), {"git.commit": "0123456"}
    parents = "select status from runs where name = '0123456'"
    assert rows(folder, parents) == [("RUNNING",)]
    store = open_store(folder)
    assert rows(folder, parents) == [("KILLED",)]
    assert sync(store, state, origin, None).startswith("completed (12 cells")
    whole = tmp_path_factory.mktemp("whole")
    shutil.copy(folder / "mlflow.db", whole)
    for table in ("params", "metrics", "latest_metrics", "tags", "runs"):
        with contextlib.closing(sqlite3.connect(whole / "mlflow.db")) as connection:
            connection.execute(f"delete from {table}")
            connection.commit()
    assert sync(open_store(whole), state, origin, None).startswith("added")
    assert content(folder) == content(whole)
    assert rows(folder, "select count(*) from runs") == [(1 + NUM_CELLS,)]
    number = "select count(*) from metrics"
    assert rows(folder, number) == rows(whole, number)


def test_two_first_syncs_at_once_make_one_state(folder: Path) -> None:
    processes = [started(folder, 0) for _ in range(2)]
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    said = [(folder / f"{process.pid}.said").read_text() for process in processes]
    assert sorted(one.partition(" (")[0] for one in said) == ["added", "already there"]
    assert rows(folder, "select count(*) from runs") == [(1 + NUM_CELLS,)]
    assert rows(folder, "select count(*) from experiments where name = 'specmill'") == [(1,)]


def test_the_same_state_under_another_experiment_name_gets_the_name_added(folder: Path) -> None:
    store, state = open_store(folder), read_state(Path())
    sync(store, state, ORIGIN, None)
    other = ORIGIN | {"dvc.exp_name": "low-bush", "git.commit": "f" * 40}
    for _ in range(2):
        sync(store, state, other, None)
    tags = parent_of(store, state.key).data.tags
    assert tags["dvc.exp_name"] == "tall-tree, low-bush"
    assert tags["git.commit"] == ORIGIN["git.commit"]


def test_what_only_the_report_changed_is_renewed_in_the_same_run(folder: Path) -> None:
    store, state = open_store(folder), read_state(Path())
    sync(store, state, ORIGIN, None)
    write(folder / "reports" / "summary.json", {"eagle3": {"c1": {"speedup": 1.25}}})
    write(folder / "reports" / "comparison.md", "# better table\n")
    renewed = read_state(Path())
    assert renewed.key == state.key
    assert sync(store, renewed, ORIGIN, None).startswith("report renewed")
    parent = parent_of(store, state.key)
    assert parent.data.metrics["eagle3.c1.speedup"] == 1.25
    place = folder / "mlartifacts" / parent.info.run_id / "artifacts"
    assert (place / "comparison.md").read_text() == "# better table\n"
    assert sync(store, renewed, ORIGIN, None).startswith("already there")
    # the report of an older commit does not come back
    assert sync(store, state, ORIGIN, None, is_newest=False).startswith("already there")


def test_another_measurement_is_another_run_and_the_reports_own_entry_is_not(folder: Path) -> None:
    first = read_state(Path()).key
    lock = (folder / "dvc.lock").read_text()
    assert "0" * 32 in lock
    (folder / "dvc.lock").write_text(lock.replace("0" * 32, "1" * 32))
    assert read_state(Path()).key == first
    write_lock(folder, run="second")
    assert read_state(Path()).key != first


def test_what_is_missing_is_absent(folder: Path) -> None:
    for name in ("reports/plots/train.json", "reports/train.json", "reports/hardware.json",
                 "reports/bench/eagle3.json", "reports/comparison.md", "reports/summary.json",
                 "models/verifier/identity.json"):  # fmt: skip
        (folder / name).unlink()
    shutil.rmtree(folder / "models" / "eagle3")
    state = read_state(Path())
    assert state.metrics == {"prepare.train.num_kept": 7}
    assert state.curves == []
    assert {cell.params["method"] for cell in state.cells} == {"none"}
    assert not {"hardware", "verifier.name", "vllm.version"} & set(state.tags)
    assert state.head == {"dvc.md5": EAGLE3_MD5}


def test_a_method_that_was_taken_out_of_params_is_not_part_of_the_state(folder: Path) -> None:
    text = (folder / "params.yaml").read_text()
    (folder / "params.yaml").write_text(text.replace("eagle3:", "ngram:"))
    state = read_state(Path())
    assert {cell.params["method"] for cell in state.cells} == {"none"}
    assert not any("bench@eagle3" in tag for tag in state.tags)


@pytest.mark.parametrize(
    ("name", "old", "new", "reason"),
    [
        ("params.yaml", "lr: 0.002", "lr: 0.003", "`train` of params.yaml is not what stage train"),
        ("reports/bench/none.json", "10.0", "99.0", "reports/bench/none.json is not what stage"),
        ("dvc.lock", "schema:", "<<<<<<< HEAD\nschema:", "dvc.lock is not YAML"),
    ],
)
def test_files_that_do_not_belong_together_are_not_recorded(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    name: str,
    old: str,
    new: str,
    reason: str,
) -> None:
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=reason):
        read_state(Path())
    sync_results(load_params(paths.PARAMS).runtime)
    assert reason in caplog.text
    assert command_line(monkeypatch) == 1
    assert capsys.readouterr().out.startswith("workspace: skipped: ")
    assert rows(folder, "select count(*) from runs") == [(0,)]


def test_a_method_that_is_not_served_has_cells_that_say_why_and_no_figures(folder: Path) -> None:
    place = {
        "num_speculative_tokens": 2, "concurrency": 1, "rate": None, "context": 0,
        "category": "all",
    }  # fmt: skip
    refused = {"num_speculative_tokens": 2, "not_served": "too Narrow", "rows": [place]}
    write(folder / "reports/bench/eagle3.json", refused)
    write_lock(folder)
    state = read_state(Path())
    (cell,) = (cell for cell in state.cells if cell.params["method"] == "eagle3")
    assert (cell.name, cell.metrics) == ("eagle3 K=2 c1 all", {})
    assert cell.flags == {"not_served": "too Narrow"}
    assert state.head == {"dvc.md5": EAGLE3_MD5, "verifier": "Tiny"}


def test_a_k_that_is_refused_has_cells_that_say_why(folder: Path) -> None:
    file = folder / "reports/bench/eagle3.json"
    bench = json.loads(file.read_text())
    empty = dict.fromkeys(bench["rows"][0]) | {
        "num_speculative_tokens": 9, "concurrency": 1, "context": 0, "category": "all",
    }  # fmt: skip
    write(file, bench | {"rows": [*bench["rows"], empty], "refused": {"9": "4 at most"}})
    write_lock(folder)
    cells = {cell.name: cell for cell in read_state(Path()).cells}
    refused = cells["eagle3 K=9 c1 all"]
    assert (refused.metrics, refused.flags) == ({}, {"not_served": "4 at most"})
    assert "not_served" not in cells["eagle3 K=2 c1 all"].flags


def test_a_head_that_drafted_nothing_has_no_acceptance_length(folder: Path) -> None:
    file = folder / "reports/bench/eagle3.json"
    write(file, file.read_text().replace('"acceptance_length": 1.75', '"acceptance_length": null'))
    write_lock(folder)
    assert read_state(Path()).head == {"dvc.md5": EAGLE3_MD5, "verifier": "Tiny"}


def test_a_result_of_another_tool_is_part_of_the_state(folder: Path) -> None:
    params = (folder / "params.yaml").read_text()
    assert "imported: {}" in params
    added = "imported: {rented: {source: a.json, reference: null, num_speculative_tokens: 3}}"
    (folder / "params.yaml").write_text(params.replace("imported: {}", added))
    row = {
        "num_speculative_tokens": 3, "concurrency": 2, "rate": None, "context": 0,
        "category": "all", "output_tokens_per_s": 7.5, "speedup": None, "verdict": None,
        "remarks": "Failed: 1",
    }  # fmt: skip
    write(folder / "reports/bench/rented.json", {"num_speculative_tokens": 3, "rows": [row]})
    (cell,) = (cell for cell in read_state(Path()).cells if cell.params["method"] == "rented")
    assert cell.name == "rented K=3 c2 all"
    assert cell.metrics == {"output_tokens_per_s": 7.5}
    assert cell.flags == {"remarks": "Failed: 1"}


def test_a_bench_of_an_earlier_head_is_not_recorded_beside_a_later_one(folder: Path) -> None:
    lock = YAML(typ="safe").load((folder / "dvc.lock").read_text())
    head = {"path": "models/eagle3", "md5": EAGLE3_MD5}
    lock["stages"]["bench@eagle3"]["deps"].append(head)
    with (folder / "dvc.lock").open("w") as handle:
        YAML(typ="safe").dump(lock, handle)
    read_state(Path())
    lock["stages"]["bench@eagle3"]["deps"][-1] = head | {"md5": "0" * 32}
    with (folder / "dvc.lock").open("w") as handle:
        YAML(typ="safe").dump(lock, handle)
    with pytest.raises(ValueError, match="bench@eagle3 ran with another models/eagle3"):
        read_state(Path())


def test_without_a_lock_there_is_nothing_to_sync(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "dvc.lock").unlink()
    with caplog.at_level(logging.INFO):
        sync_results(load_params(paths.PARAMS).runtime)
    assert "no dvc.lock: nothing to sync" in caplog.text
    assert rows(folder, "select count(*) from experiments where name = 'specmill'") == [(0,)]


def test_a_head_is_registered_once_for_each_content(folder: Path) -> None:
    store = open_store(folder)
    sync(store, read_state(Path()), ORIGIN, None)
    assert "registered as tiny-head version 1" in sync(
        store, read_state(Path()), ORIGIN, "tiny-head"
    )
    first = read_state(Path())
    write_lock(folder, run="second measurement of the same head")
    assert "registered" not in sync(store, read_state(Path()), ORIGIN, "tiny-head")
    (version,) = store.client.search_model_versions("name = 'tiny-head'")
    assert version.source == f"dvc://models/eagle3?md5={EAGLE3_MD5}"
    assert version.run_id == parent_of(store, first.key).info.run_id
    assert version.tags == {
        "dvc.md5": EAGLE3_MD5,
        "git.commit": ORIGIN["git.commit"],
        "verifier": "Tiny",
        "acceptance_length.c1": "1.75",
    }
    lock = (folder / "dvc.lock").read_text()
    (folder / "dvc.lock").write_text(lock.replace(EAGLE3_MD5, "a" * 32 + ".dir"))
    assert "registered as tiny-head version 2" in sync(
        store, read_state(Path()), ORIGIN, "tiny-head"
    )


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    done = subprocess.run(
        ["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_the_command_brings_dvc_experiments_from_git(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder / ".gitignore", "/mlflow.db\n/mlartifacts\n/models\n/.cache\n/.dvc\n")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "start")
    start = git(folder, "rev-parse", "HEAD")
    identity = (folder / paths.IDENTITY).read_bytes()
    write_lock(folder, run="another run")
    (md5,) = {
        dep["md5"]
        for entry in read_yaml(folder / "dvc.lock")["stages"].values()
        for dep in entry.get("deps", [])
    }
    cached = folder / ".dvc" / "cache" / "files" / "md5" / md5[:2] / md5[2:]
    write(cached, identity.decode())
    git(folder, "commit", "--quiet", "-am", "experiment")
    experiment = git(folder, "rev-parse", "HEAD")
    git(folder, "reset", "--quiet", "--hard", start)
    place = f"refs/exps/{start[:2]}/{start[2:]}"
    git(folder, "update-ref", f"{place}/wide-lake", experiment)
    git(folder, "update-ref", f"{place}/same-again", start)
    git(folder, "update-ref", "refs/exps/exec/EXEC_HEAD", start)
    assert sorted(name for name, _ in experiments(folder)) == ["same-again", "wide-lake"]

    assert command_line(monkeypatch, "--all-experiments") == 0
    lines = [line.partition(" (")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "workspace: added",
        "same-again: already there, experiment name added",
        "wide-lake: added",
    ]
    store = open_store(folder)
    (run,) = store.client.search_runs([store.experiment_id], "tags.`dvc.exp_name` = 'wide-lake'")
    expected = {"git.commit": experiment, "git.dirty": "false", "dvc.baseline_rev": start,
                "verifier.name": "Tiny"}  # fmt: skip
    assert expected.items() <= run.data.tags.items()
    assert len(children_of(store, run)) == NUM_CELLS
    assert not (folder / "mlartifacts" / run.info.run_id / "artifacts" / "head").exists()
    assert command_line(monkeypatch, "--all-experiments") == 0
    said = capsys.readouterr().out.splitlines()
    assert all("already there (12 cells" in line for line in said)


@pytest.mark.slow
def test_what_a_server_missed_is_synced_when_it_is_back(
    folder: Path,
    database: Path,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runtime = load_params(paths.PARAMS).runtime
    away = Runtime(**runtime.model_dump() | {"tracking_uri": f"http://127.0.0.1:{port}"})
    began = time.monotonic()
    with track(folder, "report", {"methods": {}}, away.tracking_uri) as tracker:
        tracker.log_metrics({"loss": 1.0})
        tracker.log_artifact(paths.PARAMS)
    assert caplog.text.count("`python -m specmill.sync` adds results later") == 1
    sync_results(away)
    assert caplog.text.count("`python -m specmill.sync` adds results later") == 2
    assert time.monotonic() - began < 10
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(away.tracking_uri))
    status = command_line(monkeypatch)
    assert str(status).startswith("sync: MLflow's store cannot be used: API request to http")
    assert "\n" not in str(status)

    # the environment's server wins over runtime.tracking_uri, which is None in the file
    shutil.copy(database, folder / "server.db")
    with server(folder / "server.db", folder / "served", port):
        assert command_line(monkeypatch) == 0
        assert command_line(monkeypatch) == 0
        added, there = capsys.readouterr().out.splitlines()
        assert added.startswith("workspace: added (12 cells")
        assert there.startswith("workspace: already there (12 cells")
        store, state = open_store(folder), read_state(Path())
        assert store.uri == away.tracking_uri
        assert "version 1" in sync(store, state, ORIGIN, "head")
        parent = parent_of(store, state.key)
        assert parent.data.metrics["eagle3.c1.speedup"] == 1.5
        assert len(children_of(store, parent)) == NUM_CELLS
        assert [p.name for p in (folder / "served").rglob("provenance.json")] == ["provenance.json"]
        with track(folder, "train", {"train": {"lr": 1}}, None) as tracker:
            tracker.log_metrics({"loss": 2.0}, step=3)
        executions = store.client.get_experiment_by_name("specmill-executions")
        (run,) = store.client.search_runs([executions.experiment_id])
        assert (run.info.status, run.data.metrics) == ("FINISHED", {"loss": 2.0})

import multiprocessing
import os
import sqlite3
import sys
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from specmill.tracking import git_state, numbers, open_store, track

NUM_PROCESSES = 6


@pytest.fixture(autouse=True)
def _own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """No store from outside; MLflow itself sets the variable when it is pointed at one."""
    for name in ("MLFLOW_TRACKING_URI", "DVC_EXP_NAME", "DVC_EXP_BASELINE_REV"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def run_stage(root: Path, barrier: Barrier, number: int) -> None:
    """One process that meets the store at the same moment as the others."""
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    import mlflow  # noqa: F401 - the imports should not spread the processes

    barrier.wait(60)
    with track(root, f"stage{number}", {"train": {"lr": number}}) as tracker:
        tracker.log_metrics({"loss": {"train": number / 2}, "name": "text"})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that six processes opened at once when there was none."""
    folder = tmp_path_factory.mktemp("repository")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mlflow.store.tracking.sqlalchemy_store"])
    barrier = context.Barrier(NUM_PROCESSES)
    processes = [
        context.Process(target=run_stage, args=(folder, barrier, number))
        for number in range(NUM_PROCESSES)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * NUM_PROCESSES
    return folder


def rows(root: Path, query: str) -> list[tuple[Any, ...]]:
    """Read the database without MLflow."""
    connection = sqlite3.connect(root / "mlflow.db")
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def status_of(root: Path, stage: str) -> list[str]:
    return [
        status
        for status, name in rows(root, "select status, name from runs")
        if name.startswith(f"{stage}-")
    ]


def test_numbers_are_flattened_under_dotted_names_and_the_rest_is_left_out() -> None:
    tree = {
        "a": 1,
        "b": {"c": 2.5, "d": {"e": 3}, "text": "x", "none": None, "list": [1, 2]},
        "flag": True,
        "empty": {},
    }
    found = numbers(tree)
    assert found == {"a": 1.0, "b.c": 2.5, "b.d.e": 3.0}
    assert {type(value) for value in found.values()} == {float}


def test_six_processes_that_meet_a_new_database_at_once_all_finish(root: Path) -> None:
    assert rows(root, "pragma integrity_check") == [("ok",)]
    found = rows(root, "select name, status from runs where name like 'stage%'")
    assert sorted(name.partition("-")[0] for name, _ in found) == [
        f"stage{number}" for number in range(NUM_PROCESSES)
    ]
    assert {status for _, status in found} == {"FINISHED"}
    assert rows(root, "select count(*) from experiments where name = 'specmill'") == [(1,)]


def test_every_process_left_its_own_parameters_and_metrics(root: Path) -> None:
    found = rows(
        root,
        "select runs.name, params.value, metrics.value from runs "
        "join params on params.run_uuid = runs.run_uuid and params.key = 'train.lr' "
        "join metrics on metrics.run_uuid = runs.run_uuid and metrics.key = 'loss.train' "
        "where runs.name like 'stage%' order by runs.name",
    )
    expected = [(f"stage{number}", str(number), number / 2) for number in range(NUM_PROCESSES)]
    assert [(name.partition("-")[0], lr, loss) for name, lr, loss in found] == expected


def test_the_database_reopens_and_keeps_its_experiment(root: Path) -> None:
    ((identifier,),) = rows(root, "select experiment_id from experiments where name = 'specmill'")
    assert open_store(root) == str(identifier)
    assert rows(root, "select count(*) from experiments where name = 'specmill'") == [(1,)]


def test_artifacts_lie_under_the_root(root: Path, tmp_path: Path) -> None:
    ((place,),) = rows(root, "select artifact_location from experiments where name = 'specmill'")
    assert place == (root / "mlartifacts").as_uri()
    (tmp_path / "table.md").write_text("words")
    with track(root, "artifact", {}) as tracker:
        tracker.log_artifact(tmp_path / "table.md")
    (kept,) = (root / "mlartifacts").rglob("table.md")
    assert kept.read_text() == "words"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("bad"), "FAILED"),
        (AssertionError("bug"), "FAILED"),
        (SystemExit(143), "KILLED"),
        (KeyboardInterrupt(), "KILLED"),
    ],
)
def test_a_stage_that_does_not_end_well_says_how_it_ended(
    root: Path, error: BaseException, status: str
) -> None:
    stage = f"broken{type(error).__name__}"
    with pytest.raises(type(error)) as caught, track(root, stage, {}):
        raise error
    assert caught.value is error
    assert status_of(root, stage) == [status]


def test_two_runs_of_one_stage_are_two_runs(root: Path) -> None:
    for _ in range(2):
        with track(root, "twice", {}):
            pass
    assert status_of(root, "twice") == ["FINISHED", "FINISHED"]
    names = rows(root, "select count(distinct name) from runs where name like 'twice-%'")
    assert names == [(2,)]


def test_steps_of_a_metric_are_kept_apart(root: Path) -> None:
    with track(root, "epochs", {}) as tracker:
        for epoch, loss in enumerate([3.0, 2.0]):
            tracker.log_metrics({"loss": loss}, step=epoch)
    found = rows(
        root,
        "select step, metrics.value from metrics join runs using (run_uuid) "
        "where runs.name like 'epochs-%' order by step",
    )
    assert found == [(0, 3.0), (1, 2.0)]


def test_the_tags_name_the_stage_and_the_dvc_experiment(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DVC_EXP_NAME", "tall-tree")
    with track(root, "bench@ngram", {}):
        pass
    found = dict(
        rows(
            root,
            "select key, value from tags join runs using (run_uuid) "
            "where runs.name like 'bench@ngram-%' and key like 'dvc.%'",
        )
    )
    assert found == {"dvc.stage": "bench@ngram", "dvc.exp_name": "tall-tree"}


def test_a_store_that_cannot_be_opened_does_not_fail_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://nowhere")
    done = []
    with track(tmp_path, "stage", {"train": {"lr": 1}}) as tracker:
        tracker.log_metrics({"loss": 1.0})
        tracker.log_artifact(tmp_path)
        done.append("work")
    assert done == ["work"]
    assert "the stage goes on without" in caplog.text


def test_a_damaged_database_does_not_fail_the_stage_and_is_left_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"not a database at all" * 100)
    done = []
    with track(tmp_path, "stage", {}):
        done.append("work")
    assert done == ["work"]
    assert "file is not a database" in caplog.text
    assert (tmp_path / "mlflow.db").read_bytes() == b"not a database at all" * 100


def test_a_lock_that_cannot_be_taken_does_not_fail_the_stage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".cache").write_text("a file where a folder belongs")
    done = []
    with track(tmp_path, "stage", {}):
        done.append("work")
    assert done == ["work"]
    assert "the stage goes on without" in caplog.text


def test_a_store_that_breaks_on_the_way_does_not_fail_the_stage(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = []
    with track(root, "midway", {}) as tracker:
        connection = sqlite3.connect(root / "mlflow.db")
        connection.execute("alter table metrics rename to gone")
        connection.commit()
        try:
            tracker.log_metrics({"loss": 1.0})
        finally:
            connection.execute("alter table gone rename to metrics")
            connection.commit()
            connection.close()
        done.append("work")
    assert done == ["work"]
    assert "the stage goes on without" in caplog.text
    assert status_of(root, "midway") == ["FINISHED"]


def test_a_stage_runs_where_mlflow_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("mlflow", "mlflow.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    done = []
    with track(tmp_path, "stage", {"train": {"lr": 1}}) as tracker:
        tracker.log_metrics({"loss": 1.0})
        done.append("work")
    assert done == ["work"]
    assert "the stage goes on without" in caplog.text


def test_an_error_of_the_stage_is_raised_when_the_store_is_broken_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://nowhere")
    with pytest.raises(OSError, match="disk full"), track(tmp_path, "stage", {}):
        raise OSError("disk full")


def test_outside_a_repository_there_is_no_git_state(tmp_path: Path) -> None:
    assert git_state(tmp_path) == {}

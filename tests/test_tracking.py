import multiprocessing
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from specmill.liveness import HOST, PROCESS, is_dead, process_tags
from specmill.revision import code_state, git_state
from specmill.tracking import numbers, open_store, track
from tests.workspace import ROOT

NUM_PROCESSES = 6


@pytest.fixture(autouse=True)
def _own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """No store and no experiment from outside."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("DVC_EXP_NAME", "DVC_EXP_BASELINE_REV"):
        monkeypatch.delenv(name, raising=False)


def run_stage(root: Path, barrier: Barrier, number: int) -> None:
    """One process that meets the store at the same moment as the others."""
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    import mlflow  # noqa: F401 - the imports should not spread the processes

    barrier.wait(60)
    with track(root, f"stage{number}", {"train": {"lr": number}}) as tracker:
        tracker.log_metrics({"loss": {"train": number / 2}, "name": "text"})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, database: Path) -> Path:
    """A store that one stage has used."""
    folder = tmp_path_factory.mktemp("repository")
    shutil.copy(database, folder)
    with track(folder, "first", {"train": {"lr": 3}}) as tracker:
        tracker.log_metrics({"loss": {"train": 1.5}, "name": "text"})
    return folder


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that six processes opened at once when there was none."""
    folder = tmp_path_factory.mktemp("crowded")
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


@pytest.mark.slow
def test_six_processes_that_meet_a_new_database_at_once_all_finish(crowded: Path) -> None:
    assert rows(crowded, "pragma integrity_check") == [("ok",)]
    found = rows(crowded, "select name, status from runs where name like 'stage%'")
    assert sorted(name.partition("-")[0] for name, _ in found) == [
        f"stage{number}" for number in range(NUM_PROCESSES)
    ]
    assert {status for _, status in found} == {"FINISHED"}
    assert rows(crowded, "select count(*) from experiments where name = 'specmill-executions'") == [
        (1,)
    ]


@pytest.mark.slow
def test_every_process_left_its_own_parameters_and_metrics(crowded: Path) -> None:
    found = rows(
        crowded,
        "select runs.name, params.value, metrics.value from runs "
        "join params on params.run_uuid = runs.run_uuid and params.key = 'train.lr' "
        "join metrics on metrics.run_uuid = runs.run_uuid and metrics.key = 'loss.train' "
        "where runs.name like 'stage%' order by runs.name",
    )
    expected = [(f"stage{number}", str(number), number / 2) for number in range(NUM_PROCESSES)]
    assert [(name.partition("-")[0], lr, loss) for name, lr, loss in found] == expected


def test_a_stage_leaves_its_parameters_and_the_numbers_of_its_metrics(root: Path) -> None:
    of_run = "join runs using (run_uuid) where runs.name like 'first-%'"
    assert rows(root, f"select key, params.value from params {of_run}") == [("train.lr", "3")]
    assert rows(root, f"select key, metrics.value from metrics {of_run}") == [("loss.train", 1.5)]


def test_the_database_reopens_and_keeps_its_experiment(root: Path) -> None:
    ((identifier,),) = rows(
        root, "select experiment_id from experiments where name = 'specmill-executions'"
    )
    assert open_store(root, suffix="-executions").experiment_id == str(identifier)
    assert rows(root, "select count(*) from experiments where name = 'specmill-executions'") == [
        (1,)
    ]


def test_artifacts_lie_under_the_root(root: Path, tmp_path: Path) -> None:
    ((place,),) = rows(
        root, "select artifact_location from experiments where name = 'specmill-executions'"
    )
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


def test_the_environment_names_the_experiments(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    open_store(root)
    with track(root, "named", {}):
        pass
    found = rows(root, "select name from experiments where name like 'mine%'")
    assert sorted(found) == [("mine",), ("mine-executions",)]


def missing_folder(tmp_path: Path) -> None:
    (tmp_path / "store").rmdir()


def a_folder(tmp_path: Path) -> None:
    (tmp_path / "store" / "mlflow.db").mkdir()


def garbage(tmp_path: Path) -> None:
    (tmp_path / "store" / "mlflow.db").write_bytes(b"not a database at all" * 100)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (missing_folder, "unable to open database file"),
        (a_folder, "unable to open database file"),
        (garbage, "file is not a database"),
    ],
)
def test_a_database_that_cannot_be_used_is_one_quick_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path], None],
    reason: str,
) -> None:
    (tmp_path / "store").mkdir()
    spoil(tmp_path)
    began = time.monotonic()
    done = []
    with track(tmp_path, "stage", {"a": 1}, f"sqlite:///{tmp_path}/store/mlflow.db") as tracker:
        tracker.log_metrics({"loss": 1.0})
        done.append("work")
    assert time.monotonic() - began < 10
    assert done == ["work"]
    assert [reason in record.message for record in caplog.records] == [True]
    if spoil is garbage:
        content = (tmp_path / "store" / "mlflow.db").read_bytes()
        assert content == b"not a database at all" * 100


DYING = """
import sys, time
from pathlib import Path
from specmill.tracking import track

with track(Path.cwd(), sys.argv[1], {"a": 1}) as tracker:
    assert tracker._watcher is not None
    print(tracker._watcher.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_stage_that_is_killed_outright_does_not_stay_running(root: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", DYING, "shot"],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    watcher = int(process.stdout.readline())
    assert status_of(root, "shot") == ["RUNNING"]
    assert os.getsid(watcher) == watcher != os.getsid(process.pid)
    process.kill()
    # the output ends with the stage: DVC reads it to the end
    assert process.stdout.read() == ""
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 60
    while status_of(root, "shot") == ["RUNNING"] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert status_of(root, "shot") == ["KILLED"]


def test_the_watcher_ends_with_the_stage(root: Path) -> None:
    with track(root, "watched", {}) as tracker:
        watcher = tracker._watcher
        assert watcher is not None
        assert watcher.poll() is None
        began = time.monotonic()
    assert watcher.returncode is not None
    assert time.monotonic() - began < 1


def test_the_next_opening_reaps_runs_of_dead_processes_of_this_host_only(root: Path) -> None:
    store = open_store(root)
    mine = process_tags()
    gone = subprocess.Popen(["true"])
    pid, started, boot, namespace = mine[PROCESS].split()
    gone.wait()
    tags = {
        "live": mine,
        "gone": mine | {PROCESS: f"{gone.pid} {started} {boot} {namespace}"},
        "pid used again": mine | {PROCESS: f"{pid} 1 {boot} {namespace}"},
        "before a reboot": mine | {PROCESS: f"{pid} {started} other-boot {namespace}"},
        "another container": mine | {PROCESS: f"{gone.pid} 1 {boot} pid:[1]"},
        "another host": {HOST: "elsewhere", PROCESS: f"{gone.pid} 1 {boot} {namespace}"},
        "untagged": {},
    }
    for name, own in tags.items():
        store.client.create_run(store.experiment_id, tags=own, run_name=name)
    ended = store.client.create_run(store.experiment_id, tags=tags["gone"], run_name="ended")
    store.client.set_terminated(ended.info.run_id, "FINISHED")
    open_store(root)
    names = (*tags, "ended")
    assert dict(rows(root, f"select name, status from runs where name in {names}")) == {
        "live": "RUNNING",
        "gone": "KILLED",
        "pid used again": "KILLED",
        "before a reboot": "KILLED",
        "another container": "RUNNING",
        "another host": "RUNNING",
        "untagged": "RUNNING",
        "ended": "FINISHED",
    }


def test_a_process_that_ended_and_was_not_waited_for_is_dead() -> None:
    _, _, boot, namespace = process_tags()[PROCESS].split()
    zombie = subprocess.Popen(["sleep", "600"])
    started = Path(f"/proc/{zombie.pid}/stat").read_text().rpartition(")")[2].split()[19]
    process = f"{zombie.pid} {started} {boot} {namespace}"
    assert not is_dead(process)
    zombie.kill()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert is_dead(process)
    zombie.wait()


def test_a_repository_is_dirty_by_what_a_user_changes_not_by_results(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True)

    (tmp_path / "reports").mkdir()
    for name in ("params.yaml", "dvc.lock", "reports/train.json"):
        (tmp_path / name).write_text("1")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "start")
    for name in ("dvc.lock", "reports/train.json", "reports/vocab.json"):
        (tmp_path / name).write_text("2")
    assert git_state(tmp_path)["git.dirty"] == "false"
    (tmp_path / "params.yaml").write_text("2")
    assert git_state(tmp_path)["git.dirty"] == "true"


def test_outside_a_repository_there_is_no_git_state(tmp_path: Path) -> None:
    assert git_state(tmp_path) == {}


def test_the_code_of_a_result_is_the_last_commit_that_touched_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    (tmp_path / "specmill").mkdir()
    for name, message in (("specmill/a.py", "code"), ("README.md", "words")):
        (tmp_path / name).write_text("1")
        git("add", "--all")
        git("commit", "--quiet", "-m", message)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("2")
    code = git("rev-parse", "HEAD~1")
    assert code_state() == {"code.commit": code, "code.dirty": "false"}
    (tmp_path / "specmill/a.py").write_text("2")
    assert code_state() == {"code.commit": code, "code.dirty": "true"}


@pytest.mark.slow
def test_a_first_use_that_is_killed_leaves_no_half_made_database(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path; from specmill.tracking import open_store; "
        f"open_store(Path({str(tmp_path)!r}))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    scratch = tmp_path / "mlflow.db.new"
    deadline = time.monotonic() + 60
    while not (scratch.exists() and scratch.stat().st_size > 0):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert not (tmp_path / "mlflow.db").exists()
    store = open_store(tmp_path)
    assert store.client.get_experiment(store.experiment_id).name == "specmill"

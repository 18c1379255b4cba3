import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specmill import paths
from specmill.stage import Stage, open_stage

ROOT = Path(__file__).parents[1]

# A stage that waits for a signal; its cleanup is told to stop as well and must not be.
WAITING = """
import os, signal, sys, time
sys.modules["mlflow"] = None  # to import it takes seconds
from specmill.stage import open_stage

with open_stage("vocab", ["vocab"]) as stage:
    try:
        print("ready", flush=True)
        time.sleep(600)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)
        print("cleaned up", flush=True)
print("went on")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with the project's params.yaml and an MLflow store that is none."""
    (tmp_path / "params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://nowhere")
    before = signal.getsignal(signal.SIGTERM)
    levels = {name: logging.getLogger(name).level for name in ("httpx", "mlflow", "speculators")}
    yield tmp_path
    signal.signal(signal.SIGTERM, before)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@contextlib.contextmanager
def started(program: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "DVC_ROOT": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_invalid_params_end_the_process_with_their_message_and_status_1(folder: Path) -> None:
    text = (folder / "params.yaml").read_text()
    (folder / "params.yaml").write_text(f"{text}\nextra: 1\n")
    program = """
from specmill.stage import open_stage
with open_stage("vocab", ["vocab"]):
    print("the body ran")
"""
    with started(program, folder) as process:
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == ""
    assert "vocab: params.yaml is not valid" in errors
    assert "  extra: there is no such key" in errors
    assert "Traceback" not in errors


def test_sigterm_ends_a_stage_after_its_cleanup_which_a_second_one_does_not_cut_short(
    folder: Path,
) -> None:
    with started(WAITING, folder) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=60)
    assert out == "cleaned up\n"
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in errors


def test_an_interrupted_stage_says_that_it_can_be_run_again(folder: Path) -> None:
    with pytest.raises(SystemExit) as caught, open_stage("vocab", ["vocab"]):
        raise KeyboardInterrupt
    assert caught.value.code == "vocab: interrupted; finished work is kept, run it again to go on"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("vocab.draft_vocab_size is 9"),
        RuntimeError("the server died"),
        FileNotFoundError("no such file"),
        ModuleNotFoundError("run `make venv`"),
    ],
)
def test_what_a_user_can_set_right_ends_with_its_message_and_the_name_of_the_stage(
    folder: Path, error: Exception
) -> None:
    with pytest.raises(SystemExit) as caught, open_stage("bench@ngram", ["bench"]):
        raise error
    assert caught.value.code == f"bench@ngram: {error}"


def test_a_bug_keeps_its_traceback(folder: Path) -> None:
    with pytest.raises(KeyError, match="bug"), open_stage("vocab", ["vocab"]):
        raise KeyError("bug")


def test_a_missing_params_file_is_named(folder: Path) -> None:
    (folder / "params.yaml").unlink()
    with pytest.raises(SystemExit) as caught, open_stage("vocab", ["vocab"]):
        raise AssertionError("the body ran")
    assert str(caught.value.code).startswith("vocab: ")
    assert "params.yaml" in str(caught.value.code)


class Noted:
    """Stands for an MLflow run; keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.told.append(("metrics", metrics, step))

    def log_params(self, params: dict[str, object]) -> None:
        self.told.append(("params", params))

    def log_artifact(self, path: Path) -> None:
        self.told.append(("artifact", path))


def test_metrics_go_to_git_and_to_the_run_alike(folder: Path) -> None:
    with open_stage("vocab", ["vocab"]) as opened:
        noted = Noted()
        stage = Stage(opened.name, opened.params, noted, 0.0)  # type: ignore[arg-type]
        path = folder / "reports" / "vocab.json"
        stage.write_metrics(path, {"coverage": 0.5})
        stage.log_epoch(3, {"loss": 1.5})
    assert json.loads(path.read_text()) == {"coverage": 0.5}
    assert noted.told == [
        ("metrics", {"coverage": 0.5}, None),
        ("artifact", path),
        ("metrics", {"loss": 1.5}, 3),
    ]


def test_a_section_is_logged_as_the_file_says_it(folder: Path) -> None:
    with open_stage("bench@ngram", ["bench"]) as opened:
        noted = Noted()
        Stage(opened.name, opened.params, noted, 0.0).log_section("vocab")  # type: ignore[arg-type]
        size = opened.params.vocab.draft_vocab_size
    assert noted.told == [("params", {"vocab": {"draft_vocab_size": size}})]


@pytest.mark.parametrize(
    ("error", "way_out"),
    [
        (PermissionError(13, "Permission denied", "data/vocab"), "make it writable"),
        (OSError(28, "No space left on device", "data/vocab"), "free some disk space"),
    ],
)
def test_errors_of_the_operating_system_name_the_file_and_the_way_out(
    folder: Path, error: OSError, way_out: str
) -> None:
    with (
        pytest.raises(SystemExit, match=f"vocab: .*data/vocab.*{way_out}"),
        open_stage("vocab", []),
    ):
        raise error


def test_help_prints_what_the_stage_says_of_itself_and_runs_nothing(folder: Path) -> None:
    program = """
'''Say what this does.'''
from specmill.stage import open_stage
with open_stage("vocab", []):
    print("the body ran")
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "--help"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "DVC_ROOT": str(folder)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "Say what this does.")


def test_of_several_processes_only_the_first_one_locks_the_stage_and_has_a_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "CACHE", folder / "cache")
    runs = []

    def track(root: Path, name: str, *_: object) -> contextlib.AbstractContextManager[None]:
        runs.append(name)
        return contextlib.nullcontext()

    monkeypatch.setattr("specmill.stage.track", track)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "2")  # the first one of another node
    with open_stage("train", ["train"], spread=True) as stage:
        stage.tracker.log_metrics({"loss": 1.0})
    assert runs == []
    assert not (folder / "cache").exists()
    monkeypatch.setenv("RANK", "0")
    with open_stage("train", ["train"], spread=True):
        pass
    assert runs == ["train"]
    assert (folder / "cache/locks/train").is_file()

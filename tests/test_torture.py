"""What tries of the torture come to, on records made by hand; the page says what the JSON says."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ruamel.yaml import YAML

from benchmarks import torture_runs, torture_table
from benchmarks.torture_faults import FAULTS, _cut
from benchmarks.torture_stages import STAGES, answers, cells, epochs
from benchmarks.torture_workspace import Workspace
from specmill.files import read_json, seal
from tests.workspace import ROOT

RESULTS = ROOT / "reports/torture.json"


def record(**changes: Any) -> dict[str, Any]:
    """A try after which all is well."""
    return {
        "stage": "train", "fault": "kill", "try": 0, "at_s": 3.0, "hit": "the stage", "first": 255,
        "left": [], "ports": [], "locks": [], "running": 0, "ended_s": 1.6, "finished": 2,
        "kept": 2, "did": 4, "lost": 0, "repeated": 0, "second": 0, "second_s": 30.0,
        "recover_s": -12.4, "left_after_second": [], "running_after_second": 0, "differing": [],
        "near": False, "scratch": [], "tracebacks": [], "problems": [], "commit": "0123456789",
    } | changes  # fmt: skip


def test_what_was_finished_and_is_gone_is_lost_and_what_was_there_and_is_done_is_repeated() -> None:
    """Of six epochs two were finished; one of them is gone, and the next run does all six."""
    found = torture_table.count(6, {"0", "1"}, {"0"}, 6, 0, survived=False)
    assert found == {"finished": 2, "kept": 1, "did": 6, "lost": 1, "repeated": 1}


def test_work_that_was_finished_after_the_blow_counts_for_the_tool() -> None:
    found = torture_table.count(6, {"0", "1"}, {"0", "1", "2"}, 3, 0, survived=False)
    assert (found["lost"], found["repeated"]) == (0, 0)


def test_a_run_that_goes_on_to_its_end_has_lost_nothing_but_may_have_repeated() -> None:
    found = torture_table.count(6, {"0", "1"}, set(), 0, 7, survived=True)
    assert (found["lost"], found["repeated"]) == (0, 1)


def test_a_try_after_which_all_is_well_has_no_problem() -> None:
    assert torture_table.problems(record(), takes=False) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"second": 255}, "the next dvc repro ended with status 255"),
        ({"second": None}, "the next dvc repro ended with status None"),
        ({"differing": ["models/eagle3"]}, "other outputs: models/eagle3"),
        ({"lost": 2}, "2 lost"),
        ({"repeated": 1}, "1 repeated"),
        ({"left": ["python"]}, "left: ['python']"),
        ({"ports": [8000]}, "ports: [8000]"),
        ({"locks": ["train"]}, "locks: ['train']"),
        ({"running": 1}, "running: 1"),
        ({"running_after_second": 1}, "running_after_second: 1"),
        ({"scratch": [".x.1.tmp"]}, "scratch: ['.x.1.tmp']"),
        ({"tracebacks": ["OSError: x"]}, "tracebacks: ['OSError: x']"),
        ({"first": None}, "did not end"),
    ],
)
def test_whatever_a_fault_leaves_behind_is_a_problem(changes: dict[str, Any], problem: str) -> None:
    assert torture_table.problems(record(**changes), takes=False) == [problem]


def test_a_traceback_is_told_by_its_last_line_unless_it_is_that_of_ctrl_c() -> None:
    head = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    f()\n'
    log = f"before\n{head}KeyboardInterrupt\nbetween\n{head}OSError: full\nafter\n"
    assert torture_table.tracebacks(log) == ["OSError: full"]


def test_work_that_the_fault_itself_has_taken_away_is_no_problem() -> None:
    assert torture_table.problems(record(lost=2, repeated=1), takes=True) == []


def test_a_run_that_was_not_waited_for_may_still_hold_its_lock() -> None:
    going = record(locks=["train"], running=1, first=None)
    del going["ended_s"]
    assert torture_table.problems(going, takes=False) == []


def test_a_row_sums_its_tries_and_tells_the_middle_and_the_worst() -> None:
    tries = [
        record(),
        record(**{"try": 1, "finished": 5, "lost": 1, "ended_s": 2.2, "recover_s": 3.0}),
        record(**{"try": 2, "recover_s": 20.0, "problems": ["1 lost"]}),
        record(**{"try": 3, "hit": None}),
        record(**{"fault": "term", "near": True}),
        record(stage="vocab", finished=0, did=0),
    ]
    usual = {"train": {"seconds": 42.4, "units": 6}, "vocab": {"seconds": 8.0, "units": 0}}
    results = {"machine": {"cores": 2}, "tries": tries, "undisturbed": usual,
               "skipped": {"full": "needs the right to mount"}}  # fmt: skip
    text = torture_table.table(results)
    lines = text.splitlines()
    row = "| SIGKILL to the stage | train | 3 | 9 epochs | 1 | 0 | 2 | +3 (up to +20) | "
    assert row + "`--stages train --faults kill --tries 3` |" in lines
    assert (
        "| SIGKILL to the stage | vocab | 1 | - | - | - | 2 | -12 | "
        "`--stages vocab --faults kill --tries 1` |" in lines
    )
    assert "Within the tolerance, not the same bytes: term try 0." in lines
    assert "5 tries on 2 cores, 1 more met nothing" in text
    assert "train 42 s (6 epochs), vocab 8 s" in text
    assert "Skipped: full, needs the right to mount." in text
    assert "- **train, kill, try 2**: 1 lost" in lines


def test_only_what_is_between_the_two_comments_of_the_page_is_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{torture_table.BEGIN}\nold\n{torture_table.END}\nafter\n")
    results = {"machine": {"cores": 2}, "tries": [], "undisturbed": {}, "skipped": {}}
    torture_table.write(page, results)
    text = page.read_text()
    assert text.startswith(f"before\n{torture_table.BEGIN}\n| Fault |")
    assert text.endswith(f"\n{torture_table.END}\nafter\n")
    assert "old" not in text
    page.write_text("no comments")
    with pytest.raises(ValueError, match=r"page\.md has no"):
        torture_table.write(page, results)


def test_the_page_has_the_table_that_the_results_make() -> None:
    page = (ROOT / "docs/reliability.md").read_text()
    between = page.split(torture_table.BEGIN)[1].split(torture_table.END)[0]
    assert between.strip() == torture_table.table(read_json(RESULTS))


def test_every_try_of_the_results_is_of_a_fault_that_fits_its_stage() -> None:
    tries = read_json(RESULTS)["tries"]
    assert tries
    assert all(row["stage"] in FAULTS[row["fault"]].stages for row in tries)
    places = [(row["stage"], row["fault"], row["try"]) for row in tries]
    assert len(set(places)) == len(places)


def test_an_answer_counts_when_its_line_is_whole(tmp_path: Path) -> None:
    path = tmp_path / ".cache/responses/responses.jsonl"
    assert answers(tmp_path) == set()
    path.parent.mkdir(parents=True)
    path.write_text('{"key": "a"}\n{"key": "b"}\n{"key": "a"}\n{"ke')
    assert answers(tmp_path) == {"0 a", "1 b", "2 a"}


def test_cells_measured_by_another_execution_than_the_kept_ones_were_done_anew(
    tmp_path: Path,
) -> None:
    kept = tmp_path / ".cache/bench_cells/inputs/unit.json"
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps([{"execution": "one"}, {"execution": "one"}]))
    (kept.parent / "servers.json").write_text("{}")
    (kept.parent / "cut.json").write_text("[{")
    before = cells(tmp_path)
    assert len(before) == 2
    made = tmp_path / "data/bench/ngram/cells.json"
    made.parent.mkdir(parents=True)
    made.write_text(json.dumps({"cells": [{"execution": e} for e in ("one", "one", "two")]}))
    assert STAGES["bench@ngram"].did(tmp_path, before, "") == 1


def test_samples_and_epochs_that_a_run_did_are_read_from_its_log() -> None:
    nowhere = Path("nowhere")
    log = "12:00:00 specmill.extract INFO 7 of 22 samples are to be extracted: 900 tokens\n"
    assert STAGES["extract"].did(nowhere, set(), log) == 7
    assert STAGES["extract"].did(nowhere, set(), "") == 0
    log = "epoch 5 of 6: held-out loss 3.1\nnoise\nepoch 6 of 6: held-out loss 3.0\n"
    assert STAGES["train"].did(nowhere, set(), log) == 2


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A folder with dvc.yaml in which vocab and train have run; no clone, no DVC."""
    made = Workspace.__new__(Workspace)
    made.folder, made.kept = tmp_path / "repository", tmp_path / "undisturbed"
    made.kept.mkdir()
    for name in ("data/vocab/d2t.npy", "reports/vocab.json", ".cache/checkpoints/d/0/epoch.json"):
        (made.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (made.folder / name).write_text(name)
    shutil.copy2(ROOT / "dvc.yaml", made.folder)
    (made.folder / "dvc.lock").write_text("schema: '2.0'\nstages: {vocab: {}, train: {}}\n")
    return made


def test_what_a_stage_writes_is_what_dvc_yaml_says(workspace: Workspace) -> None:
    assert workspace.outputs("vocab") == ["data/vocab", "reports/vocab.json"]
    assert workspace.outputs("bench@ngram") == ["data/bench/ngram", "reports/bench/ngram.json"]


def test_before_a_try_the_stage_has_never_run_and_after_it_all_is_as_it_was(
    workspace: Workspace,
) -> None:
    folder, whole = workspace.folder, workspace.digests("vocab")
    workspace.keep("vocab")
    workspace.before("vocab")
    assert workspace.digests("vocab") == {"data/vocab": None, "reports/vocab.json": None}
    assert YAML(typ="safe").load(folder / "dvc.lock")["stages"] == {"train": {}}
    assert (folder / ".cache/checkpoints/d").is_dir()  # another stage's
    workspace.before("train")
    assert list((folder / ".cache/checkpoints").iterdir()) == []
    workspace.restore("vocab")
    assert workspace.digests("vocab") == whole
    assert set(YAML(typ="safe").load(folder / "dvc.lock")["stages"]) == {"vocab", "train"}


def test_epochs_count_when_they_are_whole_and_links_to_them_do_not(tmp_path: Path) -> None:
    checkpoints = tmp_path / ".cache/checkpoints/d"
    for number in "01":
        (checkpoints / number).mkdir(parents=True)
        (checkpoints / number / "model.safetensors").write_bytes(b"weights")
    seal(checkpoints / "0")
    (checkpoints / "epoch0_end").symlink_to("0")
    arrow = tmp_path / ".cache/checkpoints/d.samples/0a1b"
    arrow.mkdir(parents=True)
    seal(arrow)
    assert epochs(tmp_path) == {str(checkpoints / "0")}
    seal(checkpoints / "1")
    assert len(epochs(tmp_path)) == 2
    os.truncate(checkpoints / "0/model.safetensors", 3)
    assert epochs(tmp_path) == {str(checkpoints / "1")}


def test_a_file_is_cut_within_itself_and_told(tmp_path: Path) -> None:
    file = tmp_path / ".cache/checkpoints/d/0/model.safetensors"
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(100))
    run = SimpleNamespace(stage="train", workspace=SimpleNamespace(folder=tmp_path),
                          chance=random.Random(1), notes={})  # fmt: skip
    _cut(run)  # type: ignore[arg-type]
    size = file.stat().st_size
    assert size < 100
    told = f".cache/checkpoints/d/0/model.safetensors at {size} of 100 bytes"
    assert run.notes["cut"] == told


def test_processes_are_found_by_what_they_inherit_in_sessions_of_their_own_too() -> None:
    child = "import subprocess, sys; subprocess.run(['sleep', '60'], start_new_session=True)"
    token, sessions = f"test-{os.getpid()}", set[int]()
    process = subprocess.Popen(
        [sys.executable, "-c", child],
        env=os.environ | {torture_runs.MARK: token},
        start_new_session=True,
    )
    deadline = time.monotonic() + 30
    while "sleep" not in {one.name() for one in torture_runs.marked(token, sessions)}:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    found = torture_runs.marked(token, sessions)
    assert process.pid in {one.pid for one in found}
    for one in found:
        one.send_signal(signal.SIGKILL)
    process.wait()
    while torture_runs.marked(token, sessions):  # the other one is init's to bury
        assert time.monotonic() < deadline
        time.sleep(0.05)

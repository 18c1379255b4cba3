"""Two reports: what is put side by side, and what is said not to be comparable."""

import hashlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from specmill.compare import comparison_of, main
from specmill.sides import open_side
from tests.decided import HARDWARE, bench, cell

Change = Callable[[dict[str, Any]], None]

TABLE = "| method | K | load | change in A | change in B | B against A | acceptance length A | B |"


def content() -> dict[str, Any]:
    """What a report is written from: JSON by path, and what dvc.lock says that a bench read."""
    prepare = {"bench": "mt-bench", "bench_per_category": 4, "seed": 17, "limit": 100}
    return {
        "files": {
            "reports/hardware.json": json.loads(json.dumps(HARDWARE)),
            "reports/sources.json": {"bench": [{"source": "file:x", "sha256": "aa"}]},
            "reports/bench/eagle3.json": bench(
                2,
                cell(2, 1, 1.2, 1.15, 1.25, acceptance_length=1.9),
                cell(2, 8, 0.8, 0.75, 0.85, acceptance_length=1.8),
            ),
        },
        "read": {
            "models/verifier/identity.json": "v1",
            "data/prepared/bench.parquet": "p1",
            "models/eagle3": "h1.dir",
            "specmill/bench.py": "c1",
        },
        "params": {
            "bench": {"max_tokens": 64, "enforce_eager": False, "seconds": 20.0, "rounds": 3},
            "methods.eagle3": {"method": "eagle3"},
        },
        "prepare": prepare,
        "stage": "bench@eagle3",
    }


def write(folder: Path, changed: Change | None = None, spoil: Change | None = None) -> Path:
    """A report with its dvc.lock; `spoil` changes files behind the lock's back."""
    made = content()
    if changed:
        changed(made)
    texts = {path: json.dumps(tree) for path, tree in made["files"].items()}
    md5s = {path: hashlib.md5(text.encode()).hexdigest() for path, text in texts.items()}
    read = made["read"] | {"reports/hardware.json": md5s["reports/hardware.json"]}
    stages = {
        "prepare": {"params": {"params.yaml": {"prepare": made["prepare"]}}},
        made["stage"]: {
            "deps": [{"path": path, "md5": md5} for path, md5 in read.items()],
            "params": {"params.yaml": made["params"]},
            "outs": [{"path": path, "md5": md5} for path, md5 in md5s.items() if "/bench/" in path],
        },
    }
    if spoil:
        spoil(texts)
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    with (folder / "dvc.lock").open("w") as lock:
        YAML().dump({"schema": "2.0", "stages": stages}, lock)
    return folder


def figures(made: dict[str, Any], **changes: Any) -> None:
    """Change the row of one request in flight."""
    made["files"]["reports/bench/eagle3.json"]["rows"][0] |= changes


def compared(tmp_path: Path, changed: Change | None = None, spoil: Change | None = None) -> Any:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", changed, spoil)
    lines, is_comparable = comparison_of(open_side(str(a)), open_side(str(b)))
    return lines, is_comparable


def test_two_measurements_of_the_same_stand_side_by_side(tmp_path: Path) -> None:
    lines, is_comparable = compared(tmp_path)
    assert is_comparable
    assert lines == [
        f"A is {tmp_path}/a, B is {tmp_path}/b.",
        "",
        TABLE,
        "| --- | ---: | --- | ---: | ---: | --- | ---: | ---: |",
        "| eagle3 | 2 | 1 request in flight | +20% (+15% to +25%) | +20% (+15% to +25%) | no "
        "difference shown | 1.90 | 1.90 |",
        "| eagle3 | 2 | 8 requests in flight | -20% (-25% to -15%) | -20% (-25% to -15%) | no "
        "difference shown | 1.80 | 1.80 |",
        "",
    ]


def test_another_head_is_named_and_compared_by_intervals_that_lie_apart(tmp_path: Path) -> None:
    def better(made: dict[str, Any]) -> None:
        made["read"]["models/eagle3"] = "h2.dir"
        figures(made, speedup=1.4, speedup_low=1.26, speedup_high=1.5)
        made["files"]["reports/bench/eagle3.json"]["rows"][1] |= {
            "speedup": 0.5, "speedup_low": 0.4, "speedup_high": 0.74,
        }  # fmt: skip

    lines, _ = compared(tmp_path, better)
    assert "| +40% (+26% to +50%) | **faster** |" in lines[4]
    assert "| -50% (-60% to -26%) | **slower** |" in lines[5]
    assert lines[7:] == ["- eagle3 is not the same in both: its head (models/eagle3)."]


def test_a_row_without_an_interval_is_shown_and_not_judged(tmp_path: Path) -> None:
    lines, _ = compared(
        tmp_path, lambda made: figures(made, speedup=2.0, speedup_low=None, speedup_high=None)
    )
    assert "| +100% | no interval |" in lines[4]


def another_machine(made: dict[str, Any]) -> None:
    made["files"]["reports/hardware.json"]["cpu_model"] = "Other CPU"


def another_vllm(made: dict[str, Any]) -> None:
    made["files"]["reports/hardware.json"]["versions"]["vllm"] = "0.33.0"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (another_machine, "cpu_model is Some CPU in A and Other CPU in B"),
        (another_vllm, "vllm is 0.31.0 in A and 0.33.0 in B"),
    ],
)
def test_speeds_of_other_machines_are_not_compared_but_acceptance_is(
    tmp_path: Path, changed: Change, said: str
) -> None:
    lines, is_comparable = compared(tmp_path, changed)
    assert is_comparable
    assert lines[2] == (
        f"**Speeds are not comparable between them**: {said}. Each change is against the baseline "
        "beside it and holds on its own machine; acceptance may be compared."
    )
    assert "| not comparable | 1.90 | 1.90 |" in lines[6]


def test_another_amount_of_memory_or_version_of_python_matters_to_no_speed(tmp_path: Path) -> None:
    def changed(made: dict[str, Any]) -> None:
        made["files"]["reports/hardware.json"] |= {"memory_gib": 512, "machine": "0123"}
        made["files"]["reports/hardware.json"]["versions"]["python"] = "3.12"

    lines, _ = compared(tmp_path, changed)
    assert "not comparable" not in "\n".join(lines)


def set_bench(key: str, value: Any) -> Change:
    return lambda made: made["params"]["bench"].__setitem__(key, value)


def read(path: str, digest: str) -> Change:
    return lambda made: made["read"].__setitem__(path, digest)


def other_prompts(made: dict[str, Any]) -> None:
    made["read"]["data/prepared/bench.parquet"] = "p2"
    made["files"]["reports/sources.json"]["bench"][0]["sha256"] = "bb"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (read("models/verifier/identity.json", "v2"), "the verifier is another"),
        (other_prompts,
         "the bench's prompts are others (prepare.bench and what picks from it)"),
        (set_bench("max_tokens", 128), "bench.max_tokens is 64 in A and 128 in B"),
        (set_bench("enforce_eager", True), "bench.enforce_eager is false in A and true in B"),
    ],
)  # fmt: skip
def test_what_was_asked_otherwise_is_not_comparable_and_why(
    tmp_path: Path, changed: Change, why: str
) -> None:
    lines, is_comparable = compared(tmp_path, changed)
    assert not is_comparable
    assert lines[2:] == [
        "**Not comparable**: no row of one can be put beside a row of the other.",
        "",
        f"- **Not comparable**: eagle3: {why}.",
    ]


def test_the_length_of_an_open_loop_matters_only_where_there_is_one(tmp_path: Path) -> None:
    lines, is_comparable = compared(tmp_path / "1", set_bench("seconds", 60.0))
    assert is_comparable

    def at_a_rate(made: dict[str, Any]) -> None:
        figures(made, concurrency=None, rate=2.5)

    def longer(made: dict[str, Any]) -> None:
        at_a_rate(made)
        made["params"]["bench"]["seconds"] = 60.0

    a, b = write(tmp_path / "2", at_a_rate), write(tmp_path / "3", longer)
    lines, is_comparable = comparison_of(open_side(str(a)), open_side(str(b)))
    assert not is_comparable
    assert lines[-1] == "- **Not comparable**: eagle3: bench.seconds is 20.0 in A and 60.0 in B."


def test_answers_that_another_machine_rounded_otherwise_are_no_other_prompts(
    tmp_path: Path,
) -> None:
    def rounded(made: dict[str, Any]) -> None:
        made["read"]["data/prepared/bench.parquet"] = "p2"
        made["prepare"]["limit"] = 7  # of training prompts

    assert compared(tmp_path / "1", rounded)[1]

    def picked(made: dict[str, Any]) -> None:
        rounded(made)
        made["prepare"]["seed"] = 18

    assert not compared(tmp_path / "2", picked)[1]

    def unknown(made: dict[str, Any]) -> None:
        rounded(made)
        made["prepare"] = {}

    assert not compared(tmp_path / "3", unknown)[1]


def test_rows_of_one_only_and_what_may_differ_is_named(tmp_path: Path) -> None:
    def renamed(made: dict[str, Any]) -> None:
        made["files"]["reports/bench/theirs.json"] = made["files"].pop("reports/bench/eagle3.json")

    lines, is_comparable = compared(tmp_path / "1", renamed)
    assert not is_comparable
    assert lines[-2:] == ["- In A only: eagle3.", "- In B only: theirs."]

    def otherwise(made: dict[str, Any]) -> None:
        made["params"]["methods.eagle3"] = {"method": "eagle3", "settings": {}}
        made["params"]["bench"]["rounds"] = 9
        made["read"]["specmill/bench.py"] = "c2"
        made["files"]["reports/bench/eagle3.json"]["schedule"] = [[1, 8, 2]]

    lines, is_comparable = compared(tmp_path / "2", otherwise)
    assert is_comparable
    assert lines[-1] == (
        "- eagle3 is not the same in both: its entry of `methods`, its K by requests in flight, "
        "the code that measured it (specmill/bench.py)."
    )


def test_rows_that_are_not_what_the_lock_says_are_left_out(tmp_path: Path) -> None:
    row = "reports/bench/eagle3.json"

    def touched(texts: dict[str, Any]) -> None:
        texts[row] += " "

    def left_out(folder: str, changed: Change | None = None, spoil: Change | None = None) -> str:
        return str(compared(tmp_path / folder, changed, spoil)[0][-1])

    assert left_out("1", spoil=touched) == (
        f"- Left out of B: eagle3, for {row} is not what dvc.lock says stage bench@eagle3 wrote."
    )
    assert left_out("2", spoil=lambda texts: texts.pop(row)) == (
        f"- Left out of B: eagle3, for {row} is not there."
    )
    assert left_out("3", lambda made: made.__setitem__("stage", "imported@eagle3")) == (
        "- Left out of B: eagle3, for it was measured by another tool."
    )

    def moved(texts: dict[str, Any]) -> None:
        texts["reports/hardware.json"] += " "

    assert left_out("4", spoil=moved) == (
        "- Left out of B: eagle3, for it was measured on another machine than "
        "reports/hardware.json says."
    )

    def refused(made: dict[str, Any]) -> None:
        made["files"][row]["not_served"] = "its heads are 4 wide"

    assert left_out("5", refused) == (
        "- Left out of B: eagle3, for it is not served: its heads are 4 wide."
    )

    def older(made: dict[str, Any]) -> None:
        made["files"][row] = {"c1": {"all": {"speedup": 1.0}}}

    assert left_out("6", older) == (
        "- Left out of B: eagle3, for another version of the bench wrote it."
    )


def test_a_folder_reports_is_found_with_the_lock_beside_it(tmp_path: Path) -> None:
    write(tmp_path)
    assert open_side(str(tmp_path / "reports")).rows == open_side(str(tmp_path)).rows


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda a: (a / "dvc.lock").unlink(), "has no dvc.lock in it or beside it"),
        (lambda a: (a / "dvc.lock").write_text("["), "its dvc.lock is none that DVC wrote"),
        (lambda a: (a / "dvc.lock").write_text("a"), "its dvc.lock is none that DVC wrote"),
        (lambda a: (a / "reports/hardware.json").unlink(), "has no reports/hardware.json"),
        (lambda a: (a / "reports/hardware.json").write_text("{"), "hardware.json is not valid"),
    ],
)
def test_what_is_missing_or_broken_ends_it_with_a_sentence(
    tmp_path: Path, spoil: Callable[[Path], Any], said: str
) -> None:
    spoil(write(tmp_path / "a"))
    with pytest.raises(ValueError, match=f"{tmp_path}/a.*{said}"):
        open_side(str(tmp_path / "a"))


def commit(folder: Path) -> None:
    who = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "-m", "report"]):
        subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def test_a_revision_and_a_folder_in_it_are_read_from_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    write(tmp_path / "gpu", another_machine)
    commit(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reports/hardware.json").unlink()
    here = open_side("HEAD")
    assert here.rows["eagle3"].result["rows"][0]["speedup"] == 1.2
    assert open_side("HEAD:reports").rows == here.rows
    for asked in ("HEAD:gpu", "HEAD:gpu/reports"):
        assert open_side(asked).hardware["cpu_model"] == "Other CPU"
    monkeypatch.chdir(tmp_path / "gpu")
    assert open_side("HEAD").hardware["cpu_model"] == "Other CPU"  # of the folder one is in
    for asked in ("nowhere", "nowhere:reports", ":reports", "--help"):
        with pytest.raises(ValueError, match="neither a folder nor a Git revision"):
            open_side(asked)


def test_the_command_says_what_is_not_comparable_and_ends_with_a_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b")
    c = write(tmp_path / "c", set_bench("max_tokens", 128))
    with pytest.raises(SystemExit) as ended:
        main([str(a), str(b)])
    assert ended.value.code == 0
    assert TABLE in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main([str(a), str(c)])
    assert ended.value.code == 1
    with pytest.raises(SystemExit, match=r"^not comparable: .*no dvc\.lock"):
        main([str(a), str(tmp_path)])

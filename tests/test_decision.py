"""The record as a whole: its verdict, its order, what changed, what is kept."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from specmill.decision import decide
from specmill.decision_text import decision_text
from specmill.grounds import Grounds
from specmill.hand_options import Decisions, HandOption
from specmill.revision import Committed, committed
from tests.benches import engine
from tests.decided import (
    HARDWARE,
    NEVER,
    bench,
    cell,
    foreseen,
    grounds,
    methods,
    predictions,
    results,
)

NOTHING = Decisions()
Found = dict[str, Any]


def record(found: Found | None = None, written: Decisions = NOTHING, last: Committed = NEVER,
           **further: Any) -> Found:  # fmt: skip
    return decide(grounds(found, **further), written, last)


def as_committed(of: Found, commit: str = "0ld") -> Committed:
    """A record as Git gives it back."""
    return Committed(commit, json.dumps(of))


def status(of: Found) -> dict[str, str]:
    return {option["name"]: option["status"] for option in of["options"]}


def slower() -> Found:
    """eagle3 that is slower than no speculation."""
    return {
        "none": results()["none"],
        "eagle3": bench(2, cell(2, 1, 0.9, 0.85, 0.95), cell(2, 8, 0.7, 0.6, 0.8)),
    }


def test_what_was_adopted_is_the_verdict_with_its_figures() -> None:
    made = record()
    assert made["verdict"] == (
        "Serve eagle3 with K=1: +20% (+15% to +25%) at 1 request in flight, +1% (-3% to +5%) at 8 "
        "requests in flight."
    )
    served = {"option": "eagle3, K=1", "method": "eagle3", "k": 1, "ranges": None}
    assert made["deploy"] == made["deploy_greedy"] == served
    assert status(made) == {
        "eagle3, K=1": "adopt",
        "eagle3, K=2": "pending",
        "ngram, K=3": "pending",
        "eagle3, K by requests in flight": "pending",
        "more on-policy data": "pending",
        "ngram, K by requests in flight": "pending",
        "other head": "pending",
        "train longer": "pending",
    }
    assert list(made["options"][0]) == [
        "name", "method", "k", "status", "evidence", "gate", "by", "against", "speeds",
    ]  # fmt: skip


def test_of_several_adopted_the_largest_mean_over_loads_is_served() -> None:
    found = results()
    ranges = [[1, 4, 2], [5, 8, 0]]
    # sqrt(1.26 * 0.98) = 1.111, above sqrt(1.2 * 1.01) = 1.101 of K=1
    cells = cell(2, 1, 1.26, 1.2, 1.3), cell(2, 8, 0.98, 0.97, 0.99)
    found["eagle3_scheduled"] = bench(2, *cells) | {"schedule": ranges}
    made = record(found)
    assert made["deploy"] == {
        "option": "eagle3, K by requests in flight", "method": "eagle3", "k": 2, "ranges": ranges,
    }  # fmt: skip
    assert made["verdict"] == (
        "Serve eagle3 with K=2 at 1 to 4 requests in flight, no draft from 5: +26% (+20% to +30%) "
        "at 1 request in flight, -2% (-3% to -1%) at 8 requests in flight."
    )
    assert "eagle3_scheduled, K=2" not in status(made)
    assert status(made)["eagle3, K=2"] == "ruled out"


def test_where_nothing_pays_the_nearest_is_named_with_its_gate() -> None:
    predicted = predictions(
        foreseen("eagle3", 2, 1, 0.9, bound=1.5), foreseen("eagle3", 1, 1, 1.02),
    )  # fmt: skip
    made = record(slower(), predicted=predicted)
    assert made["deploy"] is None
    assert made["deploy_greedy"] is None
    assert made["verdict"] == (
        "Serve without speculation: nothing was shown to be faster at some load and slower at "
        "none; nearest is eagle3, K=1, if `dvc exp run -S spec.tokens=1` measures it "
        "faster."
    )


def test_what_is_faster_for_greedy_requests_only_is_offered_as_that_and_not_adopted() -> None:
    found = results()
    found["eagle3"]["sampling"] = {"lossless": False}
    made = record(found)
    assert made["deploy"] is None
    assert made["deploy_greedy"]["option"] == "eagle3, K=1"
    assert made["verdict"] == (
        "Serve without speculation, or, if no request is ever sampled, eagle3 with K=1: +20% (+15% "
        "to +25%) at 1 request in flight, +1% (-3% to +5%) at 8 requests in flight; sampled "
        "requests would get another distribution."
    )


def test_without_a_measurement_there_is_nothing_to_serve_yet() -> None:
    only = {name: row for name, row in methods().items() if name == "none"}
    made = decide(Grounds({"none": results()["none"]}, only, HARDWARE), NOTHING, NEVER)
    assert made["verdict"] == (
        "Serve without speculation until a row that speculates has been measured."
    )
    assert made["options"] == []


def test_equal_grounds_make_equal_bytes() -> None:
    assert json.dumps(record()) == json.dumps(record())


def test_the_first_record_and_a_folder_without_git_say_so() -> None:
    assert record()["changes"] == ["This is the first record; none is committed yet."]
    assert record()["compared_with"] is None
    bare = record(last=Committed(None, None))
    assert bare["changes"] == ["There is no Git history here: what changed is not known."]


@pytest.mark.parametrize("text", ["{", "[]", '{"verdict": 1}', '{"options": [{"name": "x"}]}'])
def test_a_record_of_another_version_is_not_compared_with(text: str) -> None:
    made = record(last=Committed("0ld", text))
    assert made["changes"] == [
        "The record of 0ld is of another version and cannot be compared with."
    ]
    assert made["compared_with"] is None


def test_changes_of_status_verdict_and_wording_are_told_and_figures_are_not() -> None:
    found = slower()
    before = record(found)
    found["eagle3"] = bench(2, cell(2, 1, 1.1, 1.05, 1.15), cell(2, 8, 1.0, 0.95, 1.05))
    now = record(found, last=as_committed(before))
    assert now["compared_with"] == "0ld"
    assert now["changes"] == [
        "The verdict was: " + before["verdict"],
        "eagle3, K=2: ruled out before, adopt now. At 1 request in flight: +10% (+5% to +15%), "
        "faster.",
        "Gate of more on-policy data: it pays as it is; what a better head would bring is not "
        "predicted; before: break-even is in reach, which is not known without "
        "reports/predicted.json.",
        "Gate of other head: it pays as it is; what a better head would bring is not predicted; "
        "before: break-even is in reach, which is not known without reports/predicted.json.",
        "Gate of train longer: it pays as it is; what a better head would bring is not predicted; "
        "before: break-even is in reach, which is not known without reports/predicted.json.",
    ]
    found["eagle3"]["rows"][0]["speedup_high"] = 1.16
    again = record(found, last=as_committed(now | {"verdict": now["verdict"]}, "n3w"))
    assert again["changes"][0].startswith("The verdict was: ")  # it quotes figures
    assert len(again["changes"]) == 1


def test_other_figures_in_a_gate_are_no_change() -> None:
    def made(bound: float, last: Committed = NEVER) -> Found:
        predicted = predictions(foreseen("eagle3", 2, 1, 0.9, bound=bound))
        return record(slower(), predicted=predicted, last=last)

    assert made(1.6, as_committed(made(1.5)))["changes"] == ["No status and no gate: figures only."]


def test_the_same_record_made_again_keeps_what_it_said_of_the_one_before() -> None:
    before = record(slower())
    now = record(last=as_committed(before))
    assert len(now["changes"]) > 1
    assert record(last=as_committed(now, "n3w")) == now


def test_an_option_whose_row_is_gone_stays_listed_and_is_not_adopted_any_more() -> None:
    before = record()
    found = results()
    del found["eagle3"]
    rows = {name: row for name, row in methods().items() if name != "eagle3"}
    now = decide(Grounds(found, rows, HARDWARE), NOTHING, as_committed(before))
    assert now["deploy"] is None
    kept = next(option for option in now["options"] if option["name"] == "eagle3, K=1")
    assert (kept["status"], kept["gate"]) == ("pending", "it is a row again and still faster")
    first = before["options"][0]["evidence"]
    assert kept["evidence"] == [
        "Not among the options any more; as it was last recorded:", *first,
    ]  # fmt: skip
    assert (
        "eagle3, K=1: adopt before, pending now. Not among the options any more; as it was last "
        "recorded:"
    ) in now["changes"]
    # nor does it grow when that is recorded in turn
    again = decide(Grounds(found, rows, HARDWARE), NOTHING, as_committed(now, "n3w"))
    assert again == now


def test_options_by_hand_are_kept_and_go_when_they_are_taken_out() -> None:
    mine = Decisions(
        options=[HandOption(name="theirs", reason="never served here", gate="it is published")],
        gates={"ngram, K=3": "answers repeat their prompts"},
    )
    before = record(written=mine)
    kept = {option["name"]: option for option in before["options"]}
    assert kept["theirs"]["by"] == "hand"
    assert kept["ngram, K=3"]["gate"] == "answers repeat their prompts"
    after = record(last=as_committed(before))
    assert "theirs" not in status(after)
    assert "Gone: theirs, pending before." in after["changes"]


def test_the_text_has_the_limits_then_a_line_per_option_then_the_evidence() -> None:
    made = record(check={"median_absolute_error": 0.0417})
    text = decision_text(made)
    assert text.startswith(f"# Decision\n\n**{made['verdict']}**\n\n## What this run can decide\n")
    assert "- Predictions that were measured too were off by 4.2% in the median.\n" in text
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == [
        "## What this run can decide", "## Options", "## Evidence", "## What changed", "## Rules",
    ]  # fmt: skip
    table = [line for line in text.splitlines() if line.startswith("| ")]
    assert table[0] == (
        "| option | status | rests on | 1 in flight | 8 in flight | against it | would change that "
        "|"
    )
    assert [table[2], table[4]] == [
        "| eagle3, K=1 | adopt | measured | **+20% (+15% to +25%)** | +1% (-3% to +5%) | - | - |",
        "| eagle3, K=2 | pending | measured | **+25% (+20% to +30%)** | **-25% (-30% to -20%)** | "
        "slower at 8 in flight | K by requests in flight is measured (`scheduled.eagle3` in "
        "params.yaml), which drafts nothing where that costs |",
    ]
    assert (
        "- **eagle3, K=2** (pending). At 1 request in flight: +25% (+20% to +30%), faster; 1.38 "
        "tokens per step. At 8 requests in flight: -25% (-30% to -20%), slower; 1.38 tokens per "
        "step. *Worth it if* K by requests in flight is measured (`scheduled.eagle3` in "
        "params.yaml), which drafts nothing where that costs.\n"
    ) in text
    since = decision_text(record(slower(), last=as_committed(made)))
    assert "\n## What changed since the record of 0ld\n" in since


def test_a_mark_is_explained_once_and_what_is_predicted_is_in_italics() -> None:
    found = results()
    for name in ("ngram", "eagle3"):
        found[name]["sampling"] = {"lossless": False}
    predicted = predictions(foreseen("eagle3", 5, 1, 1.2), foreseen("eagle3", 5, 16, 0.5))
    text = decision_text(record(found, predicted=predicted))
    assert text.count("another distribution than the verifier's") == 1
    assert (
        "| eagle3, K=5 | pending | predicted | *+20% (+15% to +25%)* | - | *-50% (-55% to -45%)* | "
        "not measured; predicted slower at 16 in flight; not lossless when sampled † |"
    ) in text
    # of each method: what was measured, the schedule; of the head: longer, other, more; K=5
    assert text.count("not lossless when sampled † |") == 3 + 2 + 3 + 1


def test_where_none_differs_widely_from_itself_nothing_is_called_nearest() -> None:
    predicted = predictions(foreseen("eagle3", 1, 1, 1.02))
    found = slower()
    found["none"]["rows"][0] |= {"speedup_low": 0.88, "speedup_high": 1.09}  # 0.21 wide
    assert record(found, predicted=predicted)["verdict"] == (
        "Serve without speculation: nothing was shown to be faster at some load and slower at "
        "none; what is nearest cannot be said, for `none` may differ from itself by up "
        "to 12%."
    )
    found["none"]["rows"][0] |= {"speedup_low": None, "speedup_high": None}
    assert record(found, predicted=predicted)["verdict"].endswith(
        "`none` may differ from itself by nobody knows how much."
    )


def test_what_may_never_be_adopted_is_not_nearest() -> None:
    predicted = predictions(foreseen("eagle3", 1, 1, 1.02))
    found = slower()
    found["eagle3"]["sampling"] = {"lossless": False}
    made = record(found, predicted=predicted)
    assert status(made)["eagle3, K=1"] == "pending"
    assert made["verdict"].endswith(
        "; nothing that is pending may be adopted before its output is lossless."
    )


def test_a_run_of_uncompiled_engines_is_called_a_test() -> None:
    found = slower()
    found["eagle3"]["engine"] = {"method_k2_0": engine(enforce_eager="True")}
    made = record(found)
    assert made["verdict"].startswith(
        "Test configuration, whose speeds decide nothing; by them: Serve without speculation"
    )
    assert made["limits"][0].startswith("**Test configuration**: engines of eagle3 ran unco")


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def test_a_file_is_read_as_the_current_commit_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "repository" / "below"
    (folder / "reports").mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    place = Path("reports/decision.json")
    assert committed(place) == Committed(None, None)
    git(folder.parent, "init", "--quiet")
    assert committed(place) == Committed(None, None)  # before the first commit
    git(folder.parent, "commit", "--quiet", "--allow-empty", "-m", "start")
    assert committed(place).commit
    assert committed(place).text is None
    (folder / place).write_text('{"a": 1}\n')
    git(folder.parent, "add", "--all")
    git(folder.parent, "commit", "--quiet", "-m", "record")
    at = committed(place).commit
    (folder / place).write_text('{"a": 2}\n')
    git(folder.parent, "commit", "--quiet", "--allow-empty", "-m", "later")
    assert committed(place) == Committed(at, '{"a": 1}')

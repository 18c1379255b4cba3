"""The status of every row at every K, and what would reopen it."""

from typing import Any

import pytest

from specmill.grounds import Grounds
from specmill.options import Option, fixed_options
from tests.decided import bench, cell, foreseen, grounds, predictions, results


def options(known: Grounds, name: str = "eagle3") -> dict[int | None, Option]:
    return {option.k: option for option in fixed_options(known, name)}


def only(known: Grounds, name: str = "eagle3") -> Option:
    (option,) = fixed_options(known, name)
    return option


def judged(*cells: dict[str, Any], k: int = 2, **further: Any) -> Option:
    """Of eagle3 with these rows."""
    return only(grounds({"eagle3": bench(k, *cells)}, **further))


def test_faster_somewhere_and_slower_nowhere_is_adopted() -> None:
    option = options(grounds())[1]
    assert (option.name, option.status, option.gate, option.by) == (
        "eagle3, K=1", "adopt", None, "measured",
    )  # fmt: skip
    assert option.evidence == [
        "At 1 request in flight: +20% (+15% to +25%), faster; 1.38 tokens per step.",
        "At 8 requests in flight: +1% (-3% to +5%), no difference shown; 1.38 tokens per step.",
    ]
    assert option.gain == pytest.approx((1.2 * 1.01) ** 0.5)


def test_faster_here_and_slower_there_waits_for_a_schedule_of_k() -> None:
    option = options(grounds())[2]
    assert option.status == "pending"
    assert option.gate == (
        "K by requests in flight is measured (`scheduled.eagle3` in params.yaml), which drafts "
        "nothing where that costs"
    )


def test_once_the_schedule_is_measured_a_mixed_row_is_ruled_out_but_for_its_good_loads() -> None:
    found = results()
    found["eagle3_scheduled"] = bench(2, cell(2, 1, 1.2, 1.1, 1.3)) | {"schedule": [[1, 1, 2]]}
    option = options(grounds(found))[2]
    assert option.status == "ruled out"
    assert option.gate == "it is served at 1 request in flight only"


def test_a_mixed_row_that_no_schedule_can_help_is_ruled_out() -> None:
    found = {"medusa": bench(2, cell(2, 1, 1.2, 1.1, 1.3), cell(2, 8, 0.8, 0.7, 0.9),
                             served_by="medusa")}  # fmt: skip
    option = only(grounds(found), "medusa")
    assert (option.status, option.gate) == (
        "ruled out", "it is served at 1 request in flight only",
    )  # fmt: skip


def test_slower_everywhere_is_ruled_out_until_its_tokens_per_step_break_even() -> None:
    option = judged(
        cell(2, 1, 0.95, 0.92, 0.98, tokens_per_step=1.4, acceptance_rate_pos_0=0.3),
        cell(2, 8, 0.7, 0.65, 0.75, tokens_per_step=1.4, acceptance_rate_pos_0=0.3),
        predicted=predictions(
            foreseen("eagle3", 2, 1, 0.93, bound=1.5), foreseen("eagle3", 2, 8, 0.7, bound=2.0)
        ),
    )
    assert option.status == "ruled out"
    # 0.3 * (1.5 - 1) / (1.4 - 1) = 0.375
    assert option.gate == (
        "tokens per step exceed 1.50 at 1 request in flight (now 1.40; acceptance at position 0 of "
        "0.38 instead of 0.30) and 2.00 at 8 (now 1.40)"
    )
    assert option.evidence[0] == (
        "At 1 request in flight: -5% (-8% to -2%), slower; 1.40 tokens per step; predicted -7% "
        "(-12% to -2%)."
    )


@pytest.mark.parametrize(
    ("high", "status", "by"),
    [(1.02, "pending", "measured"), (0.99, "ruled out", "measured and predicted")],
)
def test_no_difference_shown_is_open_while_the_predicted_interval_reaches_above_none(
    high: float, status: str, by: str
) -> None:
    option = judged(
        cell(2, 1, 0.98, 0.93, 1.03, tokens_per_step=1.4),
        cell(2, 8, 0.7, 0.65, 0.75, tokens_per_step=1.4),
        predicted=predictions(foreseen("eagle3", 2, 1, high - 0.05), foreseen("eagle3", 2, 8, 1.2)),
    )
    assert (option.status, option.by) == (status, by)
    assert option.against == [
        "slower at 8 in flight", "no difference shown at 1 in flight",
    ]  # fmt: skip
    assert option.gate == (
        "tokens per step exceed 1.50 at 1 request in flight (now 1.40) and 1.50 at 8 (now 1.40)"
    )


def test_where_no_difference_is_shown_above_none_more_rounds_may_show_one() -> None:
    option = judged(
        cell(2, 1, 1.03, 0.98, 1.08, tokens_per_step=1.6),
        predicted=predictions(foreseen("eagle3", 2, 1, 1.04, bound=1.5)),
    )
    assert option.status == "pending"
    # what the prediction says breaks even is there already
    assert option.gate == (
        "more rounds (bench.rounds, bench.precision) show a difference at 1 request in flight, or "
        "tokens per step exceed 1.60 at 1 request in flight (now 1.60)"
    )


def test_without_a_prediction_what_is_undecided_stays_open_and_it_is_said_what_is_unknown() -> None:
    option = judged(cell(2, 1, 0.98, 0.93, 1.03))
    assert option.status == "pending"
    assert option.gate == (
        "break-even is in reach, which is not known without reports/predicted.json"
    )


def test_too_few_pairs_leave_a_row_open() -> None:
    option = judged(cell(2, 1, 0.5, None, None), cell(2, 8, 0.5, 0.4, 0.6))
    assert option.status == "pending"
    assert option.gate == (
        "more pairs (bench.requests, bench.rounds) give 1 request in flight an interval"
    )
    assert option.evidence[0] == "At 1 request in flight: -50%, without an interval."


def test_a_rate_and_a_context_are_loads_like_others() -> None:
    deep = cell(2, 1, 1.3, 1.2, 1.4) | {"context": 1024}
    option = judged(cell(2, 2.5, 0.8, 0.7, 0.9), deep)
    assert option.status == "pending"
    assert [text.split(":")[0] for text in option.evidence[:2]] == [
        "At 1 request in flight, 1024 tokens of context", "At 2.5 requests per second",
    ]  # fmt: skip


def test_prompt_types_are_told_apart_by_load() -> None:
    assert "By prompt type" not in " ".join(options(grounds())[2].evidence)  # there is only one
    found = results()
    found["eagle3"]["rows"].append(
        next(r for r in found["eagle3"]["rows"] if r["category"] == "maths"
             and r["num_speculative_tokens"] == 2 and r["concurrency"] == 1)
        | {"category": "coding", "speedup": 0.8, "speedup_low": 0.7, "speedup_high": 0.9}
    )  # fmt: skip
    assert options(grounds(found))[2].evidence[-1] == (
        "By prompt type at 1 request in flight: from -20% (-30% to -10%), coding, to +50% (+40% to "
        "+60%), maths."
    )
    found["eagle3"]["rows"][-1] |= {"speedup_low": None, "speedup_high": None}
    assert "By prompt type" not in " ".join(options(grounds(found))[2].evidence)


def test_what_is_not_lossless_is_never_adopted() -> None:
    found = results()
    found["eagle3"]["sampling"] = {"lossless": False}
    option = options(grounds(found))[1]
    assert (option.status, option.greedy_only) == ("pending", True)
    assert option.gate == "no request is sampled, or its samples are right (†)"
    assert option.against == ["not lossless when sampled †"]
    found["eagle3"]["rows"][0]["num_not_rounding"] = 2
    option = options(grounds(found))[1]
    assert (option.status, option.greedy_only) == ("ruled out", False)
    assert option.gate == "its greedy answers are the verifier's own (‡)"
    assert option.against == ["not lossless ‡ (2 greedy answers)"]


def test_all_that_is_against_a_row_is_said_of_every_k() -> None:
    found = results()
    found["eagle3"]["sampling"] = {"lossless": False}
    predicted = predictions(foreseen("eagle3", 5, 1, 1.02), foreseen("eagle3", 5, 8, 0.7))
    made = options(grounds(found, predicted=predicted))
    assert {k: option.against for k, option in made.items()} == {
        1: ["not lossless when sampled †"],
        2: ["slower at 8 in flight", "not lossless when sampled †"],
        5: ["not measured", "predicted slower at 8 in flight",
            "not lossless when sampled †"],
    }  # fmt: skip
    assert made[2].speeds == {
        "1 in flight": "**+25% (+20% to +30%)**", "8 in flight": "**-25% (-30% to -20%)**",
    }  # fmt: skip
    assert made[5].speeds == {
        "1 in flight": "*+2% (-3% to +7%)*", "8 in flight": "*-30% (-35% to -25%)*",
    }  # fmt: skip


def test_what_was_only_predicted_is_open_or_ruled_out_by_its_interval() -> None:
    predicted = predictions(
        foreseen("eagle3", 3, 1, 1.02), foreseen("eagle3", 3, 8, 0.7),
        foreseen("eagle3", 5, 1, 0.9, bound=2.0), foreseen("eagle3", 5, 8, 0.6, bound=2.6),
    )  # fmt: skip
    found = options(grounds(predicted=predicted))
    assert list(found) == [1, 2, 3, 5]
    three, five = found[3], found[5]
    assert (three.status, three.by) == ("pending", "predicted")
    assert three.gate == "`dvc exp run -S spec.tokens=3` measures it faster"
    assert three.evidence == [
        "Not measured.",
        "Predicted at 1 request in flight: +2% (-3% to +7%).",
        "Predicted at 8 requests in flight: -30% (-35% to -25%).",
    ]
    assert (five.status, five.by) == ("ruled out", "predicted")
    assert five.gate == (
        "tokens per step exceed 2.00 at 1 request in flight (now 1.40) and 2.60 at 8 (now 1.40)"
    )


def test_a_k_that_was_not_measured_waits_for_what_its_row_lacks_too() -> None:
    found = results()
    found["eagle3"]["sampling"] = {"lossless": False}
    predicted = predictions(foreseen("eagle3", 5, 1, 1.2), foreseen("eagle3", 6, 1, 0.5))
    right = "; and no request is sampled, or its samples are right (†)"
    made = options(grounds(found, predicted=predicted))
    assert made[5].gate == f"`dvc exp run -S spec.tokens=5` measures it faster{right}"
    assert made[6].status == "ruled out"
    assert made[6].gate is not None
    assert made[6].gate.endswith(right)
    for k in (5, 6):
        assert made[k].against[-1] == "not lossless when sampled †"


def test_rows_and_k_that_were_refused_say_why() -> None:
    refused = bench(3) | {"not_served": "its heads are 4 wide", "rows": [cell(3, 1, 1, None, None)]}
    option = only(grounds({"eagle3": refused}))
    assert option.evidence == ["Not served: its heads are 4 wide."]
    assert option.status == "ruled out"
    assert option.gate == "what it lacked is there: `dvc repro -f -s bench@eagle3` asks again"
    found = results()
    found["eagle3"]["refused"] = {"2": "vLLM does not start with it"}
    assert options(grounds(found))[2].evidence == ["Not served: vLLM does not start with it."]
    assert options(grounds(found))[1].status == "adopt"


def test_a_row_of_another_tool_is_no_reason_to_adopt() -> None:
    theirs = bench(3, cell(3, 8, 1.5, None, None), served_by="imported") | {"source": {}}
    option = only(grounds({"theirs": theirs}), "theirs")
    assert (option.status, option.by) == ("pending", "measured")
    assert option.gate == "`methods` has a row that measures it here, with an interval"
    alone = bench(3, cell(3, 8, 1.0, None, None) | {"speedup": None}, served_by="imported")
    option = only(grounds({"theirs": alone | {"source": {}}}), "theirs")
    assert option.evidence == ["Measured by another tool, and compared with nothing."]

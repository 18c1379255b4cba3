"""K by requests in flight as an option: planned, measured, beside the best fixed K."""

from typing import Any

from specmill.options import Option
from specmill.schedule_options import schedule_option
from tests.decided import bench, cell, foreseen, grounds, predictions, results

RANGES = [[1, 4, 2], [5, 8, 0]]
PLANNED = {"eagle3": {"ranges": RANGES, "reason": None}}


def scheduled(*cells: dict[str, Any], ranges: Any = RANGES, **changes: Any) -> Option:
    """eagle3 of tests.benches (K=2: +25% and -25%, K=1: +20% and +1%) with a measured schedule."""
    found = results()
    found["eagle3_scheduled"] = bench(2, *cells) | {"schedule": ranges} | changes
    return schedule_option(grounds(found, schedules=PLANNED), "eagle3")


def test_a_schedule_that_is_faster_and_costs_little_where_it_drafts_nothing_is_adopted() -> None:
    option = scheduled(cell(2, 1, 1.24, 1.18, 1.30), cell(2, 8, 0.95, 0.92, 0.98))
    assert (option.name, option.method, option.k) == (
        "eagle3, K by requests in flight", "eagle3_scheduled", None,
    )  # fmt: skip
    assert (option.status, option.gate, option.ranges) == ("adopt", None, RANGES)
    assert option.evidence == [
        "K=2 at 1 to 4 requests in flight, no draft from 5.",
        "At 1 request in flight: +24% (+18% to +30%), faster.",
        "At 8 requests in flight: -5% (-8% to -2%), slower.",
        "It is within or above the interval of the best fixed K at 1 request in flight, K=2: +25% "
        "(+20% to +30%).",
        "At 8 requests in flight it drafts nothing; what that costs is -5% (-8% to -2%).",
    ]


def test_a_schedule_below_the_interval_of_the_best_fixed_k_is_said_to_be() -> None:
    option = scheduled(cell(2, 1, 1.19, 1.1, 1.25), cell(2, 2, 1.0, 0.9, 1.1))
    assert option.evidence[3].startswith("It is below the interval of the best fixed K at 1 ")
    assert option.evidence[4] == "No fixed K was measured at 2 requests in flight."


def test_what_costs_more_than_it_gains_is_not_adopted() -> None:
    # 1 / 0.8 = 1.25 is lost, 1.24 gained
    option = scheduled(cell(2, 1, 1.24, 1.18, 1.30), cell(2, 8, 0.8, 0.75, 0.85))
    assert (option.status, option.gate) == (
        "ruled out", "it is served at 1 request in flight only",
    )  # fmt: skip


def test_being_slower_where_it_drafts_is_no_price_of_drafting_nothing() -> None:
    option = scheduled(cell(2, 1, 1.24, 1.18, 1.30), cell(2, 4, 0.99, 0.98, 0.995))
    assert option.status == "ruled out"
    option = scheduled(cell(2, 1, 1.24, 1.18, 1.30), cell(2, 4.0, 0.99, 0.98, 0.995))
    assert option.status == "ruled out"  # at a rate nobody knows how many are in flight


def test_a_schedule_that_is_not_lossless_when_sampled_is_for_greedy_requests_only() -> None:
    option = scheduled(
        cell(2, 1, 1.24, 1.18, 1.30), cell(2, 8, 0.95, 0.92, 0.98), sampling={"lossless": False}
    )
    assert (option.status, option.greedy_only) == ("pending", True)


def test_a_schedule_that_was_refused_says_why() -> None:
    option = scheduled(not_served="vLLM does not start with it")
    assert option.evidence == ["Not served: vLLM does not start with it."]
    assert option.gate == (
        "what it lacked is there: `dvc repro -f -s bench_scheduled@eagle3` asks again"
    )


def test_another_schedule_by_now_is_named() -> None:
    option = scheduled(cell(2, 1, 1.24, 1.18, 1.30), ranges=[[1, 8, 2]])
    assert option.evidence[-1] == (
        "The schedule as predicted by now is another: K=2 at 1 to 4 requests in flight, no draft "
        "from 5."
    )


def test_a_planned_schedule_is_pending_with_what_is_predicted_of_it() -> None:
    predicted = predictions(
        foreseen("eagle3", 2, 1, 1.2), foreseen("eagle3", 1, 1, 1.1), foreseen("eagle3", 2, 8, 0.8)
    )
    option = schedule_option(grounds(predicted=predicted, schedules=PLANNED), "eagle3")
    assert (option.status, option.by) == ("pending", "predicted")
    assert option.evidence == [
        "K=2 at 1 to 4 requests in flight, no draft from 5; not measured.",
        "Predicted at 1 request in flight: +20% (+15% to +25%).",
        "Made of predictions for 1 and 8 in flight; between them linear is assumed.",
    ]
    assert (option.against, option.speeds) == (
        ["not measured"], {"1 in flight": "*+20% (+15% to +25%)*"},
    )  # fmt: skip
    assert option.gate == "it is measured, and faster (`scheduled.eagle3` in params.yaml)"


def test_a_planned_schedule_of_a_row_that_is_not_lossless_waits_for_that_too() -> None:
    found = results()
    found["eagle3"]["sampling"] = {"lossless": False}
    predicted = predictions(foreseen("eagle3", 2, 1, 1.2), foreseen("eagle3", 1, 1, 1.1))
    known = grounds(found, predicted=predicted, schedules=PLANNED)
    option = schedule_option(known, "eagle3")
    assert option.status == "pending"
    assert option.gate is not None
    assert option.gate.endswith("; and no request is sampled, or its samples are right (†)")
    assert option.against == ["not measured", "not lossless when sampled †"]
    never = {"eagle3": {"ranges": [[1, 8, 0]], "reason": None}}
    option = schedule_option(grounds(found, schedules=never), "eagle3")
    assert option.against == ["no K is predicted faster", "not lossless when sampled †"]


def test_a_schedule_that_never_drafts_is_ruled_out_whether_it_is_a_row_or_not() -> None:
    never = {"eagle3": {"ranges": [[1, 8, 0]], "reason": None}}
    found = results()
    for _ in range(2):
        option = schedule_option(grounds(found, schedules=never), "eagle3")
        assert (option.status, option.gate) == ("ruled out", "one of its K is predicted faster")
        assert option.evidence == ["No K is predicted to be faster at 1 to 8 requests in flight."]
        found["eagle3_scheduled"] = bench(0) | {
            "schedule": [[1, 8, 0]], "not_served": "no K is predicted to be faster",
        }  # fmt: skip


def test_without_a_schedule_the_reason_is_given() -> None:
    reason = {"eagle3": {"ranges": None, "reason": "nothing is predicted for it: no curve"}}
    option = schedule_option(grounds(schedules=reason), "eagle3")
    assert option.status == "pending"
    assert option.evidence == ["There is no schedule: nothing is predicted for it: no curve."]
    option = schedule_option(grounds(), "eagle3")
    assert option.evidence == ["There is no schedule: there is no reports/schedule.json."]

import copy
from typing import Any

import pytest

from specmill.recording import Recording
from specmill.summary import summarise
from tests.benched import answer, bench_section, both, cell, drafted, request

Rows = list[dict[str, Any]]
MATHS = {"category": "maths", "number": 1}


def steps(number: int, *drafts: int) -> dict[str, int]:
    return {"engine_steps": number} | (drafted(*drafts) if drafts else {})


def measured() -> list[dict[str, Any]]:
    """Coding: 4 tokens in 2 s, and in 1 s with the method; maths: 12 in 4 s, and in 5 s.

    The last token of maths' second answer differs.
    """
    a, b, c = [1, 2, 3, 4], [5] * 6, [6] * 6
    return [
        cell("reference", 2.0, answer(a, 2.0), counters=steps(4)),
        cell("method", 1.0, request(a, 0, (0.1, 1), (0.4, 3)), counters=steps(2, 2, 1, 1)),
        cell("reference", 4.0, answer(b, 3.0), answer(c, 4.0), counters=steps(12), **MATHS),
        cell(
            "method",
            5.0,
            request(b, 0, (0.3, 2), (0.7, 1), (1.1, 3)),
            request([6] * 5 + [9], 2, (2.5, 6)),
            counters=steps(10, 8, 2, 0),
            **MATHS,
        ),
    ]


def rows_of(cells: list[dict[str, Any]], *divergences: dict[str, Any], **changes: Any) -> Rows:
    return summarise(Recording(cells, {}, list(divergences)), bench_section(**changes))


@pytest.fixture
def summary() -> dict[str, Any]:
    rows = rows_of(measured())
    assert {(row["num_speculative_tokens"], row["concurrency"]) for row in rows} == {(2, 1)}
    return {row["category"]: row for row in rows}


def test_throughput_is_output_tokens_over_wall_seconds(summary: dict[str, Any]) -> None:
    assert summary["coding"]["output_tokens_per_s"] == 4.0  # 4 / 1
    assert summary["maths"]["output_tokens_per_s"] == 2.4  # 12 / 5
    assert summary["coding"]["reference_tokens_per_s"] == 2.0  # 4 / 2
    assert [row["output_tokens"] for row in summary.values()] == [16, 4, 12]


def test_the_row_over_all_is_weighted_by_tokens_and_not_a_mean_of_rows(
    summary: dict[str, Any],
) -> None:
    assert summary["all"]["output_tokens_per_s"] == 2.6667  # 16 / 6, the mean of rows is 3.2
    assert summary["all"]["reference_tokens_per_s"] == 2.6667  # 16 / 6


def test_speedup_is_the_median_of_the_ratios_of_pairs(summary: dict[str, Any]) -> None:
    assert summary["coding"]["speedup"] == 2.0
    assert summary["maths"]["speedup"] == 0.8  # 2.4 / 3
    assert summary["all"]["speedup"] == 1.2649  # the root of 2.0 x 0.8
    assert summary["all"]["num_pairs"] == 2


def test_few_pairs_have_no_interval_and_many_have_one_around_the_speedup() -> None:
    cells = [one for n in range(6) for one in both(1.0 + n / 100, 0.5, number=n)]
    (few, _), (row, _) = rows_of(cells[:-2]), rows_of(cells)
    assert (few["speedup_low"], few["speedup_high"], few["num_pairs"]) == (None, None, 5)
    assert few["verdict"] is None
    # ratios of 2.0 to 2.1, widened by what a server's start may add
    assert 2.0 / 1.04 <= row["speedup_low"] < row["speedup"] < row["speedup_high"] <= 2.1 * 1.04
    assert (row["num_pairs"], row["verdict"]) == (6, "faster")


def test_servers_that_took_turns_have_a_wider_interval_and_after_one_round_none() -> None:
    cells = [one for n in range(12)
             for one in both(1.0 + n % 6 / 100, 0.5, round=n // 6, number=n % 6)]  # fmt: skip
    cells = [one | {"wall_s": one["wall_s"] * (1 + one["round"] / 10)} for one in cells]
    beside = rows_of(cells)[0]
    turns = [one | {"side_by_side": False} for one in cells]
    bracket, single = rows_of(turns)[0], rows_of(turns[:12])[0]
    assert bracket["speedup"] == beside["speedup"]
    assert bracket["speedup_low"] < beside["speedup_low"]
    assert bracket["speedup_high"] > beside["speedup_high"]
    assert (single["speedup_low"], single["speedup_high"]) == (None, None)
    assert single["num_pairs"] == 6


def test_latencies_are_those_of_the_method(summary: dict[str, Any]) -> None:
    assert summary["coding"]["ttft_ms_p50"] == 100.0
    assert summary["maths"]["ttft_ms_p50"] == 400.0  # of 300 and 500
    assert summary["all"]["ttft_ms_p50"] == 300.0
    # b: 0.8 s for 4 tokens; c came in one chunk and says nothing
    assert summary["maths"]["itl_ms_p50"] == 200.0
    assert summary["all"]["e2e_ms_p50"] == 500.0  # of 400, 1100 and 500


def test_goodput_is_within_the_bounds_of_the_section() -> None:
    # coding within 200 and 150 ms: one request in 1 + 5 s
    bounds = {"max_ttft_ms": 200.0, "max_itl_ms": 150.0}
    assert [row["goodput"] for row in rows_of(measured(), **bounds)] == [0.1667, 1.0, 0.0]


def test_acceptance_is_of_the_summed_counters(summary: dict[str, Any]) -> None:
    row = summary["all"]
    assert row["num_drafts"] == 10
    assert row["num_draft_tokens"] == 20
    assert row["acceptance_rate_pos_0"] == 0.3
    assert row["acceptance_rate_pos_1"] == 0.1
    assert row["acceptance_length"] == 1.4  # the mean of 2.0 and 1.25 is 1.625
    assert row["acceptance_rate"] == 0.2
    assert summary["coding"]["acceptance_length"] == 2.0
    assert summary["maths"]["acceptance_length"] == 1.25


def test_conditional_rates_are_of_the_drafts_that_came_that_far(summary: dict[str, Any]) -> None:
    given = [summary["all"][f"acceptance_given_pos_{i}"] for i in range(2)]
    assert given == [0.3, 0.3333]  # 3 of 10, 1 of 3
    assert summary["maths"]["acceptance_given_pos_1"] == 0.0


def test_rates_add_and_multiply_up_in_every_row(summary: dict[str, Any]) -> None:
    for row in summary.values():
        rates = [row[f"acceptance_rate_pos_{i}"] for i in range(2)]
        given = [row[f"acceptance_given_pos_{i}"] for i in range(2)]
        assert 1 + sum(rates) == pytest.approx(row["acceptance_length"], abs=2e-4)
        assert given[0] * given[1] == pytest.approx(rates[1], abs=2e-4)


def test_counters_that_contradict_each_other_make_no_row() -> None:
    cells = measured()
    cells[1]["counters"]["accepted_at_1"] = 2
    with pytest.raises(ValueError, match="acceptance counters contradict each other"):
        rows_of(cells)


def test_tokens_per_step_count_the_steps_of_the_method(summary: dict[str, Any]) -> None:
    engine = [row["tokens_per_engine_step"] for row in summary.values()]
    assert engine == [1.3333, 2.0, 1.2]  # 16 / 12, 4 / 2, 12 / 10
    # coding: 3 tokens after the first, 2 of them accepted, but 2 drafts: two steps
    assert summary["coding"]["tokens_per_step"] == 1.5
    assert summary["coding"]["draft_coverage"] == 1.0


def test_an_engine_that_counts_no_steps_has_no_tokens_per_engine_step() -> None:
    cells = measured()
    for one in cells:
        del one["counters"]["engine_steps"]
    assert "tokens_per_engine_step" not in rows_of(cells)[0]


def test_without_speculation_there_is_a_speedup_of_none_but_no_acceptance() -> None:
    row = rows_of(both(2.0, 1.0, k=None))[0]
    assert (row["num_speculative_tokens"], row["speedup"]) == (0, 2.0)
    assert not {"acceptance_length", "num_drafts", "draft_coverage"} & set(row)


def test_a_method_that_drafted_nothing_has_no_acceptance_length() -> None:
    row = rows_of(both(2.0, 1.0))[0]
    assert row["num_drafts"] == 0
    assert "acceptance_length" not in row
    assert "acceptance_rate_pos_0" not in row


def test_requests_in_flight_are_their_seconds_over_those_of_the_cell(
    summary: dict[str, Any],
) -> None:
    assert summary["coding"]["mean_in_flight"] == 0.4  # 0.4 of 1 s
    assert summary["maths"]["mean_in_flight"] == 0.32  # 1.1 + 0.5 of 5 s
    assert [row["longest_request"] for row in summary.values()] == [8, 6, 8]  # two of the prompt


def test_rounds_are_summed_and_each_is_compared_with_its_own_reference() -> None:
    row = rows_of(both(2.0, 1.0) + both(1.0, 3.0, round=1))[1]
    assert row["category"] == "coding"
    assert (row["num_requests"], row["num_pairs"]) == (2, 2)
    assert row["output_tokens_per_s"] == 2.0  # 8 tokens in 1 + 3 s
    assert row["reference_tokens_per_s"] == 2.6667  # 8 tokens in 2 + 1 s
    assert row["speedup"] == 0.8165  # the root of 2 x 1/3


def divergence(category: str, position: int, gap: float | None, **changes: Any) -> dict[str, Any]:
    return {"k": 2, "concurrency": 1, "rate": None, "context": 0, "category": category,
            "position": position, "gap": gap} | changes  # fmt: skip


def test_outputs_are_compared_request_by_request_and_differences_told_from_rounding() -> None:
    found = [
        divergence("maths", 5, 0.25),
        divergence("maths", 3, -0.75),
        divergence("coding", 4, None),
        divergence("coding", 0, 9.0, k=1),
        divergence("coding", 0, 9.0, concurrency=8),
        divergence("coding", 0, 9.0, context=64),
        divergence("coding", 0, 9.0, concurrency=None, rate=1.0),
    ]
    names = ("identical_outputs", "first_divergence", "largest_gap", "num_not_rounding")
    rows = {row["category"]: [row[n] for n in names] for row in rows_of(measured(), *found)}
    assert rows == {
        "all": [0.6667, 3, 0.75, 2],
        "coding": [1.0, 4, None, 1],
        "maths": [0.5, 3, 0.75, 1],
    }


def test_without_a_difference_there_is_neither_position_nor_gap() -> None:
    row = rows_of(both(1.0, 1.0))[0]
    assert (row["identical_outputs"], row["first_divergence"]) == (1.0, None)
    assert (row["largest_gap"], row["num_not_rounding"]) == (None, 0)


def test_one_reused_prompt_marks_its_category_and_the_row_over_all() -> None:
    cells = measured()
    cells[3]["fresh_prompts"] = False
    rows = rows_of(cells)
    assert [row["fresh_prompts"] for row in rows] == [False, True, False]


@pytest.mark.parametrize("index", [2, 3])
def test_cells_of_two_executions_are_marked_be_it_the_method_or_its_reference(index: int) -> None:
    cells = measured()
    assert all(row["one_execution"] for row in rows_of(cells))
    cells[index]["execution"] = "later"
    assert [row["one_execution"] for row in rows_of(cells)] == [False, True, False]


def test_the_highest_load_of_the_machine_is_kept_of_either_server() -> None:
    cells = measured()
    cells[2]["load_1m"] = 3.5
    assert [row["load_1m"] for row in rows_of(cells)] == [3.5, 0.5, 3.5]


def test_the_records_are_left_as_they_were() -> None:
    cells = measured()
    before = copy.deepcopy(cells)
    rows_of(cells)
    assert cells == before


def test_prompts_that_were_sent_again_are_no_further_pair() -> None:
    again = answer([1, 2, 3, 4], 1.0, key="a")
    cells = [cell(role, 1.0, again, round=n) for n in range(7) for role in ("reference", "method")]
    row = rows_of(cells)[0]
    assert (row["num_pairs"], row["num_requests"], row["speedup_low"]) == (1, 7, None)

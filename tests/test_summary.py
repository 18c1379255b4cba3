import copy
from typing import Any

import pytest

from specmill.summary import by_name, headline_k, summarise, without_empty_lists


def request(key: str, output: list[int], sent: float, *chunks: tuple[float, int]) -> dict[str, Any]:
    """One request: its output ids, when it was sent, and (time, tokens) of each chunk."""
    assert sum(size for _, size in chunks) == len(output)
    return {
        "sample_key": key,
        "output_ids": output,
        "sent_s": sent,
        "chunk_s": [at for at, _ in chunks],
        "chunk_tokens": [size for _, size in chunks],
    }


def cell(
    category: str,
    concurrency: int,
    wall_s: float,
    counters: dict[str, int],
    *requests: dict[str, Any],
) -> dict[str, Any]:
    return {
        "category": category,
        "concurrency": concurrency,
        "fresh_prompts": True,
        "execution": "first",
        "wall_s": wall_s,
        "counters": counters,
        "requests": list(requests),
    }


def drafted(num_drafts: int, *at: int) -> dict[str, int]:
    return {
        "num_drafts": num_drafts,
        "num_draft_tokens": num_drafts * len(at),
        "num_accepted_tokens": sum(at),
        **{f"accepted_at_{position}": accepted for position, accepted in enumerate(at)},
    }


def run(role: str, k: int | None, *cells: dict[str, Any], round_: int = 0) -> dict[str, Any]:
    return {"role": role, "k": k, "round": round_, "engine": {}, "cells": list(cells)}


# 4 tokens of coding in 2 s, 12 of maths in 4 s, without speculation one token a chunk
REFERENCE = run(
    "reference",
    None,
    cell("coding", 1, 2.0, {"engine_steps": 4}, request("a", [1, 2, 3, 4], 0, (0.2, 1), (1.1, 3))),
    cell(
        "maths",
        1,
        4.0,
        {"engine_steps": 12},
        request("b", [5] * 6, 0, (0.4, 1), (1.4, 5)),
        request("c", [6] * 6, 2, (2.1, 1), (3.1, 5)),
    ),
)
# the same prompts: coding in 1 s, maths in 5 s; c differs in its last token
METHOD = run(
    "method",
    2,
    cell(
        "coding",
        1,
        1.0,
        drafted(2, 1, 1) | {"engine_steps": 2},
        request("a", [1, 2, 3, 4], 0, (0.1, 1), (0.4, 3)),
    ),
    cell(
        "maths",
        1,
        5.0,
        drafted(8, 2, 0) | {"engine_steps": 10},
        request("b", [5] * 6, 0, (0.3, 2), (0.7, 1), (1.1, 3)),
        request("c", [6] * 5 + [9], 2, (2.5, 6)),
    ),
)


@pytest.fixture
def summary() -> dict[str, Any]:
    rows = summarise([copy.deepcopy(REFERENCE), copy.deepcopy(METHOD)])
    assert {(row["num_speculative_tokens"], row["concurrency"]) for row in rows} == {(2, 1)}
    return {row["category"]: row for row in rows}


def test_rows_are_all_and_then_the_categories_in_their_order(summary: dict[str, Any]) -> None:
    assert list(summary) == ["all", "coding", "maths"]
    assert [row["num_requests"] for row in summary.values()] == [3, 1, 2]


def test_throughput_is_output_tokens_over_wall_seconds(summary: dict[str, Any]) -> None:
    assert summary["coding"]["output_tokens_per_s"] == 4.0  # 4 / 1
    assert summary["maths"]["output_tokens_per_s"] == 2.4  # 12 / 5
    assert summary["coding"]["output_tokens"] == 4
    assert summary["maths"]["output_tokens"] == 12


def test_the_row_over_all_is_weighted_by_tokens_and_not_a_mean_of_rows(
    summary: dict[str, Any],
) -> None:
    assert summary["all"]["output_tokens"] == 16
    assert summary["all"]["output_tokens_per_s"] == 2.6667  # 16 / 6, the mean of rows is 3.2
    assert summary["all"]["reference_tokens_per_s"] == 2.6667  # 16 / 6
    assert summary["all"]["speedup"] == 1.0


def test_speedup_is_the_ratio_of_throughputs_on_the_same_prompts(summary: dict[str, Any]) -> None:
    assert summary["coding"]["reference_tokens_per_s"] == 2.0  # 4 / 2
    assert summary["coding"]["speedup"] == 2.0
    assert summary["maths"]["reference_tokens_per_s"] == 3.0  # 12 / 4
    assert summary["maths"]["speedup"] == 0.8


def test_ttft_is_the_median_time_from_sending_to_the_first_tokens(summary: dict[str, Any]) -> None:
    assert summary["coding"]["ttft_ms"] == 100.0
    assert summary["maths"]["ttft_ms"] == 400.0  # of 300 and 500
    assert summary["all"]["ttft_ms"] == 300.0  # of 100, 300 and 500


def test_itl_is_time_per_token_after_the_first_chunk_and_not_per_chunk(
    summary: dict[str, Any],
) -> None:
    assert summary["coding"]["itl_ms"] == 100.0  # 0.3 s for 3 tokens
    # b: 0.8 s for 4 tokens; c came in one chunk and says nothing
    assert summary["maths"]["itl_ms"] == 200.0
    assert summary["all"]["itl_ms"] == 150.0


def test_a_cell_of_single_chunks_has_no_itl() -> None:
    method = run("method", None, cell("coding", 1, 1.0, {}, request("a", [1, 2], 0, (0.5, 2))))
    assert summarise([method])[0]["itl_ms"] is None


def test_identical_outputs_are_the_share_of_requests_equal_to_the_reference(
    summary: dict[str, Any],
) -> None:
    assert summary["coding"]["identical_outputs"] == 1.0
    assert summary["maths"]["identical_outputs"] == 0.5
    assert summary["all"]["identical_outputs"] == 0.6667


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


def test_tokens_per_engine_step_count_the_steps_of_the_method(summary: dict[str, Any]) -> None:
    assert summary["coding"]["tokens_per_engine_step"] == 2.0
    assert summary["maths"]["tokens_per_engine_step"] == 1.2
    assert summary["all"]["tokens_per_engine_step"] == 1.3333


def test_an_engine_that_counts_no_steps_has_no_tokens_per_step() -> None:
    method = copy.deepcopy(METHOD)
    for one in method["cells"]:
        del one["counters"]["engine_steps"]
    assert "tokens_per_engine_step" not in summarise([method])[0]


def test_without_speculation_there_is_neither_reference_nor_acceptance() -> None:
    alone = copy.deepcopy(REFERENCE) | {"role": "method"}
    row = summarise([alone])[0]
    assert (row["num_speculative_tokens"], row["category"]) == (0, "all")
    assert row["output_tokens_per_s"] == 2.6667
    assert not {"speedup", "identical_outputs", "acceptance_length", "num_drafts"} & set(row)


def test_a_method_that_drafted_nothing_has_no_acceptance_length() -> None:
    method = copy.deepcopy(METHOD)
    for one in method["cells"]:
        one["counters"] = drafted(0, 0, 0)
    row = summarise([copy.deepcopy(REFERENCE), method])[0]
    assert row["num_drafts"] == 0
    assert "acceptance_length" not in row
    assert "acceptance_rate_pos_0" not in row
    assert row["speedup"] == 1.0


def test_concurrencies_and_values_of_k_are_kept_apart() -> None:
    slow = cell("coding", 8, 8.0, drafted(1, 1), request("z", [1] * 8, 0, (1.0, 1), (2.0, 7)))
    fast = cell("coding", 1, 1.0, drafted(1, 0), request("y", [1] * 5, 0, (1.0, 1), (2.0, 4)))
    more = cell("coding", 1, 1.0, drafted(1, 1, 1), request("y", [1] * 9, 0, (1.0, 9)))
    rows = summarise([run("method", 2, more), run("method", 1, slow, fast)])
    shown = ("num_speculative_tokens", "concurrency", "category")
    figures = ("output_tokens_per_s", "acceptance_length")
    assert [tuple(row[name] for name in shown + figures) for row in rows] == [
        (1, 1, "all", 5.0, 1.0),
        (1, 1, "coding", 5.0, 1.0),
        (1, 8, "all", 1.0, 2.0),
        (1, 8, "coding", 1.0, 2.0),
        (2, 1, "all", 9.0, 3.0),
        (2, 1, "coding", 9.0, 3.0),
    ]


def test_every_row_has_the_same_fields_and_none_where_nothing_was_measured() -> None:
    silent = cell("coding", 1, 1.0, drafted(0, 0), request("y", [1] * 5, 0, (1.0, 1), (2.0, 4)))
    more = cell("coding", 1, 1.0, drafted(1, 1, 1), request("y", [1] * 9, 0, (1.0, 9)))
    rows = summarise([run("method", 1, silent), run("method", 2, more)])
    assert {tuple(row) for row in rows} == {tuple(rows[0])}
    assert [row["acceptance_length"] for row in rows] == [None, None, 3.0, 3.0]
    assert [row["acceptance_rate_pos_1"] for row in rows] == [None, None, 1.0, 1.0]


def test_the_headline_is_the_first_k_measured() -> None:
    assert headline_k([REFERENCE, run("method", 3), run("method", 1)]) == 3
    assert headline_k([run("method", None)]) == 0


def test_by_name_holds_the_figures_of_one_k_only() -> None:
    place = {"num_speculative_tokens": 2, "concurrency": 8, "category": "all"}
    rows = [place | {"ttft_ms": 5.0}, place | {"num_speculative_tokens": 1, "ttft_ms": 4.0}]
    assert by_name(rows, 2) == {"c8": {"all": {"ttft_ms": 5.0}}}


def test_an_empty_list_becomes_none_at_any_depth() -> None:
    tree = {"a": {"warnings": [], "cores": [0, 1]}, "b": [], "c": False}
    assert without_empty_lists(tree) == {
        "a": {"warnings": None, "cores": [0, 1]},
        "b": None,
        "c": False,
    }


def test_two_rounds_are_summed_and_compared_with_both_references() -> None:
    records = [copy.deepcopy(record) for record in (REFERENCE, METHOD, METHOD, REFERENCE)]
    records[2]["round"] = records[3]["round"] = 1
    records[2]["cells"][0]["wall_s"] = 3.0
    row = summarise(records)[1]
    assert row["category"] == "coding"
    assert row["num_requests"] == 2
    assert row["output_tokens_per_s"] == 2.0  # 8 tokens in 1 + 3 s
    assert row["reference_tokens_per_s"] == 2.0  # 8 tokens in 2 + 2 s
    assert row["speedup"] == 1.0


def test_one_reused_prompt_marks_its_category_and_the_row_over_all() -> None:
    method = copy.deepcopy(METHOD)
    method["cells"][1]["fresh_prompts"] = False
    assert {row["category"]: row["fresh_prompts"] for row in summarise([method])} == {
        "all": False,
        "coding": True,
        "maths": False,
    }


def test_cells_of_two_executions_are_marked_and_so_is_a_reference_of_an_earlier_one() -> None:
    method = copy.deepcopy(METHOD)
    assert summarise([method])[0]["one_execution"]
    method["cells"][1]["execution"] = "later"
    assert {row["category"]: row["one_execution"] for row in summarise([method])} == {
        "all": False,
        "coding": True,
        "maths": True,
    }

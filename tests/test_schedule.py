"""K by the number of requests in flight: from predicted speed-ups to what vLLM is told."""

import json
from pathlib import Path
from typing import Any

import pytest

from specmill.acceptance import acceptance
from specmill.params import Method
from specmill.params_file import load_params
from specmill.params_scheduled import Scheduled, check_scheduled
from specmill.schedule import (
    SCHEDULABLE,
    describe,
    drafting_ranges,
    k_at,
    k_schedule,
    most_drafted,
    scheduled_config,
    schedules,
)
from specmill.scheduled import scheduled_configs
from specmill.section import DoesNotFit
from tests.workspace import ROOT


def row(concurrency: int, k: int, speedup: float, **changes: Any) -> dict[str, Any]:
    """A predicted cell."""
    place = {"method": "eagle3", "k": k, "concurrency": concurrency, "category": "all"}
    bounds = {"speedup_low": speedup - 0.05, "speedup_high": speedup + 0.05}
    return place | {"speedup": speedup} | bounds | changes


SURFACE = [row(1, 1, 1.05), row(1, 3, 1.20), row(5, 1, 1.01), row(5, 3, 0.80)]
"""Of which the schedule by hand stands in specmill/schedule.py."""


def chosen(method: str, head: str = "head", **settings: Any) -> Method:
    section: Any = "bench" if method == "none" else "spec"
    return Method(method=method, section=section, head=head, settings=settings)


def test_between_two_loads_speedups_are_linear_and_equal_neighbours_are_one_range() -> None:
    assert k_schedule(SURFACE) == [[1, 2, 3], [3, 5, 1]]


def test_where_nothing_is_faster_than_no_speculation_nothing_is_drafted() -> None:
    # K=3 at 2 ... 8 requests: 1.2 - 0.4 / 7 per request, above 1 up to 4 (1.029)
    assert k_schedule([row(1, 3, 1.2), row(8, 3, 0.8)]) == [[1, 4, 3], [5, 8, 0]]
    assert k_schedule([row(1, 3, 0.9), row(8, 3, 0.8)]) == [[1, 8, 0]]
    assert k_schedule([row(4, 2, 1.0)]) == [[1, 4, 0]]


def test_below_the_lowest_load_k_is_that_of_the_lowest() -> None:
    assert k_schedule([row(4, 2, 1.1), row(8, 2, 1.1)]) == [[1, 8, 2]]


def test_of_equal_k_the_smallest_is_taken_whatever_the_order_of_rows() -> None:
    rows = [row(1, 3, 1.1), row(1, 2, 1.1), row(2, 2, 1.1), row(2, 3, 1.1)]
    assert k_schedule(rows) == k_schedule(rows[::-1]) == [[1, 2, 2]]


def test_a_k_that_only_one_neighbour_has_is_not_used_between_them() -> None:
    rows = [row(1, 1, 1.1), row(1, 5, 1.5), row(3, 1, 1.1)]
    assert k_schedule(rows) == [[1, 1, 5], [2, 3, 1]]


def test_a_schedule_may_draft_again_where_more_are_in_flight() -> None:
    rows = [row(1, 2, 1.2), row(2, 2, 0.9), row(3, 2, 1.3)]
    assert k_schedule(rows) == [[1, 1, 2], [2, 2, 0], [3, 3, 2]]


def test_no_prediction_is_no_schedule() -> None:
    with pytest.raises(ValueError, match="needs a predicted speed-up"):
        k_schedule([])


def test_every_row_that_speculates_has_a_schedule_or_the_reason_why_not() -> None:
    methods = {
        "none": chosen("none"),
        "eagle3": chosen("eagle3"),
        "ngram": chosen("ngram"),
        "suffix": chosen("suffix"),
        "draft": chosen("draft_model"),
    }
    rows = [*SURFACE, row(1, 3, 9.0, category="maths"), row(1, 3, 1.2, method="suffix")]
    predicted = {"rows": rows, "without": {"draft": "its answers are not replayed"}}
    assert schedules(predicted, methods) == {
        "eagle3": {"ranges": [[1, 2, 3], [3, 5, 1]], "reason": None},
        "ngram": {
            "ranges": None,
            "reason": "nothing is predicted for it: no acceptance or no step times",
        },
        "suffix": {
            "ranges": None,
            "reason": "vLLM's suffix drafts one K whatever is in flight",
        },
        "draft": {
            "ranges": None,
            "reason": "nothing is predicted for it: its answers are not replayed",
        },
    }


def test_vllm_is_told_ranges_and_drafts_nothing_beyond_what_was_predicted() -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3}
    told = scheduled_config(config, [[1, 2, 3], [3, 5, 1]])
    assert told == config | {
        "num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 5, 1], [6, 6, 0]]
    }
    told = scheduled_config(config, [[1, 4, 3], [5, 8, 0]])
    assert told["num_speculative_tokens_per_batch_size"] == [[1, 4, 3], [5, 8, 0]]
    assert "num_speculative_tokens_per_batch_size" not in config


@pytest.mark.parametrize("ranges", [[[1, 2, 3], [3, 5, 1]], [[1, 4, 3], [5, 8, 0]], [[1, 1, 2]]])
def test_vllm_reads_the_schedule_as_we_do(ranges: list[list[int]]) -> None:
    lookup = pytest.importorskip("vllm.v1.spec_decode.dynamic.utils")
    told = scheduled_config({}, ranges)["num_speculative_tokens_per_batch_size"]
    dense = lookup.build_dynamic_sd_schedule_lookup(json.loads(json.dumps(told)), 16, 3)
    assert dense[1:] == [k_at(ranges, requests) for requests in range(1, 17)]


def test_a_row_with_a_schedule_is_configured_for_the_largest_k() -> None:
    window: dict[str, Any] = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    planned = {"ngram": {"ranges": [[1, 2, 3], [3, 5, 1]], "reason": None}}
    configs = scheduled_configs("ngram", chosen("ngram", **window), planned, {"name": "tiny"})
    assert configs == {
        3: {
            "method": "ngram",
            "num_speculative_tokens": 3,
            **window,
            "num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 5, 1], [6, 6, 0]],
        }
    }


@pytest.mark.parametrize(
    ("planned", "why"),
    [
        ({}, r"reports/schedule\.json has no ngram: run `dvc repro schedule`"),
        ({"ngram": {"ranges": None, "reason": "no acceptance"}}, "no schedule of K: no acceptance"),
        (
            {"ngram": {"ranges": [[1, 8, 0]], "reason": None}},
            "no K is predicted .* 1 to 8 requests",
        ),
    ],
)
def test_a_row_without_a_schedule_that_drafts_is_not_served(
    planned: dict[str, Any], why: str
) -> None:
    with pytest.raises(DoesNotFit, match=why):
        drafting_ranges(planned, "ngram")


def test_a_schedule_in_words() -> None:
    assert describe([[1, 4, 3], [5, 8, 0]]) == "K=3 at 1 to 4 requests in flight, no draft from 5"
    assert describe([[1, 1, 3], [2, 8, 1]]) == (
        "K=3 at 1 request in flight, K=1 at 2 to 8, no draft from 9"
    )
    assert describe([[1, 1, 2], [2, 2, 0], [3, 3, 2]]) == (
        "K=2 at 1 request in flight, no draft at 2, K=2 at 3, no draft from 4"
    )
    assert describe([[1, 8, 0]]) == "no draft, whatever is in flight"
    assert most_drafted([[1, 1, 1], [2, 3, 4], [4, 9, 0]]) == 4
    assert [k_at([[1, 1, 1], [2, 3, 4]], n) for n in (1, 2, 3, 4, 99)] == [1, 4, 4, 0, 0]


def test_counters_of_a_schedule_hold_with_its_largest_k() -> None:
    # 10 steps with K=3 (6, 3, 1 accepted) and 10 with K=1 (4 accepted)
    counts = {"num_drafts": 20, "num_draft_tokens": 40, "num_accepted_tokens": 14,
              "accepted_at_0": 10, "accepted_at_1": 3, "accepted_at_2": 1}  # fmt: skip
    figures = acceptance(counts, 3)
    assert figures["acceptance_rate_pos"] == [0.5, 0.15, 0.05]
    assert figures["acceptance_length"] == 1.7
    nothing = dict.fromkeys(("num_drafts", "num_draft_tokens", "num_accepted_tokens"), 0)
    assert acceptance(nothing, 3) == {"num_drafts": 0}


ENTRY = Scheduled(method="eagle3", head="models/eagle3")
SERVED = {"eagle3": ("eagle3", "models/eagle3"), "other": ("eagle3", "elsewhere")}


def test_an_entry_of_scheduled_is_a_row_and_says_what_that_says() -> None:
    check_scheduled({"eagle3": ENTRY}, SERVED, SERVED)
    with pytest.raises(ValueError, match=r"scheduled\.eagle is no entry of methods; .*eagle3"):
        check_scheduled({"eagle": ENTRY}, SERVED, SERVED)
    with pytest.raises(ValueError, match=r"methods\.other has eagle3 and elsewhere: write the"):
        check_scheduled({"other": ENTRY}, SERVED, SERVED)
    with pytest.raises(ValueError, match="would write the row eagle3_scheduled"):
        check_scheduled({"eagle3": ENTRY}, SERVED, {*SERVED, "eagle3_scheduled"})


def test_methods_that_draft_one_k_are_refused_by_the_key(tmp_path: Path) -> None:
    assert SCHEDULABLE == ("eagle3", "draft_model", "ngram")
    text = (ROOT / "params.yaml").read_text()
    entry = "\n  eagle3:\n    method: eagle3\n    head: models/eagle3\n"
    path = tmp_path / "params.yaml"
    path.write_text(text.replace("scheduled: {}\n", "scheduled:" + entry))
    assert load_params(path).scheduled == {"eagle3": ENTRY}
    medusa = entry.replace("method: eagle3", "method: medusa")
    path.write_text(text.replace("scheduled: {}\n", "scheduled:" + medusa))
    with pytest.raises(ValueError, match=r"scheduled\.eagle3\.method: Input should be"):
        load_params(path)

"""What is said beside the tables."""

from typing import Any

import pytest

from specmill.notes import engine_table, notes
from tests.benches import alone, comparable, engine, result, row
from tests.surfaces import place

Results = dict[str, dict[str, Any]]

SYNC = "- ngram: vLLM turned asynchronous scheduling off, part of its cost."
"""What there is to say of the fixture."""


@pytest.fixture
def results() -> Results:
    return comparable()


def further(results: Results) -> list[str]:
    """Notes beyond the fixture's."""
    found = notes(results)
    assert found[-1:] in ([], [""])
    return [line for line in found if line not in (SYNC, "")]


def test_where_nothing_is_to_be_said_nothing_is() -> None:
    assert notes({"none": comparable()["none"]}) == []


def test_scheduling_is_noted_where_the_method_lost_it(results: Results) -> None:
    assert notes(results) == [SYNC, ""]
    results["ngram"]["engine"]["method_k3_0"]["async_scheduling"] = None
    assert notes(results) == []


def test_scheduling_that_the_baseline_lacks_too_is_no_cost_of_the_method(results: Results) -> None:
    results["ngram"]["engine"]["reference_k0_0"]["async_scheduling"] = False
    assert notes(results) == []


def test_a_baseline_on_another_model_runner_is_noted(results: Results) -> None:
    results["ngram"]["engine"]["method_k3_0"]["model_runner"] = "V1"
    assert further(results) == [
        "- ngram: the method and its baseline ran on different model runners (V1, V2), part of the "
        "change."
    ]


def test_a_method_that_is_not_served_has_its_reason_first(results: Results) -> None:
    narrow = result(3, [place(3, 1, 0)]) | {"not_served": "its heads are 4 wide, not 8"}
    assert notes(results | {"narrow": narrow}) == [
        "- **narrow is not served**: its heads are 4 wide, not 8",
        SYNC,
        "",
    ]


def test_a_k_that_the_engine_refuses_has_its_reason_too(results: Results) -> None:
    results["eagle3"]["refused"] = {"5": "it drafts 4 at most"}
    assert further(results) == ["- **eagle3 is not served at K=5**: it drafts 4 at most"]


def test_two_equal_servers_that_differ_are_noted_over_all_prompts(results: Results) -> None:
    changed = {"speedup": 0.94, "speedup_low": 0.9, "speedup_high": 0.97, "verdict": "slower"}
    results["none"]["rows"][3] |= changed
    assert further(results) == []
    results["none"]["rows"][2] |= changed
    assert further(results) == [
        "- **`none` is not equal to itself at 8 in flight**: -6% (-10% to -3%) between two equal "
        "servers; changes of that size mean nothing there."
    ]
    del results["none"]
    assert further(results) == []


def test_a_comparison_of_none_with_itself_without_interval_shows_nothing(results: Results) -> None:
    results["none"]["rows"][0] |= {"speedup": 0.5, "speedup_low": None, "speedup_high": None}
    assert further(results) == []


def test_a_row_faster_than_its_accepted_tokens_allow_is_named(results: Results) -> None:
    # 1.52 is above 1.1 x 1.375; 1.51 is not
    results["eagle3"]["rows"][0] |= {"speedup": 1.52}
    results["eagle3"]["rows"][1] |= {"speedup": 1.51}
    assert further(results) == [
        "- **eagle3 is faster than its accepted tokens allow** (all at 1 in flight, K=1): "
        "something else kept the machine busy during the baseline. `dvc repro -f -s bench@eagle3` "
        "measures again."
    ]


def test_of_many_impossible_rows_four_are_named(results: Results) -> None:
    for one in results["eagle3"]["rows"]:
        one |= {"speedup": 2.0, "output_tokens_per_s": 2 * one["reference_tokens_per_s"]}
    (note,) = further(results)
    assert "(all at 1 in flight, K=1, maths at 1 in flight, K=1, all at 8 in flight, K=1, " in note
    assert "maths at 8 in flight, K=1 and 4 more)" in note


def test_in_open_loop_a_faster_server_has_shorter_queues_and_no_bound(results: Results) -> None:
    results["eagle3"]["rows"][0] |= {"speedup": 3.0, "concurrency": None, "rate": 2.5}
    assert further(results) == []


def test_reused_prompts_are_noted(results: Results) -> None:
    results["eagle3"]["rows"][3]["fresh_prompts"] = False
    assert further(results) == [
        "- Some prompts were sent twice to one server (eagle3): the prefix cache is told apart by "
        "a salt."
    ]
    results["eagle3"]["served_by"] = "suffix"
    assert further(results)[0].endswith("by a salt, suffix decoding may remember its answers.")


def test_a_stage_that_went_on_after_an_interruption_is_named(results: Results) -> None:
    results["ngram"]["rows"][0]["one_execution"] = False
    assert further(results) == [
        "- ngram: the stage was interrupted and went on later; `dvc repro -f -s bench@NAME` "
        "measures it in one go."
    ]


def test_how_long_a_bench_waited_for_others_is_said_from_a_second_on(results: Results) -> None:
    results["ngram"]["provenance"]["waited_s"] = 0.9
    results["eagle3"]["provenance"]["waited_s"] = 61.4
    assert further(results) == ["- Waited for other work on this machine to end: eagle3 61 s."]


@pytest.mark.parametrize("coverage", [0.94, 0.0])
def test_steps_without_a_draft_are_explained_where_there_are_some(
    results: Results, coverage: float
) -> None:
    results["ngram"]["rows"][2]["draft_coverage"] = 0.95
    assert further(results) == []
    results["ngram"]["rows"][2]["draft_coverage"] = coverage
    assert further(results) == [
        "- ngram: no draft in some steps, which acceptance length leaves out; tokens/step counts "
        "them and is what compares with a draft model's."
    ]


def elsewhere(reference: dict[str, Any] | None) -> dict[str, Any]:
    """A row that another tool measured, as specmill.imported writes it."""
    source = {"file": "ours.json", "tool": "guidellm", "measured_at": "2026-01-02T03:04:05"}
    rows = [
        row(3, 8, "all", alone(900.0) | {"remarks": "failed requests: 2 of 50"}),
        row(3, 2.5, "all", alone(90.0) | {"remarks": None}),
    ]
    return {
        "num_speculative_tokens": 3,
        "head": {},
        "rows": rows,
        "engine": {},
        "source": source | {"model": "big", "reference": reference},
    }


def test_what_was_measured_elsewhere_is_said_with_what_speaks_against_it(results: Results) -> None:
    assert further(results | {"rented": elsewhere({"file": "none.json"})}) == [
        "- rented was not measured here: ours.json of guidellm, 2026-01-02T03:04:05, model big; "
        "one run against another. At 8 in flight: failed requests: 2 of 50."
    ]
    assert further(results | {"rented": elsewhere(None)}) == [
        "- rented was not measured here: ours.json of guidellm, 2026-01-02T03:04:05, model big; "
        "without a baseline. At 8 in flight: failed requests: 2 of 50."
    ]


def test_no_stage_measures_again_what_was_measured_elsewhere(results: Results) -> None:
    rented = elsewhere({"file": "none.json"})
    rented["rows"][0] |= {"speedup": 9.0, "acceptance_length": 1.5}
    assert not any("bench@rented" in line for line in notes(results | {"rented": rented}))


def test_engines_that_ran_alike_share_a_line() -> None:
    eagle3 = result(
        2,
        [],
        reference_k0_0=engine(startup_s=9.4),
        method_k2_0=engine(startup_s=40.4),
        reference_k0_1=engine(startup_s=30.0),
        method_k1_0=engine(False, cudagraph_mode="PIECEWISE", startup_s=12.0),
    )
    eager = engine(None, enforce_eager="True", attention_backend=None, bound_cores=[0, 1])
    assert engine_table({"eagle3": eagle3, "slow": result(3, [], method_k3_0=eager)}) == [
        "## Engines",
        "",
        "| method | engine | runner | scheduling | attention | graphs | compiled | cores | "
        "start, s |",
        "| --- | --- | --- | --- | --- | --- | --- | ---: | ---: |",
        "| eagle3 | baseline, K=2 | V2 | async | FLASH_ATTN | FULL | VLLM_COMPILE | - | 9-40 |",
        "| eagle3 | K=1 | V2 | **sync** | FLASH_ATTN | PIECEWISE | VLLM_COMPILE | - | 12 |",
        "| slow | K=3 | V2 | - | - | FULL | **eager** | 2 | 31 |",
        "",
    ]


def test_without_an_engine_there_is_no_table() -> None:
    narrow = result(3, [place(3, 1, 0)]) | {"not_served": "too narrow"}
    assert engine_table({"narrow": narrow, "rented": elsewhere(None)}) == []


def test_rows_of_the_fixture_are_possible() -> None:
    """Else the tests above would not see what they change."""
    for one in comparable().values():
        for row_ in one["rows"]:
            assert (row_["speedup"] or 0) <= 1.1 * (row_["tokens_per_step"] or 2)

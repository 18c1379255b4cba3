from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from specmill.bench import not_served
from specmill.pictures import plot_acceptance, plot_speedup
from specmill.report import (
    acceptance_rows,
    comparison,
    speedup_rows,
    summary_metrics,
)
from specmill.section import DoesNotFit

HARDWARE = {
    "gpus": [],
    "cpu_model": "Some CPU",
    "num_usable_cores": 2,
    "versions": {"vllm": "0.32.0"},
}
VERIFIER = {"name": "tiny-verifier"}


def engine(eager: bool = False, async_scheduling: bool | None = True) -> dict[str, Any]:
    return {
        "enforce_eager": str(eager),
        "async_scheduling": async_scheduling,
        "model_runner": "V1",
    }


def alone(tokens_per_s: float) -> dict[str, Any]:
    return {
        "num_requests": 4,
        "output_tokens_per_s": tokens_per_s,
        "ttft_ms": 50.0,
        "itl_ms": 25.0,
        "tokens_per_engine_step": 1.0,
        "fresh_prompts": True,
        "one_execution": True,
    }


def beside(tokens_per_s: float, reference: float, *rates: float) -> dict[str, Any]:
    row = alone(tokens_per_s) | {
        "reference_tokens_per_s": reference,
        "speedup": tokens_per_s / reference,
        "identical_outputs": 0.75,
    }
    if rates:
        row["acceptance_length"] = 1 + sum(rates)
        row |= {"num_drafts": 100, "draft_coverage": 1.0, "tokens_per_step": 1.375}
    return row | {f"acceptance_rate_pos_{i}": rate for i, rate in enumerate(rates)}


def at(k: int, concurrency: int, *categories: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows over all and of maths."""
    place = {"num_speculative_tokens": k, "concurrency": concurrency}
    return [
        place | {"category": category} | figures
        for category, figures in zip(("all", "maths"), categories, strict=True)
    ]


def result(k: int, rows: list[list[dict[str, Any]]], **engines: dict[str, Any]) -> dict[str, Any]:
    rows_of_all = list(chain(*rows))
    return {"num_speculative_tokens": k, "head": {}, "rows": rows_of_all, "engine": engines}


@pytest.fixture
def results() -> dict[str, dict[str, Any]]:
    none = [at(0, 1, alone(40.0), alone(40.0)), at(0, 8, alone(200.0), alone(200.0))]
    nothing_drafted = {"acceptance_length": None, "acceptance_rate_pos_0": None}
    ngram = [
        at(3, 1, beside(44.0, 40.4) | nothing_drafted, beside(30.0, 40.0) | nothing_drafted),
        at(3, 8, beside(180.0, 196.0, 0.5), beside(180.0, 196.0, 0.5)),
    ]
    eagle3 = [
        at(1, 1, beside(48.0, 40.0, 0.4), beside(48.0, 40.0, 0.4)),
        at(1, 8, beside(200.0, 200.0, 0.4), beside(200.0, 200.0, 0.4)),
        at(2, 1, beside(50.0, 40.0, 0.4, 0.1), beside(60.0, 40.0, 0.5, 0.25)),
        at(2, 8, beside(150.0, 200.0, 0.4, 0.1), beside(150.0, 200.0, 0.4, 0.1)),
    ]
    return {
        "none": result(0, none, method_k0_round0=engine()),
        "ngram": result(
            3,
            ngram,
            reference_k0_round0=engine(),
            method_k3_round0=engine(async_scheduling=False),
        ),
        "eagle3": result(2, eagle3, reference_k0_round0=engine(), method_k2_round0=engine()),
    }


def table_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ")]


def test_both_tables_list_every_row_beside_its_own_baseline(
    results: dict[str, dict[str, Any]],
) -> None:
    text = comparison(results, HARDWARE, VERIFIER)
    first, second = text.split("## 8 requests in flight")
    assert "## 1 request in flight" in first
    assert table_lines(first) == [
        "| method | K | baseline tok/s | tok/s | change | acceptance length | drafted steps | "
        "tokens/step | TTFT ms | ms/token |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| none | 0 | - | 40.0 | - | - | - | - | 50 | 25.0 |",
        "| ngram | 3 | 40.4 | 44.0 | +9% | - | - | - | 50 | 25.0 |",
        "| eagle3 | 1 | 40.0 | 48.0 | +20% | 1.40 | 100% | 1.38 | 50 | 25.0 |",
        "| eagle3 | 2 | 40.0 | 50.0 | +25% | 1.50 | 100% | 1.38 | 50 | 25.0 |",
        "| prompt type | method | K | baseline tok/s | tok/s | change | acceptance length |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        "| maths | ngram | 3 | 40.0 | 30.0 | -25% | - |",
        "| maths | eagle3 | 1 | 40.0 | 48.0 | +20% | 1.40 |",
        "| maths | eagle3 | 2 | 40.0 | 60.0 | +50% | 1.75 |",
    ]
    assert "| ngram | 3 | 196.0 | 180.0 | -8% | 1.50 | 100% | 1.38 | 50 | 25.0 |" in second
    assert "| eagle3 | 1 | 200.0 | 200.0 | +0% | 1.40 | 100% | 1.38 | 50 | 25.0 |" in second


def test_with_several_k_one_prompt_type_lies_together(results: dict[str, dict[str, Any]]) -> None:
    rows = results["eagle3"]["rows"]
    rows += [row | {"category": "writing"} for row in rows if row["category"] == "maths"]
    text = comparison({"eagle3": results["eagle3"]}, HARDWARE, VERIFIER).split("## 8")[0]
    lines = [line.split(" | ") for line in table_lines(text) if line.startswith(("| ma", "| wr"))]
    assert [(line[0], line[2]) for line in lines] == [
        ("| maths", "1"),
        ("| maths", "2"),
        ("| writing", "1"),
        ("| writing", "2"),
    ]


def test_a_time_that_was_not_measured_is_a_dash(results: dict[str, dict[str, Any]]) -> None:
    results["none"]["rows"][0]["itl_ms"] = None
    assert "| none | 0 | - | 40.0 | - | - | - | - | 50 | - |" in comparison(
        results, HARDWARE, VERIFIER
    )


def test_the_drift_of_each_baseline_from_none_is_stated(
    results: dict[str, dict[str, Any]],
) -> None:
    text = comparison(results, HARDWARE, VERIFIER)
    line = "`none` in its own stage: {} tok/s. Drift of each method's baseline from it: {}."
    assert line.format("40.0", "ngram +1%, eagle3 +0%") in text
    assert line.format("200.0", "ngram -2%, eagle3 +0%") in text


def test_the_table_names_verifier_machine_and_engine(results: dict[str, dict[str, Any]]) -> None:
    text = comparison(results, HARDWARE, VERIFIER)
    assert "tiny-verifier on Some CPU, 2 cores, vLLM 0.32.0; greedy." in text
    gpus = HARDWARE | {"gpus": [{"name": "GPU X"}, {"name": "GPU Y"}]}
    assert "tiny-verifier on GPU X, GPU Y, vLLM" in comparison(results, gpus, VERIFIER)


def test_without_none_no_drift_is_stated(results: dict[str, dict[str, Any]]) -> None:
    del results["none"]
    text = comparison(results, HARDWARE, VERIFIER)
    assert "Drift" not in text
    assert "| eagle3 | 2 | 40.0 | 50.0 | +25% | 1.50 | 100% | 1.38 | 50 | 25.0 |" in text


def test_none_alone_gives_one_table_with_itself(results: dict[str, dict[str, Any]]) -> None:
    text = comparison({"none": results["none"]}, HARDWARE, VERIFIER)
    assert "`none` in its own stage: 40.0 tok/s." in text
    assert "no other method" in text
    assert "prompt type" not in text
    assert "| none | 0 | - | 40.0 | - | - | - | - | 50 | 25.0 |" in text


def test_uncompiled_engines_are_noted_by_method(results: dict[str, dict[str, Any]]) -> None:
    assert "eager" not in comparison(results, HARDWARE, VERIFIER)
    results["ngram"]["engine"]["reference_k0_round0"] = engine(eager=True)
    results["eagle3"]["engine"]["method_k2_round0"] = engine(eager=True)
    text = comparison(results, HARDWARE, VERIFIER)
    assert "- Served **uncompiled (eager)**, for tests only: eagle3, ngram." in text


def test_reused_prompts_are_noted(results: dict[str, dict[str, Any]]) -> None:
    note = "- Some prompts were sent twice to one server: prefixes may have been cached."
    assert note not in comparison(results, HARDWARE, VERIFIER)
    results["eagle3"]["rows"][3]["fresh_prompts"] = False
    assert note in comparison(results, HARDWARE, VERIFIER)


def test_asynchronous_scheduling_that_vllm_turned_off_is_noted(
    results: dict[str, dict[str, Any]],
) -> None:
    text = comparison(results, HARDWARE, VERIFIER)
    note = "vLLM turned asynchronous scheduling off"
    assert f"- ngram: {note}" in text
    assert text.count(note) == 1
    results["ngram"]["engine"]["method_k3_round0"]["async_scheduling"] = None
    assert note not in comparison(results, HARDWARE, VERIFIER)


def test_a_baseline_on_another_model_runner_is_noted(results: dict[str, dict[str, Any]]) -> None:
    assert "model runners" not in comparison(results, HARDWARE, VERIFIER)
    results["ngram"]["engine"]["reference_k0_round0"]["model_runner"] = "V2"
    note = "- ngram: the method and its baseline ran on different model runners (V1, V2)"
    assert note in comparison(results, HARDWARE, VERIFIER)


def test_steps_without_a_draft_are_explained_where_there_are_some(
    results: dict[str, dict[str, Any]],
) -> None:
    assert "no draft in some steps" not in comparison(results, HARDWARE, VERIFIER)
    results["ngram"]["rows"][2] |= {"draft_coverage": 0.2, "tokens_per_step": 1.25}
    text = comparison(results, HARDWARE, VERIFIER)
    assert "- ngram: no draft in some steps, which acceptance length leaves out" in text
    assert "| -8% | 1.50 | 20% | 1.25 |" in text


@pytest.fixture
def with_refusal(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same and a row that could not be served, as `bench.not_served` writes it."""
    refused = not_served(DoesNotFit("its heads are 4 wide, not 8"), 3, [1, 8])
    return results | {"narrow": {"method": "narrow", "head": {}, **refused}}


def test_a_row_that_is_not_served_is_in_the_table_with_its_reason(
    with_refusal: dict[str, dict[str, Any]],
) -> None:
    text = comparison(with_refusal, HARDWARE, VERIFIER)
    assert text.count("| narrow | 3 | - | - | not served | - | - | - | - | - |") == 2
    assert "- **narrow is not served**: its heads are 4 wide, not 8" in text


def test_a_row_that_is_not_served_changes_nothing_about_the_others(
    results: dict[str, dict[str, Any]], with_refusal: dict[str, dict[str, Any]]
) -> None:
    assert summary_metrics(with_refusal) == summary_metrics(results)
    assert acceptance_rows(with_refusal) == acceptance_rows(results)
    assert speedup_rows(with_refusal) == speedup_rows(results)
    without = [line for line in comparison(with_refusal, HARDWARE, VERIFIER).splitlines()
               if "narrow" not in line and line != "## Heads"]  # fmt: skip
    assert [line for line in without if line] == [
        line for line in comparison(results, HARDWARE, VERIFIER).splitlines() if line
    ]


def test_the_summary_holds_a_handful_of_figures_over_all_at_the_headline_k(
    results: dict[str, dict[str, Any]],
) -> None:
    assert summary_metrics(results) == {
        "none": {"c1": {"output_tokens_per_s": 40.0}, "c8": {"output_tokens_per_s": 200.0}},
        "ngram": {
            "num_speculative_tokens": 3,
            "c1": {"output_tokens_per_s": 44.0, "speedup": 44.0 / 40.4},
            "c8": {
                "output_tokens_per_s": 180.0,
                "speedup": 180.0 / 196.0,
                "acceptance_length": 1.5,
            },
        },
        "eagle3": {
            "num_speculative_tokens": 2,
            "c1": {"output_tokens_per_s": 50.0, "speedup": 1.25, "acceptance_length": 1.5},
            "c8": {"output_tokens_per_s": 150.0, "speedup": 0.75, "acceptance_length": 1.5},
        },
    }


def test_acceptance_rows_are_of_the_headline_k_and_leave_out_what_drafted_nothing(
    results: dict[str, dict[str, Any]],
) -> None:
    names = ("method", "num_speculative_tokens", "concurrency", "position", "acceptance_rate")
    assert [tuple(row[name] for name in names) for row in acceptance_rows(results)] == [
        ("ngram", 3, 8, 0, 0.5),
        ("eagle3", 2, 1, 0, 0.4),
        ("eagle3", 2, 1, 1, 0.1),
        ("eagle3", 2, 8, 0, 0.4),
        ("eagle3", 2, 8, 1, 0.1),
    ]


def test_acceptance_rows_are_in_the_order_of_positions_beyond_nine(
    results: dict[str, dict[str, Any]],
) -> None:
    rates = [(12 - position) / 100 for position in range(12)]
    row = beside(50.0, 40.0, *rates)
    rows = at(12, 1, dict(sorted(row.items())), row)
    found = acceptance_rows({"eagle3": {"num_speculative_tokens": 12, "rows": rows}})
    assert [point["position"] for point in found] == list(range(12))
    assert [point["acceptance_rate"] for point in found] == rates


def test_speedup_rows_are_of_every_speculating_method_concurrency_and_prompt_type(
    results: dict[str, dict[str, Any]],
) -> None:
    names = ("method", "num_speculative_tokens", "concurrency", "category", "speedup")
    assert [tuple(row[name] for name in names) for row in speedup_rows(results)] == [
        ("ngram", 3, 1, "all", 44.0 / 40.4),
        ("ngram", 3, 1, "maths", 0.75),
        ("ngram", 3, 8, "all", 180.0 / 196.0),
        ("ngram", 3, 8, "maths", 180.0 / 196.0),
        ("eagle3", 2, 1, "all", 1.25),
        ("eagle3", 2, 1, "maths", 1.5),
        ("eagle3", 2, 8, "all", 0.75),
        ("eagle3", 2, 8, "maths", 0.75),
    ]


def test_without_a_speculating_method_the_plots_have_one_row_without_a_value(
    results: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    none = {"none": results["none"]}
    place = {"method": "none", "num_speculative_tokens": 0, "concurrency": 1}
    assert acceptance_rows(none) == [place | {"position": 0, "acceptance_rate": None}]
    assert speedup_rows(none) == [place | {"category": "all", "speedup": None}]
    plot_acceptance(acceptance_rows(none), tmp_path / "acceptance.svg")
    plot_speedup(speedup_rows(none), tmp_path / "speedup.svg")


def test_equal_rows_give_equal_bytes_and_other_rows_give_others(
    results: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    for plot, rows in (
        (plot_acceptance, acceptance_rows(results)),
        (plot_speedup, speedup_rows(results)),
    ):
        for name, drawn in (("a", rows), ("b", rows), ("c", rows[:-1])):
            plot(drawn, tmp_path / f"{name}.svg")
        first, second, third = ((tmp_path / f"{name}.svg").read_bytes() for name in "abc")
        assert first == second
        assert first != third
        assert b"<svg" in first


def test_a_stage_that_went_on_after_an_interruption_is_named(
    results: dict[str, dict[str, Any]],
) -> None:
    assert "interrupted" not in comparison(results, HARDWARE, VERIFIER)
    results["ngram"]["rows"][0]["one_execution"] = False
    assert "- ngram: the stage was interrupted" in comparison(results, HARDWARE, VERIFIER)


def test_a_row_faster_than_its_acceptance_length_allows_is_named(
    results: dict[str, dict[str, Any]],
) -> None:
    assert "faster than their acceptance length" not in comparison(results, HARDWARE, VERIFIER)
    # 62 / 40 = 1.55 is above 1.1 x 1.4; 61 / 40 is not
    results["eagle3"]["rows"][:2] = at(1, 1, beside(62.0, 40.0, 0.4), beside(61.0, 40.0, 0.4))
    text = comparison(results, HARDWARE, VERIFIER)
    assert "**eagle3: 1 rows are faster than their acceptance length allows** (all at 1 (K=1))" in (
        text
    )
    assert "dvc repro -f -s bench@eagle3" in text

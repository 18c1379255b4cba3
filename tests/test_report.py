import json
from pathlib import Path
from typing import Any

import pytest

from specmill.report import (
    acceptance_curves,
    comparison,
    headline,
    plot_acceptance,
    summary_metrics,
)

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
        row["num_drafts"] = 100
    return row | {f"acceptance_rate_pos_{i}": rate for i, rate in enumerate(rates)}


@pytest.fixture
def results() -> dict[str, dict[str, Any]]:
    return {
        "none": {
            "headline": "k0",
            "figures": {
                "k0": {
                    "c1": {"all": alone(40.0), "maths": alone(40.0)},
                    "c8": {"all": alone(200.0), "maths": alone(200.0)},
                }
            },
            "engine": {"method_k0_round0": engine()},
        },
        "ngram": {
            "headline": "k3",
            "figures": {
                "k3": {
                    "c1": {"all": beside(44.0, 40.4), "maths": beside(30.0, 40.0)},
                    "c8": {"all": beside(180.0, 196.0, 0.5), "maths": beside(180.0, 196.0, 0.5)},
                }
            },
            "engine": {
                "reference_k0_round0": engine(),
                "method_k3_round0": engine(async_scheduling=False),
            },
        },
        "eagle3": {
            "headline": "k2",
            "figures": {
                "k2": {
                    "c1": {
                        "all": beside(50.0, 40.0, 0.4, 0.1),
                        "maths": beside(60.0, 40.0, 0.5, 0.25),
                    },
                    "c8": {
                        "all": beside(150.0, 200.0, 0.4, 0.1),
                        "maths": beside(150.0, 200.0, 0.4, 0.1),
                    },
                },
                "k1": {
                    "c1": {"all": beside(48.0, 40.0, 0.4), "maths": beside(48.0, 40.0, 0.4)},
                    "c8": {"all": beside(200.0, 200.0, 0.4), "maths": beside(200.0, 200.0, 0.4)},
                },
            },
            "engine": {"reference_k0_round0": engine(), "method_k2_round0": engine()},
        },
    }


def test_the_table_lists_every_row_beside_its_own_baseline(
    results: dict[str, dict[str, Any]],
) -> None:
    text = comparison(results, HARDWARE, VERIFIER)
    first, second = text.split("## 8 requests in flight")
    assert "## 1 request in flight" in first
    rows = [line for line in first.splitlines() if line.startswith("| ")]
    assert rows == [
        "| prompt type | method | K | baseline tok/s | tok/s | change | acceptance length |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        "| **all** | ngram | 3 | 40.4 | 44.0 | +9% | - |",
        "| maths | ngram | 3 | 40.0 | 30.0 | -25% | - |",
        "| **all** | eagle3 | 1 | 40.0 | 48.0 | +20% | 1.40 |",
        "| maths | eagle3 | 1 | 40.0 | 48.0 | +20% | 1.40 |",
        "| **all** | eagle3 | 2 | 40.0 | 50.0 | +25% | 1.50 |",
        "| maths | eagle3 | 2 | 40.0 | 60.0 | +50% | 1.75 |",
    ]
    assert "| **all** | ngram | 3 | 196.0 | 180.0 | -8% | 1.50 |" in second
    assert "| **all** | eagle3 | 1 | 200.0 | 200.0 | +0% | 1.40 |" in second


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
    assert "| **all** | eagle3 | 2 | 40.0 | 50.0 | +25% | 1.50 |" in text


def test_none_alone_gives_a_table_without_rows(results: dict[str, dict[str, Any]]) -> None:
    text = comparison({"none": results["none"]}, HARDWARE, VERIFIER)
    assert "`none` in its own stage: 40.0 tok/s." in text
    assert "no other method" in text
    assert not [line for line in text.splitlines() if line.startswith(("| **", "| maths"))]


def test_uncompiled_engines_are_noted_by_method(results: dict[str, dict[str, Any]]) -> None:
    assert "eager" not in comparison(results, HARDWARE, VERIFIER)
    results["ngram"]["engine"]["reference_k0_round0"] = engine(eager=True)
    results["eagle3"]["engine"]["method_k2_round0"] = engine(eager=True)
    text = comparison(results, HARDWARE, VERIFIER)
    assert "- Served **uncompiled (eager)**, for tests only: eagle3, ngram." in text


def test_reused_prompts_are_noted(results: dict[str, dict[str, Any]]) -> None:
    note = "- Some prompts were sent twice to one server: prefixes may have been cached."
    assert note not in comparison(results, HARDWARE, VERIFIER)
    results["eagle3"]["figures"]["k1"]["c8"]["maths"]["fresh_prompts"] = False
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


def test_the_acceptance_length_of_ngram_is_explained_where_it_is_shown(
    results: dict[str, dict[str, Any]],
) -> None:
    assert "n-gram's acceptance length counts" in comparison(results, HARDWARE, VERIFIER)
    del results["ngram"]
    assert "n-gram" not in comparison(results, HARDWARE, VERIFIER)


def test_the_headline_is_the_first_k_measured(results: dict[str, dict[str, Any]]) -> None:
    through_json = json.loads(json.dumps(results, sort_keys=True))  # as it comes from the disk
    assert headline(through_json["eagle3"])["c1"]["all"]["output_tokens_per_s"] == 50.0
    assert summary_metrics(through_json)["eagle3"]["num_speculative_tokens"] == 2
    assert headline(results["none"]) == results["none"]["figures"]["k0"]


def test_the_summary_holds_the_row_over_all_of_the_headline_k(
    results: dict[str, dict[str, Any]],
) -> None:
    rows = summary_metrics(results)
    assert rows["eagle3"] == {
        "num_speculative_tokens": 2,
        "c1": {
            "output_tokens_per_s": 50.0,
            "speedup": 1.25,
            "acceptance_length": 1.5,
            "tokens_per_engine_step": 1.0,
            "ttft_ms": 50.0,
            "itl_ms": 25.0,
            "identical_outputs": 0.75,
        },
        "c8": {
            "output_tokens_per_s": 150.0,
            "speedup": 0.75,
            "acceptance_length": 1.5,
            "tokens_per_engine_step": 1.0,
            "ttft_ms": 50.0,
            "itl_ms": 25.0,
            "identical_outputs": 0.75,
        },
    }
    assert rows["none"]["num_speculative_tokens"] == 0
    assert "speedup" not in rows["none"]["c1"]
    assert "acceptance_length" not in rows["ngram"]["c1"]


def test_curves_are_of_the_first_concurrency_and_leave_out_what_drafted_nothing(
    results: dict[str, dict[str, Any]],
) -> None:
    assert acceptance_curves(results) == (
        {
            "eagle3": [
                {"position": 0, "acceptance_rate": 0.4},
                {"position": 1, "acceptance_rate": 0.1},
            ]
        },
        "c1",
    )


def test_curves_are_in_the_order_of_positions_beyond_nine(
    results: dict[str, dict[str, Any]],
) -> None:
    rates = [(12 - position) / 100 for position in range(12)]
    row = beside(50.0, 40.0, *rates)
    results["eagle3"]["figures"]["k2"]["c1"]["all"] = dict(sorted(row.items()))
    curve = acceptance_curves(results)[0]["eagle3"]
    assert [point["position"] for point in curve] == list(range(12))
    assert [point["acceptance_rate"] for point in curve] == rates


def test_equal_curves_give_equal_bytes_and_other_curves_give_others(tmp_path: Path) -> None:
    curves = {
        "eagle3": [
            {"position": 0, "acceptance_rate": 0.4},
            {"position": 1, "acceptance_rate": 0.1},
        ]
    }
    other = {"eagle3": [{"position": 0, "acceptance_rate": 0.4}]}
    for name, drawn in (("a", curves), ("b", curves), ("c", other)):
        plot_acceptance(drawn, "c1", tmp_path / f"{name}.svg")
    first, second, third = ((tmp_path / f"{name}.svg").read_bytes() for name in "abc")
    assert first == second
    assert first != third
    assert b"<svg" in first


def test_concurrencies_and_k_are_listed_by_number_and_not_as_text(
    results: dict[str, dict[str, Any]],
) -> None:
    for result in results.values():
        for by_concurrency in result["figures"].values():
            by_concurrency["c16"] = by_concurrency["c8"]
    results["eagle3"]["figures"]["k16"] = results["eagle3"]["figures"]["k1"]
    text = comparison(json.loads(json.dumps(results, sort_keys=True)), HARDWARE, VERIFIER)
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert [heading.split()[1] for heading in headings] == ["1", "8", "16"]
    rows = [line.split("|")[3].strip() for line in text.splitlines() if "| eagle3 |" in line]
    assert rows[:6] == ["1", "1", "2", "2", "16", "16"]


def test_a_stage_that_went_on_after_an_interruption_is_named(
    results: dict[str, dict[str, Any]],
) -> None:
    assert "interrupted" not in comparison(results, HARDWARE, VERIFIER)
    results["ngram"]["figures"]["k3"]["c1"]["all"]["one_execution"] = False
    assert "- ngram: the stage was interrupted" in comparison(results, HARDWARE, VERIFIER)

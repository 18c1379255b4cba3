"""The comparison as a whole, and the summary."""

import sys
from pathlib import Path
from typing import Any

import pytest

from specmill import epilogue
from specmill.imported import import_result
from specmill.params_imported import Imported
from specmill.report import comparison, summary_metrics
from tests.benches import BENCH, alone, comparable, result, row
from tests.surfaces import place
from tests.workspace import ROOT

Results = dict[str, dict[str, Any]]

HARDWARE = {
    "gpus": [],
    "cpu_model": "Some CPU",
    "num_usable_cores": 2,
    "versions": {"vllm": "0.32.0"},
}
VERIFIER = {"name": "tiny-verifier"}
NOTHING_PREDICTED: dict[str, Any] = {
    "num_cells": 0,
    "num_cells_new": 0,
    "speed": [],
    "acceptance": [],
}


@pytest.fixture
def results() -> Results:
    return comparable()


def compared(results: Results) -> str:
    return comparison(results, NOTHING_PREDICTED, HARDWARE, VERIFIER, BENCH, ["- Not much."])


def section(text: str, title: str) -> str:
    """What stands below a heading, up to the next."""
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def headings(text: str) -> list[str]:
    return [line[3:] for line in text.splitlines() if line.startswith("## ")]


REFUSED = {
    "method": "narrow",
    "head": {},
    "num_speculative_tokens": 3,
    "not_served": "its heads are 4 wide, not 8",
    "rows": [place(3, 1, 0), place(3, 8, 0)],
    "engine": {},
    "provenance": {"waited_s": 0.0, "busy_cores_before": 0.0},
}


def test_the_answer_comes_first_and_then_what_must_be_known_of_it(results: Results) -> None:
    head = compared(results).split("\n## ")[0]
    assert head.splitlines()[:3] == [
        "# Does speculation pay?",
        "",
        "tiny-verifier on Some CPU, 2 cores, vLLM 0.32.0; greedy.",
    ]
    assert head.index("What this run can decide:\n\n- Not much.\n") < head.index("| method |")
    assert head.endswith(
        """
| method | K | 1 in flight | 8 in flight |
| --- | ---: | ---: | ---: |
| none | 0 | +0.2% (-2% to +3%) | -0.4% (-3% to +2%) |
| ngram | 3 | **+9% (+5% to +12%)** | **-8% (-12% to -5%)** |
| eagle3 | 1 | **+20% (+15% to +25%)** | +1% (-3% to +5%) |
| eagle3 | 2 | **+25% (+20% to +30%)** | **-25% (-30% to -20%)** |

- ngram: vLLM turned asynchronous scheduling off, part of its cost.
"""
    )


def test_gpus_are_named_instead_of_the_cpu(results: Results) -> None:
    gpus = HARDWARE | {"gpus": [{"name": name} for name in ("GPU X", "GPU Y", "GPU X")]}
    assert "tiny-verifier on 2 x GPU X, GPU Y, vLLM 0.32.0;" in comparison(
        results, NOTHING_PREDICTED, gpus, VERIFIER, BENCH, []
    )


def test_each_load_has_a_section_with_its_rows_only(results: Results) -> None:
    text = compared(results)
    assert headings(text) == [
        "How to read the tables",
        "1 request in flight",
        "8 requests in flight",
        "Is greedy output lossless?",
        "Engines",
    ]
    line = "| eagle3 | 2 | {} | "
    assert line.format("40.0 | 50.0") in section(text, "1 request in flight")
    assert line.format("200.0 | 150.0") in section(text, "8 requests in flight")
    assert line.format("40.0 | 50.0") not in section(text, "8 requests in flight")
    assert line.format("200.0 | 150.0") not in section(text, "1 request in flight")


def test_a_context_and_a_rate_have_sections_of_their_own(results: Results) -> None:
    rows = results["ngram"]["rows"]
    results["ngram"]["rows"] = [
        rows[0] | {"context": 512},
        rows[0] | {"concurrency": None, "rate": 2.5},
        rows[0] | {"concurrency": None, "rate": 1.0, "context": 64},
        rows[0] | {"concurrency": 8, "context": 512},
        rows[0] | {"concurrency": 8},
    ]
    text = compared({"ngram": results["ngram"]})
    assert headings(text)[1:-2] == [
        "8 requests in flight",
        "1 request in flight, 512 tokens of context",
        "8 requests in flight, 512 tokens of context",
        "2.5 requests per second",
        "1 request per second, 64 tokens of context",
    ]


def test_the_drift_of_each_baseline_from_that_of_none_is_stated(results: Results) -> None:
    text = compared(results)
    drift = (
        "Drift of the baselines from that of `none`, measured at another time: {}. Compare changes "
        "between methods, not tokens per second."
    )
    # 40.4 / 40.0 and 196 / 200
    assert drift.format("ngram +1%, eagle3 +0.0%") in section(text, "1 request in flight")
    assert drift.format("ngram -2%, eagle3 +0.0%") in section(text, "8 requests in flight")


@pytest.mark.parametrize("dropped", [["none"], ["ngram", "eagle3"]])
def test_without_none_or_with_none_alone_no_drift_is_stated(
    results: Results, dropped: list[str]
) -> None:
    for name in dropped:
        del results[name]
    assert "Drift" not in compared(results)


def test_none_alone_is_compared_with_itself(results: Results) -> None:
    text = compared({"none": results["none"]})
    assert "| none | 0 | +0.2% (-2% to +3%) | -0.4% (-3% to +2%) |" in text
    assert "prompt type" not in section(text, "1 request in flight")


def test_a_method_that_is_not_lossless_says_so_wherever_its_speed_is(results: Results) -> None:
    results["eagle3"]["rows"][4]["num_not_rounding"] = 1
    text = compared(results)
    marked = "eagle3 ‡ |"
    assert f"| {marked} 2 | **+25% (+20% to +30%)** | **-25% (-30% to -20%)** |" in text
    assert text.count("‡ Not lossless: greedy answers that leave the verifier's by more than") == 1
    # in the section of a load: speeds of both K, times of both K, maths of both K
    assert section(text, "1 request in flight").count(marked) == 6
    assert "ngram ‡" not in text
    assert "- **eagle3 is not lossless**: in 1 of its greedy answers" in text


def test_what_was_sampled_has_a_section_and_marks_what_failed(results: Results) -> None:
    results["ngram"]["sampling"] = {
        "lossless": False, "p_value": 1e-9, "num_samples": 4096, "num_tests": 6,
        "temperature": 1.0, "acceptance_length": 1.5,
    }  # fmt: skip
    text = compared(results)
    assert "| ngram | **no** | 1e-09 | 4096 | 1.50 |" in section(text, "Is sampling lossless?")
    assert "| ngram † | 3 | **+9% (+5% to +12%)** |" in text
    assert text.count("another distribution than the verifier's") == 1


def test_a_method_that_is_not_served_is_in_every_table_of_speeds_with_its_reason(
    results: Results,
) -> None:
    text = compared(results | {"narrow": REFUSED})
    assert "| narrow | 3 | not served | not served |" in text
    assert text.count("| narrow | 3 | - | - | - | - | not served | - | - | - |") == 2
    assert text.count("- **narrow is not served**: its heads are 4 wide, not 8") == 1


def test_a_method_that_is_not_served_changes_nothing_about_the_others(results: Results) -> None:
    with_refusal = results | {"narrow": REFUSED}
    assert summary_metrics(with_refusal) == summary_metrics(results)
    others = [line for line in compared(with_refusal).splitlines() if "narrow" not in line]
    assert others == compared(results).splitlines()


def test_a_headline_k_that_is_refused_leaves_the_other_k_in_the_tables(results: Results) -> None:
    rows = results["eagle3"]["rows"]
    rows[4:] = [row(2, load, "all", dict.fromkeys(rows[0].keys() - place(2, load, 0).keys()))
                for load in (1, 8)]  # fmt: skip
    results["eagle3"]["refused"] = {"2": "it drafts 1 at most"}
    text = compared(results)
    assert "| +1% (-3% to +5%) |\n| eagle3 | 2 | not served | not served |" in text
    assert "- **eagle3 is not served at K=2**: it drafts 1 at most" in text.split("\n## ")[0]
    assert "of `none`, measured at another time: ngram +1%. Compare" in text
    assert summary_metrics(results)["eagle3"] == {"c1": {}, "c8": {}, "num_speculative_tokens": 2}


def test_a_row_of_another_tool_stands_among_the_others(results: Results) -> None:
    file = str(ROOT / "tests/results/vllm_detailed.json")
    chosen = Imported(source=file, reference=file, num_speculative_tokens=0)
    text = compared(results | {"rented": import_result("rented", chosen)})
    assert "| rented | 0 | - | +0.0% | - |" in text.split("\n## ")[0]
    # compared with itself: 36 tokens in 0.3009 s
    line = "| rented | 0 | 119.6 | 119.6 | +0.0% | - | single run | - | - | - |"
    assert line in section(text, "2 requests in flight")
    assert "Drift" not in section(text, "2 requests in flight")
    assert "- rented was not measured here: vllm_detailed.json of vllm bench serve, " in text


@pytest.mark.parametrize("baseline", [None, 900.0])
def test_the_baseline_of_another_tool_does_not_drift_from_ours(
    results: Results, baseline: float | None
) -> None:
    figures = alone(950.0) | {"reference_tokens_per_s": baseline, "remarks": None}
    source = {"file": "a.json", "tool": "guidellm", "measured_at": "2026", "model": "big"}
    rented = result(3, [row(3, 8, "all", figures)]) | {"source": source | {"reference": None}}
    assert "ngram -2%, eagle3 +0.0%. Compare" in compared(results | {"rented": rented})


def test_the_summary_holds_a_handful_of_figures_over_all_at_the_headline_k(
    results: Results,
) -> None:
    assert summary_metrics(results) == {
        "none": {
            "c1": {
                "output_tokens_per_s": 40.1,
                "speedup": 1.002,
                "speedup_low": 0.98,
                "speedup_high": 1.03,
            },
            "c8": {
                "output_tokens_per_s": 199.0,
                "speedup": 0.996,
                "speedup_low": 0.97,
                "speedup_high": 1.02,
            },
        },
        "ngram": {
            "num_speculative_tokens": 3,
            "c1": {
                "output_tokens_per_s": 44.0,
                "speedup": 1.09,
                "speedup_low": 1.05,
                "speedup_high": 1.12,
            },
            "c8": {
                "output_tokens_per_s": 180.0,
                "speedup": 0.92,
                "speedup_low": 0.875,
                "speedup_high": 0.955,
                "acceptance_length": 1.5,
            },
        },
        "eagle3": {
            "num_speculative_tokens": 2,
            "c1": {
                "output_tokens_per_s": 50.0,
                "speedup": 1.25,
                "speedup_low": 1.2,
                "speedup_high": 1.3,
                "acceptance_length": 1.5,
            },
            "c8": {
                "output_tokens_per_s": 150.0,
                "speedup": 0.75,
                "speedup_low": 0.7,
                "speedup_high": 0.8,
                "acceptance_length": 1.5,
            },
        },
    }


def test_loads_of_the_summary_are_named_by_requests_rate_and_context() -> None:
    def speed(load: int | float, context: int, speed: float) -> dict[str, Any]:
        place = row(0, load, "all", {"output_tokens_per_s": speed})
        return place | {"context": context}

    rows = [speed(8, 0, 5.0), speed(8, 512, 4.0), speed(2.5, 0, 3.0), speed(2.0, 64, 2.0)]
    assert summary_metrics({"some": result(0, rows)}) == {
        "some": {
            "c8": {"output_tokens_per_s": 5.0},
            "c8_ctx512": {"output_tokens_per_s": 4.0},
            "r2.5": {"output_tokens_per_s": 3.0},
            "r2_ctx64": {"output_tokens_per_s": 2.0},
        }
    }


def test_make_repro_ends_with_the_answer_and_the_places(
    results: Results,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports/comparison.md").write_text(compared(results))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["epilogue"])
    epilogue.main()
    said = capsys.readouterr().out
    assert said.startswith("\n# Does speculation pay?\n")
    assert "| eagle3 | 2 | **+25% (+20% to +30%)** | **-25% (-30% to -20%)** |" in said
    assert "- ngram: vLLM turned asynchronous scheduling off" in said
    assert "## " not in said
    assert said.endswith(epilogue.WHERE)

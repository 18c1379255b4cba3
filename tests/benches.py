"""Rows and results as a bench writes them, to be filled in by a test."""

from typing import Any

from specmill.params_bench import Bench
from tests.surfaces import place

BENCH = Bench(
    reference="beside", concurrency=[1, 8], rates=[], seconds=20.0, context=[0], requests=4,
    rounds=2, precision=0.15, max_tokens=96, max_ttft_ms=1000.0, max_itl_ms=50.0,
    enforce_eager=False,
)  # fmt: skip
PERCENTILES = (50, 90, 99)


def alone(tokens_per_s: float) -> dict[str, Any]:
    """Figures of a row that is compared with nothing."""
    times = {"ttft": 50.0, "itl": 25.0, "chunk": 30.0, "e2e": 1000.0}
    return {
        "num_requests": 24,
        "output_tokens_per_s": tokens_per_s,
        "reference_tokens_per_s": None,
        "speedup": None,
        "speedup_low": None,
        "speedup_high": None,
        "num_pairs": 0,
        "verdict": None,
        **{f"{name}_ms_p{p}": value + p for name, value in times.items() for p in PERCENTILES},
        "goodput": 0.5,
        "draft_coverage": None,
        "tokens_per_step": None,
        "acceptance_length": None,
        "fresh_prompts": True,
        "one_execution": True,
        "identical_outputs": None,
    }


def beside(
    reference: float,
    tokens_per_s: float,
    speedup: float,
    interval: tuple[float, float] | None = None,
    *rates: float,
) -> dict[str, Any]:
    """Figures beside a reference; `rates` are of acceptance by position."""
    low, high = interval or (None, None)
    verdict = "no difference shown" if interval else None
    verdict = "faster" if low and low > 1 else "slower" if high and high < 1 else verdict
    figures: dict[str, Any] = {
        "reference_tokens_per_s": reference,
        "speedup": speedup,
        "speedup_low": low,
        "speedup_high": high,
        "num_pairs": 8 if interval else 4,
        "verdict": verdict,
        "identical_outputs": 1.0,
        "first_divergence": None,
        "largest_gap": None,
        "num_not_rounding": 0,
    }
    if rates:
        figures |= {"acceptance_length": 1 + sum(rates), "draft_coverage": 1.0}
        figures |= {"tokens_per_step": 1.375}
    figures |= {f"acceptance_rate_pos_{i}": rate for i, rate in enumerate(rates)}
    return alone(tokens_per_s) | figures


def row(k: int, load: int | float, category: str, figures: dict[str, Any]) -> dict[str, Any]:
    """A row without context; a float is a rate in requests per second."""
    return place(k, load, 0, category) | figures


def engine(async_scheduling: bool | None = True, **changes: Any) -> dict[str, Any]:
    """How an engine ran."""
    return {
        "enforce_eager": "False",
        "async_scheduling": async_scheduling,
        "model_runner": "V2",
        "attention_backend": "FLASH_ATTN",
        "cudagraph_mode": "FULL",
        "compilation_mode": "VLLM_COMPILE",
        "bound_cores": None,
        "kv_cache_tokens": None,
        "startup_s": 31.4,
    } | changes


def result(k: int, rows: list[dict[str, Any]], **engines: dict[str, Any]) -> dict[str, Any]:
    """reports/bench/NAME.json with headline K `k`."""
    return {
        "num_speculative_tokens": k,
        "head": {},
        "rows": rows,
        "engine": engines,
        "provenance": {"waited_s": 0.2, "busy_cores_before": 0.1},
    }


def comparable() -> dict[str, dict[str, Any]]:
    """`none`, `ngram` with K 3 and `eagle3` with K 2 and, not the headline, 1; two loads."""
    none = [
        row(0, 1, "all", beside(40.0, 40.1, 1.002, (0.98, 1.03))),
        row(0, 1, "maths", beside(40.0, 40.1, 1.002, (0.95, 1.04))),
        row(0, 8, "all", beside(200.0, 199.0, 0.996, (0.97, 1.02))),
        row(0, 8, "maths", beside(200.0, 199.0, 0.996, (0.94, 1.05))),
    ]
    ngram = [
        row(3, 1, "all", beside(40.4, 44.0, 1.09, (1.05, 1.12))),
        row(3, 1, "maths", beside(40.0, 30.0, 0.75, (0.7, 0.8))),
        row(3, 8, "all", beside(196.0, 180.0, 0.92, (0.875, 0.955), 0.5)),
        row(3, 8, "maths", beside(196.0, 180.0, 0.92, None, 0.5)),
    ]
    eagle3 = [
        row(1, 1, "all", beside(40.0, 48.0, 1.2, (1.15, 1.25), 0.4)),
        row(1, 1, "maths", beside(40.0, 48.0, 1.2, (1.1, 1.3), 0.4)),
        row(1, 8, "all", beside(200.0, 201.0, 1.01, (0.97, 1.05), 0.4)),
        row(1, 8, "maths", beside(200.0, 201.0, 1.01, (0.9, 1.1), 0.4)),
        row(2, 1, "all", beside(40.0, 50.0, 1.25, (1.2, 1.3), 0.4, 0.1)),
        row(2, 1, "maths", beside(40.0, 60.0, 1.5, (1.4, 1.6), 0.5, 0.25)),
        row(2, 8, "all", beside(200.0, 150.0, 0.75, (0.7, 0.8), 0.4, 0.1)),
        row(2, 8, "maths", beside(200.0, 150.0, 0.75, (0.6, 0.9), 0.4, 0.1)),
    ]
    return {
        "none": result(0, none, reference_k0_0=engine(), method_k0_0=engine()),
        "ngram": result(3, ngram, reference_k0_0=engine(), method_k3_0=engine(False)),
        "eagle3": result(2, eagle3, reference_k0_0=engine(), method_k2_0=engine(),
                         reference_k0_1=engine(), method_k1_0=engine()),
    }  # fmt: skip

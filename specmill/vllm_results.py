"""Results of `vllm bench serve --save-result`, with or without `--save-detailed`.

Keys as vLLM 0.32 writes them (vllm/benchmarks/serve.py); earlier versions lack some. Percentiles
are those asked for with --metric-percentiles and --percentile-metrics, 99 of ttft, tpot and itl by
default; a detailed file holds every request, from which the others are computed.
"""

import math
from datetime import datetime
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from specmill.measured import (
    PERCENTILES,
    Measured,
    measured_or_none,
    speculation_figures,
    without_folder,
)
from specmill.section import Count, Size

MARKS = {"completed", "duration", "total_input_tokens"}
"""Keys that every version writes, and no other tool."""

_NAMES = {"ttft": "ttft", "itl": "tpot", "chunk": "itl", "e2e": "e2el"}
"""Our latency, and vLLM's name of it."""


class VllmResult(BaseModel):
    """What is read of one result; further keys, such as `p99_ttft_ms`, are kept."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    date: str
    backend: str | None = None
    label: str | None = None
    model_id: str
    num_prompts: Size
    request_rate: Annotated[float, Field(gt=0)]
    burstiness: float = 1.0
    max_concurrency: Count | None = None
    ramp_up_strategy: str | None = None
    completed: Size
    failed: Size = 0
    total_input_tokens: Size
    total_output_tokens: Size
    output_throughput: float
    spec_decode_num_drafts: Size | None = None
    spec_decode_draft_tokens: Size = 0
    spec_decode_accepted_tokens: Size = 0
    spec_decode_per_position_acceptance_rates: list[Annotated[float, Field(ge=0, le=1)]] = []
    latencies: list[float] = []
    """Seconds; of every request, failed ones too, as the lists below."""
    ttfts: list[float] = []
    """Only with --save-detailed, as the lists below."""
    itls: list[list[float]] = []
    output_lens: list[int] = []
    errors: list[str] = []


def vllm_results(contents: list[dict[str, Any]]) -> tuple[dict[str, Any], list[Measured]]:
    """Facts of where results are from, and a run of each.

    vLLM writes neither its version, nor the server's address, nor the dataset; what --metadata
    added is in `labels`.

    Raises:
        ValueError: when a key is missing or of another type, two results are of different models,
            a rate was ramped, or figures contradict each other.
    """
    results = [VllmResult.model_validate(content) for content in contents]
    if len(models := {result.model_id for result in results}) > 1:
        raise ValueError(f"it has results of several models: {', '.join(sorted(models))}")
    return _facts(results[0]), [_run(result) for result in results]


def _facts(result: VllmResult) -> dict[str, Any]:
    texts = {"label": result.label, **(result.model_extra or {})}
    return {
        "tool": "vllm bench serve",
        "tool_version": None,
        # in the machine's own time zone
        "measured_at": datetime.strptime(result.date, "%Y%m%d-%H%M%S").isoformat(),
        "model": without_folder(result.model_id),
        "endpoint": None,
        "backend": result.backend,
        "dataset": None,
        "platform": None,
        "labels": {
            name: text
            for name, text in texts.items()
            if isinstance(text, str) and name not in ("endpoint_type", "tokenizer_id")
        },
    }


def _run(result: VllmResult) -> Measured:
    load, concurrency, rate, remarks = _load(result)
    num_failed = max(result.num_prompts - result.completed, result.failed)
    figures = {
        "num_requests": result.completed,
        "num_failed": num_failed,
        "output_tokens": result.total_output_tokens,
        "output_tokens_per_s": measured_or_none(result.output_throughput),
        **_latencies(result),
    }
    rates = result.spec_decode_per_position_acceptance_rates
    drafts = result.spec_decode_num_drafts
    if drafts is not None:
        counts = {
            "num_drafts": drafts,
            "num_draft_tokens": result.spec_decode_draft_tokens,
            "num_accepted_tokens": result.spec_decode_accepted_tokens,
            **{f"accepted_at_{position}": round(r * drafts) for position, r in enumerate(rates)},
        }
        # the server's counters: they count what failed requests drafted too
        tokens = None if num_failed else result.total_output_tokens
        figures |= speculation_figures(counts, len(rates), tokens, result.completed)
    return Measured(
        load=load,
        concurrency=concurrency,
        rate=rate,
        figures=figures,
        prompt_tokens=result.total_input_tokens / max(result.completed, 1),
        k=None if drafts is None else len(rates),
        remarks=remarks,
    )


def _load(result: VllmResult) -> tuple[str, int | None, float | None, list[str]]:
    """Load in words, concurrency, rate and what is to be said of it."""
    limit = result.max_concurrency
    if result.ramp_up_strategy is not None:
        raise ValueError("its request rate was ramped, which is no one row; measure at fixed rates")
    if math.isfinite(result.request_rate):
        rate = result.request_rate
        load = f"{rate:g} requests/s"
        if result.burstiness != 1:
            load += f", burstiness {result.burstiness:g}"
        limited = [] if limit is None else [f"at most {limit} requests in flight"]
        return ", ".join([load, *limited]), None, rate, limited
    if limit is None:
        return "all at once", result.num_prompts, None, ["all requests were sent at once"]
    return f"{limit} in flight", limit, None, []


def _latencies(result: VllmResult) -> dict[str, float | None]:
    """Percentiles in milliseconds, as the file has them or else of its requests."""
    values = _of_requests(result)
    figures: dict[str, float | None] = {}
    for ours, name in _NAMES.items():
        for p in PERCENTILES:
            written = f"median_{name}_ms" if p == 50 else f"p{p}_{name}_ms"
            found = measured_or_none((result.model_extra or {}).get(written))
            if found is None and len(values[ours]):
                found = measured_or_none(1000 * float(np.percentile(values[ours], p)))
            figures[f"{ours}_ms_p{p}"] = found
    return figures


def _of_requests(result: VllmResult) -> dict[str, list[float]]:
    """Seconds of every request that was answered; empty where the file does not have them."""
    values: dict[str, list[float]] = {name: [] for name in _NAMES}
    if len(result.latencies) == result.completed:
        values["e2e"] = result.latencies
    answered = [index for index, error in enumerate(result.errors) if not error]
    lists = [len(listed) for listed in (result.ttfts, result.itls, result.output_lens)]
    if len(answered) != result.completed or set(lists) != {len(result.errors)}:
        return values
    values["e2e"] = []
    for index in answered:
        first, between, tokens = result.ttfts[index], result.itls[index], result.output_lens[index]
        whole = result.latencies[index] if result.latencies else first + sum(between)
        values["ttft"].append(first)
        values["chunk"] += between
        values["e2e"].append(whole)
        if tokens > 1:
            values["itl"].append((whole - first) / (tokens - 1))
    return values

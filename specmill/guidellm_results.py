"""Reports of guidellm, `benchmarks.json`: one run for each load of its profile.

Report versions 1 (guidellm 0.5 and 0.6) and 2 (0.7 and 0.8): what is read here is the same in both
(guidellm/benchmark/schemas). Latencies are those of requests that were answered; output tokens per
second count all of the measured time, also those of requests that it cut off, as guidellm's own
table of the server's throughput does.
"""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field

from specmill.measured import (
    PERCENTILES,
    Measured,
    measured_or_none,
    speculation_figures,
    without_folder,
)
from specmill.section import Size

_LAST_S = 253402300799
"""The end of the year 9999, Python's last."""

MARKS = {"metadata", "benchmarks"}
"""Keys of every report."""


class _Distribution(BaseModel):
    mean: float
    max: float
    total_sum: float
    percentiles: dict[str, float]


class _ByStatus(BaseModel):
    successful: _Distribution
    total: _Distribution


class _Totals(BaseModel):
    successful: int
    errored: int
    incomplete: int


class _Metrics(BaseModel):
    request_totals: _Totals
    request_concurrency: _ByStatus
    request_latency: _ByStatus
    time_to_first_token_ms: _ByStatus
    inter_token_latency_ms: _ByStatus
    prompt_token_count: _ByStatus
    output_token_count: _ByStatus
    output_tokens_per_second: _ByStatus


class _Strategy(BaseModel):
    type_: str
    streams: int | None = None
    rate: float | None = None
    max_concurrency: int | None = None


class _Config(BaseModel):
    strategy: _Strategy
    backend: dict[str, Any] = {}


class _Speculation(BaseModel):
    acceptance_histogram: Annotated[list[Size], Field(min_length=1)]
    num_draft_tokens: Size


class _Told(BaseModel):
    speculative_decoding: _Speculation | None = None


class _Request(BaseModel):
    output_tokens: Size | None = None
    response_metrics: _Told | None = None


class _Requests(BaseModel):
    successful: list[_Request] | None = None


class _Run(BaseModel):
    config: _Config
    metrics: _Metrics
    requests: _Requests
    start_time: Annotated[float, Field(ge=0, le=_LAST_S)]
    """Seconds since 1970."""


class _Metadata(BaseModel):
    version: Literal[1, 2]
    guidellm_version: str
    platform: str | None = None


class _Report(BaseModel):
    metadata: _Metadata
    config: dict[str, Any] = {}
    """Of version 2."""
    args: dict[str, Any] = {}
    """Of version 1."""
    benchmarks: list[_Run]


def guidellm_results(content: dict[str, Any]) -> tuple[dict[str, Any], list[Measured]]:
    """Facts of where a report is from, and its runs in their order.

    Raises:
        ValueError: when the report is of another version, a key is missing or of another type, it
            has no run, or a run has neither a number of requests in flight nor a rate.
    """
    report = _Report.model_validate(content)
    if not report.benchmarks:
        raise ValueError("the report has no benchmark: guidellm was stopped before the first ended")
    return _facts(report), [_measured(run) for run in report.benchmarks]


def _facts(report: _Report) -> dict[str, Any]:
    first = report.benchmarks[0]
    backend = first.config.backend
    spec = report.config.get("spec", report.args)
    data = spec.get("data") if isinstance(spec, dict) else None
    about = report.config.get("metadata")
    return {
        "tool": "guidellm",
        "tool_version": report.metadata.guidellm_version,
        "measured_at": datetime.fromtimestamp(first.start_time, UTC).isoformat(timespec="seconds"),
        "model": without_folder(str(backend.get("model") or "")) or None,
        "endpoint": _without_password(str(backend.get("target") or "")) or None,
        "backend": backend.get("request_format"),
        "dataset": ", ".join(map(_dataset, data if isinstance(data, list) else [])) or None,
        "platform": report.metadata.platform,
        "labels": about.get("labels", {}) if isinstance(about, dict) else {},
    }


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _dataset(source: Any) -> str:
    """A data source in a few words: its name, or what kind of prompts are made up."""
    if not isinstance(source, dict):
        return str(source)
    told = {name: source[name] for name in ("prompt_tokens", "output_tokens") if source.get(name)}
    sizes = "".join(f" {name}={value}" for name, value in told.items())
    return without_folder(str(source.get("source") or source.get("kind") or "unknown")) + sizes


def _measured(run: _Run) -> Measured:
    metrics, totals = run.metrics, run.metrics.request_totals
    load, concurrency, rate, remarks = _load(run)
    speculation, k = _speculation(run)
    return Measured(
        load=load,
        concurrency=concurrency,
        rate=rate,
        figures={
            "num_requests": totals.successful,
            "num_failed": totals.errored,
            "output_tokens": round(metrics.output_token_count.successful.total_sum),
            "output_tokens_per_s": measured_or_none(metrics.output_tokens_per_second.total.mean),
            **_percentiles("ttft", metrics.time_to_first_token_ms.successful),
            **_percentiles("itl", metrics.inter_token_latency_ms.successful),
            **_percentiles("e2e", metrics.request_latency.successful, scale=1000),
            **speculation,
        },
        prompt_tokens=metrics.prompt_token_count.successful.mean,
        num_cut_off=totals.incomplete,
        k=k,
        remarks=remarks,
    )


def _load(run: _Run) -> tuple[str, int | None, float | None, list[str]]:
    """Load in words, concurrency, rate and what is to be said of it."""
    strategy = run.config.strategy
    if strategy.type_ == "synchronous":
        return "1 in flight", 1, None, []
    if strategy.type_ == "concurrent" and strategy.streams is not None:
        return f"{strategy.streams} in flight", strategy.streams, None, []
    if strategy.type_ == "throughput":
        most = round(run.metrics.request_concurrency.total.max)
        return "all at once", most, None, [f"all requests were sent at once, {most} in flight"]
    if strategy.type_ in ("constant", "poisson") and strategy.rate is not None:
        limit = strategy.max_concurrency
        limited = [] if limit is None else [f"at most {limit} requests in flight"]
        load = f"{strategy.type_} {strategy.rate:g} requests/s"
        return ", ".join([load, *limited]), None, strategy.rate, limited
    raise ValueError(
        f"a run of strategy {strategy.type_!r} is no row: it has neither a number of requests in "
        "flight nor a rate; profiles synchronous, concurrent, throughput, constant, poisson and "
        "sweep are"
    )


def _percentiles(
    name: str, distribution: _Distribution, scale: float = 1
) -> dict[str, float | None]:
    figures = {}
    for p in PERCENTILES:
        value = measured_or_none(distribution.percentiles.get(f"p{p}"))
        figures[f"{name}_ms_p{p}"] = None if value is None else scale * value
    return figures


def _speculation(run: _Run) -> tuple[dict[str, Any], int | None]:
    """Acceptance, where vLLM told it with every answer, and the number of draft positions.

    `acceptance_histogram[j]` counts the verification steps that accepted j tokens (vLLM
    entrypoints/generate/base/protocol.py): position i was accepted in those with j > i.
    """
    answered = run.requests.successful or []
    told = [one.response_metrics and one.response_metrics.speculative_decoding for one in answered]
    if not told or not all(told):
        return {}, None
    histograms = [one.acceptance_histogram for one in told if one]
    k = max(map(len, histograms)) - 1
    counts = {
        "num_drafts": sum(map(sum, histograms)),
        "num_draft_tokens": sum(one.num_draft_tokens for one in told if one),
        "num_accepted_tokens": sum(j * n for h in histograms for j, n in enumerate(h)),
        **{f"accepted_at_{i}": sum(sum(h[i + 1 :]) for h in histograms) for i in range(k)},
    }
    tokens = [one.output_tokens for one in answered]
    known = sum(n for n in tokens if n) if None not in tokens else None
    return speculation_figures(counts, k, known, len(answered)), k

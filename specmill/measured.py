"""What another benchmark tool measured, in the words of our rows.

    here       vllm bench serve      guidellm
    ttft_ms    ttft                  time_to_first_token_ms
    itl_ms     tpot                  inter_token_latency_ms, every request weighted by its tokens
    chunk_ms   itl                   not in the file
    e2e_ms     e2el                  request_latency (seconds)

vLLM's `itl` is the time between chunks of a stream: with speculation a chunk holds several tokens,
so it is no time per token (vllm/benchmarks/serve.py, calculate_metrics).
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specmill.acceptance import acceptance, conditional, draft_coverage

LATENCIES = ("ttft", "itl", "chunk", "e2e")
PERCENTILES = (50, 90, 99)
FIGURES = (
    "num_requests",
    "num_failed",
    "output_tokens",
    "output_tokens_per_s",
    *(f"{latency}_ms_p{p}" for latency in LATENCIES for p in PERCENTILES),
    "goodput",
    "tokens_per_engine_step",
    "draft_coverage",
    "tokens_per_step",
    "num_drafts",
    "num_draft_tokens",
    "acceptance_length",
    "acceptance_rate",
)


@dataclass(frozen=True)
class Measured:
    """One run of a tool at one load."""

    load: str
    """How requests were sent, in words: a run and its reference have the same."""
    concurrency: int | None
    """Requests in flight; None in open loop."""
    rate: float | None
    """Requests per second; None in closed loop."""
    figures: dict[str, Any]
    """Those of FIGURES that the file has, and acceptance by position; the first four always."""
    prompt_tokens: float
    """Length of the prompts that were answered, mean."""
    num_cut_off: int = 0
    """Requests that the end of the run cut off."""
    k: int | None = None
    """Draft positions that the file has acceptance of; None when it says nothing of drafts."""
    remarks: list[str] = field(default_factory=list)
    """What must be known of the load."""

    @property
    def faults(self) -> list[str]:
        """What is wrong with the run, in words."""
        failed, answered = self.figures["num_failed"], self.figures["num_requests"]
        faults = [f"failed requests: {failed} of {failed + answered}"] if failed else []
        if self.num_cut_off:
            faults.append(f"requests cut off at the end: {self.num_cut_off}")
        if answered and not self.figures["output_tokens"]:
            faults.append("no answer had a token")
        return faults


def measured_or_none(value: Any) -> float | None:
    """A latency or throughput; None for 0 and what is no number.

    Both tools write 0 for what they could not measure: the first token of an answer that was not
    streamed, the time between the tokens of answers of one.
    """
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        return None
    return float(value)


def without_folder(name: str) -> str:
    """A model or dataset; of an absolute path the last part, for it names another machine."""
    return Path(name).name if Path(name).is_absolute() else name


def speculation_figures(
    counts: dict[str, int], k: int, output_tokens: int | None, num_requests: int
) -> dict[str, Any]:
    """Acceptance of a run, from the engine's counters.

    Args:
        counts: As for `specmill.acceptance.acceptance`.
        k: Draft positions.
        output_tokens: Of the requests that were counted; None when it is not known.
        num_requests: How many these are.

    Returns:
        Figures of `acceptance` and `draft_coverage`; the rate at each position, unconditional
        (`acceptance_rate_pos_i`) and given that all before were accepted (`acceptance_given_pos_i`,
        None when they never were).

    Raises:
        ValueError: when the counters contradict each other.
    """
    figures = acceptance(counts, k)
    rates = figures.pop("acceptance_rate_pos", [])
    for position, (rate, given) in enumerate(zip(rates, conditional(rates), strict=True)):
        figures[f"acceptance_rate_pos_{position}"] = rate
        figures[f"acceptance_given_pos_{position}"] = given
    if output_tokens is not None:
        figures |= draft_coverage(counts, output_tokens, num_requests, num_chunks=0)  # not known
    return figures

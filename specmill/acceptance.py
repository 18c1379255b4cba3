"""Acceptance of drafts, from vLLM's counters.

    acceptance length          1 + accepted / drafts           tokens per verification step
    rate at position i         accepted at i / drafts          unconditional, never rises with i
    acceptance length       == 1 + sum of the rates

(vllm v1/spec_decode/metrics.py). The 1 is the bonus token, which the verifier always adds. A step
that drafted nothing is not a draft and is not counted.
"""

from typing import Any


def subtract(after: dict[str, float], before: dict[str, float]) -> dict[str, int]:
    """What cumulative counters gained.

    Raises:
        ValueError: when a counter fell, as after a restart.
    """
    gained = {name: int(value - before.get(name, 0)) for name, value in after.items()}
    if min(gained.values(), default=0) < 0:
        raise ValueError(f"counters fell: {before} -> {after}")
    return gained


def add(counts: list[dict[str, int]]) -> dict[str, int]:
    """Sum counters of several cells name by name."""
    names = sorted({name for row in counts for name in row})
    return {name: sum(row.get(name, 0) for row in counts) for name in names}


def acceptance(counts: dict[str, int], k: int) -> dict[str, Any]:
    """Acceptance figures of one or more cells.

    Args:
        counts: `num_drafts`, `num_draft_tokens`, `num_accepted_tokens`, `accepted_at_0` ...
        k: num_speculative_tokens.

    Returns:
        `num_drafts`, `num_draft_tokens`, `acceptance_length`, `acceptance_rate` (accepted /
        drafted) and `acceptance_rate_pos` (list of k). Without any draft only `num_drafts`, 0.

    Raises:
        ValueError: when the engine exports no such counters, or when they contradict each other:
            rates that rise with the position or start above 1, or that do not sum to acceptance
            length - 1, or more tokens accepted than drafted.
    """
    if "num_drafts" not in counts:
        raise ValueError("the engine exports no speculation counters: it is not speculating")
    drafts = counts["num_drafts"]
    at = [counts.get(f"accepted_at_{position}", 0) for position in range(k)]
    falling = [drafts, *at, 0]
    accepted, drafted = counts["num_accepted_tokens"], counts["num_draft_tokens"]
    agree = sum(at) == accepted <= drafted and (drafted > 0) == (drafts > 0)
    if not agree or sorted(falling, reverse=True) != falling:
        raise ValueError(f"acceptance counters contradict each other: {counts}")
    if drafts == 0:
        return {"num_drafts": 0}
    return {
        "num_drafts": drafts,
        "num_draft_tokens": drafted,
        "acceptance_length": 1 + accepted / drafts,
        "acceptance_rate": accepted / drafted,
        "acceptance_rate_pos": [accepted / drafts for accepted in at],
    }


def conditional(rates: list[float]) -> list[float | None]:
    """Acceptance at each position where all before it were accepted: rate i / rate i-1.

    A draft that ended before a position (n-gram and suffix may draft fewer than K tokens) counts
    as not accepted there.

    Args:
        rates: Unconditional, by position from 0.

    Returns:
        As many; None where no draft came that far.
    """
    before = [1.0, *rates]
    return [rate / prior if prior else None for prior, rate in zip(before, rates, strict=False)]


def draft_coverage(
    counts: dict[str, int], output_tokens: int, num_requests: int, num_chunks: int
) -> dict[str, Any]:
    """How many steps had a draft, and what a step gave over all of them, drafted or not.

        decode steps     = chunks after each request's first
        draft_coverage   = drafts / decode steps
        tokens_per_step  = tokens after each request's first / decode steps

    With a draft model coverage is 1 and `tokens_per_step` is acceptance length; n-gram and suffix
    do not draft where they find nothing, so that only `tokens_per_step` compares with a draft
    model's. A server that is asked faster than it can answer joins the tokens of several steps in
    one chunk. Steps are therefore no fewer than the drafts, nor than the tokens that were not
    accepted drafts (what a last step accepted beyond the end of its answer is counted as accepted
    and is no output, so that this alone would count up to K per request too few).

    Args:
        counts: As for `acceptance`.
        output_tokens: Of all requests.
        num_requests: Each got its first chunk from its prefill, which verifies no draft.
        num_chunks: Of all requests.

    Returns:
        `draft_coverage` (0 ... 1) and `tokens_per_step`; both None when no request decoded.
    """
    decoded, drafts = output_tokens - num_requests, counts["num_drafts"]
    steps = max(num_chunks - num_requests, decoded - counts["num_accepted_tokens"], drafts)
    if decoded <= 0 or steps <= 0:
        return {"draft_coverage": None, "tokens_per_step": None}
    return {"draft_coverage": drafts / steps, "tokens_per_step": decoded / steps}

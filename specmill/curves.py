"""Step time T(K, batch) from waves of requests: what every step of an engine takes, and its ratio.

A wave is `batch` requests sent at once. Every chunk of a streamed answer is an engine step, or
several; each verifies K + 1 tokens of every request and drafts the next K:

    request 1   sent ......|--|---|--|--|--|--|--|         | a chunk
    request 2   sent .........|---|--|--|--|--|--|--|
                               <---- timed ---->           all in flight, none reading its prompt

    step_ms = median over waves of (time between chunks / steps, while all requests answer)
    steps   of a chunk of n tokens ceil(n / (K + 1)): no step brings more, and a server that is
            busy sends what several steps brought as one chunk
    ratio   = median over waves of (the wave's step / the step of `none` in the same repeat)

`low` and `high` are the least and the greatest wave: with so few, no interval says more. `ratio` is
to the plain server, so that it has in it what a method costs besides its tokens, such as another
runner or no asynchronous scheduling.
"""

from collections import defaultdict
from itertools import pairwise
from math import ceil, fsum
from statistics import fmean, median
from typing import Any

from specmill.client import TimedAnswer
from specmill.curve_kinds import NONE


def steady_gaps(answers: list[TimedAnswer]) -> tuple[list[float], list[int]]:
    """Times between chunks while every request of a wave answers, and the tokens that they brought.

    From the first chunk of the last request to begin until the last chunk of the first to end.

    Returns:
        Seconds and tokens, one each per chunk; empty when the requests never answered together.
    """
    start = max(answer.chunk_times[0] for answer in answers)
    end = min(answer.chunk_times[-1] for answer in answers)
    gaps, sizes = [], []
    for answer in answers:
        chunks = zip(pairwise(answer.chunk_times), answer.chunk_sizes[1:], strict=True)
        for (before, after), size in chunks:
            if start <= before and after <= end:
                gaps.append(after - before)
                sizes.append(size)
    return gaps, sizes


def tokens_per_chunk(answers: list[TimedAnswer], k: int) -> float:
    """Mean tokens of the chunks between an answer's first, its prompt's, and its last, cut short.

    Where no answer has a chunk between them, every draft of K tokens is taken to be accepted.
    """
    sizes = [size for answer in answers for size in answer.chunk_sizes[1:-1]]
    return fmean(sizes or [k + 1])


def wave_record(
    kind: str, k: int, repeat: int, group: str, answers: list[TimedAnswer]
) -> dict[str, Any]:
    """What one wave showed.

    Args:
        kind: What drafted (specmill/curve_kinds.py).
        k: Tokens drafted at each step; 0 for none.
        repeat: Which one, from 0.
        group: The waves of `none` that it is compared with are of the same group.
        answers: Its requests.

    Raises:
        RuntimeError: when there was no step with all requests in flight.
    """
    gaps, sizes = steady_gaps(answers)
    steps = sum(ceil(size / (k + 1)) for size in sizes)
    if not gaps:
        raise RuntimeError(
            f"{len(answers)} requests to {kind} (K {k}) were never in flight together: raise "
            "curves.steps, or leave such a batch out of curves.batch"
        )
    return {
        "kind": kind,
        "k": k,
        "batch": len(answers),
        "repeat": repeat,
        "group": group,
        "step_ms": 1000 * fsum(gaps) / steps,
        "ttft_ms": 1000 * median(answer.chunk_times[0] - answer.sent_at for answer in answers),
        "tokens_per_step": sum(sizes) / steps,
        "num_gaps": len(gaps),
    }


def curve_points(waves: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One point per kind, K and batch, in that order, of the waves of `wave_record`.

    Returns:
        `kind`, `k`, `batch`, then milliseconds `step_ms`, `step_ms_low`, `step_ms_high` and
        `ttft_ms`, then `ratio`, `ratio_low`, `ratio_high`, `tokens_per_step`, `num_gaps` and
        `num_waves`.
    """
    reference = {
        (wave["group"], wave["repeat"], wave["batch"]): wave["step_ms"]
        for wave in waves
        if wave["kind"] == NONE
    }
    together: dict[tuple[str, int, int], list[dict[str, Any]]] = defaultdict(list)
    for wave in waves:
        together[wave["kind"], wave["k"], wave["batch"]].append(wave)
    points = []
    for (kind, k, batch), same in sorted(together.items()):
        steps = [wave["step_ms"] for wave in same]
        ratios = [
            wave["step_ms"] / reference[wave["group"], wave["repeat"], wave["batch"]]
            for wave in same
        ]
        points.append(
            {
                "kind": kind,
                "k": k,
                "batch": batch,
                **_spread("step_ms", steps, 3),
                **_spread("ratio", ratios, 4),
                "ttft_ms": round(median(wave["ttft_ms"] for wave in same), 3),
                "tokens_per_step": round(fmean(wave["tokens_per_step"] for wave in same), 3),
                "num_gaps": sum(wave["num_gaps"] for wave in same),
                "num_waves": len(same),
            }
        )
    return points


def plot_rows(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The points as DVC plots them."""
    return [{name: point[name] for name in ("kind", "k", "batch", "step_ms")} for point in points]


def by_name(points: list[dict[str, Any]]) -> dict[str, float]:
    """Step time (ms) by a name for each point, such as `step_ms.eagle3.k3.b16`."""
    return {
        f"step_ms.{point['kind']}.k{point['k']}.b{point['batch']}": point["step_ms"]
        for point in points
    }


def _spread(name: str, values: list[float], digits: int) -> dict[str, float]:
    """Median, least and greatest, as NAME, NAME_low and NAME_high."""
    figures = {"": median(values), "_low": min(values), "_high": max(values)}
    return {f"{name}{end}": round(value, digits) for end, value in figures.items()}

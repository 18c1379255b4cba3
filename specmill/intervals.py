"""Is one server faster than another? Medians of paired ratios with bootstrap intervals.

A pair is one cell answered by both servers, so that what differs between cells (prompts, and with
them acceptance) cancels. The interval is the bootstrap of the median over pairs: pairs are drawn
with replacement, the median of each draw is kept, and two quantiles of these bound the interval.
The plain 2.5% and 97.5% are too narrow for few pairs: of two equal servers 7 to 12% of intervals
with 7 pairs lay on one side of 1. The quantiles are therefore moved out as Hesterberg does
("What Teachers Should Know About the Bootstrap", 2015, section 5.4: expanded percentiles):

    lower quantile = Phi(-sqrt(n / (n - 1)) * t(0.975, n - 1))        n pairs, upper mirrored

What all pairs have in common cannot be drawn: how fast a server happened to start, and how far the
machine moved where servers took turns. The interval is widened by it (`pairs.drift`).
"""

from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
LEAST_PAIRS = 6
"""Fewer can all lie on one side by chance in more than one of twenty cells (2 / 2**5 = 6%)."""

_DRAWS = 2000
_SEED = 17

FASTER, SLOWER, UNDECIDED = "faster", "slower", "no difference shown"


@dataclass(frozen=True)
class Ratio:
    """How much faster the second of two servers is; all above 1 when it is."""

    median: float
    low: float | None
    """Bounds of the 95% interval; None with fewer than LEAST_PAIRS pairs or an unknown drift."""
    high: float | None
    num_pairs: int

    @property
    def verdict(self) -> str | None:
        """`faster` or `slower` when the whole interval is, else `no difference shown`.

        None without an interval: too little was measured to say even that.
        """
        if self.low is None or self.high is None:
            return None
        if self.low > 1:
            return FASTER
        return SLOWER if self.high < 1 else UNDECIDED


def paired_ratio(ratios: list[float], drift: float | None = 0.0) -> Ratio:
    """Median of paired ratios with its interval.

    Args:
        ratios: One per pair, positive.
        drift: How far the machine's speed may differ between the two servers, as |log ratio|; the
            interval is widened by it on both sides. None when nothing is known of it.

    Raises:
        ValueError: when there is no pair or a ratio is not positive.
    """
    logs = np.log(np.asarray(ratios, dtype=np.float64))
    if len(logs) == 0 or not np.isfinite(logs).all():
        raise ValueError(f"no interval of these ratios: {ratios}")
    median = float(np.exp(np.median(logs)))
    if len(logs) < LEAST_PAIRS or drift is None:
        return Ratio(median, None, None, len(logs))
    outer = _outer_quantile(len(logs))
    low, high = np.quantile(_medians(logs), [outer, 1 - outer])
    return Ratio(median, float(np.exp(low - drift)), float(np.exp(high + drift)), len(logs))


def _medians(logs: np.ndarray) -> np.ndarray:
    """Medians of resamples; float64 [_DRAWS]."""
    n = len(logs)
    # numpy sorts rows as short as these several times as fast as its median partitions them
    resamples = np.sort(logs[_drawn(n)], axis=1)
    medians: np.ndarray = (resamples[:, (n - 1) // 2] + resamples[:, n // 2]) / 2
    return medians


@lru_cache(maxsize=32)
def _drawn(n: int) -> np.ndarray:
    """Which of n pairs each resample holds, from 0; int64 [_DRAWS, n]."""
    return np.random.default_rng(_SEED).integers(0, n, (_DRAWS, n))


@cache
def _outer_quantile(n: int) -> float:
    """The lower of the two quantiles of the draws that bound the interval of n pairs."""
    t = stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)
    return float(stats.norm.cdf(-np.sqrt(n / (n - 1)) * t))

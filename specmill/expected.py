"""From acceptance and step times to a speed-up: formulas, intervals, and what is needed.

    tau   tokens per engine step = 1 + coverage * sum of acceptance rates (unconditional, by
          position); a step that drafts nothing gives one token
    T     time of a step without speculation, R * T with it, drafting included
    N     tokens of an answer; F, F' the time to its first one without speculation and with it

    time of a request    = F' + (N - 1) / tau * R * T
    speed-up             = (F + (N - 1) * T) / (F' + (N - 1) * T * R / tau)
    break-even           : tau above R, but for what the first token costs more

This is what a bench measures in a closed loop, where as many requests are in flight with a method
as without: throughput is then one over the time of a request. Of decoding alone the speed-up would
be tau / R (Leviathan et al., arXiv 2211.17192, section 3.3, with measured costs); prefill, which
speculation does not quicken, pulls that towards 1, the more so the shorter an answer.

Intervals: tau comes from recorded answers and R from an engine that drafts at random, so they are
independent. Half-widths of their intervals are added as roots of sums of squares on the log scale,
upward and downward each, and R / tau with these bounds goes through the formula. F, F' and T are
taken as known: they only weigh the first token against the rest. tau has a 95% interval; R has the
least and the greatest of few waves, which is as much as they can say.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, log


@dataclass(frozen=True)
class Estimate:
    """A positive number and its interval."""

    value: float
    low: float
    high: float

    @classmethod
    def exact(cls, value: float) -> "Estimate":
        """A number without an interval of its own."""
        return cls(value, value, value)


@dataclass(frozen=True)
class Cell:
    """What steps take at one K and number of requests in flight."""

    none_ms: float
    """A step without speculation."""
    none_ttft_ms: float
    """Time to the first token without speculation."""
    ttft_ms: float
    """The same with it."""
    ratio: Estimate
    """Time of a step with it over a step without."""

    @property
    def step_ms(self) -> float:
        """A step with speculation."""
        return self.ratio.value * self.none_ms


@dataclass(frozen=True)
class Best:
    """The fastest K."""

    k: int
    """0 is no speculation."""
    speedup: Estimate
    next_k: int
    """The second fastest."""
    margin: float
    """How much faster than that, as a ratio; 1 when they are equal."""


def tokens_per_step(rates: Sequence[float], coverage: float = 1.0) -> float:
    """Tokens that an engine step gives.

    Args:
        rates: Acceptance rate at each drafted position, unconditional: none is above the one
            before. As many as K.
        coverage: Share of steps that draft at all; 1 for a head.

    Raises:
        ValueError: when these are no such rates.
    """
    falling = [1.0, *rates, 0.0]
    if sorted(falling, reverse=True) != falling:
        raise ValueError(
            f"acceptance rates {list(rates)} are not unconditional: each is a share of all drafts "
            "(0 ... 1), so that none is above the one before"
        )
    if not 0 <= coverage <= 1:
        raise ValueError(f"coverage is {coverage}; it is a share of steps, 0 ... 1")
    return 1 + coverage * sum(rates)


def speedup(cell: Cell, tokens: Estimate, num_tokens: int) -> Estimate:
    """How much faster a request is with speculation.

    Args:
        cell: What steps take.
        tokens: Per step, at the same K.
        num_tokens: Of the answer, N.

    Raises:
        ValueError: when the answer has no second token.
    """
    ratio = cell.ratio
    slower = hypot(log(tokens.value / tokens.low), log(ratio.high / ratio.value))
    faster = hypot(log(tokens.high / tokens.value), log(ratio.value / ratio.low))
    per_token = ratio.value / tokens.value  # time of one token over that without speculation
    rest_ms = _rest_ms(cell, num_tokens)

    def gain(relative: float) -> float:
        return (cell.none_ttft_ms + rest_ms) / (cell.ttft_ms + rest_ms * relative)

    return Estimate(gain(per_token), gain(per_token * exp(slower)), gain(per_token * exp(-faster)))


def required_tokens(cell: Cell, target: float, num_tokens: int) -> float | None:
    """Tokens per step that a speed-up of `target` needs; 1 asks for break-even.

    Args:
        cell: What steps take.
        target: The speed-up.
        num_tokens: Of the answer, N.

    Returns:
        May be more than K + 1, which no drafts reach. None when no acceptance is enough, because
        the first token alone takes too long.
    """
    rest_ms = _rest_ms(cell, num_tokens)
    left_ms = (cell.none_ttft_ms + rest_ms) / target - cell.ttft_ms
    return rest_ms * cell.ratio.value / left_ms if left_ms > 0 else None


def with_coverage(cell: Cell, coverage: float, batch: int) -> Cell:
    """The same where only some steps draft, as those of n-gram and suffix decoding.

    A step in which no request drafts costs what it costs without speculation. One in which some do
    is taken to cost what it costs when all do, for attention and CUDA graphs are chosen for the
    whole batch, so that with requests that find drafts independently

        R' = 1 + (1 - (1 - coverage) ** batch) * (R - 1)

    If it costs in proportion to the drafted tokens instead, the least that it can, R' is
    1 + coverage * (R - 1): the lower bound of the interval goes down to that.

    Args:
        cell: Measured with drafts in every step.
        coverage: Share of steps that draft, 0 ... 1; 1 changes nothing.
        batch: Requests in flight.
    """
    if coverage == 1:
        return cell
    ratio, some = cell.ratio, 1 - (1 - coverage) ** batch
    value, high = (1 + some * (step - 1) for step in (ratio.value, ratio.high))
    least = [1 + share * (ratio.low - 1) for share in (coverage, some)]
    return replace(cell, ratio=Estimate(value, min(*least, value), high))


def best_k(speedups: dict[int, Estimate]) -> Best:
    """The fastest K, no speculation (0) among them.

    Args:
        speedups: By K from 1 on, at one load.
    """
    options = {0: Estimate.exact(1.0)} | speedups
    first, second = sorted(options, key=lambda k: (-options[k].value, k))[:2]
    margin = options[first].value / options[second].value
    return Best(first, options[first], second, margin)


def lengths_to_try(k: int) -> list[float]:
    """Acceptance lengths of heads one could have, from poor to perfect (K + 1)."""
    steps = (1.4, 1.7, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0)
    return [*(length for length in steps if length < k + 1), k + 1.0]


def _rest_ms(cell: Cell, num_tokens: int) -> float:
    """Milliseconds for all tokens after the first, without speculation."""
    if num_tokens < 2:
        raise ValueError(f"an answer of {num_tokens} token has no step to speed up; give 2 or more")
    return (num_tokens - 1) * cell.none_ms

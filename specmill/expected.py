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
from itertools import pairwise
from math import exp, hypot, log

from specmill.between import NotMeasured


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
    empty: Estimate | None = None
    """Time of a step in which it finds no draft, over the same; None where that was not measured,
    as for a head, which always drafts."""

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
    if not all(first >= second for first, second in pairwise(falling)):  # nor is NaN any rate
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

    A step in which no request drafts costs R0, as measured, and one in which all do costs R. One in
    which some do verifies fewer tokens than the latter and is of another shape, as the former is:
    it is taken to cost the dearer of the two, for attention and CUDA graphs are chosen for the
    whole batch. With requests that find drafts independently

        R' = none * R0 + some * max(R, R0) + all * R
        none = (1 - coverage) ** batch,  all = coverage ** batch,  some = 1 - none - all

    If it costs in proportion to the drafted tokens instead, R' is R0 + coverage * (R - R0): the
    interval reaches to that.

    Args:
        cell: Measured with drafts in every step, and with drafts in none.
        coverage: Share of steps that draft, 0 ... 1; 1 changes nothing.
        batch: Requests in flight.

    Raises:
        NotMeasured: when steps without drafts were not.
    """
    if coverage == 1:
        return cell
    if cell.empty is None:
        raise NotMeasured(
            "steps in which nothing is drafted were not measured (K 0 of the kind `tokens`): "
            "`dvc repro curves` measures them"
        )
    none, every = (1 - coverage) ** batch, coverage**batch

    def steps(drafted: float, empty: float) -> float:
        some = (1 - none - every) * max(drafted, empty)
        return none * empty + some + every * drafted

    def shared(drafted: float, empty: float) -> float:
        return empty + coverage * (drafted - empty)

    value, low, high = (
        [way(getattr(cell.ratio, name), getattr(cell.empty, name)) for way in (steps, shared)]
        for name in ("value", "low", "high")
    )
    return replace(cell, ratio=Estimate(value[0], min(*low, value[0]), max(*high, value[0])))


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

"""Does an interval keep its word? Bootstrap intervals of simulated and of recorded noise."""

from collections.abc import Callable
from functools import cache
from math import exp, log

import numpy as np
import pytest

from specmill.intervals import FASTER, LEAST_PAIRS, SLOWER, UNDECIDED, Ratio, paired_ratio

RESAMPLES = 200
Noise = Callable[[np.random.Generator, int], np.ndarray]

IDLE = [
    -0.101, -0.088, -0.062, -0.033, -0.030, -0.028, -0.025, -0.024, -0.023, -0.015, -0.013, -0.012,
    -0.009, -0.006, 0.006, 0.007, 0.011, 0.014, 0.015, 0.021, 0.023, 0.027, 0.030, 0.062, 0.070,
    0.088, 0.096, 0.160,
]  # fmt: skip
"""Log ratios, less their median, of how fast two servers without speculation answered the same 28
requests, one in flight: SmolLM2-135M on two idle cores."""
BUSY = [
    -1.256, -0.887, -0.682, -0.681, -0.565, -0.420, -0.289, -0.212, -0.175, -0.151, -0.082, -0.046,
    -0.023, -0.007, 0.007, 0.028, 0.044, 0.065, 0.121, 0.132, 0.137, 0.219, 0.258, 0.272, 0.533,
    1.031, 1.170, 1.203,
]  # fmt: skip
"""The same side by side, while other processes computed (load 7 on two cores)."""


def normal(generator: np.random.Generator, n: int) -> np.ndarray:
    return 0.04 * generator.standard_normal(n)


def heavy_tailed(generator: np.random.Generator, n: int) -> np.ndarray:
    """Student's t with 3 degrees of freedom: one pair in 70 lies beyond four of its widths."""
    return 0.04 * generator.standard_t(3, n)


def disturbed(generator: np.random.Generator, n: int) -> np.ndarray:
    """One pair in ten was measured while something else ran on one side."""
    hit = generator.random(n) < 0.1
    return 0.01 * generator.standard_normal(n) + hit * generator.choice([-0.5, 0.5], n)


def recorded(sample: list[float]) -> Noise:
    """Pairs of a recorded sample, drawn anew; of equal servers either may have been the faster."""

    def draw(generator: np.random.Generator, n: int) -> np.ndarray:
        return generator.choice(sample, n) * generator.choice([-1, 1], n)

    return draw


NOISES: dict[str, Noise] = {
    "normal": normal,
    "heavy-tailed": heavy_tailed,
    "disturbed": disturbed,
    "recorded, idle": recorded(IDLE),
    "recorded, busy": recorded(BUSY),
}


PAIRS = [6, 7, 12, 28, 42]


def verdicts(noise: Noise, n: int, seed: tuple[int, ...], effect: float = 1.0) -> list[str]:
    generator = np.random.default_rng(seed)
    return [
        paired_ratio(list(effect * np.exp(noise(generator, n)))).verdict for _ in range(RESAMPLES)
    ]


@cache
def false_positives(name: str, pairs: int) -> float:
    """Share of resamples of equal servers in which one is faster."""
    found = verdicts(NOISES[name], pairs, seed=(list(NOISES).index(name), pairs))
    return 1 - found.count(UNDECIDED) / len(found)


# a set of 200 resamples has a standard error of 1.5%: five sets together tell 5 from 7%
@pytest.mark.parametrize("name", list(NOISES))
def test_whatever_the_noise_two_equal_servers_differ_in_at_most_7_percent_of_1000_resamples(
    name: str,
) -> None:
    assert np.mean([false_positives(name, pairs) for pairs in PAIRS]) <= 0.07


@pytest.mark.parametrize("pairs", PAIRS)
def test_of_few_or_many_pairs_two_equal_servers_differ_in_at_most_7_percent_of_1000_resamples(
    pairs: int,
) -> None:
    assert np.mean([false_positives(name, pairs) for name in NOISES]) <= 0.07


@pytest.mark.parametrize("pairs", [12, 28, 42])
@pytest.mark.parametrize(("effect", "verdict"), [(1.1, FASTER), (1 / 1.1, SLOWER)])
def test_ten_percent_are_found_in_at_least_80_percent_of_resamples_with_4_percent_noise(
    pairs: int, effect: float, verdict: str
) -> None:
    def noise(generator: np.random.Generator, n: int) -> np.ndarray:
        return 0.04 * generator.standard_t(5, n) / (5 / 3) ** 0.5  # its standard deviation is 4%

    assert verdicts(noise, pairs, (pairs,), effect).count(verdict) >= 0.8 * RESAMPLES


def test_without_expanded_quantiles_seven_pairs_differ_too_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def share() -> float:
        found = [verdict for seed in range(4) for verdict in verdicts(normal, 7, (seed,))]
        return 1 - found.count(UNDECIDED) / len(found)

    expanded = share()
    monkeypatch.setattr("specmill.intervals._outer_quantile", lambda n: 0.025)
    assert expanded < 0.05
    assert share() > 0.07


def test_the_median_of_ratios_is_reported_whatever_their_number() -> None:
    assert paired_ratio([1.25]) == Ratio(pytest.approx(1.25), None, None, 1)
    # between 1.0 and 4.0 on the scale of logarithms
    assert paired_ratio([1.0, 4.0]).median == pytest.approx(2.0)
    assert paired_ratio([0.5, 1.5, 9.0]).median == pytest.approx(1.5)


def test_fewer_pairs_than_six_have_no_interval_and_show_no_difference() -> None:
    found = paired_ratio([2.0] * (LEAST_PAIRS - 1))
    assert (found.low, found.high, found.num_pairs) == (None, None, 5)
    assert found.verdict == UNDECIDED
    assert paired_ratio([2.0] * LEAST_PAIRS).verdict == FASTER


def test_equal_ratios_have_an_interval_of_no_width() -> None:
    found = paired_ratio([0.8] * 12)
    assert (found.low, found.median, found.high) == pytest.approx((0.8, 0.8, 0.8))
    assert found.verdict == SLOWER


def test_the_interval_of_a_method_is_that_of_its_reference_turned_round() -> None:
    ratios = list(np.exp(heavy_tailed(np.random.default_rng(1), 21)) * 1.02)
    found, turned = paired_ratio(ratios), paired_ratio([1 / ratio for ratio in ratios])
    assert found.low
    assert found.high
    assert turned.low == pytest.approx(1 / found.high)
    assert turned.high == pytest.approx(1 / found.low)
    assert turned.median == pytest.approx(1 / found.median)


def test_the_same_pairs_have_the_same_interval_in_any_process() -> None:
    ratios = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6]
    assert paired_ratio(ratios) == paired_ratio(ratios)
    found = paired_ratio(ratios)
    assert found.low
    assert found.high
    assert 1.0 <= found.low < 1.3 < found.high <= 1.6


def test_a_drift_widens_the_interval_on_both_sides() -> None:
    ratios = [1.05, 1.06, 1.07, 1.08, 1.09, 1.10]
    plain, wide = paired_ratio(ratios), paired_ratio(ratios, drift=0.05)
    assert plain.low
    assert plain.high
    assert (wide.low, wide.high) == pytest.approx((plain.low / exp(0.05), plain.high * exp(0.05)))
    assert wide.median == plain.median
    assert plain.verdict == paired_ratio(ratios, drift=log(1.04)).verdict == FASTER
    assert paired_ratio(ratios, drift=log(1.06)).verdict == UNDECIDED


def test_where_nothing_is_known_of_the_drift_there_is_no_interval() -> None:
    found = paired_ratio([2.0] * 12, drift=None)
    assert (found.median, found.low, found.high, found.num_pairs) == (2.0, None, None, 12)
    assert found.verdict == UNDECIDED


@pytest.mark.parametrize("ratios", [[], [1.0, 0.0], [1.0, -2.0], [float("nan")], [float("inf")]])
@pytest.mark.filterwarnings("ignore:.*log:RuntimeWarning")
def test_what_is_no_ratio_is_refused(ratios: list[float]) -> None:
    with pytest.raises(ValueError, match="no interval of these ratios"):
        paired_ratio(ratios)

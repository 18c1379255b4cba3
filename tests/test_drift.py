"""Machines that change between servers that take turns: what the bracket makes of them.

A machine is simulated whose speed changes from one server to the next; every server answers each
cell of its turn with 4% noise. No method is any faster than the reference.
"""

from collections.abc import Iterator
from math import exp, log
from typing import Any

import numpy as np
import pytest

from specmill.intervals import FASTER, UNDECIDED, paired_ratio
from specmill.pairs import _CAUTION, START_SPREAD, Pair, drift, pair_up
from tests.benched import both, cell

RESAMPLES = 200
CELLS = 14


def wandering(generator: np.random.Generator, turns: int, step: float) -> np.ndarray:
    """Log speed of each turn: a random walk."""
    return step * np.cumsum(generator.standard_normal(turns))


def steady(generator: np.random.Generator, turns: int, step: float) -> np.ndarray:
    """Log speed of each turn: a slope."""
    return step * generator.choice([-1, 1]) * np.arange(turns)


def measured(
    generator: np.random.Generator, speeds: np.ndarray, rounds: int, servers: int
) -> list[Pair]:
    """Pairs of the reference and the last of the other servers, in mirrored rounds."""
    records = []
    for number in range(rounds):
        order = list(range(servers))[:: -1 if number % 2 else 1]
        for index, role in ((0, "reference"), (servers - 1, "method")):
            speed = speeds[number * servers + order.index(index)]
            for place, noise in enumerate(0.04 * generator.standard_t(5, CELLS) / (5 / 3) ** 0.5):
                wall_s = exp(-speed - noise)
                where = {"round": number, "number": place, "side_by_side": False}
                records.append(cell(role, wall_s, **where))
    return pair_up(records)


def differ(machine: Any, step: float, rounds: int, servers: int) -> tuple[float, float]:
    """Shares of resamples in which a server is told from its equal, as it is and not widened."""
    generator = np.random.default_rng(17)
    widened = plain = 0
    for _ in range(RESAMPLES):
        speeds = machine(generator, rounds * servers, step)
        pairs = measured(generator, speeds, rounds, servers)
        ratios = [pair.ratio for pair in pairs]
        widened += paired_ratio(ratios, drift(pairs)).verdict != UNDECIDED
        plain += paired_ratio(ratios).verdict != UNDECIDED
    return widened / RESAMPLES, plain / RESAMPLES


WANDERING = [(0.03, 2, 2), (0.1, 2, 2), (0.03, 3, 2), (0.03, 2, 4)]
"""Step, rounds, servers."""


@pytest.mark.parametrize(("step", "rounds", "servers"), WANDERING)
def test_on_a_machine_that_wanders_equal_servers_differ_in_at_most_7_percent(
    step: float, rounds: int, servers: int
) -> None:
    widened, plain = differ(wandering, step, rounds, servers)
    assert widened <= 0.07
    assert plain > 0.15


# two rounds cancel a slope by themselves, three do not
@pytest.mark.parametrize(("step", "rounds", "servers"), [(0.03, 2, 2), (0.03, 3, 2), (0.03, 3, 4)])
def test_on_a_machine_that_gets_slower_steadily_equal_servers_differ_in_at_most_7_percent(
    step: float, rounds: int, servers: int
) -> None:
    widened, plain = differ(steady, step, rounds, servers)
    assert widened <= 0.07
    assert (plain > 0.07) == (rounds == 3)


def test_half_of_what_the_references_moved_would_be_too_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specmill.pairs._CAUTION", 0.5)
    widened, _ = differ(wandering, 0.1, 2, 2)
    assert widened > 0.15


def test_on_a_quiet_machine_ten_percent_are_found_in_80_percent_of_resamples_of_three_rounds() -> (
    None
):
    generator = np.random.default_rng(17)
    faster = log(1.1)
    found = 0
    for _ in range(RESAMPLES):
        pairs = measured(generator, np.array([0.0, faster, faster, 0.0, 0.0, faster]), 3, 2)
        found += paired_ratio([pair.ratio for pair in pairs], drift(pairs)).verdict == FASTER
    assert found / RESAMPLES >= 0.8


def test_where_drift_is_all_there_is_equal_servers_differ_in_at_most_7_percent() -> None:
    """Two rounds of a random walk without noise, by formula: many draws, worst with many servers.

    The median's interval then reaches from one round's ratio to the other's.
    """
    for servers, half, four in ((2, 0.23, 0.038), (6, 0.28, 0.055)):
        steps = np.random.default_rng(17).standard_normal((100_000, 2 * servers))
        speed = np.cumsum(steps, axis=1)
        ratios = np.stack(
            [
                speed[:, servers - 1] - speed[:, 0],  # there: the reference first, the method last
                speed[:, servers] - speed[:, -1],  # and back
            ]
        )
        same_side = ratios[0] * ratios[1] > 0
        moved = abs(speed[:, -1] - speed[:, 0])
        for caution, expected in ((0.5, half), (_CAUTION, four)):
            found = same_side & (abs(ratios).min(axis=0) > caution * moved)
            assert found.mean() == pytest.approx(expected, abs=0.005)


def referenced(*seconds: list[float]) -> Iterator[dict[str, Any]]:
    """Pairs whose references took so many seconds, by round."""
    for number, walls in enumerate(seconds):
        for place, wall_s in enumerate(walls):
            yield from both(wall_s, 1.0, round=number, number=place, side_by_side=False)


def test_drift_is_four_times_what_the_medians_of_the_references_moved_a_round() -> None:
    # medians of 4 tokens in 1, 1.1 and 1.05 s; what one cell of a round does is not drift
    pairs = pair_up(list(referenced([0.5, 1.0, 1.3], [1.1, 1.1, 9.0], [1.0, 1.05, 1.1])))
    assert drift(pairs) == pytest.approx(4 * log(1.1) / 2)
    assert drift(pair_up(list(referenced([1.0], [1.1])))) == pytest.approx(4 * log(1.1))


def test_nothing_is_known_of_the_drift_after_one_round() -> None:
    assert drift(pair_up(list(referenced([1.0, 2.0])))) is None


def test_servers_side_by_side_share_the_machine_but_not_their_start() -> None:
    records = [one | {"side_by_side": True} for one in referenced([1.0], [2.0])]
    assert drift(pair_up(records)) == pytest.approx(log(1 + START_SPREAD))

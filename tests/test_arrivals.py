import asyncio
import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest

from specmill.arrivals import run_open_loop


class Clock:
    """A clock that jumps to what is next instead of waiting."""

    def __init__(self) -> None:
        self.now = 0.0
        self._sleepers: dict[float, asyncio.Event] = {}

    async def sleep(self, seconds: float) -> None:
        wake = self._sleepers.setdefault(self.now + seconds, asyncio.Event())
        await wake.wait()

    async def run(self) -> None:
        while True:
            for _ in range(10):  # let everybody get as far as they can
                await asyncio.sleep(0)
            if self._sleepers:
                self.now = min(self._sleepers)
                self._sleepers.pop(self.now).set()


def arrive(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    rate: float,
    seed: tuple[int, ...] = (17,),
    work_s: Callable[[int], float] = lambda index: 0.0,
) -> tuple[list[float], list[int]]:
    """When each of `count` items arrived, and the results; work takes `work_s` of the item."""
    clock, arrived = Clock(), dict[int, float]()
    real = asyncio.sleep

    async def work(index: int) -> int:
        arrived[index] = clock.now
        await clock.sleep(work_s(index))
        return -index

    async def main() -> list[int]:
        running = asyncio.create_task(clock.run())
        try:
            return await run_open_loop(range(count), work, rate, seed)
        finally:
            running.cancel()

    async def sleep(seconds: float) -> None:
        await (clock.sleep(seconds) if seconds else real(0))

    monkeypatch.setattr("specmill.arrivals.asyncio.sleep", sleep)
    try:
        results = asyncio.run(main())
    finally:
        monkeypatch.undo()
    return [arrived[index] for index in range(count)], results


def gaps(times: list[float]) -> list[float]:
    return [later - sooner for sooner, later in itertools.pairwise([0.0, *times])]


def test_gaps_are_exponential_with_the_mean_of_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    times, _ = arrive(monkeypatch, 800, rate=4.0)
    found = np.array(gaps(times))
    assert found.min() > 0
    # of an exponential distribution mean and standard deviation are 1 / rate, and 1 / e of the
    # gaps are longer; 800 draws leave a standard error of 3.5% on the mean
    assert found.mean() == pytest.approx(0.25, rel=0.1)
    assert found.std() == pytest.approx(0.25, rel=0.15)
    assert (found > 0.25).mean() == pytest.approx(np.exp(-1), abs=0.05)


def test_the_same_seed_gives_the_same_arrivals_and_another_gives_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, _ = arrive(monkeypatch, 20, 2.0, seed=(0, 3))
    again, _ = arrive(monkeypatch, 20, 2.0, seed=(0, 3))
    next_round, _ = arrive(monkeypatch, 20, 2.0, seed=(1, 3))
    assert first == again
    assert first != next_round
    twice_as_fast, _ = arrive(monkeypatch, 20, 4.0, seed=(0, 3))
    assert twice_as_fast == pytest.approx([at / 2 for at in first])


def test_requests_arrive_however_long_answers_take(monkeypatch: pytest.MonkeyPatch) -> None:
    quick, _ = arrive(monkeypatch, 20, 10.0)
    slow, _ = arrive(monkeypatch, 20, 10.0, work_s=lambda index: 1000.0)
    assert slow == quick


def test_results_come_in_item_order_whoever_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    _, results = arrive(monkeypatch, 20, 10.0, work_s=lambda index: random.Random(index).random())
    assert results == [-index for index in range(20)]


def test_the_first_failure_ends_the_rest_and_is_raised() -> None:
    begun: list[int] = []

    async def work(index: int) -> int:
        begun.append(index)
        if len(begun) == 2:
            raise RuntimeError("the server is gone")
        await asyncio.sleep(600)
        return index

    with pytest.raises(RuntimeError, match="the server is gone"):
        asyncio.run(run_open_loop(range(3), work, rate=1e6, seed=(1,)))
    assert begun[:2] == [0, 1]

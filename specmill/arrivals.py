"""Requests that arrive whatever is in flight: an open loop."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import numpy as np

Item = TypeVar("Item")
Result = TypeVar("Result")


async def run_open_loop(
    items: Sequence[Item],
    work: Callable[[Item], Awaitable[Result]],
    rate: float,
    seed: Sequence[int],
) -> list[Result]:
    """Apply `work` to every item at its arrival; results in item order.

    Arrivals are a Poisson process: the gaps between them are exponential with mean 1 / rate
    seconds. The same seed gives the same arrivals, so that two servers meet the same bursts. The
    first failure cancels the rest and is raised.
    """
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(items))
    results: dict[int, Result] = {}

    async def arrive(index: int, at_s: float) -> None:
        await asyncio.sleep(at_s)
        results[index] = await work(items[index])

    try:
        async with asyncio.TaskGroup() as group:
            for index, at_s in enumerate(np.cumsum(gaps)):
                group.create_task(arrive(index, float(at_s)))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [results[index] for index in range(len(items))]

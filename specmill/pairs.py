"""Cells measured on a reference and on a method: pure functions of the records.

What is compared is how fast tokens came:

    closed loop    output tokens of the cell / its wall seconds
    open loop      output tokens of the cell / seconds of its requests from sending to the last
                   token, summed, since arrivals decide how many tokens a second there are

A cell gives one ratio: its requests share the machine's mood, and an interval that took them for
independent pairs found differences between equal servers in one case of six.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from statistics import median
from typing import Any

Record = dict[str, Any]
"""One cell as specmill/recording.py describes it."""


@dataclass(frozen=True)
class Pair:
    """One cell on both servers."""

    reference: Record
    method: Record

    @property
    def ratio(self) -> float:
        """How many times as fast the method was."""
        return _speed(self.method) / _speed(self.reference)

    @property
    def is_identical(self) -> bool:
        """Whether both gave the same answers."""
        return all(ours["output_ids"] == theirs["output_ids"] for theirs, ours in self.outputs())

    def outputs(self) -> Iterator[tuple[Record, Record]]:
        """The same request to the reference and to the method."""
        yield from zip(self.reference["requests"], self.method["requests"], strict=True)


def pair_up(cells: list[Record]) -> list[Pair]:
    """The method's cells, each with the reference's of the same phase and round.

    Raises:
        ValueError: when a method's cell has no reference.
    """
    beside = {_place(cell): cell for cell in cells if cell["role"] == "reference"}
    pairs = []
    for cell in cells:
        if cell["role"] == "method":
            if _place(cell) not in beside:
                raise ValueError(f"no reference was measured for cell {_place(cell)}")
            pairs.append(Pair(beside[_place(cell)], cell))
    return pairs


def distinct_ratios(pairs: list[Pair]) -> list[float]:
    """One ratio for each set of prompts: the median where one was sent again.

    What a prompt is like is no noise that repeating it would average out.
    """
    by_prompts: dict[tuple[str, ...], list[float]] = {}
    for pair in pairs:
        keys = tuple(sorted(request["sample_key"] for request in pair.method["requests"]))
        by_prompts.setdefault(keys, []).append(pair.ratio)
    return [median(ratios) for ratios in by_prompts.values()]


def _place(cell: Record) -> tuple[Any, ...]:
    names = ("phase", "round", "concurrency", "rate", "context", "category", "number")
    return tuple(cell[name] for name in names)


def throughput(cells: list[Record]) -> float:
    """Output tokens per second over all cells together."""
    tokens = sum(len(request["output_ids"]) for cell in cells for request in cell["requests"])
    return tokens / sum(float(cell["wall_s"]) for cell in cells)


def _speed(cell: Record) -> float:
    if cell["rate"] is None:
        return throughput([cell])
    requests = cell["requests"]
    seconds = sum(float(request["chunk_s"][-1] - request["sent_s"]) for request in requests)
    return sum(len(request["output_ids"]) for request in requests) / seconds


def drift(pairs: list[Pair]) -> float | None:
    """How far the machine may have moved between a method and its reference, as |log ratio|.

    Four times what the references moved from round to round: their range over rounds, divided by
    rounds - 1. A steady drift cancels in an even number of mirrored rounds, one that wanders does
    not: every round is one draw of it, and two draws lie on the same side half of the time. Where
    it outweighs all other noise, four times leave 5.5% of intervals of equal servers on one side
    of 1 (two rounds, random walk, up to six servers; three times leave 7.3%, half 28%;
    tests/test_drift.py).

    Returns:
        Side by side, where both servers answer within seconds, what starting one again can change
        (`START_SPREAD`); None of a single round in turns, which says nothing of it.
    """
    if pairs[0].reference["side_by_side"]:
        return log(1 + START_SPREAD)
    by_round: dict[int, list[float]] = {}
    for pair in pairs:
        by_round.setdefault(pair.reference["round"], []).append(log(_speed(pair.reference)))
    if len(by_round) < 2:
        return None
    speeds = [median(logs) for logs in by_round.values()]
    return _CAUTION * (max(speeds) - min(speeds)) / (len(speeds) - 1)


_CAUTION = 4

START_SPREAD = 0.04
"""How much faster one start of an engine may be than another start of the same: where its memory
lies and which core does what stay as they are from start to end, so that all of its pairs have it
in common and no number of them averages it out. `none` beside itself differed by 2.8% at one
request and by 0.9% at eight (2 cores); two standard deviations of the difference of two starts, if
these two are typical. The row of `none` shows a machine on which it is more."""

"""Cells measured on a reference and on a method, side by side: pure functions of the records.

What is compared is how fast tokens came:

    closed loop    output tokens of the cell / its wall seconds
    open loop      output tokens of a request / its seconds from sending to the last token, since
                   arrivals decide how many tokens a second there are; one pair per request
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
    def ratios(self) -> list[float]:
        """How many times as fast the method was."""
        if self.method["rate"] is None:
            return [throughput([self.method]) / throughput([self.reference])]
        return [_speed(ours) / _speed(theirs) for theirs, ours in self.outputs()]

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


def _place(cell: Record) -> tuple[Any, ...]:
    names = ("phase", "round", "concurrency", "rate", "context", "category", "number")
    return tuple(cell[name] for name in names)


def throughput(cells: list[Record]) -> float:
    """Output tokens per second over all cells together."""
    tokens = sum(len(request["output_ids"]) for cell in cells for request in cell["requests"])
    return tokens / sum(float(cell["wall_s"]) for cell in cells)


def _speed(request: Record) -> float:
    return len(request["output_ids"]) / (request["chunk_s"][-1] - request["sent_s"])


def drift(pairs: list[Pair]) -> float:
    """How far the machine's speed moved while servers took turns, as |log ratio|; 0 side by side.

    Half of what lies between the references of the first and the last round: a method measured
    between them is compared with both, so that a steady drift cancels and what is left is of that
    order. With one round nothing is known of it.
    """
    if pairs[0].reference["side_by_side"]:
        return 0.0
    by_round: dict[int, list[Record]] = {}
    for pair in pairs:
        by_round.setdefault(pair.reference["round"], []).append(pair.reference)
    if len(by_round) < 2:
        return float("inf")
    speeds = {
        number: median(log(throughput([cell])) for cell in cells)
        for number, cells in by_round.items()
    }
    return abs(speeds[max(speeds)] - speeds[min(speeds)]) / 2

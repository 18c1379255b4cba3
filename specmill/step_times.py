"""Step times between the points that the stage `curves` measured.

T is taken as linear between measured points: over K at each number of requests in flight, then over
that number. Beyond them there is no figure.

T of a method is its ratio times T of `none` at the same point, since the ratio was measured wave
beside wave and the two times were not.
"""

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from specmill.between import NotMeasured, neighbours
from specmill.expected import Cell, Estimate

NONE = "none"

Point = dict[str, Any]
"""One of `points` in reports/curves.json."""


@dataclass(frozen=True)
class StepTimes:
    """What one kind of drafting costs."""

    kind: str
    """What was measured, e.g. `eagle3`."""
    points: dict[int, dict[int, Point]]
    """By requests in flight, then K."""
    none: dict[int, Point]
    """Steps without speculation, by requests in flight."""
    empty: dict[int, Point]
    """Steps of the speculating engine in which nothing is drafted, by requests in flight; none for
    a head, which always drafts."""

    def cell(self, k: int, batch: int) -> Cell:
        """What steps take at K and `batch` requests in flight.

        Raises:
            NotMeasured: when that lies outside what was measured.
        """
        none_ms = ttft_ms = none_ttft_ms = 0.0
        drafting, empty = np.zeros(3), np.zeros(3)  # ms: median, least and greatest
        for at, share in neighbours(sorted(self.points), batch, "requests in flight").items():
            none, drafted = self.none[at], self.points[at]
            none_ms += share * none["step_ms"]
            none_ttft_ms += share * none["ttft_ms"]
            for drafts, part in neighbours(sorted(drafted), k, "K").items():
                point, weight = drafted[drafts], share * part
                ttft_ms += weight * point["ttft_ms"]
                drafting += weight * _ratios(point) * none["step_ms"]
            if self.empty:
                empty += share * _ratios(self.empty[at]) * none["step_ms"]
        ratio = Estimate(*(drafting / none_ms).tolist())
        without = Estimate(*(empty / none_ms).tolist()) if self.empty else None
        return Cell(none_ms, none_ttft_ms, ttft_ms, ratio, without)


def _ratios(point: Point) -> np.ndarray:
    """Median, least and greatest ratio to a step of `none`, [3]."""
    return np.array([point["ratio"], point["ratio_low"], point["ratio_high"]])


def check_points(curves: dict[str, Any], file: Path) -> None:
    """Refuse a file that somebody names and the stage `curves` has not written.

    Raises:
        ValueError: naming the file and what is missing or no number.
    """
    points = curves.get("points")
    if not isinstance(points, list) or not all(isinstance(point, dict) for point in points):
        raise ValueError(f"{file} has no `points`; `dvc repro curves` writes reports/curves.json")
    if not {point.get("kind") for point in points} - {NONE}:
        raise ValueError(f"{file} has step times of no kind of drafting; run `dvc repro curves`")
    for number, point in enumerate(points):
        needed = ["batch", "k", "step_ms", "ttft_ms"]
        if point.get("kind") != NONE:
            needed += ["ratio", "ratio_low", "ratio_high"]
        wrong = [name for name in needed if not _is_number(point.get(name), name == "k")]
        if wrong:
            raise ValueError(f"{file}: points[{number}] has no number as {', '.join(wrong)}")
    if not _is_number(curves.get("prompt_tokens"), may_be_zero=True):
        raise ValueError(f"{file} has no number as prompt_tokens")


def _is_number(value: Any, may_be_zero: bool) -> bool:
    is_number = isinstance(value, int | float) and 0 <= value < inf
    return is_number and (may_be_zero or value > 0)


def step_times(curves: dict[str, Any], kind: str) -> StepTimes:
    """The points of one kind.

    Args:
        curves: Content of reports/curves.json.
        kind: One of its kinds, not `none`.

    Raises:
        NotMeasured: when it has no point, or `none` has none beside one of its points.
    """
    none = {point["batch"]: point for point in curves["points"] if point["kind"] == NONE}
    points: dict[int, dict[int, Point]] = {}
    empty: dict[int, Point] = {}
    for point in curves["points"]:
        if point["kind"] == kind and point["k"] == 0:
            empty[point["batch"]] = point
        elif point["kind"] == kind:
            points.setdefault(point["batch"], {})[point["k"]] = point
    if kind == NONE or not points:
        kinds = sorted({point["kind"] for point in curves["points"]} - {NONE})
        raise NotMeasured(f"no step times of {kind!r}; there are {', '.join(kinds) or 'none'}")
    if alone := sorted(set(points) - set(none)):
        raise NotMeasured(f"{kind} was measured at {alone} requests in flight and `none` was not")
    if empty and (lost := sorted(set(points) - set(empty))):
        raise NotMeasured(f"{kind} was not measured at {lost} requests in flight without drafts")
    return StepTimes(kind, points, none, empty)

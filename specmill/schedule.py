"""K by the number of requests in flight, from the predicted surface; and how vLLM is told of it.

At a load that was predicted K is the fastest over all prompt types, and 0 (no draft) where none is
predicted to be faster than no speculation; of equals it is the smallest. Between two such loads the
speed-up of each K is taken as linear in the number of requests, as the step times behind it are.
Below the lowest load K is that of the lowest; above the highest nothing is known and nothing is
drafted.

    predicted      1 in flight: K=1 1.05, K=3 1.20        5 in flight: K=1 1.01, K=3 0.80
    K=1 between    1.05  1.04  1.03  1.02  1.01
    K=3 between    1.20  1.10  1.00  0.90  0.80
    schedule       [1, 2, 3], [3, 5, 1]                   inclusive ranges of requests, then K

`num_speculative_tokens_per_batch_size` depends on vLLM's version (v1/spec_decode/dynamic/utils.py,
as it is in 0.32): the batch is the number of requests in a step, and the last range holds for all
larger ones too. `medusa` and `suffix` assert one K.
"""

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, get_args

from specmill.params import Method
from specmill.params_scheduled import Scheduled
from specmill.rows import Row
from specmill.samples import ALL
from specmill.section import DoesNotFit

Ranges = list[list[int]]
"""Lowest and highest number of requests in flight (both included) and K, without gaps from 1 on."""

SCHEDULABLE = get_args(Scheduled.model_fields["method"].annotation)
"""Methods that draft another K when they are told so."""


def schedules(predicted: dict[str, Any], methods: Mapping[str, Method]) -> dict[str, Any]:
    """The schedule of every row that speculates.

    Args:
        predicted: Content of reports/predicted.json.
        methods: Entries of params.yaml: `methods`.

    Returns:
        `{"eagle3": {"ranges": [[1, 3, 2], [4, 8, 0]], "reason": None}, ...}`; `ranges` is None
        where there is none, and `reason` then says why.
    """
    found: dict[str, Any] = {}
    for name, chosen in methods.items():
        rows = [
            row for row in predicted["rows"] if row["method"] == name and row["category"] == ALL
        ]
        if chosen.method == "none":
            continue
        reason = None
        if chosen.method not in SCHEDULABLE:
            reason = f"vLLM's {chosen.method} drafts one K whatever is in flight"
        elif not rows:
            missing = predicted["without"].get(name, "no acceptance or no step times")
            reason = f"nothing is predicted for it: {missing}"
        found[name] = {"ranges": None if reason else k_schedule(rows), "reason": reason}
    return found


def k_schedule(rows: Iterable[Row]) -> Ranges:
    """K from one request in flight to the most that was predicted.

    Args:
        rows: Predicted speed-ups of one method over all prompt types, by `concurrency` and `k`.

    Raises:
        ValueError: when there is no row.
    """
    surface: dict[int, dict[int, float]] = {}
    for row in rows:
        surface.setdefault(row["concurrency"], {})[row["k"]] = row["speedup"]
    if not surface:
        raise ValueError("a schedule needs a predicted speed-up; there is none")
    batches = range(1, max(surface) + 1)
    grouped = groupby(batches, lambda batch: _fastest(_speedups(surface, batch)))
    spans = [(k, list(members)) for k, members in grouped]
    return [[members[0], members[-1], k] for k, members in spans]


def _speedups(surface: dict[int, dict[int, float]], batch: int) -> dict[int, float]:
    """Speed-up by K with `batch` requests in flight, of the K that both neighbours have."""
    loads = sorted(surface)
    above = next(load for load in loads if load >= batch)
    below = max((load for load in loads if load <= batch), default=above)
    share = (batch - below) / (above - below) if above != below else 0.0
    return {
        k: (1 - share) * surface[below][k] + share * surface[above][k]
        for k in sorted(surface[below].keys() & surface[above].keys())
    }


def _fastest(speedups: dict[int, float]) -> int:
    """The K of the largest speed-up above 1, of equals the smallest; 0 without one."""
    options = {0: 1.0} | speedups
    return min(options, key=lambda k: (-options[k], k))


def drafting_ranges(schedules: dict[str, Any], name: str) -> Ranges:
    """The schedule of a row that drafts somewhere.

    Args:
        schedules: Content of reports/schedule.json.
        name: The row.

    Raises:
        DoesNotFit: when it has none, or one that never drafts; says why.
    """
    if name not in schedules:
        raise DoesNotFit(f"reports/schedule.json has no {name}: run `dvc repro schedule`")
    ranges: Ranges | None = schedules[name]["ranges"]
    if ranges is None:
        raise DoesNotFit(f"there is no schedule of K: {schedules[name]['reason']}")
    if not most_drafted(ranges):
        raise DoesNotFit(
            f"no K is predicted to be faster than no speculation at 1 to {ranges[-1][1]} requests "
            "in flight"
        )
    return ranges


def most_drafted(ranges: Ranges) -> int:
    """The largest K of a schedule, which vLLM is told as num_speculative_tokens."""
    return max(k for _, _, k in ranges)


def k_at(ranges: Ranges, requests: int) -> int:
    """K with so many requests in flight; 0 above the last range."""
    return next((k for low, high, k in ranges if low <= requests <= high), 0)


def scheduled_config(config: dict[str, Any], ranges: Ranges) -> dict[str, Any]:
    """A `--speculative-config` with K by the number of requests.

    Args:
        config: What vLLM is told for the largest K of the schedule.
        ranges: The schedule.
    """
    last = ranges[-1][1]
    beyond = [[last + 1, last + 1, 0]] if ranges[-1][2] else []
    return config | {"num_speculative_tokens_per_batch_size": [*ranges, *beyond]}


def describe(ranges: Ranges) -> str:
    """In words: `K=3 at 1 to 4 requests in flight, K=1 at 5 to 8, no draft from 9`."""
    drafting = [*ranges] if not ranges[-1][2] else [*ranges, [ranges[-1][1] + 1, 0, 0]]
    *inner, (first_without, _, _) = drafting
    parts = [
        f"{f'K={k}' if k else 'no draft'} at {low if low == high else f'{low} to {high}'}"
        for low, high, k in inner
    ]
    if not parts:
        return "no draft, whatever is in flight"
    unit = " request" if inner[0][1] == 1 else " requests"
    return ", ".join([f"{parts[0]}{unit} in flight", *parts[1:], f"no draft from {first_without}"])

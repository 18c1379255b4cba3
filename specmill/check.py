"""What was predicted beside what was measured: acceptance by replay, speed by curves.

Acceptance is compared on exactly the sequences that a bench served, one request in flight and
without context: prompt lookup is replayed on what was served; of a head, whose hidden states are
those of the recorded answer, a sequence counts up to where the served answer leaves it. Whole steps
are counted, that is, chunks of the stream after the first, which the prefill gave:

    served tokens    a0 | a1 a2 a3 | a4 | a5 b6 b7 |       a0 ... a9 is the recorded answer
    chunks            -      1       2      left out       4 tokens in 2 steps
    replayed         a0 ... a4, with the same K            4 tokens in as many steps as it takes
"""

from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any

import numpy as np

from specmill.lossless import first_difference
from specmill.samples import ALL
from specmill.walk import Runs, walk

Request = dict[str, Any]
"""A row of data/bench/NAME/requests.parquet (specmill.records)."""


def whole_steps(chunk_tokens: list[int], num_agreed: int) -> tuple[int, int] | None:
    """Steps of a served answer that lie within its first `num_agreed` tokens.

    Returns:
        The steps, and the tokens up to the end of the last of them, the first token included; None
        when there is no step, or when the first chunk holds those of the prefill and more.
    """
    ends = np.cumsum(chunk_tokens)
    if chunk_tokens[0] != 1:
        return None
    num_steps = int((ends[1:] <= num_agreed).sum())
    return (num_steps, int(ends[num_steps])) if num_steps else None


def compare_acceptance(
    requests: Iterable[Request], known: Callable[[Request], tuple[list[int], Runs]]
) -> list[dict[str, Any]]:
    """Tokens per step, served and replayed, by K.

    Args:
        requests: Of one method; those of one request in flight and no context count.
        known: Gives the answer that is replayed in a request's place, and its runs.

    Returns:
        By K: `num_sequences`, `num_left_out` (no whole step), `num_tokens`, `served_steps`,
        `replayed_steps`, `served`, `replayed` (tokens per step) and `error`, replayed / served - 1.
        A K with no sequence is left out.
    """
    found: dict[int, dict[str, int]] = {}
    for request in requests:
        if request["role"] != "method" or request["concurrency"] != 1 or request["context"]:
            continue
        answer, runs = known(request)
        if request["k"] > runs.most_k:
            continue
        counts = found.setdefault(request["k"], dict.fromkeys(_COUNTS, 0))
        differs = first_difference(request["output_ids"], answer)
        agreed = len(request["output_ids"]) if differs is None else differs
        steps = whole_steps(request["chunk_tokens"], agreed)
        if steps is None:
            counts["num_left_out"] += 1
            continue
        replayed = walk(runs, request["k"], steps[1])
        counts["num_sequences"] += 1
        counts["num_tokens"] += replayed.num_tokens
        counts["served_steps"] += steps[0]
        counts["replayed_steps"] += replayed.num_steps
    return [
        {
            "k": k,
            **counts,
            "served": round(counts["num_tokens"] / counts["served_steps"], 4),
            "replayed": round(counts["num_tokens"] / counts["replayed_steps"], 4),
            "error": round(counts["served_steps"] / counts["replayed_steps"] - 1, 4),
        }
        for k, counts in sorted(found.items())
        if counts["num_sequences"]
    ]


_COUNTS = ("num_sequences", "num_left_out", "num_tokens", "served_steps", "replayed_steps")


def compare_speed(
    predicted: Iterable[dict[str, Any]],
    measured: Mapping[str, dict[str, Any]],
    points: Iterable[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Predicted and measured speed-ups of the cells that have both.

    Args:
        predicted: `rows` of reports/predicted.json.
        measured: reports/bench/NAME.json by name.
        points: `points` of reports/curves.json.

    Returns:
        A row per cell: `method`, `k`, `concurrency`, `category`, both figures with their bounds,
        `error` (predicted / measured - 1), and `is_new`: the curves have no point of this K and
        batch, so that interpolation is tested too.
    """
    grid = {(point["k"], point["batch"]) for point in points}
    cells = {
        (name, row["num_speculative_tokens"], row["concurrency"], row["category"]): row
        for name, result in measured.items()
        for row in result["rows"]
        if row["rate"] is None and not row["context"] and row.get("speedup") is not None
    }
    rows = []
    for row in predicted:
        place = (row["method"], row["k"], row["concurrency"], row["category"])
        if place not in cells:
            continue
        cell = cells[place]
        rows.append(
            {
                **{name: row[name] for name in ("method", "k", "concurrency", "category")},
                "predicted": row["speedup"],
                "predicted_low": row["speedup_low"],
                "predicted_high": row["speedup_high"],
                "measured": cell["speedup"],
                "measured_low": cell["speedup_low"],
                "measured_high": cell["speedup_high"],
                "error": round(row["speedup"] / cell["speedup"] - 1, 4),
                "is_new": (row["k"], row["concurrency"]) not in grid,
            }
        )
    return rows


def errors_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median absolute errors of predicted speed-ups; a group without a cell is left out.

    Returns:
        `median_absolute_error` over all prompt types together of every cell;
        `median_absolute_error_new` the same of cells that are new to the curves;
        `median_absolute_error_by_category` of the single prompt types; and how many cells each is
        over, `num_cells`, `num_cells_new` and `num_cells_by_category`.
    """
    together = [row for row in rows if row["category"] == ALL]
    groups = {
        "": together,
        "_new": [row for row in together if row["is_new"]],
        "_by_category": [row for row in rows if row["category"] != ALL],
    }
    found: dict[str, Any] = {}
    for name, group in groups.items():
        found[f"num_cells{name}"] = len(group)
        if group:
            error = median(abs(row["error"]) for row in group)
            found[f"median_absolute_error{name}"] = round(error, 4)
    return found

"""What a run can decide: how much was measured, and how far `none` lies from itself.

`none` is served twice and compared with itself like any other row. Its interval is what the bench
tells apart on this machine: a change that lies within it may be the machine's.
"""

from typing import Any

from specmill.rows import Results, Row, load_label, load_order, load_sentence
from specmill.samples import ALL
from specmill.tables import change

WIDE = 0.2
"""Width of that interval, as a ratio, from which rows cannot be ranked: from -10% to +10%. The
default run has 0.12 (docs/log.md), and most changes worth deploying are smaller than 0.2."""


def limits(results: Results, curves: dict[str, Any] | None) -> list[str]:
    """Sentences: whether engines ran as they would be deployed, and by load what is told apart.

    Args:
        results: reports/bench/NAME.json by name.
        curves: reports/curves.json, or None: whether predictions have whole intervals.
    """
    found = []
    if uncompiled := _uncompiled(results):
        found.append(
            f"**Test configuration**: engines of {', '.join(uncompiled)} ran uncompiled "
            "(`bench.enforce_eager`), as no deployment does."
        )
    found += [_of_load(rows) for rows in _by_load(results).values()]
    if "none" not in results:
        found.append("`none` was not measured: how far equal servers differ here is not known.")
    if curves and any(point["num_waves"] == 1 for point in curves["points"] if point["k"]):
        found.append(
            "Step times were measured once each (`curves.repeats`): intervals of predictions are "
            "those of acceptance alone, too narrow."
        )
    return found


def is_test(results: Results) -> bool:
    """Whether some engine ran uncompiled."""
    return bool(_uncompiled(results))


def _uncompiled(results: Results) -> list[str]:
    """Rows with such an engine."""
    return [
        name
        for name, result in results.items()
        if any(facts["enforce_eager"] == "True" for facts in result["engine"].values())
    ]


def blur(results: Results) -> float | None:
    """How far `none` may lie from itself, as |ratio - 1|, at the load where that is most.

    None where rows can be ranked: its interval is narrower than WIDE at every load. Without an
    interval it may be anything: infinite.
    """
    rows = [row for rows in _by_load(results).values() for name, row in rows if name == "none"]
    wide = [row for row in rows if _width(row) > WIDE]
    return max(map(_farthest, wide), default=None)


def _by_load(results: Results) -> dict[str, list[tuple[str, Row]]]:
    """Rows over all prompt types that were compared here, by load in order."""
    rows = [
        (name, row)
        for name, result in results.items()
        if "source" not in result
        for row in result["rows"]
        if row["category"] == ALL and row.get("speedup") is not None
    ]
    found: dict[str, list[tuple[str, Row]]] = {}
    for name, row in sorted(rows, key=lambda one: load_order(one[1])):
        found.setdefault(load_label(row), []).append((name, row))
    return found


def _of_load(rows: list[tuple[str, Row]]) -> str:
    pairs = _span([row["num_pairs"] for _, row in rows])
    size = f"{pairs} pair{'' if pairs == '1' else 's'}"
    tokens = [row["output_tokens"] for _, row in rows if row.get("output_tokens") is not None]
    if tokens:
        size += f" and {_span(tokens)} output tokens"
    text = f"At {load_sentence(rows[0][1])}: {size} for each method"
    none = dict(rows).get("none")
    if none is None:
        return f"{text}."
    if none["speedup_low"] is None:
        return f"{text}, too few for an interval of `none` against itself ({change(none)})."
    return (
        f"{text}; `none` against itself is {change(none)}, so a change of less than "
        f"{_farthest(none):.0%} may be the machine's."
    )


def _span(numbers: list[int]) -> str:
    """`7`, or the least and the greatest: `7 to 21`."""
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _width(row: Row) -> float:
    if row["speedup_low"] is None:
        return float("inf")
    return float(row["speedup_high"] - row["speedup_low"])


def _farthest(row: Row) -> float:
    if row["speedup_low"] is None:
        return float("inf")
    return float(max(1 - row["speedup_low"], row["speedup_high"] - 1))

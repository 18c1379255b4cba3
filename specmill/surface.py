"""The result as a surface: the rows of every plot, from the JSON that the benches wrote.

Pure functions. What was not measured has no row, and never a zero. A list is never empty, for DVC
cannot plot an empty one: a row without a value stands in. All rows of a plot have the same keys.

Rows are ordered by load: requests in flight before requests per second, then by tokens of context,
then by the number of requests; at one load by method and prompt type as the benches have them.
"""

from typing import Any

from specmill.rows import Results, Row, headline_rows, load_label, load_order
from specmill.samples import ALL

_RATE = "acceptance_rate_pos_"
_SPEEDUP = ("speedup", "speedup_low", "speedup_high", "verdict")


def plot_rows(results: Results) -> dict[str, list[Row]]:
    """The rows of every plot, by its name: reports/plots/NAME.json, reports/NAME.svg."""
    return {
        "acceptance": acceptance_rows(results),
        "acceptance_by_category": acceptance_by_category_rows(results),
        "speedup": speedup_rows(results),
        "speedup_by_load": speedup_by_load_rows(results),
        "speedup_by_k": speedup_by_k_rows(results),
    }


def acceptance_rows(results: Results) -> list[Row]:
    """Acceptance rate by draft position (from 0) at the headline K, over all prompt types.

    The rate is unconditional: accepted at this position over all drafts. A method that drafted
    nothing at a load has no row there.
    """
    found = [
        point
        for method, row in _headline(results)
        if row["category"] == ALL
        for point in _by_position(method, row)
    ]
    return found or [_first_place(results) | {"position": 0, "acceptance_rate": None}]


def acceptance_by_category_rows(results: Results) -> list[Row]:
    """Acceptance rate by prompt type and position, at the headline K and a method's lowest load.

    The rates are unconditional, of `num_drafts` drafts; `all` is among the prompt types.
    """
    rows = _headline(results)
    lowest: dict[str, Any] = {}
    for method, row in rows:
        lowest.setdefault(method, load_order(row))
    found = [
        point | {"category": row["category"], "num_drafts": row.get("num_drafts")}
        for method, row in rows
        if load_order(row) == lowest[method]
        for point in _by_position(method, row)
    ]
    nothing = {"category": ALL, "num_drafts": None, "position": 0, "acceptance_rate": None}
    return found or [_first_place(results) | nothing]


def speedup_rows(results: Results) -> list[Row]:
    """Speed-up and its interval by load and prompt type, at the headline K."""
    found = [
        _speedup(method, row) | {"category": row["category"]}
        for method, row in _headline(results)
        if row.get("speedup") is not None
    ]
    return found or [_no_speedup(results) | {"category": ALL}]


def speedup_by_load_rows(results: Results) -> list[Row]:
    """Speed-up and its interval over all prompt types, against the load, at the headline K.

    Every row names its `panel`: what `requests` counts there and the context. A rate is no
    concurrency, so the two never share an axis.
    """
    found = [
        _speedup(method, row) | {"panel": _panel(row), "requests": _requests(row)}
        for method, row in _headline(results)
        if row["category"] == ALL and row.get("speedup") is not None
    ]
    nothing = {"panel": "requests in flight", "requests": None}
    return found or [_no_speedup(results) | nothing]


def speedup_by_k_rows(results: Results) -> list[Row]:
    """Speed-up and its interval by K and load, over all prompt types; K is above 0."""
    found = [
        _speedup(method, row)
        for method, row in _by_load(results, every_k=True)
        if row["category"] == ALL and row["num_speculative_tokens"]
        if row.get("speedup") is not None
    ]
    return found or [_no_speedup(results)]


def _panel(row: Row) -> str:
    unit = "requests in flight" if row["rate"] is None else "requests per second"
    return unit + _context(row)


def _context(row: Row) -> str:
    return f" +{row['context']}" if row["context"] else ""


def _requests(row: Row) -> float:
    value: float = row["concurrency"] if row["rate"] is None else row["rate"]
    return value


def _headline(results: Results) -> list[tuple[str, Row]]:
    return _by_load(results, every_k=False)


def _by_load(results: Results, *, every_k: bool) -> list[tuple[str, Row]]:
    """Method and row, of all K or of the headline K, ordered by load."""
    rows = [
        (method, row)
        for method, result in results.items()
        for row in (result["rows"] if every_k else headline_rows(result))
    ]
    return sorted(rows, key=lambda found: load_order(found[1]))


def _by_position(method: str, row: Row) -> list[Row]:
    positions = sorted(int(name.removeprefix(_RATE)) for name in row if name.startswith(_RATE))
    rates = [(position, row[f"{_RATE}{position}"]) for position in positions]
    return [
        _place(method, row) | {"position": position, "acceptance_rate": rate}
        for position, rate in rates
        if rate is not None
    ]


def _speedup(method: str, row: Row) -> Row:
    return _place(method, row) | {name: row.get(name) for name in _SPEEDUP}


def _place(method: str, row: Row) -> Row:
    names = ("num_speculative_tokens", "concurrency", "rate", "context")
    place = {name: row[name] for name in names}
    return {"method": method} | place | {"load": load_label(row)}


def _first_place(results: Results) -> Row:
    """Where a row without a value stands."""
    method, result = next(iter(results.items()))
    return _place(method, result["rows"][0])


def _no_speedup(results: Results) -> Row:
    return _first_place(results) | dict.fromkeys(_SPEEDUP)

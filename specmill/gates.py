"""What would have to change for an option to be worth another look: gates, as clauses.

    R    time of a step with the method over a step without
    tau  tokens per step

A method breaks even where tau reaches a bound that its step times set, R but for what the first
token costs more (specmill.expected). The bound is predicted before anything is measured. Where the
measurement contradicts it (slower though tau is above the bound) tau / speed-up takes its place,
which is R as measured, but for the first token.

The same said of position 0: rates by position falling off as they do,

    rate at position 0 needed = rate at position 0 * (bound - 1) / (tau - 1)
"""

from specmill.grounds import Grounds, in_flight, plain_load
from specmill.rows import Row, load_order, load_sentence


def break_even(grounds: Grounds, name: str, k: int) -> str:
    """The tokens per step that would break even, the load where least is missing first.

    Nothing is adopted that is slower at another load: those where tokens are missing too follow.

    Args:
        grounds: What is known.
        name: The row.
        k: Its K.
    """
    if grounds.predicted is None:
        return "break-even is in reach, which is not known without reports/predicted.json"
    bounds = _bounds(grounds, name, k)
    if not bounds:
        why = grounds.predicted["without"].get(name, f"no step times at K={k}")
        return f"break-even is in reach, which is not known: {why}"
    measured = {plain_load(row): row for row in grounds.measured(name, k)}
    foreseen = grounds.foreseen(name, k)
    found, out_of_reach = [], []
    for load, bound in bounds.items():
        row = measured.get(load) or foreseen.get(load, {})
        now = row.get("tokens_per_step")
        if load in measured and now is not None and bound is not None and bound <= now:
            bound = now / row["speedup"] if row["speedup"] < 1 else now
        if bound is not None and bound <= k + 1:
            found.append((bound / now if now else bound, load, bound, row))
        else:
            out_of_reach.append(in_flight(load))
    if not found:
        return (
            f"a step costs less: at K={k} not even {k + 1} tokens per step, all drafts accepted, "
            "break even"
        )
    first, *others = sorted(found, key=lambda one: one[:2])
    clauses = [_clause(*first[1:])]
    clauses += [
        f"{bound:.2f} at {load}{_short(row)}"
        for missing, load, bound, row in sorted(others, key=lambda one: one[1])
        if missing > 1
    ]
    gate = f"tokens per step exceed {_listed(clauses)}"
    if out_of_reach:
        gate += f", and it is not served at {loads(out_of_reach)}, where no acceptance is enough"
    return gate


def _bounds(grounds: Grounds, name: str, k: int) -> dict[int, float | None]:
    """Tokens per step that break even, by requests in flight; None where no number is enough.

    Of a method whose acceptance is not predicted the table of better heads has them.
    """
    rows = [row for rows in grounds.heads(name, k).values() for row in rows]
    rows += grounds.foreseen(name, k).values()
    bounds = {row["concurrency"]: row["break_even_tokens_per_step"] for row in rows}
    served = {plain_load(row) for row in grounds.measured(name, k)} - {None}
    return {load: bound for load, bound in sorted(bounds.items()) if not served or load in served}


def _now(row: Row, bound: float) -> str:
    """What they are, and what the bound means for the first draft."""
    now, rate = row.get("tokens_per_step"), row.get("acceptance_rate_pos_0")
    if now is None:
        return ""
    needed = rate * (bound - 1) / (now - 1) if rate and now > 1 else None
    if needed is None or needed > 1:
        return f" (now {now:.2f})"
    return f" (now {now:.2f}; acceptance at position 0 of {needed:.2f} instead of {rate:.2f})"


def _clause(load: int, bound: float, row: Row) -> str:
    return f"{bound:.2f} at {load_sentence(in_flight(load))}{_now(row, bound)}"


def _short(row: Row) -> str:
    now = row.get("tokens_per_step")
    return "" if now is None else f" (now {now:.2f})"


def _listed(words: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *before, last = words
    return f"{', '.join(before)} and {last}" if before else last


def loads(rows: list[Row]) -> str:
    """Loads by name: `1, 8 and 32 requests in flight`; those of another kind each by its own."""
    ordered = sorted(rows, key=load_order)
    plain = [str(row["concurrency"]) for row in ordered if plain_load(row)]
    if len(ordered) > 1 and len(plain) == len(ordered):
        return f"{_listed(plain)} requests in flight"
    return _listed([load_sentence(row) for row in ordered])

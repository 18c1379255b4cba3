"""Sentences on what speaks for and against an option: figures with their intervals."""

from specmill.fidelity import MARKS, flaw, num_wrong
from specmill.grounds import Grounds, in_flight, plain_load
from specmill.intervals import FASTER, SLOWER, UNDECIDED
from specmill.rows import Row, load_label, load_order, load_sentence
from specmill.samples import ALL
from specmill.tables import change, stressed


def measured(rows: list[Row], foreseen: dict[int, Row]) -> list[str]:
    """A sentence per load, what was predicted for it beside it.

    Args:
        rows: Measured, over all prompt types.
        foreseen: Predicted, by requests in flight.
    """
    found = []
    for row in sorted(rows, key=load_order):
        text = f"At {load_sentence(row)}: {change(row)}, {row['verdict'] or 'without an interval'}"
        if row.get("tokens_per_step") is not None:
            text += f"; {row['tokens_per_step']:.2f} tokens per step"
        load = plain_load(row)
        if load in foreseen:
            text += f"; predicted {change(foreseen[load])}"
        found.append(f"{text}.")
    return found


def predicted(rows: list[Row]) -> list[str]:
    """A sentence per predicted load."""
    return [
        f"Predicted at {load_sentence(in_flight(row['concurrency']))}: {change(row)}."
        for row in sorted(rows, key=lambda row: int(row["concurrency"]))
    ]


def prompt_types(grounds: Grounds, name: str, k: int) -> list[str]:
    """The slowest and the fastest prompt type of each load that has several with an interval."""
    kinds: dict[str, list[Row]] = {}
    for row in sorted(grounds.results[name]["rows"], key=load_order):
        if (
            row["num_speculative_tokens"] == k
            and row["category"] != ALL
            and row.get("speedup_low") is not None
        ):
            kinds.setdefault(load_sentence(row), []).append(row)
    found = []
    for at, rows in kinds.items():
        low, high = (pick(rows, key=lambda row: float(row["speedup"])) for pick in (min, max))
        if len(rows) > 1:
            found.append(
                f"By prompt type at {at}: from {change(low)}, {low['category']}, to "
                f"{change(high)}, {high['category']}."
            )
    return found


def speeds(rows: list[Row], foreseen: dict[int, Row]) -> dict[str, str]:
    """The change at every load, by its label: measured, bold where decided; predicted, in italics.

    Args:
        rows: Measured, over all prompt types.
        foreseen: Predicted, by requests in flight.
    """
    places = {load: in_flight(load) for load in foreseen}
    cells = [(places[load], f"*{change(row)}*") for load, row in foreseen.items()]
    cells += [(row, stressed(row)) for row in rows]
    return {
        load_label(place): cell for place, cell in sorted(cells, key=lambda c: load_order(c[0]))
    }


def against(grounds: Grounds, name: str, rows: list[Row], foreseen: dict[int, Row]) -> list[str]:
    """All that keeps a row from being adopted, clauses; nothing where nothing does.

    Args:
        grounds: What is known.
        name: The row.
        rows: Measured, over all prompt types, at one K or with its schedule.
        foreseen: Predicted for it, by requests in flight.
    """
    if rows:
        verdicts = {row["verdict"] for row in rows}
        places = {verdict: [r for r in rows if r["verdict"] == verdict] for verdict in verdicts}
        said = {SLOWER: "slower at", None: "no interval at"}
        if FASTER not in verdicts:
            said[UNDECIDED] = "no difference shown at"
    else:
        slow = [in_flight(load) for load, row in foreseen.items() if row["speedup_high"] <= 1]
        places, said = {SLOWER: slow}, {SLOWER: "predicted slower at"}
    found = [] if rows else ["not measured"]
    num_loads = len(rows or foreseen)
    for verdict, text in said.items():
        if here := places.get(verdict):
            labels = ", ".join(load_label(row) for row in sorted(here, key=load_order))
            found.append(f"{text} {'every load' if len(here) == num_loads > 1 else labels}")
    return [*found, *flaws(grounds, name)]


def flaws(grounds: Grounds, name: str) -> list[str]:
    """What is not the verifier's in a method's outputs, a clause; nothing of a lossless one.

    Why, the footnotes of specmill.fidelity say once for all rows.
    """
    found = flaw(name, grounds.results)
    if found is None:
        return []
    wrong = num_wrong(name, grounds.results)
    return [f"{found}{MARKS[found]}" + (f" ({wrong} greedy answers)" if wrong else "")]

"""Sentences on what speaks for and against an option: figures with their intervals."""

from specmill.engine_faults import known_sampling_fault
from specmill.fidelity import flaw, num_wrong
from specmill.grounds import Grounds, in_flight, plain_load
from specmill.rows import Row, load_order, load_sentence
from specmill.samples import ALL
from specmill.tables import percent


def change(row: Row) -> str:
    """Change of speed, with the 95% interval where there is one: `+12% (+3% to +20%)`."""
    middle = percent(row["speedup"])
    if row["speedup_low"] is None:
        return middle
    return f"{middle} ({percent(row['speedup_low'])} to {percent(row['speedup_high'])})"


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
    """The slowest and the fastest prompt type of each load that has several."""
    kinds: dict[str, list[Row]] = {}
    for row in sorted(grounds.results[name]["rows"], key=load_order):
        if (
            row["num_speculative_tokens"] == k
            and row["category"] != ALL
            and row.get("speedup") is not None
        ):
            kinds.setdefault(load_sentence(row), []).append(row)
    found = []
    for at, rows in kinds.items():
        low, high = (pick(rows, key=lambda row: float(row["speedup"])) for pick in (min, max))
        if len(rows) > 1:
            found.append(
                f"By prompt type at {at}: {percent(low['speedup'])} ({low['category']}) to "
                f"{percent(high['speedup'])} ({high['category']})."
            )
    return found


def flaws(grounds: Grounds, name: str) -> list[str]:
    """What is not the verifier's in a method's outputs; nothing of a lossless one."""
    if flaw(name, grounds.results) is None:
        return []
    if wrong := num_wrong(name, grounds.results):
        return [f"Not lossless: {wrong} greedy answers leave the verifier's by more than rounding."]
    fault = known_sampling_fault(grounds.hardware)
    return [
        "Not lossless when sampled: its samples have another distribution than the verifier's"
        + (f" ({fault})." if fault else ".")
    ]

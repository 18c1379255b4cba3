"""Two reports side by side: of two heads, two machines, two weeks.

    python -m specmill.compare A B

A and B are folders `reports` with dvc.lock beside them, folders above those, or Git revisions. What
must be the same for figures to be put side by side at all: the verifier, the bench's prompts, the
length of answers and whether engines were compiled. Where the hardware or the version of vLLM or
torch is another, each change is still against its own baseline and holds there, but a difference of
two changes would be of machines and methods at once: it is not drawn. Heads, settings of methods,
schedules and the number of rounds may differ, and are named.

Of two changes no interval of the difference is made. They are called different when their 95%
intervals lie apart, which is stricter than a test of the difference.
"""

import argparse
import json
import sys
from typing import Any

from specmill import paths
from specmill.rows import Row, load_order, load_sentence
from specmill.samples import ALL
from specmill.sides import Measured, Side, open_side
from specmill.tables import change, figure

NOTHING = 1
"""Exit status when no row can be compared."""


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m specmill.compare",
        description="Compare two reports: what changed with another head, machine or version, and "
        "what cannot be compared.",
        epilog="Each is a folder `reports` with its dvc.lock beside it, the folder above, or a Git "
        f"revision (REV or REV:FOLDER). Ends with status {NOTHING} when nothing can be compared.",
    )
    parser.add_argument("a", metavar="A", help="the report that stands first")
    parser.add_argument("b", metavar="B", help="the other one")
    chosen = parser.parse_args(arguments)
    try:
        a, b = open_side(chosen.a), open_side(chosen.b)
    except (ValueError, OSError) as error:
        sys.exit(f"not comparable: {error}")
    lines, is_comparable = comparison_of(a, b)
    sys.stdout.write("\n".join(lines) + "\n")
    sys.exit(0 if is_comparable else NOTHING)


def comparison_of(a: Side, b: Side) -> tuple[list[str], bool]:
    """Markdown, and whether any row could be compared."""
    machines = machine_differences(a, b)
    blocked = {
        name: reasons
        for name in a.rows.keys() & b.rows.keys()
        if (reasons := obstacles(name, a, b))
    }
    shared = [name for name in a.rows if name in b.rows and name not in blocked]
    lines = [f"A is {a.name}, B is {b.name}.", ""]
    if machines:
        lines += [
            f"**Speeds are not comparable between them**: {'; '.join(machines)}. Each change is "
            "against the baseline beside it and holds on its own machine; acceptance may be "
            "compared.",
            "",
        ]
    table = [line for name in shared for line in _rows(name, a, b, is_same_machine=not machines)]
    if table:
        lines += [
            "| method | K | load | change in A | change in B | B against A | acceptance length A | "
            "B |",
            "| --- | ---: | --- | ---: | ---: | --- | ---: | ---: |",
            *table,
            "",
        ]
    else:
        lines += ["**Not comparable**: no row of one can be put beside a row of the other.", ""]
    remarks = [*_blocked(blocked), *_freedoms(shared, a, b), *_alone(a, b)]
    lines += [f"- {remark}" for remark in remarks]
    return lines, bool(table)


def machine_differences(a: Side, b: Side) -> list[str]:
    """In what the machines of two reports differ that speeds depend on, a clause each."""
    found = []
    for name in ("cpu_model", "num_usable_cores", "gpus"):
        ours, theirs = a.hardware[name], b.hardware[name]
        if ours != theirs:
            found.append(f"{name} is {_short(ours)} in A and {_short(theirs)} in B")
    for name in ("vllm", "torch"):
        ours, theirs = (side.hardware["versions"].get(name) for side in (a, b))
        if ours != theirs:
            found.append(f"{name} is {ours} in A and {theirs} in B")
    return found


def obstacles(name: str, a: Side, b: Side) -> list[str]:
    """Why a row's figures cannot stand side by side at all; nothing when they can.

    Args:
        name: A row that both have.
        a: One report.
        b: The other.
    """
    ours, theirs = a.rows[name], b.rows[name]
    found = []
    if _differ(ours, theirs, str(paths.IDENTITY)):
        found.append("the verifier is another")
    prompts = str(paths.PREPARED / "bench.parquet")
    if _differ(ours, theirs, prompts) and not _same_prompts(a, b):
        found.append("the bench's prompts are others (prepare.bench and what picks from it)")
    settings = ["max_tokens", "enforce_eager"]
    if any(row["rate"] is not None for row in ours.result["rows"]):
        settings.append("seconds")
    for key in settings:
        values = [side.params.get("bench", {}).get(key) for side in (ours, theirs)]
        if values[0] != values[1]:
            found.append(f"bench.{key} is {_short(values[0])} in A and {_short(values[1])} in B")
    return found


def _differ(ours: Measured, theirs: Measured, path: str) -> bool:
    """Whether two rows read different files at a path; unknown counts as different."""
    digests = [row.digests.get(path) for row in (ours, theirs)]
    return None in digests or digests[0] != digests[1]


def _same_prompts(a: Side, b: Side) -> bool:
    """Whether prompts were picked alike: their file also holds answers, which machines round."""
    made = []
    for side in (a, b):
        if side.prompts["sources"] is None or not side.prompts["prepare"]:
            return False
        kept = {
            key: value
            for key, value in side.prompts["prepare"].items()
            if key in ("bench_per_category", "max_rows", "chat_template_kwargs", "seed")
        }
        made.append([side.prompts["sources"], kept])
    return bool(made[0] == made[1])


def _rows(name: str, a: Side, b: Side, *, is_same_machine: bool) -> list[str]:
    ours, theirs = ({_place(row): row for row in _overall(side, name)} for side in (a, b))
    lines = []
    for place, row in sorted(ours.items(), key=lambda item: (item[0][0], load_order(item[1]))):
        if place not in theirs:
            continue
        other = theirs[place]
        verdict = _against(row, other) if is_same_machine else "not comparable"
        lengths = [figure(one, "acceptance_length", ".2f") for one in (row, other)]
        cells = [name, str(place[0]), load_sentence(row), change(row), change(other), verdict]
        lines.append(f"| {' | '.join([*cells, *lengths])} |")
    return lines


def _overall(side: Side, name: str) -> list[Row]:
    return [
        row
        for row in side.rows[name].result["rows"]
        if row["category"] == ALL and row.get("speedup") is not None
    ]


def _place(row: Row) -> tuple[Any, ...]:
    return row["num_speculative_tokens"], row["concurrency"], row["rate"], row["context"]


def _against(row: Row, other: Row) -> str:
    if None in (row["speedup_low"], other["speedup_low"]):
        return "no interval"
    if other["speedup_low"] > row["speedup_high"]:
        return "**faster**"
    if other["speedup_high"] < row["speedup_low"]:
        return "**slower**"
    return "no difference shown"


def _blocked(blocked: dict[str, list[str]]) -> list[str]:
    """What cannot be compared, rows with the same reasons together."""
    by_reason: dict[str, list[str]] = {}
    for name, reasons in sorted(blocked.items()):
        by_reason.setdefault("; ".join(reasons), []).append(name)
    return [f"**Not comparable**: {', '.join(names)}: {why}." for why, names in by_reason.items()]


def _freedoms(shared: list[str], a: Side, b: Side) -> list[str]:
    """What may differ and does."""
    found = []
    for name in shared:
        ours, theirs = a.rows[name], b.rows[name]
        paths_read = sorted(ours.digests.keys() | theirs.digests.keys())
        heads = [path for path in paths_read if path.startswith("models/")
                 and path != str(paths.IDENTITY) and _differ(ours, theirs, path)]  # fmt: skip
        code = [path for path in paths_read
                if path.endswith(".py") and _differ(ours, theirs, path)]  # fmt: skip
        parts = [f"its head ({', '.join(heads)})"] if heads else []
        if ours.params.get(f"methods.{name}") != theirs.params.get(f"methods.{name}"):
            parts.append("its entry of `methods`")
        if ours.result.get("schedule") != theirs.result.get("schedule"):
            parts.append("its K by requests in flight")
        if code:
            parts.append(f"the code that measured it ({', '.join(code)})")
        if parts:
            found.append(f"{name} is not the same in both: {', '.join(parts)}.")
    return found


def _alone(a: Side, b: Side) -> list[str]:
    found = [
        f"In {label} only: {', '.join(sorted(names))}."
        for label, names in (
            ("A", a.rows.keys() - b.rows.keys()),
            ("B", b.rows.keys() - a.rows.keys()),
        )
        if names
    ]
    return found + [
        f"Left out of {label}: {name}, for {why}."
        for label, side in (("A", a), ("B", b))
        for name, why in side.left_out.items()
    ]


def _short(value: Any) -> str:
    """A value of a JSON file in a sentence."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


if __name__ == "__main__":
    main()

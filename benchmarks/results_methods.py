"""Tables of docs/results.md on methods beside each other, what was foreseen, and the goals set.

From reports/gpu/demo-h200-decision: methods, replay, prediction and the profile of a step, of one
lease of the machine; the sweep of K and the stages' times are of reports/gpu/demo-h200.
"""

from pathlib import Path
from typing import Any

from specmill import paths
from specmill.files import read_json
from specmill.samples import ALL
from specmill.tables import change, figure

_GPU = paths.ROOT / "reports" / "gpu"
SWEEP, METHODS = _GPU / "demo-h200", _GPU / "demo-h200-decision"
_LOADS = (1, 8, 32)

Rows = list[dict[str, Any]]


def rows_of(method: str, k: int, *, of: str | None = ALL) -> Rows:
    """Rows of a method at a K, of one prompt type, or of all types one by one."""
    return _rows_in(METHODS / f"bench_{method}.json", k, of)


def _rows_in(file: Path, k: int, of: str | None) -> Rows:
    every = read_json(file)["rows"]
    return [
        row
        for row in every
        if row["speedup"]
        and row["num_speculative_tokens"] == k
        and (row["category"] == of if of else row["category"] != ALL)
    ]


def overview(folder: Path = METHODS) -> list[str]:
    """A line for each method and load.

    Args:
        folder: Of the benches' results.
    """
    lines = [
        "| requests in flight | method | K | `none` beside it, tok/s | tok/s "
        "| change (95% interval) | verdict | acceptance length | tokens a step |",
        "| ---: | --- | ---: | ---: | ---: | --- | --- | ---: | ---: |",
    ]
    found = {
        (method, k): _rows_in(folder / f"bench_{method}.json", k, ALL)
        for method, k in (("none", 0), ("ngram", 3), ("eagle3", 3))
    }
    for load in [row["concurrency"] for row in found["none", 0]]:
        for (method, k), rows in found.items():
            (row,) = [row for row in rows if row["concurrency"] == load]
            name = "`none`, against itself" if method == "none" else method
            lines.append(
                f"| {load} | {name} | {k} | {row['reference_tokens_per_s']:,.0f} "
                f"| {row['output_tokens_per_s']:,.0f} | {change(row)} | {row['verdict']} "
                f"| {figure(row, 'acceptance_length', '.2f')} "
                f"| {figure(row, 'tokens_per_step', '.2f')} |"
            )
    return lines


def replayed() -> list[str]:
    """Steps that replay foresaw of the answers that were served, beside those of the server."""
    lines = [
        "| method | K | answers | tokens | steps replayed | steps served | error |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in read_json(METHODS / "check.json")["acceptance"]:
        lines.append(
            f"| {one['method']} | {one['k']} | {one['num_sequences']} | {one['num_tokens']:,} "
            f"| {one['replayed_steps']:,} | {one['served_steps']:,} | {one['error']:.2%} |"
        )
    return lines


def foreseen() -> list[str]:
    """Predicted change beside the measured one, all prompt types together."""
    lines = [
        "| method | K | requests | predicted | measured | off by |",
        "| --- | ---: | ---: | --- | --- | ---: |",
    ]
    for one in read_json(METHODS / "check.json")["speed"]:
        if one["category"] == ALL:
            lines.append(
                f"| {one['method']} | {one['k']} | {one['concurrency']} "
                f"| {_interval(one, 'predicted')} | {_interval(one, 'measured')} "
                f"| {one['error']:+.1%} |"
            )
    return lines


def _interval(one: dict[str, Any], name: str) -> str:
    middle, low, high = (one[name + end] - 1 for end in ("", "_low", "_high"))
    return f"{middle:+.0%} ({low:+.0%} to {high:+.0%})"


def step_kinds() -> list[str]:
    """What the GPU does in a step of `none`, and how long it has nothing to do."""
    runs = [run for run in read_json(METHODS / "decode_step.json")["runs"] if not run["k"]]
    kinds = sorted({kind for run in runs for kind in run["traced"]["by_kind"]})
    lines = [
        "| requests | step, ms | step in its trace, ms | GPU busy, ms | "
        + " | ".join(kinds)
        + " |",
        "| ---: | ---: | ---: | ---: |" + " ---: |" * len(kinds),
    ]
    for run in runs:
        traced, steps = run["traced"], sorted(run["step_ms"])
        each = " | ".join(f"{traced['by_kind'].get(kind, 0.0):.2f}" for kind in kinds)
        lines.append(
            f"| {run['batch']} | {steps[0]:.2f} to {steps[-1]:.2f} | {traced['step']:.2f} "
            f"| {traced['busy']:.2f} | {each} |"
        )
    return lines


def goals() -> list[str]:
    """What was wanted of the head, with the figure and whether it was met."""
    swept = read_json(SWEEP / "bench_eagle3.json")["rows"]
    lines = ["| wanted | measured | met |", "| --- | --- | --- |"]

    def add(wanted: str, measured: str, met: bool) -> None:
        lines.append(f"| {wanted} | {measured} | {'yes' if met else 'no'} |")

    for wanted, category, k, least in (
        ("acceptance length at K=3, all prompt types, from 3.1 on", ALL, 3, 3.1),
        ("the same of writing, from 2.6 on", "writing", 3, 2.6),
        ("acceptance length at K=5, from 4.0 on", ALL, 5, 4.0),
    ):
        place = {"category": category, "num_speculative_tokens": k, "concurrency": 1}
        (row,) = [row for row in swept if place.items() <= row.items()]
        add(wanted, f"{row['acceptance_length']:.2f}", row["acceptance_length"] >= least)
    by_load = [
        max(
            (
                row
                for row in [*swept, *rows_of("eagle3", 3)]
                if row["category"] == ALL and row["speedup"] and row["concurrency"] == load
            ),
            key=lambda row: float(row["speedup"]),
        )
        for load in _LOADS
    ]
    best = ", ".join(f"{change(row)} (K={row['num_speculative_tokens']})" for row in by_load)
    enough = all(row["speedup"] >= 1.5 and row["speedup_low"] > 1.3 for row in by_load)
    add("best K 1.5 times as fast as `none` at 1, 8 and 32, interval above 1.3", best, enough)
    theirs = {_place(row): row["speedup"] for row in rows_of("ngram", 3, of=None)}
    ours = {_place(row): row["speedup"] for row in rows_of("eagle3", 3, of=None)}
    ahead = [place for place, speed in ours.items() if speed > theirs[place]]
    add(
        "ahead of n-gram in every prompt type and load",
        f"in {len(ahead)} of {len(ours)}",
        len(ahead) == len(ours),
    )
    same = {row["concurrency"]: row["identical_outputs"] for row in rows_of("eagle3", 3)}
    itself = {row["concurrency"]: row["identical_outputs"] for row in rows_of("none", 0)}
    add(
        "greedy outputs at 1 request those of `none`",
        f"{same[1]:.0%} of the answers of {rows_of('eagle3', 3)[0]['num_pairs']} pairs",
        same[1] == 1,
    )
    add(
        "at 8 and 32 as often as `none` gives its own",
        ", ".join(f"{same[load]:.0%} and {itself[load]:.0%}" for load in _LOADS[1:]),
        all(same[load] >= itself[load] for load in _LOADS[1:]),
    )
    took = read_json(SWEEP / "timeline.json")
    seconds = sum(took[stage] for stage in ("verifier", "prepare", "vocab", "extract", "train"))
    add("from the model to the head in 12 minutes", f"{seconds / 60:.1f}", seconds <= 12 * 60)
    return lines


def _place(row: dict[str, Any]) -> tuple[str, int]:
    return row["category"], row["concurrency"]

"""What tries of benchmarks.torture come to: counts, problems, the table of docs/reliability.md."""

import re
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.torture_faults import FAULTS
from benchmarks.torture_stages import STAGES

BEGIN = "<!-- from reports/torture.json: python -m benchmarks.torture --table -->"
END = "<!-- torture ends -->"


def count(
    total: int, before: set[str], after: set[str], did: int, done_first: int, survived: bool
) -> dict[str, int]:
    """What a fault cost in units of work (answers, samples, epochs, cells).

    Args:
        total: Units of an undisturbed run.
        before: Those that were finished and on the disk when it struck.
        after: Those that were there when the second run started.
        did: What the second run did.
        done_first: What the first run did, where it ended well.
        survived: Whether it did.

    Returns:
        `finished` and `kept`, how many were in `before` and `after`; `did`; `lost`, finished ones
        that were gone; `repeated`, done once more though they were there. A run that ends well
        clears what it kept, so that nothing is lost then.
    """
    more = done_first - total if survived else did - (total - len(after))
    return {
        "finished": len(before),
        "kept": len(after),
        "did": did,
        "lost": 0 if survived else len(before - after),
        "repeated": max(0, more),
    }


def problems(record: dict[str, Any], *, takes: bool) -> list[str]:
    """What should not be after a fault; `takes` is said of one that removes finished work itself.

    A run that is not waited for (`ended_s` is missing) may hold locks and have its MLflow run.
    """
    found = []
    if record["second"] != 0:
        found.append(f"the next dvc repro ended with status {record['second']}")
    if record["differing"]:
        found.append(f"other outputs: {', '.join(record['differing'])}")
    for name in () if takes else ("lost", "repeated"):
        if record[name]:
            found.append(f"{record[name]} {name}")
    seen = ["left_after_second", "running_after_second", "scratch", "tracebacks"]
    if "ended_s" in record:
        seen += ["left", "ports", "locks", "running"]
        if record["first"] is None:
            found.append("did not end")
    return found + [f"{name}: {record[name]}" for name in seen if record[name]]


def tracebacks(log: str) -> list[str]:
    """Last lines of tracebacks in a log; that of a Ctrl-C while modules are imported is usual."""
    ends = re.findall(
        r"^Traceback \(most recent call last\):\n(?:[ \n].*\n?)*(.*)", log, re.MULTILINE
    )
    return [end for end in ends if end != "KeyboardInterrupt"]


def hits(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Tries whose fault met something; one drawn after the end did not."""
    return [row for row in results["tries"] if row["hit"]]


def table(results: dict[str, Any]) -> str:
    """The table as Markdown, a row for each fault and stage that was tried, and its notes."""
    lines = [
        "| Fault | Stage | Tries | Finished before | Lost | Repeated | Ended after, s | "
        "Time to recover, s | `python -m benchmarks.torture` with |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    tried = hits(results)
    for name, fault in FAULTS.items():
        for stage, kept in STAGES.items():
            rows = [row for row in tried if (row["fault"], row["stage"]) == (name, stage)]
            if rows:
                options = f"`--stages {stage} --faults {name} --tries {len(rows)}`"
                cells = [fault.told, stage, str(len(rows)), *_figures(rows, kept.unit), options]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_notes(results, tried)])


def _figures(rows: list[dict[str, Any]], unit: str) -> list[str]:
    sums = {name: sum(row[name] for row in rows) for name in ("finished", "lost", "repeated")}
    ended = [row["ended_s"] for row in rows if "ended_s" in row]
    if unit == "-":
        counted = ["-", "-", "-"]
    else:
        counted = [f"{sums['finished']} {unit}", str(sums["lost"]), str(sums["repeated"])]
    return [
        *counted,
        f"{max(ended):.0f}" if ended else "-",
        _spread([row["recover_s"] for row in rows]),
    ]


def _spread(seconds: list[float]) -> str:
    """`12`, or `12 (up to 20)` of several."""
    middle, most = (f"{round(one):+d}" for one in (median(seconds), max(seconds)))
    return middle if len(seconds) == 1 else f"{middle} (up to {most})"


def _notes(results: dict[str, Any], tried: list[dict[str, Any]]) -> list[str]:
    machine, bad = results["machine"], [row for row in tried if row["problems"]]
    usual = ", ".join(
        f"{stage} {found['seconds']:.0f} s"
        + (f" ({found['units']} {STAGES[stage].unit})" if found["units"] else "")
        for stage, found in results["undisturbed"].items()
    )
    missed = len(results["tries"]) - len(tried)
    commits = sorted({row["commit"][:7] for row in tried})
    lines = [
        f"{len(tried)} tries on {machine['cores']} cores, {missed} more met nothing (the run was "
        f"over, or not at an engine yet). Undisturbed: {usual}. Commits {', '.join(commits)}.",
    ]
    lines += [f"Skipped: {name}, {why}." for name, why in results["skipped"].items()]
    near = [f"{row['fault']} try {row['try']}" for row in tried if row["near"]]
    if near:
        lines.append(f"Within the tolerance, not the same bytes: {', '.join(near)}.")
    lines += [""] if bad else []
    lines += [
        f"- **{row['stage']}, {row['fault']}, try {row['try']}**: {'; '.join(row['problems'])}"
        for row in bad
    ]
    return lines


def write(page: Path, results: dict[str, Any]) -> None:
    """Put the table between its two comments in a Markdown file.

    Raises:
        ValueError: when it does not have both.
    """
    text = page.read_text()
    between = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if not between.search(text):
        raise ValueError(f"{page} has no {BEGIN} ... {END}")
    page.write_text(between.sub(lambda _: f"{BEGIN}\n{table(results)}\n{END}", text))

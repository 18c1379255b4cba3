"""Is a method lossless: are its greedy outputs those of the verifier alone? From the results.

The bench compares outputs and asks the reference about every first difference
(specmill/lossless.py). `none` is compared with itself: where even it leaves its reference by more
than rounding, a method is blamed only for what is more than that.
"""

from typing import Any

from scipy.stats import fisher_exact

from specmill.rows import Results, Row, load_label, load_order
from specmill.samples import ALL

GREEDY, SAMPLED = "not lossless", "not lossless when sampled"
MARKS = {GREEDY: " ‡", SAMPLED: " †"}
"""What stands behind the name of a method that is not lossless; a footnote says why."""


def flaw(name: str, results: Results) -> str | None:
    """What speaks against a method: its greedy outputs, else its samples at temperature 1."""
    if num_wrong(name, results):
        return GREEDY
    sampled = (results[name].get("sampling") or {}).get("lossless")
    return SAMPLED if sampled is False else None


def marked(results: Results) -> Results:
    """The results with a mark behind the name of what is not lossless, to be shown so."""
    return {f"{name}{_mark(name, results)}": result for name, result in results.items()}


def _mark(name: str, results: Results) -> str:
    found = flaw(name, results)
    return MARKS[found] if found else ""


def footnotes(results: Results, known_fault: str | None) -> list[str]:
    """What the marks mean, a sentence or two each; none where nothing is marked.

    Args:
        results: reports/bench/NAME.json by name.
        known_fault: What is known to be wrong with this engine's sampling, a clause; or None.
    """
    found = []
    flaws = {name: flaw(name, results) for name in results}
    if wrong := [name for name in flaws if flaws[name] == GREEDY]:
        counts = ", ".join(f"{num_wrong(name, results)} of {name}" for name in wrong)
        found.append(
            f"‡ {GREEDY.capitalize()}: greedy answers that leave the verifier's by more than "
            f"rounding explains, {counts}."
        )
    if wrong := [name for name in flaws if flaws[name] == SAMPLED]:
        text = (
            f"† {SAMPLED.capitalize()}: {', '.join(wrong)}. At temperature 1 the samples have "
            "another distribution than the verifier's"
        )
        text += f": {known_fault}." if known_fault else ", and no cause is known."
        if (results.get("none", {}).get("sampling") or {}).get("lossless"):
            text += " A server without speculation is not affected: `none` passes the same test."
        found.append(text)
    return found


def num_wrong(name: str, results: Results) -> int:
    """Greedy answers that left the reference's by more than rounding, at loads that can tell.

    Where `none` leaves itself too, only what is more than that counts: by Fisher's exact test, at
    1%, one-sided.
    """
    own = {load_label(row): row for row in _compared(results.get("none", {"rows": []}))}
    return sum(
        row["num_not_rounding"]
        for row in _compared(results[name])
        if _is_more(row, own.get(load_label(row)))
    )


def _is_more(row: Row, none: Row | None) -> bool:
    if none is None or not none["num_not_rounding"]:
        return bool(row["num_not_rounding"])
    table = [
        [one["num_not_rounding"], one["num_requests"] - one["num_not_rounding"]]
        for one in (row, none)
    ]
    return bool(fisher_exact(table, alternative="greater").pvalue < _SIGNIFICANT)


_SIGNIFICANT = 0.01


def fidelity_section(results: Results) -> list[str]:
    """Markdown: how often outputs were the same, a line per method and K, a column per load."""
    rows = [(name, row) for name, result in results.items() for row in _compared(result)]
    if not rows:
        return []
    loads = [load_label(row) for row in sorted((row for _, row in rows), key=load_order)]
    loads = list(dict.fromkeys(loads))
    lines = [
        "## Is greedy output lossless?",
        "",
        "Share of answers that are the baseline's token by token, by load; the earliest token at "
        "which one was not (from 0); the largest gap between the two candidates there, in nats, as "
        "the baseline's server sees it: where it is small, rounding decides; and answers that "
        "rounding does not explain. `none` is compared with itself.",
        "",
        f"| method | K | {' | '.join(loads)} | first divergence | largest gap | not rounding |",
        f"| --- | ---: |{' ---: |' * (len(loads) + 3)}",
    ]
    alike: dict[tuple[str, int], list[Row]] = {}
    for name, row in rows:
        alike.setdefault((name, row["num_speculative_tokens"]), []).append(row)
    lines += [_line(name, k, of_k, loads) for (name, k), of_k in alike.items()]
    return [*lines, "", *_sentences(results)]


def _line(name: str, k: int, rows: list[Row], loads: list[str]) -> str:
    same = {load_label(row): f"{row['identical_outputs']:.0%}" for row in rows}
    positions = [one for row in rows if (one := row["first_divergence"]) is not None]
    gaps = [one for row in rows if (one := row["largest_gap"]) is not None]
    cells = [name, str(k), *(same.get(load, "-") for load in loads)]
    cells += [str(min(positions, default="-")), f"{max(gaps):.2g}" if gaps else "-"]
    return f"| {' | '.join(cells)} | {sum(row['num_not_rounding'] for row in rows)} |"


def _sentences(results: Results) -> list[str]:
    found = [
        f"- **{name} is not lossless**: in {wrong} of its greedy answers the first other token is "
        "not nearly as likely to the baseline as the baseline's own."
        for name in results
        if (wrong := num_wrong(name, results))
    ]
    none = _compared(results.get("none", {"rows": []}))
    found += [
        f"- `none` left itself by more than rounding in {row['num_not_rounding']} of "
        f"{row['num_requests']} answers at {load_label(row)}."
        for row in none
        if row["num_not_rounding"]
    ]
    return [*found, ""] if found else []


def _compared(result: dict[str, Any]) -> list[Row]:
    return [
        row
        for row in result["rows"]
        if row["category"] == ALL and row.get("identical_outputs") is not None
    ]

"""Is a method lossless: are its greedy outputs those of the verifier alone? From the results.

The bench compares outputs and asks the reference about every first difference
(specmill/lossless.py). `none` is compared with itself: where even it leaves its reference by more
than rounding, a method is blamed only for what is more than that.
"""

from typing import Any

from scipy.stats import fisher_exact

from specmill.rows import Results, Row, load_label, load_order
from specmill.samples import ALL


def flaw(name: str, results: Results) -> str | None:
    """What speaks against a method: its greedy outputs, else its samples at temperature 1."""
    if num_wrong(name, results):
        return "not lossless"
    sampled = (results[name].get("sampling") or {}).get("lossless")
    return "not lossless when sampled" if sampled is False else None


def marked(results: Results, *, bold: bool = True) -> Results:
    """The results with what speaks against a method behind its name, to be shown so."""
    flaws = {name: flaw(name, results) for name in results}
    stars = "**" if bold else ""
    return {
        f"{name} ({stars}{flaws[name]}{stars})" if flaws[name] else name: result
        for name, result in results.items()
    }


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

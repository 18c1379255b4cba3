"""Is a method lossless: are its outputs those of the verifier alone? Functions of the results.

Greedy outputs are compared in the bench (specmill/lossless.py). `none` is compared with itself, and
what it reaches under the same load is what any method can be asked for.
"""

from typing import Any

from specmill.rows import Results, load_name
from specmill.samples import ALL


def faults(result: dict[str, Any]) -> list[str]:
    """Why a method is not lossless; empty when nothing speaks against it."""
    found = []
    wrong = sum(row.get("num_not_rounding") or 0 for row in _overall(result))
    if wrong:
        found.append(
            f"{wrong} greedy answers left the reference's at a token that the reference does not "
            "find nearly as likely as its own: rounding does not explain that"
        )
    if (result.get("sampling") or {}).get("lossless") is False:
        found.append("its samples at temperature 1 do not have the verifier's distribution")
    return found


def fidelity_section(results: Results) -> list[str]:
    """Markdown: how often outputs were the same, by load, and what was found at temperature 1."""
    shown = {name: _overall(result) for name, result in results.items()}
    shown = {name: rows for name, rows in shown.items() if rows}
    if not shown:
        return []
    lines = [
        "## Losslessness",
        "",
        "Share of greedy answers that are the reference's token by token, the earliest token at "
        "which one was not, and the largest gap between the two candidates there, in nats, as the "
        "reference sees it: where it is small, rounding decides. The row of `none` is what it "
        "reaches against itself.",
        "",
        "| method | K | load | same output | first divergence | largest gap | not rounding |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for name, rows in shown.items():
        for row in rows:
            lines.append(
                f"| {name} | {row['num_speculative_tokens']} | {load_name(row)} | "
                f"{row['identical_outputs']:.0%} | {_text(row['first_divergence'])} | "
                f"{_text(row['largest_gap'])} | {row['num_not_rounding']} |"
            )
    broken = [f"- **{name} is not lossless**: {fault}."
              for name, result in results.items() for fault in faults(result)]  # fmt: skip
    return [*lines, "", *broken, *([""] if broken else [])]


def _overall(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in result["rows"]
            if row["category"] == ALL and row.get("identical_outputs") is not None]  # fmt: skip


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"

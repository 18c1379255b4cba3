"""What the rows say about the heads they serve: for whom each was made, and why one falls short.

Pure functions of the benches' JSON. A bench's `head` holds what was found out about its head before
it was served (specmill/inspection.py).
"""

from typing import Any

from specmill.rows import Results, headline_rows, load_order
from specmill.samples import ALL
from specmill.tables import cell

_SOUND = 0.7
"""Share of its offline acceptance that a head keeps when it is served as it should be. Ours keep
0.85 to 1.05 of it: bench prompts are other prompts than the held-out ones."""


def heads_section(results: Results) -> list[str]:
    """Markdown: a table of the heads served, then a line per row that needs an explanation."""
    with_head = {name: result for name, result in results.items() if result["head"]}
    explained = [line for name, result in results.items() for line in causes(name, result)]
    if not with_head and not explained:
        return []
    lines = ["## Heads", ""]
    if with_head:
        lines += [
            "Position 0 is the share of drafts whose first token was accepted. Offline, the head "
            "was run on stored hidden states of held-out samples before it was served.",
            "",
            "| row | trained for | run on | position 0, offline | served |",
            "| --- | --- | --- | ---: | ---: |",
        ]
        for name, result in with_head.items():
            head = result["head"]
            offline, served = head.get("offline_acceptance_pos_0"), served_at_0(result)
            lines.append(
                f"| {name} | {cell(head.get('trained_for') or 'not said')} | "
                f"{cell(head['run_on'])} | {_rate(offline)} | {_rate(served)} |"
            )
        lines.append("")
    return [*lines, *(f"- {line}" for line in explained), *([""] if explained else [])]


def causes(name: str, result: dict[str, Any]) -> list[str]:
    """What is likely wrong with a row's head; nothing about a sound one, or one not served."""
    if "not_served" in result:
        return []
    head = result["head"]
    found = [f"**{name}**: {sentence}" for sentence in (head.get("findings") or {}).values()]
    offline, served = head.get("offline_acceptance_pos_0"), served_at_0(result)
    if not found and offline is not None and served is not None and served < _SOUND * offline:
        found = [
            f"**{name}**: accepted at position 0 {served:.2f}, but {offline:.2f} on stored hidden "
            "states: the head is sound, what the engine feeds it is not; compare the aux layer ids "
            "and norms in its config with those it was trained with, and the engine's version"
        ]
    return found


def served_at_0(result: dict[str, Any]) -> float | None:
    """Acceptance at position 0, headline K, all prompt types, at the lowest load."""
    rows = [row for row in headline_rows(result) if row["category"] == ALL]
    rate = min(rows, key=load_order).get("acceptance_rate_pos_0")
    return None if rate is None else float(rate)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

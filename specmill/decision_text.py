"""The decision record as Markdown: the verdict, what the run can decide, a line per option."""

from typing import Any

from specmill.decision import STATUSES
from specmill.options import ADOPT, PENDING, RULED_OUT
from specmill.tables import cell, document

_GATES = {ADOPT: "Reconsider if", PENDING: "Worth it if", RULED_OUT: "Reopen if"}

RULES = """\
An interval is the 95% interval of the speed-up over all prompt types at a load, against the same
server without speculation; the loads measured are taken for those that will be served.

- **Adopt**: faster at some load and slower at none. K by requests in flight may be slower where it
  drafts nothing, by less than it gains elsewhere.
- **Ruled out**: faster at no load, and where no difference is shown none was predicted either; or
  faster at some loads and slower at others, and a schedule of K cannot help.
- **Pending**: everything else. What was not measured is pending while some predicted interval
  reaches above no change.
- What is not lossless, greedy or sampled, is never adopted.
- *Would change that*: what would have to be the case for another status. Tokens per step are over
  all steps, with a draft or without; where they break even is predicted from step times.
- An option stays listed when its row is gone. Options and what would change them are written by
  hand in `decisions.yaml`.""".splitlines()


def decision_text(record: dict[str, Any]) -> str:
    """reports/decision.md.

    Args:
        record: Content of reports/decision.json (specmill.decision).
    """
    lines = ["# Decision", "", f"**{record['verdict']}**", ""]
    lines += ["## What this run can decide", "", *limit_lines(record), ""]
    if record["options"]:
        lines += ["## Options", "", *options_table(record), ""]
        lines += [line for note in record["footnotes"] for line in (note, "")]
        lines += ["## Evidence", "", *evidence_lines(record), ""]
    lines += [f"## {changes_title(record)}", "", *change_lines(record), ""]
    return document([*lines, "## Rules", "", *RULES])


def limit_lines(record: dict[str, Any]) -> list[str]:
    """List items: what the run can tell apart, and how far its predictions were off."""
    lines = [f"- {line}" for line in record["limits"]]
    error = record["prediction_error"]
    if error is not None:
        lines.append(f"- Predictions that were measured too were off by {error:.1%} in the median.")
    return lines or ["- Nothing was compared, so nothing."]


def options_table(record: dict[str, Any]) -> list[str]:
    """A line per option, a column per load."""
    options = record["options"]
    used = {load for option in options for load in option["speeds"]}
    loads = [load for load in record["loads"] if load in used]
    loads += sorted(used - {*loads})  # of an option whose row is gone
    headings = ["option", "status", "rests on", *loads, "against it", "would change that"]
    rules = ["---"] * 3 + ["---:"] * len(loads) + ["---"] * 2
    lines = [f"| {' | '.join(map(cell, row))} |" for row in (headings, rules)]
    for status in STATUSES:
        lines += [_line(one, loads) for one in options if one["status"] == status]
    if used:
        lines += [
            "",
            "Change of speed with its 95% interval: **bold** where the whole of it is faster or "
            "slower, *in italics* as predicted.",
        ]
    return lines


def _line(option: dict[str, Any], loads: list[str]) -> str:
    cells = [option["name"], option["status"], option["by"]]
    cells += [option["speeds"].get(load, "-") for load in loads]
    cells += ["; ".join(option["against"]) or "-", option["gate"] or "-"]
    return f"| {' | '.join(map(cell, cells))} |"


def evidence_lines(record: dict[str, Any]) -> list[str]:
    """List items: an option, what is known of it, and what would change its status."""
    lines = []
    for option in record["options"]:
        said = [f"- **{option['name']}** ({option['status']}).", *option["evidence"]]
        if option["gate"]:
            said.append(f"*{_GATES[option['status']]}* {option['gate']}.")
        lines.append(_one_line(" ".join(said)))
    return lines


def changes_title(record: dict[str, Any]) -> str:
    """Since when something changed."""
    since = f" since the record of {record['compared_with']}" if record["compared_with"] else ""
    return f"What changed{since}"


def change_lines(record: dict[str, Any]) -> list[str]:
    """List items: what changed."""
    return [f"- {_one_line(one)}" for one in record["changes"]]


def _one_line(text: str) -> str:
    """What an engine said may have line breaks, which would end an item."""
    return " ".join(text.split())

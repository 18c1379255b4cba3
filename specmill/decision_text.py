"""The decision record as Markdown."""

from typing import Any

from specmill.decision import STATUSES
from specmill.options import ADOPT, PENDING, RULED_OUT

_TITLES = {ADOPT: "Adopt", PENDING: "Pending", RULED_OUT: "Ruled out"}
_GATES = {ADOPT: "Reconsider if", PENDING: "Worth it if", RULED_OUT: "Reopen if"}

_RULES = """\
## Rules

An interval is the 95% interval of the speed-up over all prompt types at a load, against the same
server without speculation; the loads measured are taken for those that will be served.

- **Adopt**: faster at some load and slower at none. K by requests in flight may be slower where it
  drafts nothing, by less than it gains elsewhere.
- **Ruled out**: faster at no load, and where no difference is shown none was predicted either; or
  faster at some loads and slower at others, and a schedule of K cannot help.
- **Pending**: everything else. What was not measured is pending while some predicted interval
  reaches above no change.
- What is not lossless, greedy or sampled, is never adopted.
- A gate is what would have to be the case for another status. Tokens per step are over all steps,
  with a draft or without; where they break even is predicted from step times.
- An option stays listed when its row is gone. Options and gates are written by hand in
  `decisions.yaml`.""".splitlines()


def decision_text(record: dict[str, Any]) -> str:
    """reports/decision.md.

    Args:
        record: Content of reports/decision.json (specmill.decision).
    """
    lines = ["# Decision", "", f"**{record['verdict']}**", ""]
    error = record["prediction_error"]
    if error is not None:
        lines += [f"Predictions that were measured too were off by {error:.1%} in the median.", ""]
    for status in STATUSES:
        options = [option for option in record["options"] if option["status"] == status]
        if options:
            lines += [f"## {_TITLES[status]}", "", *map(_item, options), ""]
    since = f" since the record of {record['compared_with']}" if record["compared_with"] else ""
    lines += [f"## What changed{since}", "", *(f"- {_line(one)}" for one in record["changes"]), ""]
    return "\n".join([*lines, *_RULES]) + "\n"


def _item(option: dict[str, Any]) -> str:
    said = [f"- **{option['name']}** ({option['by']}).", *option["evidence"]]
    if option["gate"]:
        said.append(f"*{_GATES[option['status']]}* {option['gate']}.")
    return _line(" ".join(said))


def _line(text: str) -> str:
    """What an engine said may have line breaks, which would end an item."""
    return " ".join(text.split())

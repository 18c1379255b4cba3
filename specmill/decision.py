"""The decision record: what to serve, every option with its status, and what changed.

Options come from specmill.options (rows at every K), schedule_options (K by requests in flight),
head_options (the trained head) and hand_options (written by hand); their rules are there. Of those
adopted the one with the largest geometric mean of speed-ups over the measured loads is served.

An option that the last record has and this one does not, as after a row was taken out of
params.yaml, stays listed as it was; but nothing is adopted that is not measured any more.
"""

import re
from dataclasses import replace
from math import inf
from typing import Any

from pydantic import BaseModel, ValidationError

from specmill.engine_faults import known_sampling_fault
from specmill.fidelity import flaw, footnotes
from specmill.grounds import Grounds
from specmill.hand_options import Decisions, with_hand
from specmill.head_options import head_options
from specmill.options import (
    ADOPT,
    BOTH,
    BY_HAND,
    MEASURED,
    PENDING,
    RULED_OUT,
    Option,
    fixed_options,
)
from specmill.params_scheduled import unscheduled_name
from specmill.revision import Committed
from specmill.rows import load_order, load_sentence
from specmill.schedule import SCHEDULABLE, describe, most_drafted
from specmill.schedule_options import schedule_option
from specmill.tables import change
from specmill.yardstick import blur, is_test, limits

STATUSES = (ADOPT, PENDING, RULED_OUT)

_CARRIED = "Not among the options any more; as it was last recorded:"


class RecordedOption(BaseModel):
    """An option as the record keeps it."""

    name: str
    method: str | None
    k: int | None
    status: str
    evidence: list[str]
    gate: str | None
    by: str
    against: list[str]
    speeds: dict[str, str]


class Record(BaseModel):
    """As much of reports/decision.json as a later one is compared with."""

    verdict: str
    options: list[RecordedOption]
    changes: list[str]
    compared_with: str | None


def decide(grounds: Grounds, written: Decisions, last: Committed) -> dict[str, Any]:
    """The record.

    Args:
        grounds: Results and predictions.
        written: What was written by hand.
        last: reports/decision.json as Git has it.

    Returns:
        `verdict`, one sentence; `deploy`, what reports/serve.sh serves (`method`, a row of
        params.yaml, `k`, the largest, and `ranges`, its K by requests in flight), None without
        speculation; `deploy_greedy`, the same if no request is ever sampled; `options`, with
        the fields of RecordedOption; `loads`, their labels in order; `limits`, what the run can
        decide, and `footnotes`, what marks mean, sentences; `changes` since the record of the
        commit `compared_with`; and `prediction_error`, the median absolute error of predictions
        that were measured, or None.

    Raises:
        ValueError: when an option by hand has the name of one that is computed.
    """
    found = [option for name in grounds.results for option in _served(grounds, name)]
    found += head_options(grounds)
    previous, reason = _last_record(last)
    known = {option.name for option in found} | {one.name for one in written.options}
    found += _carried(previous, known)
    found = with_hand(found, written)
    best, greedy = (_best(found, greedy=greedy) for greedy in (False, True))
    current = {
        "verdict": _verdict(grounds, found, best, greedy),
        "options": [_recorded(option) for option in sorted(found, key=_order)],
    }
    if previous and previous.model_dump(include=set(current)) == current:
        changes, compared_with = previous.changes, previous.compared_with  # it is that record
    else:
        changes = changes_since(previous, current) if previous else [reason]
        compared_with = last.commit if previous else None
    return current | {
        "deploy": _deployment(best),
        "deploy_greedy": _deployment(best or greedy),
        "loads": grounds.load_labels(),
        "limits": limits(grounds.results, grounds.curves),
        "footnotes": footnotes(grounds.results, known_sampling_fault(grounds.hardware)),
        "changes": changes,
        "compared_with": compared_with,
        "prediction_error": (grounds.check or {}).get("median_absolute_error"),
    }


def _served(grounds: Grounds, name: str) -> list[Option]:
    result = grounds.results[name]
    if "schedule" in result:  # an option of the row that it is made from
        return []
    found = fixed_options(grounds, name)
    if result.get("served_by") in SCHEDULABLE:
        found.append(schedule_option(grounds, name))
    return found


def _order(option: Option) -> tuple[int, float, str]:
    return STATUSES.index(option.status), -(option.gain or 0.0), option.name


def _recorded(option: Option) -> dict[str, Any]:
    return {name: getattr(option, name) for name in RecordedOption.model_fields}


def _best(options: list[Option], *, greedy: bool) -> Option | None:
    """The fastest of those that may be served."""
    may = [
        option
        for option in options
        if option.by == MEASURED
        and option.gain is not None
        and (option.greedy_only if greedy else option.status == ADOPT)
    ]
    return min(may, key=_order, default=None)


def _deployment(option: Option | None) -> dict[str, Any] | None:
    if option is None:
        return None
    assert option.method is not None, "what is served is a row"
    ranges = option.ranges
    k = most_drafted(ranges) if ranges else option.k
    method = unscheduled_name(option.method) if ranges else option.method
    return {"option": option.name, "method": method, "k": k, "ranges": ranges}


def _verdict(
    grounds: Grounds, options: list[Option], best: Option | None, greedy: Option | None
) -> str:
    said = _what_to_serve(grounds, options, best, greedy)
    if is_test(grounds.results):
        return f"Test configuration, whose speeds decide nothing; by them: {said}"
    return said


def _what_to_serve(
    grounds: Grounds, options: list[Option], best: Option | None, greedy: Option | None
) -> str:
    if best is not None:
        return f"Serve {_speed(grounds, best)}."
    if greedy is not None:
        return (
            f"Serve without speculation, or, if no request is ever sampled, "
            f"{_speed(grounds, greedy)}; sampled requests would get another distribution."
        )
    if not any(option.by in (MEASURED, BOTH) and option.gain is not None for option in options):
        return "Serve without speculation until a row that speculates has been measured."
    said = (
        "Serve without speculation: nothing was shown to be faster at some load and slower at none"
    )
    return f"{said}{_nearest(grounds, options)}."


def _nearest(grounds: Grounds, options: list[Option]) -> str:
    """What is pending and closest to being adopted; or why that cannot be said."""
    pending = [
        option
        for option in options
        if option.status == PENDING and option.gate and option.gain is not None
    ]
    if not pending:
        return ""
    sound = [option for option in pending if not _is_flawed(grounds, option)]
    wide = blur(grounds.results)
    if wide is not None:
        by = f"by up to {wide:.0%}" if wide != inf else "by nobody knows how much"
        return f"; what is nearest cannot be said, for `none` may differ from itself {by}"
    if not sound:
        return "; nothing that is pending may be adopted before its output is lossless"
    nearest = min(sound, key=_order)
    return f"; nearest is {nearest.name}, if {nearest.gate}"


def _is_flawed(grounds: Grounds, option: Option) -> bool:
    name = option.method or ""
    rows = {name, unscheduled_name(name)} & grounds.results.keys()
    return any(flaw(row, grounds.results) for row in rows)


def _speed(grounds: Grounds, option: Option) -> str:
    """An option and its speed at every load."""
    k = most_drafted(option.ranges) if option.ranges else option.k
    assert option.method is not None, "what was measured is a row"
    assert k is not None, "and has a K"
    rows = sorted(grounds.measured(option.method, k), key=load_order)
    what = f"{option.method} with K={k}"
    if option.ranges:
        what = f"{unscheduled_name(option.method)} with {describe(option.ranges)}"
    return f"{what}: " + ", ".join(f"{change(row)} at {load_sentence(row)}" for row in rows)


def _last_record(last: Committed) -> tuple[Record | None, str]:
    """The last record; or None and why there is nothing to compare with."""
    if last.commit is None:
        return None, "There is no Git history here: what changed is not known."
    if last.text is None:
        return None, "This is the first record; none is committed yet."
    try:
        return Record.model_validate_json(last.text), ""
    except ValidationError:
        return None, (
            f"The record of {last.commit} is of another version and cannot be compared with."
        )


def _carried(previous: Record | None, known: set[str]) -> list[Option]:
    """What the last record has and nothing here speaks of; what was written by hand is dropped."""
    kept = []
    for one in previous.options if previous else []:
        if one.name in known or one.by == BY_HAND or one.status not in STATUSES:
            continue
        option = Option(**one.model_dump())
        if option.evidence[:1] != [_CARRIED]:
            option = replace(option, evidence=[_CARRIED, *option.evidence])
        if option.status == ADOPT:
            option = replace(option, status=PENDING, gate="it is a row again and still faster")
        kept.append(option)
    return kept


def changes_since(previous: Record, current: dict[str, Any]) -> list[str]:
    """What is new, gone or of another status, a sentence each.

    Args:
        previous: The last record.
        current: `verdict` and `options` of this one.
    """
    before = {option.name: option for option in previous.options}
    now = {option["name"]: option for option in current["options"]}
    found = []
    if previous.verdict != current["verdict"]:
        found.append(f"The verdict was: {previous.verdict}")
    for name, option in now.items():
        if name not in before:
            found.append(f"New: {name}, {option['status']}.")
        elif before[name].status != option["status"]:
            reason = f" {option['evidence'][0]}" if option["evidence"] else ""
            found.append(f"{name}: {before[name].status} before, {option['status']} now.{reason}")
    found += [
        f"Gate of {name}: {option['gate'] or 'none'}; before: {before[name].gate or 'none'}."
        for name, option in now.items()
        if name in before
        and before[name].status == option["status"]
        and _wording(before[name].gate) != _wording(option["gate"])
    ]
    found += [f"Gone: {name}, {before[name].status} before." for name in before if name not in now]
    return found or ["No status and no gate: figures only."]


def _wording(gate: str | None) -> str | None:
    """A gate without its figures, which every measurement moves."""
    return gate and re.sub(r"\d+(\.\d+)?", "", gate)

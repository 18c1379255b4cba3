"""K by the number of requests in flight as an option.

It is judged as a row with one K is (specmill.options), but for loads at which it drafts nothing:
what it costs there, the price of having a draft model at hand, may be had for a larger gain
elsewhere. Beside that stands how it does against the best fixed K.
"""

from specmill.evidence import against, flaws, measured, predicted, prompt_types, speeds
from specmill.gates import loads
from specmill.grounds import Grounds
from specmill.intervals import FASTER, SLOWER
from specmill.options import (
    ADOPT,
    MEASURED,
    PENDING,
    PREDICTED,
    RULED_OUT,
    Judgement,
    Option,
    judge,
    mean_gain,
    rests_on,
    unless_flawed,
)
from specmill.params_scheduled import scheduled_name
from specmill.rows import Row, load_sentence
from specmill.schedule import Ranges, describe, k_at, most_drafted
from specmill.tables import change


def schedule_option(grounds: Grounds, name: str) -> Option:
    """The schedule of a row that can have one.

    Args:
        grounds: What is known.
        name: The row without it.
    """
    result = grounds.results.get(scheduled_name(name), {})
    ranges: Ranges | None = result.get("schedule")
    if ranges and most_drafted(ranges):
        if "not_served" not in result:
            return _measured(grounds, name, ranges)
        gate = f"what it lacked is there: `dvc repro -f -s bench_scheduled@{name}` asks again"
        evidence = [f"Not served: {result['not_served']}."]
        return _option(name, RULED_OUT, evidence, gate, MEASURED, ["not served"])
    planned = (grounds.schedules or {}).get(name)
    if planned is None or planned["ranges"] is None:
        why = planned["reason"] if planned else "there is no reports/schedule.json"
        gate = "its speed-ups are predicted, of which a schedule is made"
        lacks = ["not measured", *flaws(grounds, name)]
        return _option(name, PENDING, [f"There is no schedule: {why}."], gate, PREDICTED, lacks)
    return _planned(grounds, name, planned["ranges"])


def _option(
    name: str,
    status: str,
    evidence: list[str],
    gate: str | None,
    by: str,
    lacks: list[str],
    speeds: dict[str, str] | None = None,
) -> Option:
    row = scheduled_name(name)
    return Option(_label(name), row, None, status, evidence, gate, by, lacks, speeds or {})


def _label(name: str) -> str:
    return f"{name}, K by requests in flight"


def _planned(grounds: Grounds, name: str, ranges: Ranges) -> Option:
    if not most_drafted(ranges):
        evidence = [
            f"No K is predicted to be faster at 1 to {ranges[-1][1]} requests in flight.",
            *_basis(grounds, name),
        ]
        judgement = unless_flawed(grounds, name, (RULED_OUT, "one of its K is predicted faster"))
        lacks = ["no K is predicted faster", *flaws(grounds, name)]
        return _option(name, judgement[0], evidence, judgement[1], PREDICTED, lacks)
    chosen = {
        load: row
        for k in sorted({k for _, _, k in ranges if k})
        for load, row in grounds.foreseen(name, k).items()
        if k_at(ranges, load) == k
    }
    evidence = [f"{describe(ranges)}; not measured.", *predicted([*chosen.values()])]
    evidence += _basis(grounds, name)
    hoped = (PENDING, f"it is measured, and faster (`scheduled.{name}` in params.yaml)")
    status, gate = unless_flawed(grounds, name, hoped)
    lacks = ["not measured", *flaws(grounds, name)]
    return _option(name, status, evidence, gate, PREDICTED, lacks, speeds([], chosen))


def _basis(grounds: Grounds, name: str) -> list[str]:
    """At which loads something was predicted."""
    rows = grounds.predicted["rows"] if grounds.predicted else []
    found = sorted({row["concurrency"] for row in rows if row["method"] == name})
    if not found:
        return []
    loads = " and ".join(map(str, found))
    return [f"Made of predictions for {loads} in flight; between them linear is assumed."]


def _measured(grounds: Grounds, name: str, ranges: Ranges) -> Option:
    row_name, k = scheduled_name(name), most_drafted(ranges)
    rows = grounds.measured(row_name, k)
    judgement = _judge(grounds, row_name, k, rows, ranges)
    status, gate = unless_flawed(grounds, row_name, judgement)
    evidence = [f"{describe(ranges)}.", *measured(rows, {})]
    evidence += [_beside_fixed(grounds, name, row, ranges) for row in rows]
    planned = (grounds.schedules or {}).get(name, {}).get("ranges")
    if planned != ranges:
        other = describe(planned) if planned else "there is none"
        evidence.append(f"The schedule as predicted by now is another: {other}.")
    evidence += prompt_types(grounds, row_name, k)
    return Option(
        _label(name), row_name, None, status, evidence, gate, rests_on(status, rows),
        against(grounds, row_name, rows, {}), speeds(rows, {}), mean_gain(rows), ranges,
        greedy_only=(judgement[0], status) == (ADOPT, PENDING),
    )  # fmt: skip


def _judge(grounds: Grounds, name: str, k: int, rows: list[Row], ranges: Ranges) -> Judgement:
    faster, slower = (
        [row for row in rows if row["verdict"] == verdict] for verdict in (FASTER, SLOWER)
    )
    if not faster or not slower:
        return judge(grounds, name, k, rows)
    price = 1 / min(row["speedup"] for row in slower)
    gain = max(row["speedup"] for row in faster)
    if all(_drafts_nothing(row, ranges) for row in slower) and price < gain:
        return ADOPT, None
    return RULED_OUT, f"it is served at {loads(faster)} only"


def _drafts_nothing(row: Row, ranges: Ranges) -> bool:
    return row["concurrency"] is not None and k_at(ranges, row["concurrency"]) == 0


def _beside_fixed(grounds: Grounds, name: str, row: Row, ranges: Ranges) -> str:
    """A schedule at one load, and the best of the fixed K there."""
    at = load_sentence(row)
    if _drafts_nothing(row, ranges):
        return f"At {at} it drafts nothing; what that costs is {change(row)}."
    place = [row["concurrency"], row["rate"], row["context"]]
    fixed = [
        other
        for k in {one["num_speculative_tokens"] for one in grounds.results[name]["rows"]}
        for other in grounds.measured(name, k)
        if [other["concurrency"], other["rate"], other["context"]] == place
    ]
    if not fixed:
        return f"No fixed K was measured at {at}."
    best = max(fixed, key=lambda other: float(other["speedup"]))
    against = f"the best fixed K at {at}, K={best['num_speculative_tokens']}: {change(best)}"
    if best["speedup_low"] is None:
        return f"There is no interval of {against}."
    where = "within or above" if row["speedup"] >= best["speedup_low"] else "below"
    return f"It is {where} the interval of {against}."

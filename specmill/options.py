"""Rows at every K, each with a status. The rules, of intervals over all prompt types at a load:

    adopt        faster at some load and slower at none
    ruled out    faster at no load, and where no difference is shown none was predicted either: the
                 predicted interval does not reach above no change; or faster at some loads, slower
                 at others, and a schedule of K cannot help
    pending      everything else: no difference shown where one may be, no interval, or faster at
                 some loads and slower at others while the schedule has not been measured

A method that is not lossless (specmill.fidelity) is never adopted. What was not measured is ruled
out when no predicted interval reaches above no change, and else pending. The loads measured are
taken for those that will be served: measure only these (`bench.concurrency`, `bench.rates`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import exp, inf, log
from statistics import mean

from specmill.evidence import against, measured, predicted, prompt_types, speeds
from specmill.fidelity import flaw, num_wrong
from specmill.gates import break_even, loads
from specmill.grounds import Grounds, plain_load
from specmill.intervals import FASTER, SLOWER
from specmill.params_scheduled import scheduled_name
from specmill.rows import Row
from specmill.samples import ALL
from specmill.schedule import SCHEDULABLE, Ranges

ADOPT, RULED_OUT, PENDING = "adopt", "ruled out", "pending"
MEASURED, PREDICTED, BOTH, BY_HAND = "measured", "predicted", "measured and predicted", "hand"

Judgement = tuple[str, str | None]
"""A status, and the gate to another."""


@dataclass(frozen=True)
class Option:
    """Something that could be done."""

    name: str
    method: str | None
    """Row of the comparison."""
    k: int | None
    status: str
    evidence: list[str]
    """Sentences."""
    gate: str | None
    """What would have to be the case for another status, a clause; None when nothing is open."""
    by: str
    """What its status rests on: `measured`, `predicted`, `measured and predicted` or `hand`."""
    against: list[str] = field(default_factory=list)
    """All that keeps it from being adopted, clauses."""
    speeds: dict[str, str] = field(default_factory=dict)
    """Its change by load, as text; what is predicted in italics."""
    gain: float | None = None
    """Geometric mean of its speed-ups over loads."""
    ranges: Ranges | None = None
    """Its K by requests in flight."""
    greedy_only: bool = False
    """Whether it would be adopted if no request were sampled."""


def fixed_options(grounds: Grounds, name: str) -> list[Option]:
    """A row at every K that was measured or predicted."""
    result = grounds.results[name]
    ks = {row["num_speculative_tokens"] for row in result["rows"]} - {0}
    rows = grounds.predicted["rows"] if grounds.predicted else []
    ks |= {row["k"] for row in rows if (row["method"], row["category"]) == (name, ALL)}
    return [_option(grounds, name, k) for k in sorted(ks)]


def _option(grounds: Grounds, name: str, k: int) -> Option:
    label, result = f"{name}, K={k}", grounds.results[name]
    refusal = result.get("not_served") or result.get("refused", {}).get(str(k))
    if refusal:
        again = f"what it lacked is there: `dvc repro -f -s bench@{name}` asks again"
        return Option(
            label, name, k, RULED_OUT, [f"Not served: {refusal}."], again, MEASURED, ["not served"]
        )
    rows, foreseen = grounds.measured(name, k), grounds.foreseen(name, k)
    if rows:
        judgement = judge(grounds, name, k, rows)
        status, gate = unless_flawed(grounds, name, judgement)
        evidence = [*measured(rows, foreseen), *prompt_types(grounds, name, k)]
        return Option(
            label, name, k, status, evidence, gate, rests_on(status, rows),
            against(grounds, name, rows, foreseen), speeds(rows, {}), mean_gain(rows),
            greedy_only=(judgement[0], status) == (ADOPT, PENDING),
        )  # fmt: skip
    if "source" in result:
        gate = "its file has a reference, or `methods` has a row that serves it"
        evidence = ["Measured by another tool, and compared with nothing."]
        return Option(label, name, k, PENDING, evidence, gate, MEASURED, ["compared with nothing"])
    expected = [*foreseen.values()]
    evidence = ["Not measured.", *predicted(expected)]
    hoped: Judgement = (RULED_OUT, break_even(grounds, name, k))
    if any(row["speedup_high"] > 1 for row in expected):
        hoped = (PENDING, f"`dvc exp run -S spec.tokens={k}` measures it faster")
    status, gate = unless_flawed(grounds, name, hoped)
    return Option(
        label, name, k, status, evidence, gate, PREDICTED, against(grounds, name, [], foreseen),
        speeds([], foreseen), mean_gain(expected),
    )  # fmt: skip


def judge(grounds: Grounds, name: str, k: int, rows: list[Row]) -> Judgement:
    """The status of a measured row, whatever its outputs are.

    Args:
        grounds: What is known.
        name: The row.
        k: Its K.
        rows: Of it, over all prompt types; at least one.
    """
    faster, slower = (
        [row for row in rows if row["verdict"] == verdict] for verdict in (FASTER, SLOWER)
    )
    if "source" in grounds.results[name]:
        return PENDING, "`methods` has a row that measures it here, with an interval"
    if faster:
        return _judge_faster(grounds, name, faster, slower)
    if few := [row for row in rows if row["verdict"] is None]:
        return PENDING, f"more pairs (bench.requests, bench.rounds) give {loads(few)} an interval"
    foreseen = grounds.foreseen(name, k)
    hopeful = [row for row in rows if row not in slower and _highest(foreseen, row) > 1]
    if not hopeful:
        return RULED_OUT, break_even(grounds, name, k)
    gate = break_even(grounds, name, k)
    if gained := [row for row in hopeful if row["speedup"] > 1]:
        more = "more rounds (bench.rounds, bench.precision) show a difference at"
        gate = f"{more} {loads(gained)}, or {gate}"
    return PENDING, gate


def rests_on(status: str, rows: list[Row]) -> str:
    """Of a measured row: where no difference is shown, only a prediction rules it out."""
    decided = {row["verdict"] for row in rows} <= {FASTER, SLOWER}
    faster = any(row["verdict"] == FASTER for row in rows)
    return MEASURED if status != RULED_OUT or decided or faster else BOTH


def _judge_faster(grounds: Grounds, name: str, faster: list[Row], slower: list[Row]) -> Judgement:
    if not slower:
        return ADOPT, None
    beside = grounds.results.get(scheduled_name(name), {"not_served": "it is no row"})
    if grounds.results[name]["served_by"] in SCHEDULABLE and "not_served" in beside:
        return PENDING, (
            f"K by requests in flight is measured (`scheduled.{name}` in params.yaml), which "
            "drafts nothing where that costs"
        )
    return RULED_OUT, f"it is served at {loads(faster)} only"


def _highest(foreseen: dict[int, Row], row: Row) -> float:
    """Upper bound of what was predicted for a row's load; what was not predicted may be all."""
    load = plain_load(row)
    return float(foreseen[load]["speedup_high"]) if load in foreseen else inf


def unless_flawed(grounds: Grounds, name: str, judgement: Judgement) -> Judgement:
    """The same, but a method whose outputs are not the verifier's is not adopted, and whatever else
    would reopen it, that has to be mended too.
    """
    if flaw(name, grounds.results) is None:
        return judgement
    status, gate = judgement
    wrong = num_wrong(name, grounds.results)
    mended = "no request is sampled, or its samples are right (†)"
    if wrong:
        mended = "its greedy answers are the verifier's own (‡)"
    if status == ADOPT:
        return RULED_OUT if wrong else PENDING, mended
    return status, f"{gate}; and {mended}" if gate else mended


def mean_gain(rows: Iterable[Row]) -> float | None:
    """Geometric mean of speed-ups; None of no row."""
    logs = [log(row["speedup"]) for row in rows]
    return exp(mean(logs)) if logs else None

"""The speed-up surface before anything is served: replayed acceptance times measured step times.

Pure functions of reports/replay/NAME.json and reports/curves.json. A cell that one of them does not
reach has no row, and `without` says why.
"""

from typing import Any

from specmill.between import NotMeasured
from specmill.expected import (
    Cell,
    Estimate,
    best_k,
    lengths_to_try,
    required_tokens,
    speedup,
    with_coverage,
)
from specmill.intervals import FASTER, SLOWER, UNDECIDED
from specmill.params import Spec
from specmill.params_bench import Bench
from specmill.rows import Row, load_label
from specmill.samples import ALL
from specmill.step_times import NONE, StepTimes, step_times

SEARCHED = "tokens"
"""The kind of rows that look their drafts up: they have no head that could be a better one."""


_NO_STEP_TIMES = {
    "rates": "how many requests will be in flight is not known, and step times depend on it",
    "context": "step times are of the bench prompts alone; context before them is not predicted",
}
"""Loads of params.yaml: bench that have no prediction."""


class _Missing:
    """Reasons for what has no row, each once, in the order they came up."""

    def __init__(self) -> None:
        self._reasons: dict[str, dict[str, None]] = {}

    def add(self, name: str, reason: str) -> None:
        self._reasons.setdefault(name, {})[reason] = None

    def texts(self) -> dict[str, str]:
        return {name: "; ".join(reasons) for name, reasons in self._reasons.items()}


def predict(
    curves: dict[str, Any],
    kinds: tuple[dict[str, str | None], dict[str, str]],
    replays: dict[str, dict[str, Any]],
    spec: Spec,
    bench: Bench,
) -> dict[str, Any]:
    """Predicted speed-up of every row of `methods`, at every K and number of requests in flight.

    Args:
        curves: Content of reports/curves.json.
        kinds: The kind of every row, and the reason of those that have none
            (specmill.curve_kinds: kinds_by_row).
        replays: Content of reports/replay/NAME.json by row of `methods`.
        spec: K, for what a better head would bring and for reasons.
        bench: Loads, and how long answers get.

    Returns:
        `kinds`, pairs of a row and its kind, no mapping, which would be columns of `dvc metrics`;
        `rows` by method, K, `concurrency` and category, with `speedup`, its interval,
        `tokens_per_step`, `step_ratio` and `break_even_tokens_per_step` (None when no acceptance is
        enough); `best`, the fastest K by method and concurrency, with how much faster than the
        second (`margin`, `next_k`); `better_head`, the speed-up of acceptance lengths up to K + 1
        at spec.tokens; `headline`, the best again by name, for `dvc metrics`; `without`, why
        something is missing.
    """
    named, _ = kinds
    missing = _without_step_times(bench)
    rows: list[Row] = []
    better: list[Row] = []
    for method, replay in replays.items():
        if (kind := named.get(method)) == NONE:
            continue
        times = _step_times(method, kinds, curves, missing)
        if not replay["replayed"]:
            missing.add(method, replay["reason"])
        elif times is not None:
            rows += _rows(method, replay, times, spec, bench, missing)
        if times is not None and kind != SEARCHED:
            better += _better(method, times, spec, bench, missing)
    best = _best(rows)
    return {
        "rows": rows,
        "kinds": [[method, kind] for method, kind in named.items()],
        "best": best,
        "better_head": better,
        "headline": _headline(best),
        "without": missing.texts(),
    }


def _without_step_times(bench: Bench) -> _Missing:
    missing = _Missing()
    for load, reason in _NO_STEP_TIMES.items():
        if any(getattr(bench, load)):
            missing.add(f"bench.{load}", reason)
    return missing


def _step_times(
    method: str,
    kinds: tuple[dict[str, str | None], dict[str, str]],
    curves: dict[str, Any],
    missing: _Missing,
) -> StepTimes | None:
    named, reasons = kinds
    kind = named.get(method)
    if kind is None:
        missing.add(method, reasons[method])
        return None
    try:
        return step_times(curves, kind)
    except NotMeasured as error:
        missing.add(method, str(error))
        return None


def plot_rows(predicted: dict[str, Any]) -> list[Row]:
    """The map of K and load, as the measured one (specmill.surface: speedup_by_k).

    A list is never empty, for DVC cannot plot an empty one: a row without a value stands in.
    """
    found = [_plotted(row) for row in predicted["rows"] if row["category"] == ALL]
    nothing = {
        "method": NONE, "num_speculative_tokens": 0, "load": None,
        "speedup": None, "speedup_low": None, "speedup_high": None, "verdict": None,
    }  # fmt: skip
    return found or [nothing]


def _rows(
    method: str,
    replay: dict[str, Any],
    times: StepTimes,
    spec: Spec,
    bench: Bench,
    missing: _Missing,
) -> list[Row]:
    replayed = {row["k"] for row in replay["rows"]}
    for k in sorted({spec.tokens, *spec.sweep} - replayed):
        missing.add(method, f"K {k} was not replayed")
    rows = []
    for found in sorted(replay["rows"], key=lambda row: row["k"]):
        if found["tokens_per_step_low"] is None:
            missing.add(method, f"too few answers of {found['category']} for an interval")
            continue
        for concurrency in bench.concurrency:
            cell = _cell(method, times, found["k"], concurrency, missing)
            if cell is None:
                continue
            tokens = Estimate(
                found["tokens_per_step"],
                found["tokens_per_step_low"],
                found["tokens_per_step_high"],
            )
            if times.kind == SEARCHED:
                try:
                    cell = with_coverage(cell, found["draft_coverage"], concurrency)
                except NotMeasured as error:
                    missing.add(method, str(error))
                    continue
            rows.append(
                _place(method, found["k"], concurrency)
                | {"category": found["category"]}
                | _figures(cell, tokens, bench.max_tokens)
            )
    return rows


def _better(
    method: str, times: StepTimes, spec: Spec, bench: Bench, missing: _Missing
) -> list[Row]:
    """What heads of other acceptance would bring, at the headline K."""
    rows = []
    for concurrency in bench.concurrency:
        cell = _cell(method, times, spec.tokens, concurrency, missing)
        if cell is not None:
            place = _place(method, spec.tokens, concurrency)
            lengths = map(Estimate.exact, lengths_to_try(spec.tokens))
            rows += [place | _figures(cell, length, bench.max_tokens) for length in lengths]
    return rows


def _cell(
    method: str, times: StepTimes, k: int, concurrency: int, missing: _Missing
) -> Cell | None:
    try:
        return times.cell(k, concurrency)
    except NotMeasured as error:
        missing.add(method, str(error))
        return None


def _place(method: str, k: int, concurrency: int) -> Row:
    return {"method": method, "k": k, "concurrency": concurrency}


def _figures(cell: Cell, tokens: Estimate, num_tokens: int) -> Row:
    gain = speedup(cell, tokens, num_tokens)
    needed = required_tokens(cell, 1.0, num_tokens)
    return {
        "speedup": round(gain.value, 4),
        "speedup_low": round(gain.low, 4),
        "speedup_high": round(gain.high, 4),
        "tokens_per_step": round(tokens.value, 4),
        "step_ratio": round(cell.ratio.value, 4),
        "break_even_tokens_per_step": None if needed is None else round(needed, 4),
    }


def _best(rows: list[Row]) -> list[Row]:
    """The fastest K by method and concurrency, over all prompt types."""
    options: dict[tuple[str, int], dict[int, Estimate]] = {}
    for row in rows:
        if row["category"] == ALL:
            gain = Estimate(row["speedup"], row["speedup_low"], row["speedup_high"])
            options.setdefault((row["method"], row["concurrency"]), {})[row["k"]] = gain
    found = []
    for (method, concurrency), speedups in options.items():
        best = best_k(speedups)
        found.append(
            _place(method, best.k, concurrency)
            | {
                "speedup": best.speedup.value,
                "speedup_low": best.speedup.low,
                "speedup_high": best.speedup.high,
                "next_k": best.next_k,
                "margin": round(best.margin, 4),
            }
        )
    return found


def _headline(best: list[Row]) -> dict[str, Any]:
    """`{"eagle3": {"c1": {"best_k": 2, "predicted_speedup": 1.1}}}`."""
    named: dict[str, Any] = {}
    for row in best:
        figures = {"best_k": row["k"], "predicted_speedup": row["speedup"]}
        named.setdefault(row["method"], {})[f"c{row['concurrency']}"] = figures
    return named


def _plotted(row: Row) -> Row:
    load = {"concurrency": row["concurrency"], "rate": None, "context": 0}
    low, high = row["speedup_low"], row["speedup_high"]
    return {
        "method": row["method"],
        "num_speculative_tokens": row["k"],
        "load": load_label(load),
        "speedup": row["speedup"],
        "speedup_low": low,
        "speedup_high": high,
        "verdict": FASTER if low > 1 else SLOWER if high < 1 else UNDECIDED,
    }

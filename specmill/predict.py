"""Does speculation pay, before anything is trained or served? A table of K and requests in flight.

From measured step times (`dvc repro curves` writes them) and the acceptance of some drafts:

    python -m specmill.predict --acceptance 0.5,0.3,0.1 --curves reports/curves.json

For a machine one does not have, from a model's config.json and the bytes a step moves:

    python -m specmill.predict --acceptance 0.6,0.4,0.25 --from-model config.json --bandwidth 12e12

Every cell has the predicted speed-up, its interval where step times have one, and the tokens per
step that break even. docs/prediction.md says how far to believe either form.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from specmill import predict_model
from specmill.between import NotMeasured
from specmill.expected import (
    Cell,
    Estimate,
    best_k,
    lengths_to_try,
    required_tokens,
    speedup,
    tokens_per_step,
    with_coverage,
)
from specmill.files import read_object
from specmill.step_times import NONE, check_points, step_times

_TARGETS = (1.0, 1.25, 1.5, 2.0)
"""Speed-ups to ask for."""
_HEAD = "eagle3"
"""What drafts unless something else is said."""
_FOR_CURVES = ("kind", "tokens")


@dataclass(frozen=True)
class Source:
    """Where step times come from."""

    cell: Callable[[int, int], Cell]
    """Of K and requests in flight; raises NotMeasured."""
    num_tokens: int
    """Of an answer."""
    concurrency: list[int]
    assumptions: list[str]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m specmill.predict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--acceptance", type=_rates, required=True, metavar="P0,P1,...",
        help="acceptance rate by position, unconditional (accepted there / drafts); as many as K",
    )  # fmt: skip
    parser.add_argument(
        "--coverage", type=float, default=1.0, metavar="SHARE",
        help="share of steps that draft at all (default 1: a head; n-gram finds less)",
    )  # fmt: skip
    parser.add_argument(
        "--concurrency", type=_counts, metavar="N,N,...",
        help="requests in flight (default: those of the curves; 1,8,32 with --from-model)",
    )  # fmt: skip
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--curves", type=Path, metavar="FILE", help="measured step times")
    source.add_argument("--from-model", type=Path, metavar="CONFIG", help="a model's config.json")
    measured = parser.add_argument_group("with --curves")
    measured.add_argument("--kind", help="what drafts (default: eagle3, or the only one there)")
    measured.add_argument("--tokens", type=int, help="tokens of an answer (default 64)")
    predict_model.add_options(parser.add_argument_group("with --from-model"))
    return parser


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
        tokens_per_step(rates)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return rates


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no list of numbers from 1 on")
    return counts


def main(arguments: list[str]) -> None:
    """The command line."""
    parser = _parser()
    options = parser.parse_args(arguments)
    others = _FOR_CURVES if options.from_model else predict_model.OPTIONS
    if odd := [name for name in others if getattr(options, name) != parser.get_default(name)]:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in odd)
        parser.error(f"{flags}: only with {'--curves' if options.from_model else '--from-model'}")
    try:
        source = _modelled(options) if options.from_model else _measured(options)
        answer = _answer(source, options.acceptance, options.coverage)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    sys.stdout.write(answer)


def _measured(options: argparse.Namespace) -> Source:
    curves = read_object(options.curves)
    check_points(curves, options.curves)
    kinds = sorted({point["kind"] for point in curves["points"]} - {NONE})
    kind = options.kind or (_HEAD if _HEAD in kinds else kinds[0])
    if options.kind is None and kind != _HEAD and len(kinds) > 1:
        raise ValueError(f"{options.curves} has {', '.join(kinds)}: choose one with --kind")
    times = step_times(curves, kind)
    num_tokens = options.tokens or 64
    measured_k = sorted({k for at in times.points.values() for k in at})
    return Source(
        times.cell,
        num_tokens,
        options.concurrency or sorted(times.points),
        [
            f"step times of {options.curves}, kind {kind}, linear between K {_listed(measured_k)} "
            f"and {_listed(sorted(times.points))} in flight",
            f"answers of {num_tokens} tokens after prompts of {curves['prompt_tokens']:.0f}; "
            "prefill is counted",
            "intervals are from the least to the greatest step time; acceptance is taken as exact",
        ],
    )


def _modelled(options: argparse.Namespace) -> Source:
    served = predict_model.served(options)
    # without a prefill the number of tokens cancels: any from 2 on gives the same
    return Source(served.cell, 2, options.concurrency or [1, 8, 32], served.assumptions())


def _answer(source: Source, rates: list[float], coverage: float) -> str:
    shown = " ".join(f"{rate:g}" for rate in rates)
    assumed = [f"acceptance by position {shown}; {coverage:.0%} of steps draft"]
    if coverage < 1:
        assumed.append(
            "a step in which only some requests draft costs what it costs when all do, or when "
            "none does if that is more; intervals reach to a cost that grows by request"
        )
    measured = source.cell
    source = replace(
        source, cell=lambda k, batch: with_coverage(measured(k, batch), coverage, batch)
    )
    lines = ["Assumed", *(f"  {line}" for line in (*assumed, *source.assumptions)), ""]
    lines += _surface(source, rates, coverage)
    shown_k = [k for k in range(1, len(rates) + 1) if _cells(source, k)]
    lines += _better(source, max(shown_k)) if shown_k else []
    return "\n".join(lines) + "\n"


def _surface(source: Source, rates: list[float], coverage: float) -> list[str]:
    reasons: dict[str, None] = {}
    found: dict[int, dict[int, Estimate]] = {number: {} for number in source.concurrency}
    table = [["K", "tokens/step", *(f"{number} in flight" for number in source.concurrency)]]
    for k in range(1, len(rates) + 1):
        tokens = tokens_per_step(rates[:k], coverage)
        shown = []
        for number in source.concurrency:
            try:
                cell = source.cell(k, number)
            except NotMeasured as error:
                reasons[str(error)] = None
                shown.append("-")
                continue
            gain = speedup(cell, Estimate.exact(tokens), source.num_tokens)
            found[number][k] = gain
            needed = required_tokens(cell, 1.0, source.num_tokens)
            shown.append(f"{_gain(gain)}, needs {_needed(needed, k)}")
        table.append([str(k), f"{tokens:.2f}", *shown])
    table.append(["best", "", *(_best(found[number]) for number in source.concurrency)])
    return [
        "Predicted speed-up [interval], and the tokens per step that break even",
        *_aligned(table),
        *(f"  -: {reason}" for reason in reasons),
        "",
    ]


def _better(source: Source, k: int) -> list[str]:
    """What other acceptance would bring, and what is needed for more, at one K."""
    cells = _cells(source, k)
    table = [["tokens/step", *(f"{number} in flight" for number in cells)]]
    for length in lengths_to_try(k):
        tokens = Estimate.exact(length)
        gains = [speedup(cell, tokens, source.num_tokens) for cell in cells.values()]
        table.append([f"{length:.2f}", *(_gain(gain) for gain in gains)])
    for target in _TARGETS:
        needed = [required_tokens(cell, target, source.num_tokens) for cell in cells.values()]
        table.append([f"for {target:.2f}x", *(_needed(value, k) for value in needed)])
    return [f"What other drafts would bring at K = {k}, and what a speed-up needs",
            *_aligned(table)]  # fmt: skip


def _cells(source: Source, k: int) -> dict[int, Cell]:
    """Those of one K that there are, by requests in flight."""
    cells = {}
    for number in source.concurrency:
        with contextlib.suppress(NotMeasured):  # said below the first table
            cells[number] = source.cell(k, number)
    return cells


def _gain(gain: Estimate) -> str:
    if gain.low == gain.high:
        return f"{gain.value:.2f}x"
    return f"{gain.value:.2f}x [{gain.low:.2f}, {gain.high:.2f}]"


def _needed(tokens: float | None, k: int) -> str:
    if tokens is None or tokens > k + 1:
        return f"more than {k + 1}"  # which is all that K drafts can give
    return f"{tokens:.2f}"


def _best(speedups: dict[int, Estimate]) -> str:
    if not speedups:
        return "-"
    best = best_k(speedups)
    first, second = (f"K = {k}" if k else "none" for k in (best.k, best.next_k))
    return f"{first} ({best.margin:.2f}x {second})"


def _listed(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers)


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return [
        "  " + "   ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))
        for row in table
    ]


if __name__ == "__main__":
    main(sys.argv[1:])

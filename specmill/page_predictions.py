"""Sections of the page with what was known before serving, and how well it was known."""

from collections.abc import Callable
from functools import partial
from typing import Any

from specmill.blocks import (
    Block,
    Bullets,
    Column,
    Figure,
    Folded,
    Heading,
    Paragraph,
    blocks,
    inline,
    number,
    of,
    table,
)
from specmill.canvas import Target, measured
from specmill.curve_kinds import TOKENS
from specmill.heat_maps import plot_speedup_by_k
from specmill.inline_svg import drawn
from specmill.page_pictures import plot_check, plot_experts, plot_step_ratio
from specmill.palette import Look
from specmill.prediction_section import prediction_section
from specmill.rows import Row
from specmill.samples import ALL
from specmill.tables import change

_PLACE: list[Column] = [
    ("method", of("method")),
    ("K", of("k")),
    ("in flight", of("concurrency")),
]


def prediction_blocks(
    predicted: dict[str, Any] | None, rows: list[Row], check: dict[str, Any] | None
) -> list[Block]:
    """The surface that was predicted from replayed acceptance and step times.

    Args:
        predicted: reports/predicted.json, or None.
        rows: reports/plots/predicted.json, drawn as the measured map is.
        check: reports/check.json, or None: how far predictions were off.
    """
    if not predicted:
        return []
    return [
        Paragraph(inline(_how_predicted(check))),
        *_fastest(predicted["best"]),
        *_predicted_map(predicted["rows"], rows),
        *_better_heads(predicted["better_head"]),
        *_not_predicted(predicted["without"]),
    ]


def _fastest(best: list[Row]) -> list[Block]:
    if not best:
        return []
    if not any(row["k"] for row in best):
        text = "No K of any method is predicted to be faster than none at any load."
        return [Paragraph(inline(text))]
    columns: list[Column] = [
        ("method", of("method")),
        ("K", lambda row: row["k"] or "no draft"),
        ("in flight", of("concurrency")),
        ("predicted change (95% interval)", lambda row: change(row) if row["k"] else "-"),
    ]
    return [table(best, "The K predicted to be best", columns)]


def _predicted_map(predicted: list[Row], rows: list[Row]) -> list[Block]:
    drawable = [row | {"context": 0} for row in measured("speedup", rows)]
    if not drawable:
        return []
    title = "Map of the predicted change of speed by K and requests in flight"
    columns = [
        *_PLACE,
        ("predicted change (95% interval)", change),
        ("tokens per step", number("tokens_per_step", ".2f")),
        ("to break even", number("break_even_tokens_per_step", ".2f")),
        ("step time, times as long", number("step_ratio", ".2f")),
    ]
    return [
        Figure(
            drawn(_plot_predicted, drawable, "predicted", title),
            inline(
                "Before anything was served. All prompt types. To break even takes more tokens "
                "per step than a step takes times as long: the first token comes later with "
                "speculation, whose drafter reads the prompt too."
            ),
            table([row for row in predicted if row["category"] == ALL], title, columns),
        )
    ]


def _better_heads(rows: list[Row]) -> list[Block]:
    title = "What heads of other acceptance would bring"
    columns = [
        *_PLACE,
        ("tokens per step", number("tokens_per_step", ".2f")),
        ("predicted change (95% interval)", change),
    ]
    return [Folded(title, [table(rows, title, columns)])] if rows else []


def _not_predicted(without: dict[str, str]) -> list[Block]:
    reasons = [inline(f"{name}: {reason}") for name, reason in without.items()]
    return [Folded("Not predicted", [Bullets(reasons)])] if reasons else []


def _plot_predicted(rows: list[Row], target: Target) -> None:
    plot_speedup_by_k(rows, target, "Predicted change of speed")


def _how_predicted(check: dict[str, Any] | None) -> str:
    """What a prediction is made of, and how far predictions were off here."""
    how = (
        "Acceptance replayed on recorded answers, times step times measured with a head that need "
        "not be trained; no bench was read."
    )
    error = (check or {}).get("median_absolute_error")
    if error is None:
        return f"{how} It was not held against a measurement."
    return (
        f"{how} Measured afterwards, half of the measurements lay within **{error:.1%}** of it "
        "(below)."
    )


def check_blocks(check: dict[str, Any] | None, looks: dict[str, Look]) -> list[Block]:
    """Predicted speed-up beside the measured one, replayed acceptance beside the served.

    Args:
        check: reports/check.json, or None.
        looks: Of all methods of the report.
    """
    found: list[Block] = []
    if check and check["speed"]:
        title = "Predicted and measured speed-up by method, K, load and prompt type"
        columns: list[Column] = [
            *_PLACE,
            ("prompt type", of("category")),
            ("predicted (95% interval)", _side("predicted")),
            ("measured (95% interval)", _side("measured")),
            ("error", number("error", "+.1%")),
        ]
        found.append(
            Figure(
                drawn(partial(plot_check, looks=looks), check["speed"], "check", title),
                inline(
                    "On the line both are equal. Large: all prompt types; small: one. Hollow: step "
                    "times were measured at that K and load; full: interpolated between others."
                ),
                table(check["speed"], title, columns),
            )
        )
    if check:
        found += blocks(prediction_section(check)[1:], "Predicted and measured")
    return found


def _side(side: str) -> Callable[[Row], Any]:
    """The predicted or measured change with its interval."""
    ends = {"speedup": side, "speedup_low": f"{side}_low", "speedup_high": f"{side}_high"}
    return lambda row: change({name: row[key] for name, key in ends.items()})


def cost_blocks(
    curves: dict[str, Any] | None, kinds: dict[str, str | None], routing: dict[str, Any] | None
) -> list[Block]:
    """Step times by K and batch; the experts that a step loads where the verifier has experts.

    Args:
        curves: reports/curves.json, or None.
        kinds: The kind of draft of every row, where it is known.
        routing: reports/routing.json, without `windows` of a dense verifier; or None.
    """
    found: list[Block] = []
    if curves:
        title = "Step time by kind of draft, K and requests in flight"
        points = [point | {"kind": _kind(point["kind"], kinds)} for point in curves["points"]]
        columns: list[Column] = [
            ("kind of draft", of("kind")),
            ("K", of("k")),
            ("in flight", of("batch")),
            ("step, ms (least to greatest)", _step),
            ("none beside it, ms", lambda row: f"{row['step_ms'] / row['ratio']:.1f}"),
            ("times as long", number("ratio", ".2f")),
        ]
        found.append(
            Figure(
                drawn(plot_step_ratio, points, "step-ratio", title),
                inline(
                    "A step must bring as many tokens as it takes times as long, or speculation "
                    "costs. It is held against `none` as that ran beside it, at the same time. "
                    "Bars: the least and the greatest of several measurements; of one there is "
                    "none. K=0: an engine that speculates and finds nothing to draft."
                ),
                table(points, title, columns),
            )
        )
    if routing and "windows" in routing:
        found += _experts(routing)
    return found


def _kind(kind: str, kinds: dict[str, str | None]) -> str:
    """What drafts, in words: rows that look their drafts up share a kind."""
    if kind != TOKENS:
        return kind
    rows = ", ".join(row for row, one in kinds.items() if one == kind)
    return f"looked up ({rows})" if rows else "looked up"


def _step(row: Row) -> str:
    if row["num_waves"] == 1:
        return f"{row['step_ms']:.1f}"
    return f"{row['step_ms']:.1f} ({row['step_ms_low']:.1f} to {row['step_ms_high']:.1f})"


def _experts(routing: dict[str, Any]) -> list[Block]:
    title = "Experts a verification step loads"
    columns: list[Column] = [
        ("in flight", of("batch")),
        ("tokens of each", of("t")),
        ("experts loaded", number("experts_loaded", ".2f")),
        ("if tokens were independent", number("upper_bound", ".2f")),
        ("share", number("ratio", ".0%")),
    ]
    text = (
        f"The verifier is a mixture of {routing['num_experts']} experts a layer, "
        f"{routing['top_k']} of them for each token. A dense verifier reads the same weights "
        "whatever K is; this one reads more experts the more tokens a step verifies."
    )
    return [
        Heading("Dense against mixture of experts"),
        Paragraph(inline(text)),
        Figure(
            drawn(plot_experts, routing["windows"], "experts", title),
            inline(
                "Full lines: counted in what the verifier's own answers were routed to. Broken "
                "lines: what as many independent tokens would load."
            ),
            table(routing["windows"], title, columns),
        ),
    ]

"""Sections of the page with what was measured: pictures, with their rows as tables."""

from dataclasses import dataclass
from typing import Any

from specmill.blocks import Block, Column, Figure, Paragraph, inline, number, of, table
from specmill.canvas import measured
from specmill.inline_svg import drawn, inline_svg
from specmill.page_pictures import plot_lengths, plot_loss
from specmill.rows import Row
from specmill.tables import change

_METHOD: list[Column] = [("method", of("method")), ("K", of("num_speculative_tokens"))]
_LOAD: Column = ("load", of("load"))
_CATEGORY: Column = ("prompt type", of("category"))
_SPEED: list[Column] = [
    ("change (95% interval)", change),
    ("verdict", lambda row: row["verdict"] or "no interval"),
]
_ACCEPTED: list[Column] = [
    ("position", of("position")),
    ("accepted", number("acceptance_rate", ".1%")),
]


@dataclass(frozen=True)
class _Picture:
    """How the page shows a plot."""

    title: str
    """What a screen reader says, and the caption of the table."""
    caption: str
    drawn: str
    """The figure without which a row is not drawn."""
    columns: list[Column]


SURFACE = {
    "speedup_by_load": _Picture(
        "Speed-up against load, a line per method",
        "Above 1 speculation pays. Bars are 95% intervals; where one meets 1, no difference is "
        "shown. Grey: as far as `none` may lie from itself. All prompt types, K of `spec.tokens`.",
        "speedup",
        [*_METHOD, _LOAD, *_SPEED],
    ),
    "speedup_by_k": _Picture(
        "Map of the change of speed by K and load, a panel per method",
        "Which K at which load: blue is faster, red slower, without a colour no difference is "
        "shown. All prompt types.",
        "speedup",
        [*_METHOD, _LOAD, *_SPEED],
    ),
    "speedup": _Picture(
        "Speed-up by prompt type and method, a panel per load",
        "For which prompts it pays, with K of `spec.tokens`. The colour is the method's, the "
        "marker says what is shown.",
        "speedup",
        [_CATEGORY, *_METHOD, _LOAD, *_SPEED],
    ),
}
"""Where it pays: by load, by K and load, by prompt type."""

ACCEPTANCE = {
    "acceptance": _Picture(
        "Accepted share of drafts by position, a line per method, a panel per load",
        "Share of all drafts that were accepted up to a position (from 0). Acceptance length is "
        "1 + the sum over positions. Loads with the same shares have one picture.",
        "acceptance_rate",
        [*_METHOD, _LOAD, *_ACCEPTED],
    ),
    "acceptance_by_category": _Picture(
        "Map of the accepted share by prompt type and position, a panel per method",
        "The same by prompt type, at the lowest load of each method; before each line how many "
        "drafts its shares are of.",
        "acceptance_rate",
        [_CATEGORY, *_METHOD, ("drafts", of("num_drafts")), *_ACCEPTED],
    ),
}
"""What is accepted, by position and by prompt type."""


def figures(
    shown: dict[str, _Picture], plots: dict[str, list[Row]], pictures: dict[str, str]
) -> list[Block]:
    """Pictures with their rows as tables; a plot without a measured row has none.

    Args:
        shown: SURFACE or ACCEPTANCE.
        plots: Rows by plot (specmill.surface).
        pictures: SVG by plot, as drawn from those rows.
    """
    found: list[Block] = []
    for name, picture in shown.items():
        rows = measured(picture.drawn, plots[name])
        if rows and not (name == "speedup_by_k" and _has_one_k(rows)):
            svg = inline_svg(pictures[name], name, picture.title)
            rows_table = table(rows, picture.title, picture.columns)
            found.append(Figure(svg, inline(picture.caption), rows_table))
    return found


def _has_one_k(rows: list[Row]) -> bool:
    """Whether every method has one K: what a map shows is in the picture by load too."""
    return len({(row["method"], row["num_speculative_tokens"]) for row in rows}) == len(
        {row["method"] for row in rows}
    )


def training_blocks(rows: list[Row], train: dict[str, Any] | None) -> list[Block]:
    """Held-out acceptance and loss by epoch, of the head that this repository trains.

    Args:
        rows: `epoch`, `position`, `accuracy`, `loss` and, where it was replayed, `replayed_length`;
            none where nothing was trained.
        train: reports/train.json.
    """
    if not rows or not train:
        return []
    shown = _lengths(rows)
    text = (
        f"An EAGLE-3 head, trained on {train['num_samples']} samples for {train['num_epochs']} "
        f"epochs; that of epoch {train['best_epoch']} (from 0) is served."
    )
    loss: Column = ("loss", number("loss", ".3f"))
    lengths = "Acceptance length on held-out answers by epoch and K"
    losses = "Held-out loss by epoch and draft position"
    return [
        Paragraph(inline(text)),
        Figure(
            drawn(plot_lengths, shown, "lengths", lengths),
            inline(
                "Full lines, where there are some: held-out answers replayed as an engine would "
                "serve them. Broken lines: 1 + the agreement with the verifier at every token of "
                "its own answer (teacher-forced)."
            ),
            table(
                shown,
                lengths,
                [
                    ("epoch", of("epoch")),
                    ("K", of("k")),
                    ("replayed", number("replayed_length", ".3f")),
                    ("teacher-forced", number("agreed_length", ".3f")),
                ],
            ),
        ),
        Figure(
            drawn(plot_loss, shown, "loss", losses),
            inline("The lowest loss need not have the most accepted."),
            table(shown, losses, [("epoch", of("epoch")), ("position", of("position")), loss]),
        ),
    ]


def _lengths(rows: list[Row]) -> list[Row]:
    """Rows with `k` and acceptance lengths at that K: replayed, and 1 + the summed agreement."""
    return [
        row
        | {
            "k": row["position"] + 1,
            "replayed_length": row.get("replayed_length"),
            "agreed_length": 1
            + sum(
                one["accuracy"]
                for one in rows
                if one["epoch"] == row["epoch"] and one["position"] <= row["position"]
            ),
        }
        for row in rows
    ]

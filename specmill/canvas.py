"""What every picture stands on: a figure that is saved as SVG, panels, groups of rows.

Names, dates and hashes that would differ between two drawings of the same rows are left out.
"""

import contextlib
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

from specmill.rows import Row

CHARACTER = 0.08
"""Inches of a character, about."""

Target = Path | StringIO
"""What a picture is written to: a file, or text for a page."""


@contextlib.contextmanager
def canvas(
    target: Target, size: tuple[float, float], title: str, least: tuple[float, float] = (4.7, 2.2)
) -> Iterator[Any]:
    """A matplotlib figure of this size in inches, at least `least`, saved when all is drawn."""
    import matplotlib
    from matplotlib.figure import Figure

    settings = {
        "svg.hashsalt": "specmill",
        "svg.fonttype": "none",  # text stays text: it can be searched, and files are small
        "text.parse_math": False,  # a prompt type may be called "from $5 to $6"
        "font.size": 9,
        "axes.titlesize": "medium",
        "hatch.linewidth": 0.6,
        "lines.markersize": 4.5,
        "lines.linewidth": 1.1,
    }
    with matplotlib.rc_context(settings):
        width, height = (max(pair) for pair in zip(size, least, strict=True))
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.suptitle(title)
        yield figure
        if isinstance(target, Path):
            target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, format="svg", metadata={"Date": None})


def panels(figure: Any, num_panels: int, columns: int, **shared: bool) -> list[Any]:
    """Axes row by row; without any panel a line of text says that nothing was measured."""
    if not num_panels:
        figure.text(0.5, 0.5, "nothing was measured", ha="center", va="center")
        return []
    rows = -(-num_panels // columns)
    axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for surplus in axes[num_panels:]:
        surplus.remove()
    for lowest in axes[max(0, num_panels - columns) : num_panels]:
        lowest.tick_params(labelbottom=True)
    return axes[:num_panels]


def legend(figure: Any, all_axes: list[Any], **place: Any) -> None:
    """One legend for all panels: what is labelled, once each, in the order met."""
    labelled = [axes.get_legend_handles_labels() for axes in all_axes]
    lines = {label: line for handles in labelled for line, label in zip(*handles, strict=True)}
    if lines:
        columns = legend_columns(figure, list(lines))
        figure.legend(lines.values(), lines.keys(), frameon=False, ncols=columns, **place)


def legend_columns(figure: Any, labels: list[str]) -> int:
    """How many columns of a legend fit below a picture."""
    inches = 0.6 + CHARACTER * max(map(len, labels))
    return max(1, min(len(labels), int(figure.get_figwidth() / inches)))


def grouped(name: str, rows: list[Row]) -> dict[Any, list[Row]]:
    """Rows by a field, in the order met."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[name], []).append(row)
    return groups


def measured(name: str, rows: list[Row]) -> list[Row]:
    """The rows that have a value."""
    return [row for row in rows if row[name] is not None]


def context_note(rows: list[Row]) -> str:
    """A line that explains `+1024` where a load has it."""
    some = any(row["context"] for row in rows)
    return "\n+N: N tokens of context before every prompt" if some else ""

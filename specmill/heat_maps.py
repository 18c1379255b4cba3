"""Maps of cells, a panel per method: the colour says where to look, the figure how much.

A cell that was not measured is not drawn.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from specmill.canvas import CHARACTER, Target, canvas, context_note, grouped, measured, panels
from specmill.intervals import UNDECIDED
from specmill.rows import Row

_CELLS_ACROSS = 24
"""About as many cells as fit side by side on a screen."""
_LOW = 2.5
"""Inches of a picture whose scale has room for every second tick only."""
_LEAST_TITLE = 14
"""Characters of a line of a title at least."""


@dataclass(frozen=True)
class HeatMap:
    """What a map shows of its rows."""

    title: Callable[[Row], str]
    """Of a panel, from its first row."""
    x: Callable[[Row], Any]
    y: Callable[[Row], Any]
    value: Callable[[Row], float]
    """What the colour stands for."""
    text: Callable[[Row], str]
    is_open: Callable[[Row], bool]
    """Whether a cell shows nothing: hatched, and without a colour."""
    colours: str
    """Name of a matplotlib colour map."""
    limits: tuple[float, float]
    """The values of its ends; a value beyond has the colour of the end."""
    ticks: dict[float, str]
    x_label: str
    y_label: str
    count: Callable[[Row], str] | None = None
    """What stands before each line of a panel, from its first row."""


SPEEDUP_BY_K = HeatMap(
    title=lambda row: row["method"],
    x=lambda row: row["load"].replace(" in flight", "").replace(" ", "\n"),
    y=lambda row: row["num_speculative_tokens"],
    value=lambda row: math.log2(row["speedup"]),
    text=lambda row: _change(row),
    is_open=lambda row: row["verdict"] == UNDECIDED,
    colours="RdBu",
    limits=(-1.0, 1.0),
    ticks={
        math.log2(1 + change / 100): f"{change:+d}%".replace("+0", "0")
        for change in (-50, -25, 0, 50, 100)
    },
    x_label="requests in flight, or per second (/s)",
    y_label="K",
)
"""Red is slower, blue is faster, always on the same scale."""

FEW_DRAFTS = 30
"""Of fewer a share has a standard error of up to 9 points, sqrt(0.25 / 30), and more."""

ACCEPTANCE_BY_CATEGORY = HeatMap(
    title=lambda row: f"{row['method']}, K={row['num_speculative_tokens']}",
    x=lambda row: row["position"],
    y=lambda row: row["category"],
    value=lambda row: row["acceptance_rate"],
    text=lambda row: f"{100 * row['acceptance_rate']:.0f}",
    is_open=lambda row: (row["num_drafts"] or 0) < FEW_DRAFTS,
    colours="Blues",
    limits=(0.0, 1.0),
    ticks={0.0: "0%", 0.5: "50%", 1.0: "100%"},
    x_label="number of drafts, then the draft position (from 0)",
    y_label="",
    count=lambda row: "-" if row["num_drafts"] is None else f"{row['num_drafts']:,}",
)


def plot_speedup_by_k(rows: list[Row], target: Target, what: str = "Change of speed") -> None:
    """Draw `speedup_by_k_rows`: K by load; `what` is what the title says they are."""
    title = f"{what} by K and load, %\nhatched, in brackets: no difference shown" + context_note(
        rows
    )
    shown = measured("speedup", rows)
    ks = sorted(grouped("num_speculative_tokens", shown))
    _plot(SPEEDUP_BY_K, shown, ks, target, title)


def plot_acceptance_by_category(rows: list[Row], target: Target) -> None:
    """Draw `acceptance_by_category_rows`: prompt type by position."""
    loads = ", ".join(grouped("load", rows))
    title = f"Accepted drafts by prompt type and position, %\n{loads}"
    title += f"; hatched: of fewer than {FEW_DRAFTS}"
    title += context_note(rows)
    shown = measured("acceptance_rate", rows)
    _plot(ACCEPTANCE_BY_CATEGORY, shown, list(grouped("category", shown)), target, title)


def _change(row: Row) -> str:
    """The change in per cent, in brackets where no difference is shown."""
    text = f"{round(100 * (row['speedup'] - 1)):+d}"
    return f"({text})" if row["verdict"] == UNDECIDED else text


def _plot(spec: HeatMap, rows: list[Row], ys: list[Any], target: Target, title: str) -> None:
    methods = grouped("method", rows)
    xs = list(dict.fromkeys(spec.x(row) for row in rows))
    columns = max(1, min(4, len(methods), _CELLS_ACROSS // max(1, len(xs))))
    lines = -(-len(methods) // columns)
    left = -1.5 if spec.count else -0.5
    width = 0.3 + 0.45 * (len(xs) - 0.5 - left)  # of a panel
    longest = max((len(str(y)) for y in ys), default=0)
    size = (1.4 + CHARACTER * longest + columns * width, 1.6 + lines * (0.3 + 0.24 * len(ys)))
    with canvas(target, size, title) as figure:
        all_axes = panels(figure, len(methods), columns, sharex=True, sharey=True)
        for axes, of_method in zip(all_axes, methods.values(), strict=True):
            for row in of_method:
                _draw_cell(axes, spec, row, xs.index(spec.x(row)), ys.index(spec.y(row)))
            if spec.count:
                for y, of_line in _lines(spec, of_method, ys).items():
                    axes.text(-1, y, spec.count(of_line), ha="center", va="center",
                              fontsize="small")  # fmt: skip
            axes.set(
                title=fill(spec.title(of_method[0]), max(_LEAST_TITLE, int(width / CHARACTER))),
                xlim=(left, len(xs) - 0.5),
                ylim=(len(ys) - 0.5, -0.5),
            )
            axes.set_xticks(range(len(xs)), xs)
            axes.set_yticks(range(len(ys)), ys)
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
        if all_axes:
            _draw_scale(figure, spec, all_axes)
            figure.supxlabel(spec.x_label, fontsize="medium")
            figure.supylabel(spec.y_label, fontsize="medium")


def _lines(spec: HeatMap, rows: list[Row], ys: list[Any]) -> dict[int, Row]:
    """The first row of every line of a panel, by its place."""
    found: dict[int, Row] = {}
    for row in rows:
        found.setdefault(ys.index(spec.y(row)), row)
    return found


def _colour_map(spec: HeatMap) -> Any:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    return ScalarMappable(Normalize(*spec.limits, clip=True), spec.colours)


def _draw_cell(axes: Any, spec: HeatMap, row: Row, x: int, y: int) -> None:
    from matplotlib.patches import Rectangle

    corner = (x - 0.5, y - 0.5)
    inside: dict[str, Any]
    if spec.is_open(row):
        ink, inside = "black", {"facecolor": "#ffffff", "hatch": "////", "edgecolor": "#dddddd"}
    else:
        red, green, blue, _ = colour = _colour_map(spec).to_rgba(spec.value(row))
        is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5  # luma, ITU-R BT.601
        # nearly white and black: the page draws white and black as its own (inline_svg.py)
        ink, inside = "#fefefe" if is_dark else "#010101", {"facecolor": colour}
    axes.add_patch(Rectangle(corner, 1, 1, linewidth=0, **inside))
    axes.add_patch(Rectangle(corner, 1, 1, facecolor="none", edgecolor="white"))
    axes.text(x, y, spec.text(row), ha="center", va="center", fontsize="small", color=ink)


def _draw_scale(figure: Any, spec: HeatMap, all_axes: list[Any]) -> None:
    scale = figure.colorbar(_colour_map(spec), ax=all_axes, aspect=30, shrink=0.8, pad=0.01)
    ticks = dict(list(spec.ticks.items())[:: 2 if figure.get_figheight() < _LOW else 1])
    scale.set_ticks(list(ticks), labels=list(ticks.values()))
    scale.outline.set_visible(False)

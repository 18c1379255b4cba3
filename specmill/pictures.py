"""The plots as pictures, for readers without a network: the same rows give the same bytes.

Colours are told apart by colour-blind readers and never stand alone: methods differ in marker too,
verdicts in marker or hatching, and cells have their figure written in them.
"""

from collections.abc import Callable
from typing import Any

from specmill.canvas import Target, canvas, context_note, grouped, legend, measured, panels
from specmill.heat_maps import plot_acceptance_by_category, plot_speedup_by_k
from specmill.intervals import FASTER, SLOWER, UNDECIDED
from specmill.rows import Row

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#888888")
"""Okabe and Ito's, without the yellow, which is faint on white, and with a grey."""

MARKERS = "osD^vPX*"
_DASHES = ("-", "--", ":")

_VERDICTS: dict[str | None, dict[str, Any]] = {
    FASTER: {"label": FASTER, "color": "#0072B2", "marker": ">"},
    SLOWER: {"label": SLOWER, "color": "#D55E00", "marker": "<"},
    UNDECIDED: {"label": UNDECIDED, "color": "#777777", "marker": "o", "mfc": "white"},
    None: {"label": "no interval", "color": "black", "marker": "x"},
}


def plot_acceptance(rows: list[Row], target: Target) -> None:
    """Draw `acceptance_rows`: a line per method, a panel per load."""
    shown = measured("acceptance_rate", rows)
    styles, loads = _styles(shown), grouped("load", shown)
    columns = min(3, max(1, len(loads)))
    height = max(2.6 * -(-len(loads) // columns), 0.17 * len(styles))
    title = "Acceptance by position" + context_note(rows)
    with canvas(target, (2.4 + 2.7 * columns, 1.0 + height), title) as figure:
        all_axes = panels(figure, len(loads), columns, sharex=True, sharey=True)
        for axes, (load, of_load) in zip(all_axes, loads.items(), strict=True):
            for method, points in grouped("method", of_load).items():
                dodge, style = styles[method]
                x = [row["position"] + dodge for row in points]
                axes.plot(x, [row["acceptance_rate"] for row in points], **style)
            axes.set(ylim=(-0.03, 1.03), title=load)
            axes.set(xlabel="draft position (from 0)", ylabel="accepted share of drafts")
            axes.label_outer(remove_inner_ticks=False)
            axes.set_xticks(range(1 + max(row["position"] for row in shown)))
            axes.grid(alpha=0.3, axis="y")
        legend(figure, all_axes, loc="outside right upper")


def plot_speedup(rows: list[Row], target: Target) -> None:
    """Draw `speedup_rows`: a line per prompt type and method, a panel per load."""
    shown = measured("speedup", rows)
    loads = grouped("load", shown)
    lines: list[tuple[str, str | None]] = []
    for category, of_category in grouped("category", shown).items():
        lines += [(category, None), *((category, m) for m in grouped("method", of_category))]
    title = "Speed-up by prompt type, with 95% intervals" + context_note(rows)
    size = (1.8 + 2.1 * max(1, len(loads)), 1.6 + 0.15 * len(lines))
    with canvas(target, size, title) as figure:
        all_axes = panels(figure, len(loads), max(1, len(loads)), sharex=True, sharey=True)
        for axes, (load, of_load) in zip(all_axes, loads.items(), strict=True):
            for verdict, points in grouped("verdict", of_load).items():
                y = [lines.index((row["category"], row["method"])) for row in points]
                x = [row["speedup"] for row in points]
                axes.errorbar(x, y, xerr=_arms(points), linestyle="", **_VERDICTS[verdict])
            axes.axvline(1.0, color="black", linewidth=0.8)
            axes.set(title=load, xlabel="speed-up", ylim=(len(lines) - 0.4, -0.8))
            for line, (_, method) in enumerate(lines):
                if method is None:
                    axes.axhspan(line - 0.5, line + 0.5, color="#eeeeee", zorder=0)
            axes.grid(alpha=0.3)
            axes.tick_params(axis="y", length=0)
        for axes in all_axes[:1]:
            axes.set_yticks(range(len(lines)), [method or kind for kind, method in lines])
            for label, (_, method) in zip(axes.get_yticklabels(), lines, strict=True):
                label.set_fontweight("normal" if method else "bold")
        legend(figure, all_axes, loc="outside lower center", ncols=4)


def plot_speedup_by_load(rows: list[Row], target: Target) -> None:
    """Draw `speedup_by_load_rows`: a line per method, the panels one under another.

    Loads are evenly spaced, and at each the methods lie side by side. A legend has the order in
    which its lines end.
    """
    shown = measured("speedup", rows)
    styles, all_panels = _styles(shown), grouped("panel", shown)
    height = max(2.6, 0.6 + 0.19 * len(styles)) * max(1, len(all_panels))
    title = "Speed-up against load, with 95% intervals" + context_note(rows)
    with canvas(target, (5.0 + 0.3 * len(styles), 0.6 + height), title) as figure:
        all_axes = panels(figure, len(all_panels), 1, sharey=True)
        for axes, (panel, of_panel) in zip(all_axes, all_panels.items(), strict=True):
            loads = sorted(grouped("requests", of_panel))
            ends = []
            for method, points in grouped("method", of_panel).items():
                dodge, style = styles[method]
                at = [loads.index(row["requests"]) for row in points]
                y = [row["speedup"] for row in points]
                drawn = axes.errorbar(
                    [x + dodge for x in at], y, yerr=_arms(points), elinewidth=1.2, **style
                )
                ends.append(((at[-1], y[-1]), drawn))
            axes.axhline(1.0, color="black", linewidth=0.8)
            axes.set_xticks(range(len(loads)), [f"{load:g}" for load in loads])
            axes.set(xlabel=panel, ylabel="speed-up", xlim=(-0.5, len(loads) - 0.5))
            for left in range(len(loads) - 1):
                axes.axvline(left + 0.5, color="#dddddd", linewidth=0.8)
            axes.grid(alpha=0.3, axis="y")
            ends.sort(key=lambda end: end[0], reverse=True)
            handles = [drawn for _, drawn in ends]
            axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


PICTURES: dict[str, Callable[[list[Row], Target], None]] = {
    "acceptance": plot_acceptance,
    "acceptance_by_category": plot_acceptance_by_category,
    "speedup": plot_speedup,
    "speedup_by_load": plot_speedup_by_load,
    "speedup_by_k": plot_speedup_by_k,
}
"""What draws each of `surface.plot_rows`."""


def _styles(rows: list[Row]) -> dict[str, tuple[float, dict[str, Any]]]:
    """How far each method stands aside, of a distance of 1, and its colour, marker and line."""
    methods = grouped("method", rows)
    styles = {}
    for index, (method, points) in enumerate(methods.items()):
        cycle, step = divmod(index, len(COLOURS))
        style = {
            "label": f"{method}, K={points[0]['num_speculative_tokens']}",
            "color": COLOURS[step],
            "marker": MARKERS[step],
            "linestyle": _DASHES[cycle % len(_DASHES)],
        }
        dodge = min(0.8, 0.06 * len(methods)) * ((index + 0.5) / len(methods) - 0.5)
        styles[method] = dodge, style | ({"mfc": "white"} if cycle % 2 else {})
    return styles


def _arms(rows: list[Row]) -> list[list[float]]:
    """Lengths of the error bars to both sides, [2][num_rows]; NaN, not drawn, without interval."""
    return [
        [float("nan") if row[end] is None else abs(row["speedup"] - row[end]) for row in rows]
        for end in ("speedup_low", "speedup_high")
    ]

"""The plots as pictures, for readers without a network: the same rows give the same bytes.

Colours are told apart by colour-blind readers and never stand alone: methods differ in marker too,
verdicts in marker or hatching, and cells have their figure written in them.
"""

from collections.abc import Callable
from typing import Any

from specmill.canvas import (
    CHARACTER,
    Target,
    canvas,
    context_note,
    grouped,
    legend,
    legend_columns,
    measured,
    panels,
)
from specmill.heat_maps import plot_acceptance_by_category, plot_speedup_by_k
from specmill.intervals import FASTER, SLOWER, UNDECIDED
from specmill.palette import NONE, Look, plain
from specmill.rows import Row

Looks = dict[str, Look]
"""Of all methods of a report (specmill.palette)."""

_VERDICTS: dict[str | None, Look] = {
    FASTER: {"label": FASTER, "marker": ">"},
    SLOWER: {"label": SLOWER, "marker": "<"},
    UNDECIDED: {"label": UNDECIDED, "marker": "o", "mfc": "white"},
    None: {"label": "no interval", "marker": "x"},
}


def plot_acceptance(rows: list[Row], target: Target, looks: Looks) -> None:
    """Draw `acceptance_rows`: a line per method, a panel per load; of equal panels one."""
    shown = measured("acceptance_rate", rows)
    styles, loads = _styles(shown, looks), _unlike(shown)
    columns = min(3, max(1, len(loads)))
    size = (1.2 + 2.9 * columns, 1.3 + 2.6 * -(-len(loads) // columns) + 0.12 * len(styles))
    title = "Acceptance by position" + context_note(rows)
    with canvas(target, size, title) as figure:
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
        legend(figure, all_axes, loc="outside lower center")


def _unlike(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows by load; loads with the same rates to a hundredth are one, called by all of them."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    loads = grouped("load", rows)
    for load, points in loads.items():
        what = [(one["method"], one["position"], round(one["acceptance_rate"], 2))
                for one in points]  # fmt: skip
        alike.setdefault(tuple(what), []).append(load)
    return {"; ".join(names): loads[names[0]] for names in alike.values()}


def plot_speedup(rows: list[Row], target: Target, looks: Looks) -> None:
    """Draw `speedup_rows`: a line per prompt type and method, a panel per load.

    The colour is the method's, the marker the verdict's.
    """
    shown = measured("speedup", rows)
    loads = grouped("load", shown)
    lines: list[tuple[str, str | None]] = []
    for category, of_category in grouped("category", shown).items():
        lines += [(category, None), *((category, m) for m in grouped("method", of_category))]
    title = "Speed-up by prompt type, with 95% intervals" + context_note(rows)
    longest = max((len(method or kind) for kind, method in lines), default=0)
    size = (0.8 + CHARACTER * longest + 2.1 * max(1, len(loads)), 1.6 + 0.15 * len(lines))
    with canvas(target, size, title) as figure:
        all_axes = panels(figure, len(loads), max(1, len(loads)), sharex=True, sharey=True)
        for axes, (load, of_load) in zip(all_axes, loads.items(), strict=True):
            for (verdict, name), points in _by_verdict(of_load).items():
                y = [lines.index((row["category"], row["method"])) for row in points]
                x = [row["speedup"] for row in points]
                style = {"linestyle": "", "color": looks[plain(name)]["color"]}
                axes.errorbar(x, y, xerr=_arms(points), **style, **_VERDICTS[verdict])
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
        _verdict_legend(figure, all_axes, shown)


def _by_verdict(rows: list[Row]) -> dict[tuple[str | None, str], list[Row]]:
    found: dict[tuple[str | None, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["verdict"], row["method"]), []).append(row)
    return found


def _verdict_legend(figure: Any, all_axes: list[Any], rows: list[Row]) -> None:
    """Markers of the verdicts that there are, in no method's colour."""
    from matplotlib.lines import Line2D

    used = grouped("verdict", rows)
    handles = [
        Line2D([], [], linestyle="", color="black", **style)
        for verdict, style in _VERDICTS.items()
        if verdict in used
    ]
    if all_axes:
        figure.legend(handles=handles, frameon=False, loc="outside lower center", ncols=2)


def plot_speedup_by_load(rows: list[Row], target: Target, looks: Looks) -> None:
    """Draw `speedup_by_load_rows`: a line per method, the panels one under another.

    Loads are evenly spaced, and at each the methods lie side by side. A legend has the order in
    which its lines end. Grey is as far as `none` may lie from itself.
    """
    shown = measured("speedup", rows)
    styles, all_panels = _styles(shown, looks), grouped("panel", shown)
    height = (2.8 + 0.1 * len(styles)) * max(1, len(all_panels))
    title = "Speed-up against load, with 95% intervals" + context_note(rows)
    with canvas(target, (4.0 + 0.15 * len(styles), 0.6 + height), title) as figure:
        all_axes = panels(figure, len(all_panels), 1, sharey=True)
        for axes, (panel, of_panel) in zip(all_axes, all_panels.items(), strict=True):
            loads = sorted(grouped("requests", of_panel))
            ends = []
            for method, points in grouped("method", of_panel).items():
                if plain(method) == NONE:
                    _draw_band(axes, loads, points)
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
            columns = legend_columns(figure, [one.get_label() for one in handles])
            axes.legend(handles=handles, loc="upper center", ncols=columns, frameon=False,
                        bbox_to_anchor=(0.5, -0.2))  # fmt: skip


def _draw_band(axes: Any, loads: list[float], points: list[Row]) -> None:
    """Grey as wide as a load and as high as its interval."""
    for row in points:
        if row["speedup_low"] is not None:
            middle = loads.index(row["requests"])
            span = [middle - 0.5, middle + 0.5]
            low, high = row["speedup_low"], row["speedup_high"]
            axes.fill_between(span, low, high, color="#888888", alpha=0.18, linewidth=0, zorder=0)


PICTURES: dict[str, Callable[[list[Row], Target, Looks], None]] = {
    "acceptance": plot_acceptance,
    "acceptance_by_category": lambda rows, target, _: plot_acceptance_by_category(rows, target),
    "speedup": plot_speedup,
    "speedup_by_load": plot_speedup_by_load,
    "speedup_by_k": lambda rows, target, _: plot_speedup_by_k(rows, target),
}
"""What draws each of `surface.plot_rows`."""


def _styles(rows: list[Row], looks: Looks) -> dict[str, tuple[float, Look]]:
    """How far each method stands aside, of a distance of 1, and how its line looks."""
    methods = grouped("method", rows)
    styles = {}
    for index, (method, points) in enumerate(methods.items()):
        label = f"{method}, K={points[0]['num_speculative_tokens']}"
        dodge = min(0.8, 0.06 * len(methods)) * ((index + 0.5) / len(methods) - 0.5)
        styles[method] = dodge, {"label": label} | looks[plain(method)]
    return styles


def _arms(rows: list[Row]) -> list[list[float]]:
    """Lengths of the error bars to both sides, [2][num_rows]; NaN, not drawn, without interval."""
    return [
        [float("nan") if row[end] is None else abs(row["speedup"] - row[end]) for row in rows]
        for end in ("speedup_low", "speedup_high")
    ]

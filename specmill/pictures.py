"""The plots as pictures, for readers without a network: the same rows give the same bytes."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specmill.report import Row


def plot_acceptance(rows: list[Row], path: Path) -> None:
    """Draw `acceptance_rows` as SVG; the same rows give the same bytes."""
    with _panels(rows, path, "Acceptance by position") as panels:
        for axes, curves in panels:
            for points, style in curves:
                positions = [row["position"] for row in points]
                rates = [row["acceptance_rate"] for row in points]
                axes.plot(positions, rates, marker="o", **style)
            axes.set(xlabel="draft position (from 0)", ylim=(0, 1))
            axes.xaxis.get_major_locator().set_params(integer=True)
        panels[0][0].set_ylabel("accepted share of drafts")


def plot_speedup(rows: list[Row], path: Path) -> None:
    """Draw `speedup_rows` as SVG; the same rows give the same bytes."""
    categories = list(_by("category", rows))
    num_methods = len(_by("method", rows))
    with _panels(rows, path, "Speed-up by prompt type") as panels:
        for axes, curves in panels:
            for index, (points, style) in enumerate(curves):
                below = 0.6 * ((index + 0.5) / num_methods - 0.5)  # methods one under the other
                y = [categories.index(row["category"]) + below for row in points]
                axes.plot([row["speedup"] for row in points], y, "o", **style)
            axes.axvline(1.0, color="black", linewidth=1)
            axes.set_xlabel("speed-up over its own reference")
            axes.set_yticks(range(len(categories)), categories)
        panels[0][0].invert_yaxis()


@contextlib.contextmanager
def _panels(rows: list[Row], path: Path, title: str) -> Iterator[list[tuple[Any, Any]]]:
    """Axes, one per concurrency, with (rows, style) of every method; saved when all is drawn."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "specmill"
    from matplotlib import pyplot

    styles = {}
    for index, (method, points) in enumerate(_by("method", rows).items()):
        label = f"{method}, K={points[0]['num_speculative_tokens']}"
        styles[method] = {"label": label, "color": f"C{index}"}
    at = _by("concurrency", rows)
    figure = pyplot.figure(figsize=(1.5 + 3.3 * len(at), 4), layout="constrained")
    all_axes = figure.subplots(ncols=len(at), sharex=True, sharey=True, squeeze=False)
    panels = []
    for axes, (concurrency, shown) in zip(all_axes[0], at.items(), strict=True):
        axes.set_title(f"{concurrency} in flight", fontsize="medium")
        axes.grid(alpha=0.3)
        panels.append((axes, [(p, styles[method]) for method, p in _by("method", shown).items()]))
    yield panels
    figure.suptitle(title)
    labelled = [axes.get_legend_handles_labels() for axes in all_axes[0]]
    lines = {label: line for handles in labelled for line, label in zip(*handles, strict=True)}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _by(name: str, rows: list[Row]) -> dict[Any, list[Row]]:
    """Rows grouped by a field, in the order met."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[name], []).append(row)
    return groups

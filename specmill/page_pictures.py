"""Pictures that only the page has: training, prediction against measurement, costs of a step.

Small enough for a phone held upright; what they show is in a table below them too.
"""

from typing import Any

from specmill.canvas import Target, canvas, grouped, legend, panels
from specmill.palette import Look, shades
from specmill.rows import Row
from specmill.samples import ALL

_SIZE = (4.4, 3.3)  # inches


def plot_lengths(rows: list[Row], target: Target) -> None:
    """Acceptance length by epoch and K: replayed in full lines, teacher-forced in broken ones.

    Args:
        rows: `epoch`, `k`, `agreed_length` and `replayed_length` (None where it was not replayed).
        target: What it is written to.
    """
    with canvas(target, _SIZE, "Acceptance length, held-out answers", _SIZE) as figure:
        (axes,) = panels(figure, 1, 1)
        for k, points, look in _shaded("k", rows):
            epochs = [row["epoch"] for row in points]
            agreed = [row["agreed_length"] for row in points]
            axes.plot(epochs, agreed, "--", color=look["color"], linewidth=0.9)
            replayed = [row for row in points if row["replayed_length"] is not None]
            lengths = [row["replayed_length"] for row in replayed]
            axes.plot([row["epoch"] for row in replayed], lengths, label=f"K={k}", **look)
        _epochs(axes, rows, "tokens per step")
        legend(figure, [axes], loc="outside lower center")


def plot_loss(rows: list[Row], target: Target) -> None:
    """Held-out loss by epoch, a line per draft position (from 0)."""
    with canvas(target, _SIZE, "Held-out loss", _SIZE) as figure:
        (axes,) = panels(figure, 1, 1)
        for position, points, look in _shaded("position", rows):
            losses = [row["loss"] for row in points]
            axes.plot([row["epoch"] for row in points], losses, label=f"{position}", **look)
        _epochs(axes, rows, "loss")
        legend(figure, [axes], loc="outside lower center", title="draft position")


def plot_check(rows: list[Row], target: Target, looks: dict[str, Look]) -> None:
    """Predicted speed-up against measured, intervals both ways; on the line they are equal.

    Args:
        rows: `method`, `category`, `predicted` and `measured` with `_low` and `_high`, `is_new`.
            Those over all prompt types are drawn large; hollow ones had a step time of their own.
        target: What it is written to.
        looks: Of all methods of the report.
    """
    with canvas(target, (_SIZE[0], 4.2), "Speed-up, predicted against measured", _SIZE) as figure:
        (axes,) = panels(figure, 1, 1)
        axes.axline((1, 1), slope=1, color="black", linewidth=0.8)
        for draw in (axes.axhline, axes.axvline):  # neither faster nor slower
            draw(1.0, color="#dddddd", linewidth=0.8)
        for method, points in grouped("method", rows).items():
            look = looks[method] | {"linestyle": ""}
            for row in points:
                place = row["measured"], row["predicted"]
                hollow = {} if row["is_new"] else {"mfc": "white"}
                if row["category"] == ALL:
                    arms = {"xerr": _arms(row, "measured"), "yerr": _arms(row, "predicted")}
                    axes.errorbar(*place, **arms, elinewidth=0.8, **look, **hollow)
                else:
                    axes.plot(*place, alpha=0.6, markersize=3, **look, **hollow)
            axes.plot([], [], label=method, **look)
        axes.set(xlabel="measured", ylabel="predicted")
        axes.set_aspect("equal", adjustable="datalim")
        axes.grid(alpha=0.3)
        legend(figure, [axes], loc="outside lower center")


def plot_step_ratio(points: list[Row], target: Target) -> None:
    """What a step costs against one of `none`: a panel per kind of draft, a line per batch.

    Bars from the least to the greatest measurement where there are several.
    """
    kinds = grouped("kind", [point for point in points if point["kind"] != "none"])
    columns = min(2, max(1, len(kinds)))
    lines = -(-len(kinds) // columns)
    size = (0.6 + 2.2 * columns, 0.9 + 2.3 * max(1, lines))
    with canvas(target, size, "Step time against one of none", (_SIZE[0], 2.2)) as figure:
        all_axes = panels(figure, len(kinds), columns, sharex=True, sharey=True)
        for axes, (kind, of_kind) in zip(all_axes, kinds.items(), strict=True):
            for batch, of_batch, look in _shaded("batch", of_kind):
                ks = [point["k"] for point in of_batch]
                ratios = [point["ratio"] for point in of_batch]
                arms = [
                    [abs(point["ratio"] - point[end]) if point["num_waves"] > 1 else float("nan")
                     for point in of_batch]
                    for end in ("ratio_low", "ratio_high")
                ]  # fmt: skip
                label = f"{batch} in flight"
                axes.errorbar(ks, ratios, yerr=arms, elinewidth=0.8, label=label, **look)
            axes.axhline(1.0, color="black", linewidth=0.8)
            axes.set(title=kind, xlabel="K", ylabel="times as long")
            axes.set_xticks(sorted(grouped("k", of_kind)))
            axes.label_outer(remove_inner_ticks=False)
            axes.grid(alpha=0.3)
        legend(figure, all_axes, loc="outside lower center")


def plot_experts(rows: list[Row], target: Target) -> None:
    """Experts that a step loads by tokens of a request: counted, and if tokens were independent.

    Args:
        rows: `batch` (requests), `t` (tokens of each), `experts_loaded` and `upper_bound`.
        target: What it is written to.
    """
    with canvas(target, _SIZE, "Experts a step loads, of a layer", _SIZE) as figure:
        (axes,) = panels(figure, 1, 1)
        for batch, points, look in _shaded("batch", rows):
            tokens = [row["t"] for row in points]
            bounds = [row["upper_bound"] for row in points]
            axes.plot(tokens, bounds, "--", color=look["color"], linewidth=0.9)
            loaded = [row["experts_loaded"] for row in points]
            axes.plot(tokens, loaded, label=f"{batch} in flight", **look)
        axes.set(xlabel="tokens of a request in the step (K + 1)", ylabel="experts", ylim=(0, None))
        axes.set_xticks(sorted(grouped("t", rows)))
        axes.grid(alpha=0.3)
        legend(figure, [axes], loc="outside lower center")


def _shaded(name: str, rows: list[Row]) -> list[tuple[Any, list[Row], Look]]:
    """Rows by a field, and how the line of each looks."""
    groups = grouped(name, rows)
    return [
        (value, points, look)
        for (value, points), look in zip(groups.items(), shades(len(groups)), strict=True)
    ]


def _epochs(axes: Any, rows: list[Row], y_label: str) -> None:
    axes.set(xlabel="epoch (from 0)", ylabel=y_label)
    axes.set_xticks(sorted(grouped("epoch", rows)))
    axes.grid(alpha=0.3)


def _arms(row: Row, side: str) -> list[list[float]] | None:
    """Lengths of an error bar to both sides, [2][1]; None without an interval."""
    low, high = row[f"{side}_low"], row[f"{side}_high"]
    return None if low is None else [[row[side] - low], [high - row[side]]]

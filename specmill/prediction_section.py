"""What was predicted beside what was measured, in the comparison."""

from typing import Any

from specmill.samples import ALL


def prediction_section(check: dict[str, Any]) -> list[str]:
    """Lines of Markdown; none when nothing was both predicted and measured.

    Args:
        check: reports/check.json.
    """
    lines = [*_speed(check), *_acceptance(check["acceptance"])]
    return ["## Predicted and measured", "", *lines] if lines else []


def _speed(check: dict[str, Any]) -> list[str]:
    rows = [row for row in check["speed"] if row["category"] == ALL]
    if not rows:
        return []
    new = ""
    if check["num_cells_new"]:
        new = (
            f"; {check['median_absolute_error_new']:.1%} over the {check['num_cells_new']} whose K "
            "and load the curves did not measure (*)"
        )
    return [
        "Speed-ups as they were predicted before anything was served with the method (acceptance "
        "by replay, step times by the stage `curves`). Median absolute error: "
        f"{check['median_absolute_error']:.1%} over {check['num_cells']} of them{new}.",
        "",
        "| method | K | in flight | predicted (95% interval) | measured (95% interval) | error |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {row['method']} | {row['k']} | {row['concurrency']}{'*' if row['is_new'] else ''} "
            f"| {_change(row, 'predicted')} | {_change(row, 'measured')} | {row['error']:+.1%} |"
            for row in rows
        ),
        "",
    ]


def _change(row: dict[str, Any], name: str) -> str:
    bounds = [row[f"{name}_{side}"] for side in ("low", "high")]
    interval = "" if None in bounds else f" ({bounds[0] - 1:+.0%} to {bounds[1] - 1:+.0%})"
    return f"{row[name] - 1:+.0%}{interval}"


def _acceptance(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    return [
        "Tokens per step on the very sequences that were served, one request in flight, up to "
        "where each left the recorded answer:",
        "",
        "| method | K | replayed | served | error | answers | tokens |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {row['method']} | {row['k']} | {row['replayed']:.3f} | {row['served']:.3f} | "
            f"{row['error']:+.1%} | {row['num_sequences']} | {row['num_tokens']} |"
            for row in rows
        ),
        "",
    ]

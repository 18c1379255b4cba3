"""Tables of the comparison for one load and context; pure functions of the benches' rows."""

from itertools import chain

from specmill.rows import Row
from specmill.samples import ALL

Named = list[tuple[str, Row]]
"""Rows with the name their method is shown by."""


def speed_table(rows: Named) -> list[str]:
    """All prompt types together: a line per method and K, `none` against itself among them."""
    lines = [
        "| method | K | baseline tok/s | tok/s | change | 95% interval | verdict | same output | "
        "acceptance length | drafted steps | tokens/step |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for method, row in rows:
        if row["category"] == ALL:
            further = " | ".join(figure(row, name, form) for name, form in _FURTHER.items())
            lines.append(f"| {method} | {_change(row)} | {further} |")
    return lines


_FURTHER = {
    "identical_outputs": ".0%",
    "acceptance_length": ".2f",
    "draft_coverage": ".0%",
    "tokens_per_step": ".2f",
}


def latency_table(rows: Named) -> list[str]:
    """What a user waits for, milliseconds: median, 90th and 99th percentile."""
    lines = [
        "| method | K | first token | per token | between chunks | whole answer | goodput, req/s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for method, row in rows:
        if row["category"] == ALL and row.get("ttft_ms_p50") is not None:
            times = " | ".join(
                " / ".join(figure(row, f"{name}_ms_p{percent}", form) for percent in (50, 90, 99))
                for name, form in (
                    ("ttft", ".0f"),
                    ("itl", ".1f"),
                    ("chunk", ".1f"),
                    ("e2e", ".0f"),
                )
            )
            lines.append(
                f"| {method} | {row['num_speculative_tokens']} | {times} | "
                f"{figure(row, 'goodput', '.2f')} |"
            )
    return [*lines, ""] if len(lines) > 2 else []


def prompt_type_table(rows: Named) -> list[str]:
    """A line per method, prompt type and K; what differs in K only lies together."""
    lines = [
        "| prompt type | method | K | baseline tok/s | tok/s | change | 95% interval | verdict | "
        "acceptance length |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
    grouped: dict[tuple[str, str], list[str]] = {}
    for method, row in rows:
        category = row["category"]
        if row.get("speedup") is not None and row["num_speculative_tokens"] and category != ALL:
            length = figure(row, "acceptance_length", ".2f")
            line = f"| {category} | {method} | {_change(row)} | {length} |"
            grouped.setdefault((method, category), []).append(line)
    return [*lines, *chain.from_iterable(grouped.values()), ""] if grouped else []


def _change(row: Row) -> str:
    """K, baseline, throughput, change, interval and verdict."""
    if row.get("output_tokens_per_s") is None:
        return f"{row['num_speculative_tokens']} | - | - | not served | - | -"
    change, interval, verdict = "-", "-", "-"
    if row.get("speedup") is not None:
        change = percent(row["speedup"])
        verdict = row["verdict"] or "single run"
        if row.get("speedup_low") is not None:
            interval = f"{percent(row['speedup_low'])} to {percent(row['speedup_high'])}"
        elif row["num_pairs"]:
            interval = f"{row['num_pairs']} pairs: too few"
    return (
        f"{row['num_speculative_tokens']} | {figure(row, 'reference_tokens_per_s', '.1f')} | "
        f"{figure(row, 'output_tokens_per_s', '.1f')} | {change} | {interval} | {verdict}"
    )


def figure(row: Row, name: str, form: str) -> str:
    """A number as text; what was not measured is a dash."""
    value = row.get(name)
    return "-" if value is None else f"{value:{form}}"


def percent(ratio: float) -> str:
    """A ratio as a signed whole percentage; what rounds to nothing is +0%."""
    return f"{round(100 * (ratio - 1)):+d}%"

"""Tables of the comparison; pure functions of the benches' rows.

A row has an interval, or there is a reason: a method that is not served has no figures, a row
that another tool measured was measured once, and few pairs have none.
"""

import re
from itertools import chain

from specmill.intervals import FASTER, SLOWER
from specmill.params_bench import Bench
from specmill.rows import Row, load_label, load_order
from specmill.samples import ALL

Named = list[tuple[str, Row]]
"""Rows with the name their method is shown by."""


def overview_table(rows: Named) -> list[str]:
    """All prompt types together: a line per method and K, the change at every load.

    Bold where the whole interval lies on one side of no change. A row that is compared with nothing
    is left out.
    """
    rows = [
        (method, row)
        for method, row in rows
        if row["category"] == ALL and (not is_served(row) or row["speedup"] is not None)
    ]
    ordered = sorted((row for _, row in rows), key=load_order)
    loads = list(dict.fromkeys(load_label(row) for row in ordered))
    cells: dict[tuple[str, int], dict[str, str]] = {}
    for method, row in rows:
        cells.setdefault((method, row["num_speculative_tokens"]), {})[load_label(row)] = _cell(row)
    return [
        f"| method | K | {' | '.join(loads)} |",
        f"| --- | ---: |{' ---: |' * len(loads)}",
        *(
            f"| {method} | {k} | {' | '.join(at.get(load, '-') for load in loads)} |"
            for (method, k), at in cells.items()
        ),
    ]


def speed_table(rows: Named) -> list[str]:
    """All prompt types together, of one load: a line per method and K, `none` among them."""
    lines = [
        "| method | K | baseline tok/s | tok/s | change of a pair, median (95% interval) | pairs | "
        "verdict | acceptance length | drafted steps | tokens/step |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    further = {"acceptance_length": ".2f", "draft_coverage": ".0%", "tokens_per_step": ".2f"}
    for method, row in rows:
        if row["category"] == ALL:
            figures = [_speeds(row), change(row), str(row.get("num_pairs") or "-"), _verdict(row)]
            figures += [figure(row, name, form) for name, form in further.items()]
            lines.append(f"| {method} | {' | '.join(figures)} |")
    return [*lines, "", *_other_totals(rows)]


def _other_totals(rows: Named) -> list[str]:
    """A line on rows whose totals changed the other way than their median pair."""
    found = [
        f"{method}, K={row['num_speculative_tokens']}: {change(row).split()[0]} and "
        f"{percent(row['output_tokens_per_s'] / row['reference_tokens_per_s'])}"
        for method, row in rows
        if row["category"] == ALL
        and row["rate"] is None
        and None not in (row.get("speedup"), row.get("reference_tokens_per_s"))
        and (row["speedup"] - 1) * (row["output_tokens_per_s"] - row["reference_tokens_per_s"]) < 0
    ]
    if not found:
        return []
    return [
        f"Median pair and total tok/s disagree in sign: {'; '.join(found)}. Long answers weigh "
        "more in a total; the median counts every pair once.",
        "",
    ]


_TIMES = {"ttft": ".0f", "itl": ".1f", "chunk": ".1f", "e2e": ".0f"}


def latency_table(rows: Named, bench: Bench) -> list[str]:
    """What a user waits for, milliseconds: median, 90th and 99th percentile.

    Args:
        rows: Of one load.
        bench: Within which times a request counts as good.
    """
    good = f"first token in {bench.max_ttft_ms:g} ms, others in {bench.max_itl_ms:g} each"
    lines = [
        "| method | K | requests | first token, ms | per token, ms | between chunks, ms | "
        f"whole answer, ms | good requests/s ({good}) |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for method, row in rows:
        if row["category"] == ALL and row.get("ttft_ms_p50") is not None:
            figures = [str(row["num_speculative_tokens"]), figure(row, "num_requests", "d")]
            figures += [_percentiles(row, name, form) for name, form in _TIMES.items()]
            figures.append(figure(row, "goodput", ".2f"))
            lines.append(f"| {method} | {' | '.join(figures)} |")
    return [*lines, ""] if len(lines) > 2 else []


def prompt_type_table(rows: Named) -> list[str]:
    """A line per method, prompt type and K; what differs in K only lies together."""
    lines = [
        "| prompt type | method | K | baseline tok/s | tok/s | change of a pair, median (95% "
        "interval) | verdict | acceptance length |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
    grouped: dict[tuple[str, str], list[str]] = {}
    for method, row in rows:
        category = row["category"]
        if row.get("speedup") is not None and row["num_speculative_tokens"] and category != ALL:
            length = figure(row, "acceptance_length", ".2f")
            figures = [_speeds(row), change(row), _verdict(row), length]
            line = f"| {cell(category)} | {method} | {' | '.join(figures)} |"
            grouped.setdefault((method, category), []).append(line)
    return [*lines, *chain.from_iterable(grouped.values()), ""] if grouped else []


def is_served(row: Row) -> bool:
    """False for a method, or a K of it, that the engine refused: its rows have no figures."""
    return row.get("num_requests") is not None


def change(row: Row) -> str:
    """The speed-up of a row as a signed percentage with its interval: `+12% (+3% to +20%)`.

    A dash without one. An interval without a width is that of something taken as known, or measured
    once: there is none.
    """
    if row.get("speedup") is None:
        return "-"
    middle = percent(row["speedup"])
    if row["speedup_low"] is None or row["speedup_low"] == row["speedup_high"]:
        return middle
    return f"{middle} ({percent(row['speedup_low'])} to {percent(row['speedup_high'])})"


def _cell(row: Row) -> str:
    if not is_served(row):
        return "not served"
    return stressed(row)


def stressed(row: Row) -> str:
    """The change, bold where the whole interval lies on one side of none."""
    return f"**{change(row)}**" if row["verdict"] in (FASTER, SLOWER) else change(row)


def _speeds(row: Row) -> str:
    """K, baseline and throughput."""
    speeds = (figure(row, f"{name}_tokens_per_s", ".1f") for name in ("reference", "output"))
    return " | ".join([str(row["num_speculative_tokens"]), *speeds])


def _verdict(row: Row) -> str:
    if not is_served(row):
        return "not served"
    if row["speedup"] is None:
        return "-"
    if row["speedup_low"] is None:
        return "too few pairs" if row["num_pairs"] else "single run"
    return str(row["verdict"])


def _percentiles(row: Row, name: str, form: str) -> str:
    times = [figure(row, f"{name}_ms_p{percentile}", form) for percentile in (50, 90, 99)]
    return "-" if set(times) == {"-"} else " / ".join(times)


def figure(row: Row, name: str, form: str) -> str:
    """A number as text; what was not measured is a dash."""
    value = row.get(name)
    return "-" if value is None else f"{value:{form}}"


def cell(text: str) -> str:
    """A text from elsewhere as a cell: a bar in it would begin another, a line break a row."""
    return " ".join(text.split()).replace("|", r"\|")


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    """`text` without control characters, which a terminal would obey; lines and tabs stay."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


_MARKUP = re.compile(r"<(?=[A-Za-z/!?])|\]\(")
"""What begins a tag of HTML, a link in angle brackets, or the target of a link or picture."""


def document(lines: list[str]) -> str:
    """Lines of Markdown as a file in which nothing from elsewhere is a tag, a link or a line.

    A prompt type, an engine's message or a head's config may hold anything; what we write ourselves
    has no tags and no links. In Markdown a backslash before punctuation makes text of it.
    """
    whole = (visible(" ".join(line.splitlines())) for line in lines)
    return "\n".join(_MARKUP.sub(r"\\\g<0>", line) for line in whole).rstrip() + "\n"


def percent(ratio: float) -> str:
    """A ratio as a signed percentage: whole, but `+0.3%` for what would be no change."""
    change = 100 * (ratio - 1)
    return f"{round(change):+d}%" if round(change) else f"{round(change, 1) + 0.0:+.1f}%"

"""How to read the tables: the words in them, of what this run has and of nothing else."""

from specmill.params_bench import Bench
from specmill.rows import Results, Row, load_label
from specmill.tables import Named

_BASELINES = {
    "beside": "With both up, each set of prompts went to one and then to the other.",
    "bracket": (
        "One engine was up at a time, in mirrored rounds; the interval is widened by what the "
        "baselines drifted from round to round."
    ),
}
"""What a baseline is beside its row, by `bench.reference`."""


def overview(rows: Named) -> list[str]:
    """Lines above the first table: what its cells and columns say.

    Args:
        rows: All of the tables.
    """
    lines = [
        "Change of speed against the same server without speculation, over all prompt types, with "
        "its 95% interval.",
        "**Bold**: faster or slower, the whole interval lies on that side. Else no difference is "
        "shown.",
        "K is how many tokens a step drafts; `none` drafts none and is compared with itself.",
    ]
    loads = [row for _, row in rows]
    if deep := _first(loads, "context"):
        lines.append(
            f"`{load_label(deep)}`: {deep['context']} tokens of context before every prompt."
        )
    if arriving := _first(loads, "rate"):
        lines.append(
            f"`{load_label(arriving)}`: so many requests arrive each second, whatever is in flight."
        )
    return lines


def reading(results: Results, bench: Bench) -> list[str]:
    """List items: what the columns are.

    Args:
        results: reports/bench/NAME.json by name.
        bench: Section of params.yaml: within which times a request counts as good.
    """
    rows = [row for result in results.values() for row in result["rows"]]
    here = [result for result in results.values() if "source" not in result]
    ways = {result["provenance"].get("reference") for result in here}
    baseline = " ".join(text for way, text in _BASELINES.items() if way in ways)
    items = [
        "A *row* is an entry of `methods` in params.yaml: a method with its settings and its head.",
        "The *baseline* of a row is the same server without speculation, started for that row with "
        f"the same flags and asked the same prompts. {baseline}".rstrip(),
        "A *pair* is one set of prompts, answered by both. *Change* is the median over pairs of "
        "the ratio of their output tokens per second; so it is not the ratio of the two columns "
        "before it, which are totals, and may have another sign. Its interval is a bootstrap over "
        "pairs. Of 20 intervals of equal servers about one misses +0%.",
    ]
    if _first(rows, "rate"):
        items.append(
            "Where requests arrive at a rate, that rate decides how many tokens a second there "
            "are. There the ratio of a pair is of how long its answers took, waiting included, per "
            "token."
        )
    if any(row.get("acceptance_length") is not None for row in rows):
        items.append(
            "A *step* is one pass of the verifier. *Acceptance length* is tokens per step that had "
            "a draft, the verifier's own token included; *drafted steps* is the share of steps "
            "that had one. *Tokens/step* is over all steps, the last of an answer among them, "
            "which is cut at its end: a little less than the acceptance length even where every "
            "step drafts."
        )
    if any(row.get("ttft_ms_p50") is not None for row in rows):
        items.append(
            "Times are the median / 90th / 99th percentile, of requests or of the time between two "
            "chunks, which is what a step streams; the 99th of a hundred requests or fewer is "
            "about their slowest. *Per token* is after the first one. A request is *good* "
            "(goodput) when its first token came "
            f"within {bench.max_ttft_ms:g} ms (`bench.max_ttft_ms`) and the others took "
            f"{bench.max_itl_ms:g} ms each or less on average (`bench.max_itl_ms`)."
        )
    return [f"- {item}" for item in items]


def _first(rows: list[Row], name: str) -> Row | None:
    """A row that has such a load."""
    return next((row for row in rows if row[name]), None)

"""What speaks against a figure: rows that cannot be right, or that are not what they are called."""

from typing import Any

from specmill.intervals import UNDECIDED
from specmill.rows import Results, Row, load_label
from specmill.samples import ALL
from specmill.tables import percent

_FULL = 0.85
"""Share of a load's requests that must be in flight on average for the load to be called by it."""
_BUSY = 0.5
"""Share of the cores that may be busy in the second before a measurement."""


def doubts(results: Results) -> list[str]:
    """A sentence each, of results that were measured here."""
    return [
        *_same_server_twice(results),
        *_impossible(results),
        *_contradicting_totals(results),
        *_busy(results),
        *_draining(results),
        *_short_of_memory(results),
    ]


def _same_server_twice(results: Results) -> list[str]:
    rows = results["none"]["rows"] if "none" in results else []
    return [
        f"**`none` is not equal to itself at {load_label(row)}**: {percent(row['speedup'])} "
        f"({percent(row['speedup_low'])} to {percent(row['speedup_high'])}) between two equal "
        "servers; changes of that size mean nothing there."
        for row in rows
        if row["category"] == ALL and row["speedup_low"] is not None and row["verdict"] != UNDECIDED
    ]


def _impossible(results: Results) -> list[str]:
    """Rows that are faster than accepted tokens allow: something else slowed their baseline.

    A verification step costs at least a step without speculation, and steps emit tokens_per_step
    tokens on average: no speed-up is larger, a tenth of noise apart. Where requests arrive at a
    rate there is no such bound: a faster server has shorter queues too.
    """
    found = []
    for name, result in results.items():
        rows = [
            row
            for row in result["rows"]
            if row["rate"] is None
            and row.get("tokens_per_step") is not None
            and (row.get("speedup") or 0) > 1.1 * row["tokens_per_step"]
        ]
        if rows:
            places = ", ".join(
                f"{row['category']} at {load_label(row)}, K={row['num_speculative_tokens']}"
                for row in rows[:4]
            )
            found.append(
                f"**{name} is faster than its accepted tokens allow** ({places}"
                f"{f' and {len(rows) - 4} more' if len(rows) > 4 else ''}): something else kept "
                f"the machine busy during the baseline. `dvc repro -f -s bench@{name}` measures "
                "again."
            )
    return found


def _contradicting_totals(results: Results) -> list[str]:
    """Rows whose median pair and whose totals lie on different sides: a few prompts decide."""
    return [
        f"**{name} at {load_label(row)}, K={row['num_speculative_tokens']}**: {row['verdict']} by "
        f"the median of its pairs ({percent(row['speedup'])}), but its tokens per second over all "
        f"of them changed by {percent(row['output_tokens_per_s'] / row['reference_tokens_per_s'])}:"
        " a few prompts weigh much; see the prompt types."
        for name, result in results.items()
        for row in result["rows"]
        if row["category"] == ALL
        and row["rate"] is None
        and row.get("verdict") not in (None, UNDECIDED)
        and (row["speedup"] - 1) * (row["output_tokens_per_s"] - row["reference_tokens_per_s"]) < 0
    ]


def _busy(results: Results) -> list[str]:
    found = []
    for name, result in results.items():
        cores = max((len(one["bound_cores"] or []) for one in result["engine"].values()), default=0)
        busy = result["provenance"]["busy_cores_before"]
        if cores and busy > _BUSY * cores:
            found.append(
                f"{name}: something else kept {busy:.1f} of {cores} cores busy in the second "
                "before the measurement."
            )
    return found


def _draining(results: Results) -> list[str]:
    """A cell ends when its last answer does: where some are short, few are in flight at the end."""
    rows = [
        (name, row)
        for name, row in _overall(results)
        if row["concurrency"] and row["mean_in_flight"] < _FULL * row["concurrency"]
    ]
    if not rows:
        return []
    means = [f"{name} at {load_label(row)} {row['mean_in_flight']:.1f}" for name, row in rows]
    return [
        f"Fewer were in flight than asked for, on average: {', '.join(means)}. Answers end at "
        "different times; more bench.requests keep a load full for longer."
    ]


def _short_of_memory(results: Results) -> list[str]:
    found = []
    for name, row in _overall(results):
        room = _kv_tokens(results[name])
        if row["concurrency"] and room and row["concurrency"] * row["longest_request"] > room:
            found.append(
                f"{name} at {load_label(row)}: requests of up to {row['longest_request']} tokens "
                f"need more than the {room} tokens that the KV cache holds, so that some waited "
                "(runtime.cpu_kv_cache_gib, gpu_memory_utilization; `bench.reference: bracket` "
                "gives one engine all of it)."
            )
    return found


def _kv_tokens(result: dict[str, Any]) -> int:
    """Of the method's engine that has the least; 0 where the engine did not say."""
    said = [facts["kv_cache_tokens"] for name, facts in result["engine"].items()
            if name.startswith("method") and facts["kv_cache_tokens"]]  # fmt: skip
    return min((int(text.replace(",", "")) for text in said), default=0)


def _overall(results: Results) -> list[tuple[str, Row]]:
    """Rows with figures over all prompt types."""
    return [
        (name, row)
        for name, result in results.items()
        for row in result["rows"]
        if row["category"] == ALL and row.get("mean_in_flight") is not None
    ]

"""From raw bench records to the figures of a method: pure functions of the records."""

from typing import Any

from specmill.acceptance import acceptance, add, conditional, draft_coverage
from specmill.intervals import paired_ratio
from specmill.latency import goodput, latency
from specmill.lossless import is_rounding
from specmill.pairs import Pair, distinct_ratios, drift, pair_up, throughput
from specmill.params_bench import Bench
from specmill.recording import Recording
from specmill.rows import PLACE, Row, load_name
from specmill.samples import ALL


def summarise(recording: Recording, bench: Bench) -> list[Row]:
    """The rows of a method: by K, then load, context, and `all` and the categories.

    Returns:
        `[{"num_speculative_tokens": 3, "concurrency": 1, "rate": None, "context": 0, "category":
        "all", figures}, ...]`; K is 0 without speculation. Every row has the same keys, None where
        nothing was measured: DVC plots a list only when its first row names every field.
        Throughput is output tokens over wall seconds, summed over cells, so that `all` is weighted
        by tokens; `speedup` is the median of paired ratios with its 95% interval
        (specmill/pairs.py, intervals.py). `one_execution` is False when an interrupted stage went
        on later. The engine's facts (`model_runner` ...) are texts, None of a recording without
        them.
    """
    pairs = pair_up(recording.cells)
    rows = []
    for place in _places(pairs):
        chosen = [pair for pair in pairs if _is_at(pair, place)]
        differing = [one for one in recording.divergences if _is_of(one, place)]
        rows.append(
            dict(zip(PLACE, place, strict=True))
            | _rounded(_figures(chosen, place[0], bench) | _outputs(chosen, differing))
            | _engine(chosen, recording.servers)
        )
    return same_fields(rows)


def same_fields(rows: list[Row]) -> list[Row]:
    """The same rows, each with every field that any of them has."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def by_name(rows: list[Row], k: int) -> dict[str, Any]:
    """The figures of one K as `{"c1": {"all": figures, "coding": figures, ...}, ...}`."""
    named: dict[str, Any] = {}
    for row in rows:
        figures = {name: value for name, value in row.items() if name not in PLACE}
        if row["num_speculative_tokens"] == k:
            named.setdefault(load_name(row), {})[row["category"]] = figures
    return named


def without_empty_lists(tree: dict[str, Any]) -> dict[str, Any]:
    """The same with None for every empty list: DVC cannot plot a file that holds one."""
    return {
        name: without_empty_lists(value) if isinstance(value, dict) else value
        for name, value in ((name, None if value == [] else value) for name, value in tree.items())
    }


def _places(pairs: list[Pair]) -> list[tuple[Any, ...]]:
    """Coordinates of every row, in order: K rising, `all` before the categories."""
    found: dict[tuple[Any, ...], dict[str, None]] = {}
    for pair in sorted(pairs, key=lambda pair: pair.method["k"] or 0):
        cell = pair.method
        where = (cell["k"] or 0, cell["concurrency"], cell["rate"], cell["context"])
        found.setdefault(where, {ALL: None})[cell["category"]] = None
    return [(*where, category) for where, names in found.items() for category in names]


def _is_at(pair: Pair, place: tuple[Any, ...]) -> bool:
    cell = pair.method
    k, concurrency, rate, context, category = place
    return (cell["k"] or 0, cell["concurrency"], cell["rate"], cell["context"]) == (
        k, concurrency, rate, context,
    ) and category in (ALL, cell["category"])  # fmt: skip


def _is_of(divergence: dict[str, Any], place: tuple[Any, ...]) -> bool:
    *where, category = place
    return [divergence[n] for n in ("k", *PLACE[1:-1])] == where and category in (
        ALL,
        divergence["category"],
    )


def _figures(pairs: list[Pair], k: int, bench: Bench) -> dict[str, Any]:
    cells = [pair.method for pair in pairs]
    reference = [pair.reference for pair in pairs]
    requests = [request for cell in cells for request in cell["requests"]]
    counts = add([cell["counters"] for cell in cells])
    ratio = paired_ratio(distinct_ratios(pairs), drift(pairs))
    tokens = sum(len(request["output_ids"]) for request in requests)
    wall_s = sum(float(cell["wall_s"]) for cell in cells)
    bounds = {"max_ttft_ms": bench.max_ttft_ms, "max_itl_ms": bench.max_itl_ms}
    figures: dict[str, Any] = {
        "num_requests": len(requests),
        "output_tokens": tokens,
        "output_tokens_per_s": throughput(cells),
        "reference_tokens_per_s": throughput(reference),
        "speedup": ratio.median,
        "speedup_low": ratio.low,
        "speedup_high": ratio.high,
        "num_pairs": ratio.num_pairs,
        "verdict": ratio.verdict,
        **latency(requests),
        "goodput": goodput(requests, wall_s, bounds),
        "mean_in_flight": sum(r["chunk_s"][-1] - r["sent_s"] for r in requests) / wall_s,
        "longest_request": max(r["num_prompt_tokens"] + len(r["output_ids"]) for r in requests),
        "fresh_prompts": all(cell["fresh_prompts"] for cell in cells),
        "one_execution": len({cell["execution"] for cell in [*cells, *reference]}) == 1,
        "load_1m": max(cell["load_1m"] for cell in [*cells, *reference]),
    }
    if "engine_steps" in counts:
        figures["tokens_per_engine_step"] = tokens / counts["engine_steps"]
    if k:
        chunks = sum(len(request["chunk_s"]) for request in requests)
        figures |= draft_coverage(counts, tokens, len(requests), chunks)
        accepted = acceptance(counts, k)
        rates = accepted.pop("acceptance_rate_pos", [])
        for name, values in (("rate", rates), ("given", conditional(rates))):
            figures |= {f"acceptance_{name}_pos_{i}": value for i, value in enumerate(values)}
        figures |= accepted
    return figures


def _outputs(pairs: list[Pair], divergences: list[dict[str, Any]]) -> dict[str, Any]:
    """How far the answers are the reference's; `None` positions where all are."""
    answers = [theirs["output_ids"] == ours["output_ids"]
               for pair in pairs for theirs, ours in pair.outputs()]  # fmt: skip
    beyond = [one for one in divergences if not is_rounding(one)]
    return {
        "identical_outputs": sum(answers) / len(answers),
        "first_divergence": min((one["position"] for one in divergences), default=None),
        "largest_gap": max((abs(one["gap"]) for one in divergences if one["gap"] is not None),
                           default=None),
        "num_not_rounding": len(beyond),
    }  # fmt: skip


_FACTS = (
    "model_runner",
    "async_scheduling",
    "attention_backend",
    "moe_backend",
    "cudagraph_mode",
    "compilation_mode",
    "enforce_eager",
    "bound_cores",
)


def _engine(pairs: list[Pair], servers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How the method's engine ran, as text; of several starts that differ, all there were."""
    ran = [servers[name] for name in dict.fromkeys(pair.method["server"] for pair in pairs)
           if name in servers]  # fmt: skip
    return {
        name: " | ".join(dict.fromkeys(str(facts[name]) for facts in ran)) or None
        for name in _FACTS
    }


def _rounded(figures: dict[str, Any]) -> dict[str, Any]:
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in figures.items()
    }

"""From raw bench records to the figures of a method: pure functions of the records."""

from statistics import median
from typing import Any

from specmill.acceptance import acceptance, add, draft_coverage
from specmill.samples import ALL

PLACE = ("num_speculative_tokens", "concurrency", "category")
"""What a row is about; its other fields are figures."""


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a method: by K, then concurrency, then `all` and the categories.

    Args:
        records: What `bench.measure` returns.

    Returns:
        `[{"num_speculative_tokens": 3, "concurrency": 1, "category": "all", figures}, ...]`; K is 0
        without speculation. Every row has the same keys, None where nothing was measured: DVC plots
        a list only when its first row names every field.
        Throughput is output tokens over wall seconds, summed over cells and rounds, so `all` is
        weighted by tokens. `one_execution` is False when an interrupted stage went on later. With a
        reference, `speedup` is the ratio of throughputs and `identical_outputs` the share of
        requests whose greedy output equals the reference's.
    """
    reference = [record for record in records if record["role"] == "reference"]
    measured = [record for record in records if record["role"] == "method"]
    rows = []
    for k in sorted({record["k"] or 0 for record in measured}):
        runs = [record for record in measured if (record["k"] or 0) == k]
        for concurrency, category in _groups(runs):
            cells = _pick(runs, concurrency, category)
            beside = _pick(reference, concurrency, category)
            figures = _figures(cells, beside, k) | (_beside(cells, beside) if beside else {})
            place = dict(zip(PLACE, (k, concurrency, category), strict=True))
            rows.append(place | _rounded(figures))
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def headline_k(records: list[dict[str, Any]]) -> int:
    """K of the method's first server, which is spec.tokens; 0 without speculation."""
    return next(record["k"] or 0 for record in records if record["role"] == "method")


def by_name(rows: list[dict[str, Any]], k: int) -> dict[str, Any]:
    """The figures of one K as `{"c1": {"all": figures, "coding": figures, ...}, ...}`."""
    named: dict[str, Any] = {}
    for row in rows:
        figures = {name: value for name, value in row.items() if name not in PLACE}
        if row["num_speculative_tokens"] == k:
            named.setdefault(f"c{row['concurrency']}", {})[row["category"]] = figures
    return named


def without_empty_lists(tree: dict[str, Any]) -> dict[str, Any]:
    """The same with None for every empty list: DVC cannot plot a file that holds one."""
    return {
        name: without_empty_lists(value) if isinstance(value, dict) else value
        for name, value in ((name, None if value == [] else value) for name, value in tree.items())
    }


def _groups(runs: list[dict[str, Any]]) -> list[tuple[int, str]]:
    seen = dict.fromkeys((cell["concurrency"], cell["category"]) for cell in runs[0]["cells"])
    concurrencies = sorted({concurrency for concurrency, _ in seen})
    categories = list(dict.fromkeys([ALL, *(category for _, category in seen)]))
    return [(concurrency, category) for concurrency in concurrencies for category in categories]


def _pick(runs: list[dict[str, Any]], concurrency: int, category: str) -> list[dict[str, Any]]:
    return [
        cell
        for run in runs
        for cell in run["cells"]
        if cell["concurrency"] == concurrency and category in (ALL, cell["category"])
    ]


def _figures(cells: list[dict[str, Any]], beside: list[dict[str, Any]], k: int) -> dict[str, Any]:
    requests = [request for cell in cells for request in cell["requests"]]
    counts = add([cell["counters"] for cell in cells])
    figures: dict[str, Any] = {
        "num_requests": len(requests),
        "output_tokens": _tokens(cells),
        "output_tokens_per_s": _throughput(cells),
        "ttft_ms": 1000 * median(request["chunk_s"][0] - request["sent_s"] for request in requests),
        "itl_ms": _inter_token_ms(requests),
        "fresh_prompts": all(cell["fresh_prompts"] for cell in cells),
        "one_execution": len({cell["execution"] for cell in [*cells, *beside]}) == 1,
    }
    if "engine_steps" in counts:
        figures["tokens_per_engine_step"] = figures["output_tokens"] / counts["engine_steps"]
    if k:
        figures |= draft_coverage(counts, figures["output_tokens"], len(requests))
        accepted = acceptance(counts, k)
        for position, rate in enumerate(accepted.pop("acceptance_rate_pos", [])):
            figures[f"acceptance_rate_pos_{position}"] = rate
        figures |= accepted
    return figures


def _inter_token_ms(requests: list[dict[str, Any]]) -> float | None:
    """Median over requests of the time per token after the first, milliseconds.

    Over tokens, not chunks: with speculation one chunk holds several accepted tokens. None when no
    request has a second chunk.
    """
    times = [
        1000
        * (request["chunk_s"][-1] - request["chunk_s"][0])
        / (len(request["output_ids"]) - request["chunk_tokens"][0])
        for request in requests
        if len(request["chunk_s"]) > 1
    ]
    return median(times) if times else None


def _beside(cells: list[dict[str, Any]], reference: list[dict[str, Any]]) -> dict[str, Any]:
    outputs = {
        request["sample_key"]: request["output_ids"]
        for cell in reference
        for request in cell["requests"]
    }
    same = [
        request["output_ids"] == outputs[request["sample_key"]]
        for cell in cells
        for request in cell["requests"]
    ]
    return {
        "reference_tokens_per_s": _throughput(reference),
        "speedup": _throughput(cells) / _throughput(reference),
        "identical_outputs": sum(same) / len(same),
    }


def _tokens(cells: list[dict[str, Any]]) -> int:
    return sum(len(request["output_ids"]) for cell in cells for request in cell["requests"])


def _throughput(cells: list[dict[str, Any]]) -> float:
    return _tokens(cells) / sum(float(cell["wall_s"]) for cell in cells)


def _rounded(figures: dict[str, Any]) -> dict[str, Any]:
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in figures.items()
    }

"""From raw bench records to the figures of a method: pure functions of the records."""

from statistics import median
from typing import Any

from specmill.acceptance import acceptance, add
from specmill.samples import ALL


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures by K, concurrency and category.

    Args:
        records: What `bench.measure` returns.

    Returns:
        `{"k3": {"c1": {"all": figures, "coding": figures, ...}, ...}, ...}`; `k0` is no
        speculation. Throughput is output tokens over wall seconds, summed over cells and rounds,
        so `all` is weighted by tokens. `one_execution` is False when an
        interrupted stage went on later. With a reference, `speedup` is the ratio of throughputs and
        `identical_outputs` the share of requests whose greedy output equals the reference's.
    """
    reference = [record for record in records if record["role"] == "reference"]
    measured = [record for record in records if record["role"] == "method"]
    summary: dict[str, Any] = {}
    for k in dict.fromkeys(record["k"] for record in measured):
        runs = [record for record in measured if record["k"] == k]
        by_concurrency: dict[str, Any] = {}
        for concurrency, category in _groups(runs):
            cells = _pick(runs, concurrency, category)
            beside = _pick(reference, concurrency, category)
            figures = _figures(cells, beside, k) | (_beside(cells, beside) if beside else {})
            by_concurrency.setdefault(f"c{concurrency}", {})[category] = _rounded(figures)
        summary[f"k{k or 0}"] = by_concurrency
    return summary


def _groups(runs: list[dict[str, Any]]) -> list[tuple[int, str]]:
    seen = dict.fromkeys((cell["concurrency"], cell["category"]) for cell in runs[0]["cells"])
    concurrencies = dict.fromkeys(concurrency for concurrency, _ in seen)
    return [(concurrency, ALL) for concurrency in concurrencies] + list(seen)


def _pick(runs: list[dict[str, Any]], concurrency: int, category: str) -> list[dict[str, Any]]:
    return [
        cell
        for run in runs
        for cell in run["cells"]
        if cell["concurrency"] == concurrency and category in (ALL, cell["category"])
    ]


def _figures(
    cells: list[dict[str, Any]], beside: list[dict[str, Any]], k: int | None
) -> dict[str, Any]:
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
    if k is not None:
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
        if value is not None
    }

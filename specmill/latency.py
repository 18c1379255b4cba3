"""What a user waits for: percentiles over requests and chunks, and goodput."""

from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)


def latency(requests: list[dict[str, Any]]) -> dict[str, float | None]:
    """Percentiles of the times of requests, milliseconds.

    Args:
        requests: Records with `sent_s`, `chunk_s` [num_chunks], `chunk_tokens` [num_chunks].

    Returns:
        `ttft_ms_pXX` (sent to first chunk), `itl_ms_pXX` (of a request: time after its first chunk
        per token after it; with speculation one chunk holds several accepted tokens),
        `chunk_ms_pXX` (between chunks, which is what a reader sees) and `e2e_ms_pXX` (sent to last
        chunk). None where no request has a second chunk.
    """
    chunks = [gap for request in requests for gap in np.diff(request["chunk_s"])]
    times = {
        "ttft": [ttft_s(request) for request in requests],
        "itl": [itl for request in requests if (itl := itl_s(request)) is not None],
        "chunk": chunks,
        "e2e": [request["chunk_s"][-1] - request["sent_s"] for request in requests],
    }
    return {
        f"{name}_ms_p{percent}": 1000 * float(np.percentile(values, percent)) if values else None
        for name, values in times.items()
        for percent in PERCENTILES
    }


def ttft_s(request: dict[str, Any]) -> float:
    """Seconds from sending to the first chunk with tokens."""
    return float(request["chunk_s"][0] - request["sent_s"])


def itl_s(request: dict[str, Any]) -> float | None:
    """Seconds per token after the first chunk; None when there is no second chunk."""
    if len(request["chunk_s"]) < 2:
        return None
    tokens = int(sum(request["chunk_tokens"][1:]))
    return float(request["chunk_s"][-1] - request["chunk_s"][0]) / tokens


def goodput(requests: list[dict[str, Any]], wall_s: float, bounds: dict[str, float]) -> float:
    """Requests per second whose latencies were within bounds, as vLLM's serving benchmark counts.

    Args:
        requests: As for `latency`.
        wall_s: Seconds in which they were served.
        bounds: `max_ttft_ms` and `max_itl_ms`; a request of one chunk has no inter-token latency
            that could be too long.
    """
    good = [
        ttft_s(request) * 1000 <= bounds["max_ttft_ms"]
        and (itl_s(request) or 0.0) * 1000 <= bounds["max_itl_ms"]
        for request in requests
    ]
    return sum(good) / wall_s

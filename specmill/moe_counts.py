"""How many experts a forward pass loads, counted in what a verifier routed its tokens to.

A verification step of K drafts is a forward pass over K + 1 tokens in a row of each request. So a
window of t consecutive tokens of b answers is the pass of b requests whose t - 1 drafts are all
accepted:

    answer 1    a b [c d e] f g ...
    answer 2    h i [j k l] m n ...        the window at offset 2 of t = 3 tokens, b = 2 requests

A draft that is rejected is another token and may be routed elsewhere; windows do not have it.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from specmill.moe import experts_loaded

TOKENS = (1, 2, 3, 4, 6, 8, 9)
"""Tokens of a request in one pass: 1 without speculation, K + 1 with."""
BATCHES = (1, 4, 8, 16)
"""Requests in one pass."""


def unique_experts(routed: list[np.ndarray], tokens: int, num_experts: int) -> np.ndarray:
    """Experts of each layer that each window of a group of answers loads.

    Args:
        routed: Of each answer, the experts of its tokens: int [num_tokens, num_layers, top_k],
            ids from 0. Windows end where the shortest answer does.
        tokens: Tokens of an answer in a window, no more than the shortest has.
        num_experts: Experts of a layer.

    Returns:
        int [num_windows, num_layers], windows by rising offset.
    """
    shortest = min(len(ids) for ids in routed)
    used = np.zeros((shortest, routed[0].shape[1], num_experts), dtype=bool)
    for ids in routed:
        np.put_along_axis(used, ids[:shortest].astype(np.int64), True, axis=2)
    windows = sliding_window_view(used, tokens, axis=0)  # [.., num_layers, num_experts, tokens]
    return np.asarray(windows.any(axis=3).sum(axis=2))


def overlap(routed: list[np.ndarray], num_experts: int, top_k: int) -> list[dict[str, Any]]:
    """Experts loaded against what independent tokens would load, by requests and tokens of a pass.

    Args:
        routed: As for `unique_experts`. Answers that stand together make up the groups.
        num_experts: Experts of a layer.
        top_k: Experts a token is routed to.

    Returns:
        Rows of `batch`, `t` (tokens of each request), `experts_loaded` (mean over windows and
        layers), `upper_bound` (specmill.moe), `ratio` of the two and `num_windows`. A batch or t
        that the answers are too few or too short for has no row.
    """
    rows = []
    for batch in BATCHES:
        for tokens in TOKENS:
            groups = [group for group in _groups(routed, batch) if min(map(len, group)) >= tokens]
            if not groups:
                continue
            counts = np.concatenate([unique_experts(one, tokens, num_experts) for one in groups])
            loaded, bound = counts.mean(), experts_loaded(num_experts, top_k, batch * tokens)
            rows.append(
                {
                    "batch": batch,
                    "t": tokens,
                    "experts_loaded": round(float(loaded), 3),
                    "upper_bound": round(bound, 3),
                    "ratio": round(float(loaded) / bound, 4),
                    "num_windows": len(counts),
                }
            )
    return rows


def _groups(routed: list[np.ndarray], batch: int) -> Iterator[list[np.ndarray]]:
    """Disjoint groups of `batch` answers in order; what is left over is in none."""
    for start in range(0, len(routed) - batch + 1, batch):
        yield routed[start : start + batch]


def busiest_share(routed: list[np.ndarray], num_experts: int) -> float:
    """Share of a layer's routed choices that its busiest expert gets, mean over layers.

    It is 1 / num_experts where all are equally busy. What lies above says how much of the overlap
    comes from popular experts, rather than from neighbours that choose alike.
    """
    ids = np.concatenate(routed)  # [num_tokens, num_layers, top_k]
    shares = [
        np.bincount(ids[:, layer].ravel(), minlength=num_experts).max() / ids[:, layer].size
        for layer in range(ids.shape[1])
    ]
    return float(np.mean(shares))

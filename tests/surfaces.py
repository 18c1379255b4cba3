"""Results of benches as if sixteen methods had been measured, with noise from a seed."""

import random
from typing import Any

from specmill.intervals import FASTER, SLOWER, UNDECIDED

LEVELS = {
    "ngram": 0.36,
    "ngram_1_2": 0.33,
    "ngram_3_5": 0.4,
    "suffix": 0.6,
    "eagle3": 0.52,
    "peagle": 0.44,
    "dflash": 0.48,
    "medusa": 0.4,
    "draft_model": 0.7,
    "self_draft": 0.99,
    "noised": 0.3,
    "wrong_width": None,
    "shuffled_d2t": 0.02,
    "shifted_aux_layers": 0.12,
    "random_layer": 0.05,
}
"""Acceptance rate at position 0; None where the method cannot be served."""

CATEGORIES = ("all", "coding", "dialogue", "explanation", "maths", "structured", "writing")
MAX_K = 5


def place(k: int, load: int | float, context: int, category: str = "all") -> dict[str, Any]:
    """Coordinates of a row; a float is a rate in requests per second."""
    rate = load if isinstance(load, float) else None
    return {
        "num_speculative_tokens": k,
        "concurrency": None if rate else load,
        "rate": rate,
        "context": context,
        "category": category,
    }


def sixteen_methods(
    ks: tuple[int, ...] = (3, 1, 2, 5),
    loads: tuple[int | float, ...] = (1, 8, 32),
    contexts: tuple[int, ...] = (0, 1024),
    seed: int = 17,
) -> dict[str, dict[str, Any]]:
    """reports/bench/NAME.json by method, `none` first; the first K is the headline."""
    noise = random.Random(seed)
    places = [
        place(k, load, context, category)
        for k in sorted(ks)
        for context in contexts
        for load in loads
        for category in CATEGORIES
    ]
    results: dict[str, dict[str, Any]] = {
        "none": _result("none", 0, [place | {"num_speculative_tokens": 0} for place in places])
    }
    for method, level in LEVELS.items():
        rows = [place if level is None else place | _figures(place, level, noise)
                for place in places]  # fmt: skip
        results[method] = _result(method, ks[0], rows)
    results["wrong_width"]["not_served"] = "its hidden size is 288, the verifier's 576"
    return results


def _result(method: str, k: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"method": method, "num_speculative_tokens": k, "head": {}, "rows": rows, "engine": {}}


def _figures(place: dict[str, Any], level: float, noise: random.Random) -> dict[str, Any]:
    k = place["num_speculative_tokens"]
    level = min(1.0, level * noise.uniform(0.85, 1.15))
    rates = [level * 0.6**position * noise.uniform(0.95, 1.0) for position in range(k)]
    load = place["concurrency"] or 10 * place["rate"]
    cost = 1 + k * (0.06 + 0.012 * load)
    middle = (1 + sum(rates)) / cost * noise.uniform(0.95, 1.05)
    width = noise.uniform(0.02, 0.12) * (1 if place["category"] == "all" else 1.5)
    low, high = middle * (1 - width), middle * (1 + width)
    return {
        "speedup": round(middle, 4),
        "speedup_low": round(low, 4),
        "speedup_high": round(high, 4),
        "verdict": FASTER if low > 1 else SLOWER if high < 1 else UNDECIDED,
    } | {f"acceptance_rate_pos_{i}": round(rates[i], 4) if i < k else None for i in range(MAX_K)}

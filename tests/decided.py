"""What decisions are made of, to be filled in by a test: benches, predictions, rows of params."""

from typing import Any

from specmill.grounds import Grounds
from specmill.params import Method
from specmill.revision import Committed
from tests.benches import beside, comparable, result, row

HARDWARE = {
    "gpus": [],
    "cpu_model": "Some CPU",
    "num_usable_cores": 2,
    "versions": {"vllm": "0.31.0", "torch": "2.13.0+cpu"},
}
NEVER = Committed("abc1234", None)
"""No record is committed."""


def methods() -> dict[str, Method]:
    window = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    identity = "models/verifier/identity.json"
    return {
        "none": Method(method="none", section="bench", head=identity, settings={}),
        "ngram": Method(method="ngram", section="spec", head=identity, settings=window),
        "eagle3": Method(method="eagle3", section="spec", head="models/eagle3", settings={}),
    }


def results() -> dict[str, Any]:
    """Those of tests.benches: eagle3 with K=1 +20% and (+1%), K=2 +25% and -25%; ngram +9%, -8%."""
    found: dict[str, Any] = comparable()
    for name, one in found.items():
        one |= {"method": name, "served_by": name, "refused": {}}
    return found


def bench(k: int, *cells: dict[str, Any], served_by: str = "eagle3") -> dict[str, Any]:
    """A result with one K."""
    return result(k, list(cells)) | {"served_by": served_by, "refused": {}}


def cell(
    k: int, load: int | float, speedup: float, low: float | None, high: float | None, **more: Any
) -> dict[str, Any]:
    """A measured row over all prompt types."""
    interval = None if low is None or high is None else (low, high)
    figures = beside(100.0, 100.0 * speedup, speedup, interval)
    return row(k, load, "all", figures | more)


def foreseen(
    method: str,
    k: int,
    load: int,
    speedup: float,
    width: float = 0.05,
    *,
    bound: float | None = 1.5,
    tokens: float = 1.4,
) -> dict[str, Any]:
    """A predicted row over all prompt types."""
    return {
        "method": method,
        "k": k,
        "concurrency": load,
        "category": "all",
        "speedup": speedup,
        "speedup_low": round(speedup - width, 4),
        "speedup_high": round(speedup + width, 4),
        "tokens_per_step": tokens,
        "break_even_tokens_per_step": bound,
        "step_ratio": 1.5,
    }


def better(
    method: str, k: int, load: int, *lengths: tuple[float, float], bound: float
) -> list[dict[str, Any]]:
    """Rows of what heads would bring: tokens per step and speed-up."""
    return [
        foreseen(method, k, load, speedup, 0.01, bound=bound, tokens=tokens)
        for tokens, speedup in lengths
    ]


def predictions(*rows: dict[str, Any], heads: Any = (), **without: str) -> dict[str, Any]:
    """reports/predicted.json."""
    return {"rows": [*rows], "better_head": [*heads], "best": [], "without": without}


def grounds(found: dict[str, Any] | None = None, **further: Any) -> Grounds:
    return Grounds(
        results() if found is None else found, methods(), HARDWARE, **further
    )  # fmt: skip

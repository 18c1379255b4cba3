"""Waves of step-time curves, made by hand."""

from typing import Any

from specmill.client import TimedAnswer
from specmill.curve_engines import Engine
from specmill.curve_kinds import Kind
from specmill.params import Method
from specmill.params_curves import Curves
from specmill.plan import Run

NGRAM = Method(
    method="ngram",
    section="spec",
    head="models/verifier/identity.json",
    settings={"prompt_lookup_min": 2, "prompt_lookup_max": 4},
)
TOKENS = Kind("tokens", "ngram", NGRAM, None)
THREE = Engine("tokens", (1, 3), Run("tokens", 3, 0, {"num_speculative_tokens": 3}))


def curves_section(**changes: Any) -> Curves:
    values: dict[str, Any] = {"tokens": [1, 3], "batch": [1, 2], "steps": 4, "repeats": 2}
    return Curves(**(values | changes))


def streamed(*chunks: tuple[float, int], sent: float = 0.0) -> TimedAnswer:
    """An answer whose chunks came at these times (s) with so many tokens."""
    sizes = [size for _, size in chunks]
    return TimedAnswer([7] * sum(sizes), "length", sent, [at for at, _ in chunks], sizes)


def waves_of(kind: str, k: int, steps: list[float], group: str = "g") -> list[dict[str, Any]]:
    """Waves of one request, one per repeat, with these step times."""
    return [
        {"kind": kind, "k": k, "batch": 1, "repeat": repeat, "group": group, "step_ms": step,
         "ttft_ms": 10.0 * step, "tokens_per_step": 1.0, "num_gaps": 4}
        for repeat, step in enumerate(steps)
    ]  # fmt: skip

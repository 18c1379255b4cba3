"""What a GPU did in a trace of torch's profiler: milliseconds by kind of kernel.

A kind is told by its kernel's name, by the first row that matches. Names as vLLM 0.26 to 0.32 and
CUDA 12 and 13 have them on an H200.
"""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = {
    "all-reduce": r"all_?reduce|cross_device_reduce|multimem|two_shot|one_shot",
    "other between GPUs": r"nccl|all_?gather|reduce_?scatter",
    "attention": r"flash|fmha|attention|attn|reshape_and_cache",
    "matrix products": r"gemm|gemv|nvjet|cutlass|splitk|cublas|matmul|xmma|_mm_",
    "norms, activations, rope": r"norm|silu|act_and_mul|rotary|rope|^triton_",
    "choosing tokens": r"argmax|topk|top_k|sampl|softmax|gumbel|reject|sort|radix",
    "copies": r"memcpy|memset|copy",
}
"""Patterns, case ignored; what matches none is `other`."""

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_STEP = re.compile(r"execute_")
_PATTERNS = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in KINDS.items()}


@dataclass(frozen=True)
class Rank:
    """What one GPU did in the steps of a trace, in milliseconds."""

    steps: int
    span: float
    """From its first kernel's start to its last one's end."""
    busy: float
    """With at least one kernel running."""
    by_kind: dict[str, float]
    """Of kernels, added up."""
    reduces: list[float]
    """Of every all-reduce, in the order of their starts."""
    names: dict[str, float]
    """By the kernel's name."""


def kind_of(name: str) -> str:
    """The kind of a kernel of that name."""
    for kind, pattern in _PATTERNS.items():
        if pattern.search(name):
            return kind
    return "other"


def read_trace(file: Path) -> list[dict[str, Any]]:
    """The events of a trace, as torch.profiler exports it, gzipped or not."""
    content = file.read_bytes()
    if file.suffix == ".gz":
        content = gzip.decompress(content)
    events: list[dict[str, Any]] = json.loads(content)["traceEvents"]
    return events


def read_rank(events: Iterable[dict[str, Any]]) -> Rank:
    """What the GPU of one trace did; its steps are vLLM's own marks (`execute_...`).

    Raises:
        ValueError: where the trace has no kernel, as that of a CPU, or no step.
    """
    whole = [event for event in events if event.get("ph") == "X"]
    steps = sum(
        event.get("cat") == "user_annotation" and bool(_STEP.match(event["name"]))
        for event in whole
    )
    ran = sorted(
        (event for event in whole if event.get("cat") in _ON_GPU), key=lambda event: event["ts"]
    )
    if not ran or not steps:
        raise ValueError(
            f"the trace has {len(ran)} kernels and {steps} steps: it must be of an engine of vLLM "
            "on a GPU"
        )
    by_kind: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    reduces = []
    for event in ran:
        kind, took = kind_of(event["name"]), event["dur"] / 1e3
        by_kind[kind] += took
        names[event["name"]] += took
        if kind == "all-reduce":
            reduces.append(took)
    end = max(event["ts"] + event["dur"] for event in ran)
    busy = _covered((event["ts"], event["ts"] + event["dur"]) for event in ran)
    span = (end - ran[0]["ts"]) / 1e3
    return Rank(steps, span, busy / 1e3, dict(by_kind), reduces, dict(names))


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans that are in the order of their starts."""
    total, until = 0.0, float("-inf")
    for start, end in spans:
        if end > until:
            total += end - max(start, until)
            until = end
    return total


def per_step(ranks: list[Rank]) -> dict[str, Any]:
    """One step of an engine, in milliseconds, over its ranks.

    An all-reduce lasts until the last rank has come, so that a rank that is early counts its
    waiting as one. `all_reduce_least` takes of every all-reduce the rank that waited least.

    Returns:
        `step`, `busy`, `by_kind` (the mean over ranks), `all_reduces` (their number),
        `all_reduce_least` (None where ranks saw different numbers of them) and the ten `kernels`
        that took longest on the first rank.
    """
    each = [1 / rank.steps for rank in ranks]
    kinds = sorted({kind for rank in ranks for kind in rank.by_kind})
    numbers = {len(rank.reduces) for rank in ranks}
    least = None
    if len(numbers) == 1:
        least = sum(map(min, zip(*(rank.reduces for rank in ranks), strict=True))) * each[0]
    longest = sorted(ranks[0].names.items(), key=lambda item: -item[1])[:10]

    def mean(values: Iterable[float]) -> float:
        return sum(value * one for value, one in zip(values, each, strict=True)) / len(ranks)

    return {
        "steps": ranks[0].steps,
        "step": mean(rank.span for rank in ranks),
        "busy": mean(rank.busy for rank in ranks),
        "by_kind": {kind: mean(rank.by_kind.get(kind, 0.0) for rank in ranks) for kind in kinds},
        "all_reduces": mean(float(len(rank.reduces)) for rank in ranks),
        "all_reduce_least": least,
        "kernels": [{"name": name[:120], "ms": took * each[0]} for name, took in longest],
    }

"""What a bench plans and records, made by hand."""

from typing import Any

from specmill.params_bench import Bench
from specmill.samples import Sample
from tests.fakes import sample


def bench_section(**changes: Any) -> Bench:
    """A section `bench` of one request in flight, with some keys changed."""
    values: dict[str, Any] = {
        "reference": "beside",
        "concurrency": [1],
        "rates": [],
        "context": [0],
        "requests": 2,
        "rounds": 1,
        "precision": 0.1,
        "max_tokens": 8,
        "max_ttft_ms": 1000.0,
        "max_itl_ms": 50.0,
        "enforce_eager": False,
    }
    return Bench(**(values | changes))


def prompts(category: str, count: int, first: int = 10) -> list[Sample]:
    """Prompts [5, first], [5, first + 1] ... whose own answers are of no interest."""
    return [
        sample([5, first + number], [], category=category, split="bench") for number in range(count)
    ]


def request(
    output: list[int], sent: float, *chunks: tuple[float, int], key: str = "a"
) -> dict[str, Any]:
    """One request: its output ids, when it was sent, and (time, tokens) of each chunk, seconds."""
    assert sum(size for _, size in chunks) == len(output)
    return {
        "sample_key": key,
        "num_prompt_tokens": 2,
        "output_ids": output,
        "finish_reason": "length",
        "sent_s": sent,
        "chunk_s": [at for at, _ in chunks],
        "chunk_tokens": [size for _, size in chunks],
    }


def answer(output: list[int], seconds: float = 1.0, key: str = "a") -> dict[str, Any]:
    """A request that was sent at 0 and came in one chunk."""
    return request(output, 0.0, (seconds, len(output)), key=key)


def drafted(num_drafts: int, *at: int) -> dict[str, int]:
    """Counters of drafts of as many tokens as there are positions, accepted so often at each."""
    return {
        "num_drafts": num_drafts,
        "num_draft_tokens": num_drafts * len(at),
        "num_accepted_tokens": sum(at),
        **{f"accepted_at_{position}": accepted for position, accepted in enumerate(at)},
    }


def cell(role: str, wall_s: float, *requests: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The record of a cell of coding with one request in flight, K = 2 of a method."""
    k = changes.get("k", 2 if role == "method" else None)
    values = {
        "role": role,
        "k": k,
        "phase": 0,
        "round": 0,
        "number": 0,
        "concurrency": 1,
        "rate": None,
        "context": 0,
        "category": "coding",
        "server": f"{role}_k{k or 0}_0",
        "side_by_side": True,
        "fresh_prompts": True,
        "execution": "first",
        "started_at": "2026-01-02T03:04:05+00:00",
        "load_1m": 0.5,
        "wall_s": wall_s,
        "counters": drafted(0, *[0] * k) if k else {},
        "requests": list(requests) or [answer([1, 2, 3, 4], wall_s)],
    }
    assert changes.keys() <= values.keys()
    return values | changes


def both(reference_s: float, method_s: float, **changes: Any) -> list[dict[str, Any]]:
    """The same cell on a reference and on a method, four tokens each."""
    return [
        cell("reference", reference_s, **(changes | {"k": None})),
        cell("method", method_s, **changes),
    ]

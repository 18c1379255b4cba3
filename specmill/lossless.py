"""Is greedy output what it is without speculation, and where it is not, is that rounding?

Verification scores K + 1 tokens at once where plain decoding scores one, and a batch of other
requests changes shapes too: sums are taken in another order, and bf16 logits move in their last
bits. Where the two likeliest tokens are that close, greedy decoding may take either. A draft that
is accepted against the verifier's choice is something else. Each first divergence is therefore put
to the reference server: how far apart does it find the two tokens there?

    prompt  a0 a1 a2 ... a(n-1) | reference's token
                                | method's token        gap = log p(reference's) - log p(method's)
"""

from typing import Any

from specmill.client import Client
from specmill.pairs import Pair
from specmill.plan import Cell
from specmill.server import Server

ROUNDING = 0.5
"""Log probabilities that rounding can exchange, nats: four units in the last place of a bf16 logit
between 16 and 32 (8 bits of significand: 2**-3 each)."""

_TOP = 20


async def find_divergences(
    pairs: list[Pair], cells: dict[tuple[int, int], Cell], server: Server, timeout_s: float
) -> list[dict[str, Any]]:
    """First divergence of every answer that is not the reference's.

    Args:
        pairs: Measured cells.
        cells: What was sent, by round and number.
        server: A reference.
        timeout_s: Of one request.

    Returns:
        `k` (0 without speculation), `concurrency`, `rate`, `context`, `category`, `sample_key`;
        `position`, the first output token that differs, from 0; `reference_id` and `method_id`
        there, None where that answer had ended; and `gap`, the nats by which the reference prefers
        its own token: None when an answer had ended or either token is not among the likeliest 20.
    """
    found = []
    async with Client(server, timeout_s) as client:
        for pair in pairs:
            sent = cells[pair.method["round"], pair.method["number"]].ids
            for prompt, (theirs, ours) in zip(sent, pair.outputs(), strict=True):
                position = first_difference(theirs["output_ids"], ours["output_ids"])
                if position is None:
                    continue
                tokens = [_at(answer["output_ids"], position) for answer in (theirs, ours)]
                shared = prompt + ours["output_ids"][:position]
                ended = None in tokens
                likely = {} if ended else await client.top_logprobs(shared, _TOP)
                place = {name: pair.method[name] for name in _PLACE}
                found.append(
                    {
                        "k": pair.method["k"] or 0,
                        **place,
                        "sample_key": ours["sample_key"],
                        "position": position,
                        "reference_id": tokens[0],
                        "method_id": tokens[1],
                        "gap": _gap(likely, *tokens),
                    }
                )
    return found


_PLACE = ("concurrency", "rate", "context", "category")


def is_rounding(divergence: dict[str, Any]) -> bool:
    """Whether the two tokens are so close that rounding decides."""
    return divergence["gap"] is not None and abs(divergence["gap"]) <= ROUNDING


def first_difference(left: list[int], right: list[int]) -> int | None:
    """Index of the first token that differs, from 0; None when both are the same.

    Where one is the beginning of the other, it is the length of the shorter.
    """
    for index, (ours, theirs) in enumerate(zip(left, right, strict=False)):
        if ours != theirs:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def _at(ids: list[int], position: int) -> int | None:
    return ids[position] if position < len(ids) else None


def _gap(likely: dict[int, float], reference_id: int | None, method_id: int | None) -> float | None:
    if reference_id not in likely or method_id not in likely:
        return None
    return round(likely[reference_id] - likely[method_id], 4)

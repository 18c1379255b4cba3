"""Is greedy output what it is without speculation, and where it is not, is that rounding?

Verification scores K + 1 tokens at once where plain decoding scores one, and a batch of other
requests changes shapes too: sums are taken in another order, and bf16 logits move in their last
bits. Where the two likeliest tokens are that close, greedy decoding may take either. A draft that
is accepted against the verifier's choice is something else. Each first divergence is therefore put
to the reference server: how far apart does it find the two tokens there?

    prompt  a0 a1 a2 ... a(n-1) | reference's token
                                | method's token        gap = log p(reference's) - log p(method's)
"""

from dataclasses import asdict, dataclass
from typing import Any

from specmill.client import Client
from specmill.pairs import Pair
from specmill.plan import Cell

ROUNDING = 0.5
"""Log probabilities that rounding can exchange, nats: four units in the last place of a bf16 logit
between 16 and 32 (8 bits of significand: 2**-3 each)."""

_TOP = 20


@dataclass(frozen=True)
class Divergence:
    """Where a method's answer left the reference's."""

    k: int
    concurrency: int | None
    rate: float | None
    context: int
    category: str
    sample_key: str
    position: int
    """First output token that differs, from 0."""
    reference_id: int | None
    """None where this answer had ended."""
    method_id: int | None
    gap: float | None
    """Nats by which the reference server prefers its own token; None when the method's is not among
    the likeliest 20, or when one answer had ended."""

    @property
    def is_rounding(self) -> bool:
        """Whether the two tokens are so close that rounding decides."""
        return self.gap is not None and abs(self.gap) <= ROUNDING


async def find_divergences(
    pairs: list[Pair], cells: dict[tuple[int, int], Cell], client: Client
) -> list[dict[str, Any]]:
    """First divergence of every answer that is not the reference's, with its gap.

    Args:
        pairs: Measured cells.
        cells: What was sent, by round and number.
        client: Of a reference server.

    Returns:
        `Divergence` as dictionaries.
    """
    found = []
    for pair in pairs:
        sent = cells[pair.method["round"], pair.method["number"]].ids
        for prompt, (theirs, ours) in zip(sent, pair.outputs(), strict=True):
            position = first_difference(theirs["output_ids"], ours["output_ids"])
            if position is None:
                continue
            expected, given = (_at(answer["output_ids"], position) for answer in (theirs, ours))
            gap = None
            if expected is not None and given is not None:
                shared = prompt + ours["output_ids"][:position]
                gap = _gap(await client.top_logprobs(shared, _TOP), expected, given)
            found.append(
                asdict(
                    Divergence(
                        k=pair.method["k"] or 0,
                        **{n: pair.method[n] for n in _PLACE},
                        sample_key=ours["sample_key"],
                        position=position,
                        reference_id=expected,
                        method_id=given,
                        gap=gap,
                    )
                )
            )
    return found


_PLACE = ("concurrency", "rate", "context", "category")


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


def _gap(likely: dict[int, float], reference_id: int, method_id: int) -> float | None:
    if reference_id not in likely or method_id not in likely:
        return None
    return round(likely[reference_id] - likely[method_id], 4)

"""How an engine goes through a recorded greedy answer when one knows which drafts are right.

Verification accepts a draft token exactly when it is the verifier's own, so that a method's steps
follow from what it would have drafted at every place. With K = 3, for a prompt p0 p1 p2 and an
answer a0 ... a6:

    token         p0  p1  p2  a0  a1  a2  a3  a4  a5  a6
    start                      0   1   2   3   4   5      start i: a0 ... ai are known
    right                      2   0   1   3   0   1      first drafts from there that are right

    prefill       gives a0                                  no draft is verified
    step 1        start 0: a1 a2 are right, a3 is the bonus
    step 2        start 3: a4 a5 a6 are right; the answer has ended

    tokens per step    = 6 / 2           tokens after the first over steps
    acceptance length  = 1 + (2 + 3) / 2 tokens per step *that drafted*, bonus included

An engine that drafts beyond the end of an answer may count what it accepts there; that is no
output, and here it does not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_DRAWS = 1000
_SEED = 17


@dataclass(frozen=True)
class Runs:
    """What a method would draft at every start of one answer, for every K up to the largest."""

    accepted: np.ndarray
    """int32 [num_starts, most_k]: drafts from start i that are right before the first wrong one,
    with K = k in column k - 1."""
    drafted: np.ndarray
    """int32 [num_starts, most_k]: drafts made there."""

    @classmethod
    def of_chain(cls, right: np.ndarray, drafted: np.ndarray | None = None) -> "Runs":
        """Of a method that drafts the same first tokens whatever K is.

        Args:
            right: bool [num_starts, most_k], whether each draft is right if all before it are.
            drafted: int [num_starts], drafts made with the largest K; None when always all.
        """
        most_k = right.shape[1]
        ks = np.arange(1, most_k + 1)
        run = np.cumprod(right, axis=1, dtype=np.int32).sum(1)
        made = np.full(len(run), most_k) if drafted is None else drafted
        return cls(
            np.minimum(run[:, None], ks).astype(np.int32),
            np.minimum(made[:, None], ks).astype(np.int32),
        )

    @property
    def most_k(self) -> int:
        """Largest K."""
        return int(self.accepted.shape[1])


@dataclass(frozen=True)
class Walk:
    """One answer, gone through as an engine does; counts."""

    num_steps: int
    num_tokens: int
    """Tokens that the steps gave: all of the answer but its first."""
    num_drafts: int
    """Steps that drafted at least one token."""
    num_draft_tokens: int
    accepted_at: tuple[int, ...]
    """Steps whose draft at position i, from 0, was accepted."""


def walk(runs: Runs, k: int, num_tokens: int | None = None) -> Walk:
    """Go through an answer with K draft tokens.

    Args:
        runs: Of its starts.
        k: num_speculative_tokens, at most `runs.most_k`.
        num_tokens: Tokens of the answer to go through; None for all.

    Raises:
        ValueError: when K is not covered, or the answer is shorter than that.
    """
    if not 1 <= k <= runs.most_k:
        raise ValueError(f"K is {k}, and drafts are known for 1 to {runs.most_k}")
    last = len(runs.accepted) if num_tokens is None else num_tokens - 1
    if last > len(runs.accepted):
        raise ValueError(f"{num_tokens} tokens of an answer of {len(runs.accepted) + 1}")
    accepted, drafted = runs.accepted[:, k - 1].tolist(), runs.drafted[:, k - 1].tolist()
    at = [0] * k
    place = num_steps = num_drafts = num_draft_tokens = 0
    while place < last:
        right = min(accepted[place], last - place)
        num_steps += 1
        num_drafts += drafted[place] > 0
        num_draft_tokens += drafted[place]
        for position in range(right):
            at[position] += 1
        place += right + 1
    return Walk(num_steps, max(last, 0), num_drafts, num_draft_tokens, tuple(at))


def figures(walks: Sequence[Walk]) -> dict[str, Any]:
    """What the walks of several answers come to, with one K.

    Returns:
        `num_sequences`, `num_tokens`, `num_steps`, `num_drafts`; `tokens_per_step` with the bounds
        of its 95% interval, `tokens_per_step_low` and `_high` (bootstrap over answers, 1,000 draws;
        None of fewer than two); `draft_coverage`, the share of steps that drafted;
        `acceptance_length` and `acceptance_rate_pos_i`, of those alone and unconditional: None
        where nothing was drafted.
    """
    steps = np.array([one.num_steps for one in walks], dtype=np.int64)
    tokens = np.array([one.num_tokens for one in walks], dtype=np.int64)
    drafts = sum(one.num_drafts for one in walks)
    at = np.sum([one.accepted_at for one in walks], axis=0) if len(walks) else np.zeros(0)
    total = int(steps.sum())
    low, high = _interval(tokens, steps) if total and len(walks) > 1 else (None, None)
    rates = [int(count) / drafts if drafts else None for count in at]
    return {
        "num_sequences": len(walks),
        "num_tokens": int(tokens.sum()),
        "num_steps": total,
        "num_drafts": drafts,
        "tokens_per_step": int(tokens.sum()) / total if total else None,
        "tokens_per_step_low": low,
        "tokens_per_step_high": high,
        "draft_coverage": drafts / total if total else None,
        "acceptance_length": 1 + int(at.sum()) / drafts if drafts else None,
        **{f"acceptance_rate_pos_{position}": rate for position, rate in enumerate(rates)},
    }


def _interval(tokens: np.ndarray, steps: np.ndarray) -> tuple[float, float]:
    """95% percentile interval of sum(tokens) / sum(steps) over resampled answers."""
    drawn = np.random.default_rng(_SEED).integers(0, len(steps), (_DRAWS, len(steps)))
    ratios = tokens[drawn].sum(1) / np.maximum(steps[drawn].sum(1), 1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)

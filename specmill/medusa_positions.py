"""What Medusa heads are trained on: which position is paired with which tokens.

For a sample of prompt p0 p1 p2 and answer a0 ... a4 with two heads, `-` being nothing to learn:

    position t     0   1   2   3   4   5   6   7
    token         p0  p1  p2  a0  a1  a2  a3  a4
    verifier       -   -  a0  a1  a2  a3  a4   -     x_(t+1), what it wrote from y_t
    head 0         -   -  a1  a2  a3  a4   -   -     x_(t+2)
    head 1         -   -  a2  a3  a4   -   -   -     x_(t+3)

Only positions from which the verifier wrote a token count: from no other is a draft made. Near the
end of a sample the heads drop out one after the other.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from specmill.medusa import VerifierHead
from specmill.params_heads import Medusa
from specmill.samples import Sample
from specmill.states import restore
from specmill.view import StateView

Tensors = tuple[torch.Tensor, ...]
"""Of a `Step`, in its order."""

_POOL = 1 << 17
"""Positions shuffled together, 1.9 GB at hidden size 7,168. It matters: steps of a few whole
samples taught head 0 of the embedded verifier 0.25 where shuffled positions taught it 0.30."""

NOTHING = -100
"""Target of a head that has nothing to learn at a position; torch's cross-entropy skips it."""


def align(
    input_ids: np.ndarray, loss_mask: np.ndarray, num_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The positions of a sample that draft, and what follows each.

    Args:
        input_ids: int32 [num_tokens].
        loss_mask: [num_tokens], 1 on what the verifier wrote.
        num_heads: Heads.

    Returns:
        Positions t, int64 [num_positions], where x_(t+1) is the verifier's; these x_(t+1), int64
        [num_positions]; and x_(t+2+i) of head i, int64 [num_positions, num_heads], `NOTHING` where
        that lies beyond the end or is not the verifier's.
    """
    beyond = np.full(num_heads + 1, NOTHING)
    written = np.concatenate([np.where(loss_mask == 1, input_ids, NOTHING), beyond])
    positions = np.flatnonzero(loss_mask[1:] == 1)
    following = written[positions[:, None] + np.arange(1, num_heads + 2)]
    found = torch.from_numpy(following.astype(np.int64))  # [num_positions, 1 + num_heads]
    return torch.from_numpy(positions), found[:, 0], found[:, 1:]


@dataclass(frozen=True)
class Step:
    """Positions of one optimizer step, of as many samples as it takes."""

    normed: torch.Tensor  # [num_positions, hidden_size], after the final norm
    following: torch.Tensor  # int64 [num_positions], x_(t+1)
    targets: torch.Tensor  # int64 [num_positions, num_heads], x_(t+2+i) or NOTHING


class Positions:
    """The drafting positions of samples, packed into steps; only the last layer is kept.

    Args:
        samples: What trains, or what is held out.
        view: Their hidden states.
        head: The verifier's final norm; steps lie where it does, in its dtype.
        chosen: Parameters of training.

    Raises:
        ValueError: when hidden states are missing, or none are kept.
    """

    def __init__(self, samples: list[Sample], view: StateView, head: VerifierHead, chosen: Medusa):
        if view.online:
            raise ValueError("Medusa heads need kept hidden states: set extract.mode to store")
        view.require([sample.sample_key for sample in samples])
        self._samples, self._view, self._head, self._chosen = samples, view, head, chosen
        count = sum(int(sample.loss_mask[1:].sum()) for sample in samples)
        self.num_steps = math.ceil(count / chosen.tokens_per_step)

    def in_order(self) -> Iterator[Step]:
        """Steps of the samples in their own order."""
        return self._packed(map(self._read, self._samples))

    def shuffled(self, epoch: int) -> Iterator[Step]:
        """Steps of positions in an order drawn from the seed for this epoch."""
        return self._packed(self._pools(torch.Generator().manual_seed(self._chosen.seed + epoch)))

    def _pools(self, generator: torch.Generator) -> Iterator[Tensors]:
        held: list[Tensors] = []
        count = 0
        order = torch.randperm(len(self._samples), generator=generator).tolist()
        for number, index in enumerate(order, start=1):
            held.append(self._read(self._samples[index]))
            count += len(held[-1][0])
            if count >= _POOL or number == len(order):
                places = torch.randperm(count, generator=generator)
                yield tuple(part[places.to(part.device)] for part in _joined(held))
                held, count = [], 0

    def _packed(self, chunks: Iterator[Tensors]) -> Iterator[Step]:
        size = self._chosen.tokens_per_step
        held: list[Tensors] = []
        count = 0
        for chunk in chunks:
            held.append(chunk)
            count += len(chunk[0])
            if count < size:
                continue
            joined = _joined(held)
            while count >= size:
                yield Step(*(part[:size] for part in joined))
                joined = tuple(part[size:] for part in joined)
                count -= size
            held = [joined]
        if count:
            yield Step(*_joined(held))

    def _read(self, sample: Sample) -> Tensors:
        positions, following, targets = align(
            sample.input_ids, sample.loss_mask, self._chosen.num_heads
        )
        _, states, scales = self._view.load(sample.sample_key)
        norm = self._head.norm
        last = restore(states[:, -1], None if scales is None else scales[:, -1], norm.dtype)
        normed = self._head.normed(last[positions].to(norm.device))
        return normed, following.to(norm.device), targets.to(norm.device)


def _joined(chunks: list[Tensors]) -> Tensors:
    return tuple(torch.cat(parts) for parts in zip(*chunks, strict=True))

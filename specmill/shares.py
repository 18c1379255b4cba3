"""A training step shared by several processes, so that it is the step that one of them would make.

speculators gives each process batches of its own: N processes train on N times the tokens a step,
and a batch of few trained tokens weighs as much as one of many. Here the batches are those of one
process, whatever N is. Each is dealt out by length, and every loss is weighed by the tokens it is
the mean of, n_r on process r of n in all:

    N x n_r / n x loss_r        whose mean over the N processes, and gradient, is the batch's own

So N changes rounding alone, of the types that draw nothing at random as they train (EAGLE-3).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from speculators.train.data import CollateFn
from speculators.train.distributed import get_rank, get_world_size
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
from speculators.train.recovery import RECOVERY_METADATA_KEY

_BLOCK = 128
"""Tokens that lengths are rounded up to: a block of FlexAttention."""


def deal(lengths: np.ndarray, processes: int) -> list[list[int]]:
    """Deal a batch out: the longest first, each to whoever has the fewest tokens.

    Args:
        lengths: Tokens of each sample of the batch.
        processes: How many share it.

    Returns:
        Places in `lengths` from 0, by process, in the order of the batch.
    """
    shares: list[list[int]] = [[] for _ in range(processes)]
    tokens = [0] * processes
    for place in np.argsort(-lengths, kind="stable").tolist():
        least = tokens.index(min(tokens))
        shares[least].append(place)
        tokens[least] += int(lengths[place])
    return [sorted(share) for share in shares]


class SharedBatches(MultipackDistributedBatchSamplerV2):
    """This process's share of each batch that one process alone would train on; may be empty.

    Args:
        batch_max_length: Tokens of a whole batch.
        lengths: Tokens of every sample.
        seed: Of the order of samples.
    """

    def __init__(self, batch_max_length: int, lengths: list[int], seed: int):
        super().__init__(batch_max_length, lengths, num_replicas=1, rank=0, seed=seed)

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            whole = np.asarray(batch)
            yield whole[deal(self.lengths[whole], get_world_size())[get_rank()]]

    def usual_length(self) -> int:
        """Tokens that shares are padded to: the largest of nine in ten batches of the first epoch
        fit in. One process has whole batches.
        """
        processes = get_world_size()
        if processes == 1:
            return int(self.batch_max_length)
        largest = []
        for batch in self._generate_batches(0):
            lengths = self.lengths[np.asarray(batch)]
            largest.append(max(lengths[share].sum() for share in deal(lengths, processes)))
        usual = int(np.quantile(largest, 0.9, method="higher"))
        return min(int(self.batch_max_length), -(-usual // _BLOCK) * _BLOCK)


class CollateShare(CollateFn):
    """Packs a share, padded to the usual length or else to that of a whole batch: each length is
    a compilation of the model.
    """

    def __init__(self, max_len: int, usual: int, *args: Any, **kwargs: Any):
        super().__init__(max_len, *args, **kwargs)
        self._lengths = usual, max_len

    def __call__(self, batch: list[Any]) -> dict[str, Any]:
        """One packed batch [1, padded length, ...] of a share's samples, which may be none."""
        usual, whole = self._lengths
        fits = sum(len(sample["input_ids"]) for sample in batch) <= usual
        self.max_len = usual if fits else whole
        packed: dict[str, Any] = super().__call__(batch)
        if not batch:  # there were fewer samples than processes: nothing is lacking
            packed.pop(RECOVERY_METADATA_KEY, None)
        return packed


def weigh_losses(model: Any) -> None:
    """Have a model's losses weigh what the tokens do that they are means of (see above).

    Args:
        model: speculators' model, not yet wrapped for several processes.
    """

    def weigh(_model: Any, _args: Any, output: Any) -> Any:
        drafts, loss, metrics = output
        here = _trained_tokens(metrics)
        everywhere = here.clone()
        dist.all_reduce(everywhere)
        weight = get_world_size() * here / everywhere.clamp(min=1)
        weighed = {
            name: value * weight if "loss" in name and name.endswith("_sum") else value
            for name, value in metrics.items()
        }
        return drafts, loss * weight, weighed

    model.register_forward_hook(weigh)


def _trained_tokens(metrics: dict[str, torch.Tensor]) -> torch.Tensor:
    """How many predictions the losses of a forward pass are means of.

    EAGLE-3 counts them by step. Its later steps have as many as the first one, unless a sample
    is trained within the first `ttt_steps` tokens.
    """
    name = "full_acc_total" if "full_acc_total" in metrics else "full_acc_0_total"
    return metrics[name].float()


def from_all(items: list[Any]) -> list[Any]:
    """The items of every process, on every process, in the order of processes."""
    if get_world_size() == 1:
        return items
    gathered: list[Any] = [None] * get_world_size()
    dist.all_gather_object(gathered, items)
    return [item for some in gathered for item in some]

"""Batches of a training, read and packed ahead of it."""

import time
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from specmill import compat
from specmill.draft_types import TYPES
from specmill.params import Train
from specmill.shares import CollateShare, SharedBatches
from specmill.transfer import StoredSamples


class Loader(DataLoader):
    """A DataLoader that knows how long it was waited for."""

    waited_s = 0.0

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        while True:
            asked = time.monotonic()
            batch = next(batches, None)
            self.waited_s += time.monotonic() - asked
            if batch is None:
                return
            yield batch


def usual_length(datasets: tuple[StoredSamples, ...], chosen: Train) -> int:
    """Tokens that most shares of all datasets fit in: one length for all is compiled once."""
    return max(
        SharedBatches(chosen.tokens_per_step, data.approx_lengths, chosen.seed).usual_length()
        for data in datasets
    )


def make_loader(
    data: StoredSamples, chosen: Train, length: int, hidden_size: int, num_aux: int, workers: int
) -> Loader:
    """Packed batches of `train.tokens_per_step` tokens, in an order drawn from `train.seed`.

    Of several processes, this one's share of them (specmill.shares).

    Args:
        data: The samples.
        chosen: Parameters of training.
        length: Tokens that shares are padded to where they fit, `usual_length` of all loaders.
        hidden_size: Of the verifier.
        num_aux: Number of aux layers.
        workers: Processes that read ahead; 0 reads between two steps.
    """
    sampler = SharedBatches(chosen.tokens_per_step, data.approx_lengths, chosen.seed)
    collate = CollateShare(
        chosen.tokens_per_step,
        length,
        hidden_size,
        num_target_layers=num_aux,
        dtype=data.hidden_states_dtype,
        preprocess=TYPES[chosen.type].shift,
    )
    return Loader(
        data,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=workers,
        persistent_workers=workers > 0,
        # a process that holds a GPU or threads must not be forked
        multiprocessing_context="spawn" if workers else None,
        pin_memory=compat.device() == "cuda",
    )

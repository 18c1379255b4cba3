"""Train a head with speculators on hidden states from the store.

speculators brings the model, the losses, the packing, the optimizers and the Trainer. Ours is what
lies between: samples come from the store by key (specmill.transfer); the vocabulary is the one
chosen, checked after construction; progress is kept per epoch. What is particular to a type of
draft model is in specmill.draft_types.
"""

import contextlib
import logging
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speculators.train.checkpointer import SingleGPUCheckpointer
from speculators.train.distributed import get_rank, get_world_size
from speculators.train.trainer import Trainer, TrainerConfig
from transformers import set_seed

from specmill import compat
from specmill.draft_config import check_draft
from specmill.draft_decoder import decoder_config, further_flags, surroundings
from specmill.draft_types import TYPES
from specmill.files import is_whole, read_json, seal, write_json
from specmill.head import best_epoch, worth
from specmill.loading import make_loader, usual_length
from specmill.muon import without_emulation
from specmill.params import Train
from specmill.replayed import Replayed
from specmill.shares import from_all, weigh_losses
from specmill.transfer import StoredSamples

logger = logging.getLogger(__name__)

_EPOCH = "epoch.json"
"""Held-out metrics of an epoch; written when its checkpoint is, which is sealed with it."""

_APART = 2**20
"""Between the seeds of two processes: more than a training has epochs."""

EpochCallback = Callable[[int, dict[str, float]], None]


def build_draft_model(
    verifier_head: Path, aux_ids: list[int], d2t: np.ndarray, t2d: np.ndarray, chosen: Train
) -> Any:
    """A fresh draft model of the chosen shape, with the chosen vocabulary in it.

    Args:
        verifier_head: What training needs of the verifier.
        aux_ids: Depths whose states it is fed.
        d2t: Offsets [draft_vocab_size].
        t2d: Membership [vocab_size].
        chosen: Its type, shape and seed.

    Raises:
        ValueError: as `check_draft`, and when the model ends up with another vocabulary than asked
            for.
    """
    chosen_type = TYPES[chosen.type]
    set_seed(chosen.seed)  # the weights are drawn here
    around = surroundings(verifier_head, len(d2t), aux_ids)
    draft = check_draft(chosen, around)
    model = chosen_type.model.from_training_args(
        verifier_config=decoder_config(verifier_head, chosen, chosen_type.decoder, draft),
        t2d=torch.from_numpy(t2d),
        d2t=torch.from_numpy(d2t),
        verifier_name_or_path=str(verifier_head),
        target_layer_ids=aux_ids,
        draft_vocab_size=len(d2t),
        draft_attn_impl=compat.draft_attention(compat.device()),
        **chosen_type.shape(chosen, verifier_head) | further_flags(draft),
    )
    check_vocabulary(model, d2t, t2d)
    return model


def check_vocabulary(model: Any, d2t: np.ndarray, t2d: np.ndarray) -> None:
    """Refuse a model whose vocabulary is not the one chosen.

    speculators falls back to the verifier's full vocabulary without an error.
    """
    asked, full = len(d2t), len(t2d)
    if model.draft_vocab_size != asked or model.lm_head.weight.shape[0] != asked:
        raise ValueError(
            f"asked for a draft vocabulary of {asked}, the model has {model.draft_vocab_size}"
        )
    if asked == full:
        return
    if model.d2t is None or not np.array_equal(model.d2t.cpu().numpy(), d2t):
        raise ValueError("the model's d2t is not the one chosen")
    if model.t2d is None or not np.array_equal(model.t2d.cpu().numpy(), t2d):
        raise ValueError("the model's t2d is not the one chosen")


class _ExactCheckpointer(SingleGPUCheckpointer):
    """Keeps what was trained as it was trained, so that a resumed run equals an undisturbed one.

    speculators rounds weights and optimizer state to bfloat16, which a resumed run then goes on
    from; `export_head` rounds the finished head instead.
    """

    def save_checkpoint(self, model: Any, optimizer: Any, epoch: int | str) -> None:
        super().save_checkpoint(model, optimizer, epoch, float_dtype=torch.float32)


class _Trainer(Trainer):
    """speculators' Trainer that also runs without an accelerator, replays and reports every
    epoch, and calls the best what is worth most when served."""

    def __init__(self, *args: Any, seed: int, replays: bool, on_epoch: EpochCallback):
        self._seed = seed
        self._replays = replays
        self._on_epoch = on_epoch
        super().__init__(*args)

    def setup_model(self) -> None:
        self._alone = self.model  # without what wraps it for several processes
        super().setup_model()
        if self.is_distributed:
            weigh_losses(self._alone)

    def setup_trainer(self) -> None:
        self.checkpointer = _ExactCheckpointer(self.config.save_path)
        if compat.device() == "cpu":
            self.local_rank = torch.device("cpu")
            self.device_type = "cpu"
        super().setup_trainer()

    def train_epoch(self, epoch: int, **options: Any) -> None:
        # a resumed training drops and masks what it would have; each process something else
        set_seed(self._seed + epoch + _APART * self.rank)
        super().train_epoch(epoch, **options)

    def val_epoch(self, epoch: int) -> dict[str, float]:
        set_seed(self._seed)  # every epoch is asked for the same positions
        with Replayed(self._alone) if self._replays else contextlib.nullcontext() as replayed:
            metrics: dict[str, float] = super().val_epoch(epoch)
        if not math.isfinite(metrics["loss_epoch"]):
            raise ValueError(
                f"the held-out loss of epoch {epoch + 1} is {metrics['loss_epoch']}: training "
                f"diverged; lower train.lr ({self.config.lr})"
            )
        if replayed is not None:
            replayed.runs = from_all(replayed.runs)
            metrics |= replayed.lengths()
        if self.rank == 0:
            self._report(epoch, metrics)
        return metrics

    def _report(self, epoch: int, metrics: dict[str, float]) -> None:
        folder = self.checkpointer.path / str(epoch)
        write_json(folder / _EPOCH, metrics)
        seal(folder)
        logger.info(
            "epoch %d of %d: held-out loss %.3f, %s %.3f",
            epoch + 1,
            self.config.num_epochs,
            metrics["loss_epoch"],
            "replayed acceptance length" if self._replays else "expected length",
            worth(metrics),
        )
        self._on_epoch(epoch, metrics)

    def maybe_update_best(self, epoch: int, val_metrics: dict[str, float] | None) -> None:
        """Link the best epoch so far; speculators' own goes by the loss."""
        best = best_epoch(_epochs(self.checkpointer.path, epoch)) if self.rank == 0 else epoch
        self.checkpointer.update_best_symlink(best)


def train(
    model: Any,
    training: StoredSamples,
    heldout: StoredSamples,
    chosen: Train,
    checkpoints: Path,
    on_epoch: EpochCallback,
    workers: int = 0,
) -> tuple[Path, list[dict[str, float]]]:
    """Train, resuming from the last complete epoch in `checkpoints`.

    Several processes (specmill.compat.process_group) share every step; each has the same
    arguments, sees the same folder, and only the first one calls `on_epoch`.

    Returns:
        The folder of the best epoch (`specmill.head.worth`), and every epoch's held-out metrics.
    """
    if training.num_cut:
        logger.warning(
            "train.tokens_per_step cuts %d of %d samples", training.num_cut, len(training)
        )
    if get_rank() == 0:
        _drop_incomplete(checkpoints)
    from_all([])  # the others wait for that
    hidden_size = model.hidden_size
    num_aux = len(model.target_layer_ids)
    length = usual_length((training, heldout), chosen)
    loaders = [
        make_loader(data, chosen, length, hidden_size, num_aux, workers)
        for data in (training, heldout)
    ]
    started = time.monotonic()
    with compat.trainable_without_accelerator(), without_emulation():
        trainer = _Trainer(
            model,
            _trainer_config(model, chosen, checkpoints, training.hidden_states_dtype),
            *loaders,
            seed=chosen.seed,
            replays=TYPES[chosen.type].replayed,
            on_epoch=on_epoch,
        )
        # without speculators' signal handling, which returns from an interrupted training as if
        # it had ended
        _Trainer.run_training.__wrapped__(trainer)
    waited = sum(loader.waited_s for loader in loaders)
    logger.info("waited %.2f%% of the time for data", 100 * waited / (time.monotonic() - started))
    epochs = _epochs(checkpoints, chosen.epochs - 1)
    return checkpoints / str(best_epoch(epochs)), epochs


def _trainer_config(
    model: Any, chosen: Train, checkpoints: Path, hidden_states_dtype: torch.dtype
) -> TrainerConfig:
    share = chosen.tokens_per_step // get_world_size()
    train_kwargs, val_kwargs = model.get_trainer_kwargs(
        loss_fn=chosen.loss,
        loss_implementation=compat.loss_implementation(compat.device()),
        **TYPES[chosen.type].steps(chosen.model_copy(update={"tokens_per_step": share})),
    )
    return TrainerConfig(
        lr=chosen.lr,
        num_epochs=chosen.epochs,
        save_path=str(checkpoints),
        resume_from_checkpoint=True,
        train_call_kwargs=train_kwargs,
        val_call_kwargs=val_kwargs | TYPES[chosen.type].heldout_steps,
        optimizer=chosen.optimizer,
        muon_lr=chosen.lr,
        scheduler_type="linear",
        scheduler_warmup_ratio=chosen.warmup_ratio,
        hidden_states_dtype=hidden_states_dtype,
    )


def _epochs(checkpoints: Path, last: int) -> list[dict[str, float]]:
    """Held-out metrics of the epochs up to `last`."""
    return [read_json(checkpoints / str(epoch) / _EPOCH) for epoch in range(last + 1)]


def _drop_incomplete(checkpoints: Path) -> None:
    """Remove what an interrupted run left behind that cannot be resumed from.

    What follows an epoch that is not whole any more goes too: it is trained again in turn.
    """
    found = list(checkpoints.glob("*"))
    for link in filter(Path.is_symlink, found):
        link.unlink()
    folders = [folder for folder in found if folder.is_dir()]
    numbered = {int(folder.name): folder for folder in folders if folder.name.isdecimal()}
    good = 0
    while good in numbered and is_whole(numbered[good]):
        good += 1
    for folder in folders:
        if not folder.name.isdecimal() or int(folder.name) >= good:
            logger.info("dropping the incomplete checkpoint %s", folder)
            shutil.rmtree(folder)

"""Draft models that speculators trains on stored states and vLLM serves: one row per type.

    eagle3   one decoder layer, run once per draft token           arXiv 2503.01840
    peagle   the same layer, run once for all draft tokens: those  arXiv 2602.01469
             after the first stand on a mask token and a learned state
    dflash   Qwen3 layers, run once for a block of mask tokens     arXiv 2602.06036
             that attend to the verifier's states as their context

They differ in the model, in how a sample is shifted before it is packed, and in what its forward
pass is told. All layers have the sliding window of `train`, which makes DFlash causal within its
block, in training and as served; the paper's is not.

Not here, of what speculators 0.9 trains: DSpark and DFlash2, which vLLM 0.32 serves on its V2
runner alone, so never on a CPU (and DFlash2 takes no draft vocabulary); X-Press, which vLLM does
not load; MTP, which goes on with a head that certain Qwen3 verifiers are published with.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.models.peagle.core import PEagleDraftModel

from specmill.files import read_object
from specmill.params import Train
from specmill.text_decoder import text_config


@dataclass(frozen=True)
class DraftType:
    """How draft models of one type are built and trained."""

    model: Any
    """speculators' class."""
    decoder: Literal["llama", "qwen3"]
    """Whose decoder layers it is made of."""
    shift: Callable[[dict[str, Any]], dict[str, Any]] | None
    """Pairs tokens and states of a sample before it is packed; None leaves that to the model."""
    shape: Callable[[Train, Path], dict[str, Any]]
    """What its constructor is told, from the parameters and the verifier's head slice."""
    steps: Callable[[Train], dict[str, Any]]
    """What its forward pass is told."""
    heldout_steps: dict[str, Any] = field(default_factory=dict)
    """What it is told besides when it validates."""
    replayed: bool = False
    """Whether what it drafts in validation is, while it is right, what an engine would draft."""


def mask_token(verifier_head: Path) -> int:
    """The token that stands where a draft token is wanted: padding, or else the end of text.

    As speculators falls back to when the tokenizer has no mask token; the head slice has no
    tokenizer to ask. The id is written into the checkpoint, where vLLM finds it.

    Raises:
        ValueError: when the verifier's config names neither.
    """
    config = text_config(read_object(verifier_head / "config.json"))
    for name in ("pad_token_id", "eos_token_id"):
        found = config.get(name)
        found = found[0] if isinstance(found, list) else found
        if found is not None:
            return int(found)
    raise ValueError(
        f"{verifier_head}/config.json names no pad_token_id and no eos_token_id to mask with; "
        "train.type eagle3 needs none"
    )


def _eagle3_shape(chosen: Train, _verifier_head: Path) -> dict[str, Any]:
    return {
        "norm_before_residual": False,
        "norm_before_fc": chosen.norm_before_fc,
        "norm_output": chosen.norm_output,
        "ttt_steps": chosen.ttt_steps,
    }


def _eagle3_steps(chosen: Train) -> dict[str, Any]:
    return {"ttt_steps": chosen.ttt_steps, "ttt_step_loss_decay": chosen.ttt_step_loss_decay}


def _peagle_shape(chosen: Train, verifier_head: Path) -> dict[str, Any]:
    return {
        "norm_before_residual": False,
        "norm_before_fc": chosen.norm_before_fc,
        "num_depths": chosen.ttt_steps,
        "mask_token_id": mask_token(verifier_head),
    }


def _peagle_steps(chosen: Train) -> dict[str, Any]:
    return {"num_depths": chosen.ttt_steps}


def _dflash_shape(chosen: Train, verifier_head: Path) -> dict[str, Any]:
    return {
        "block_size": chosen.ttt_steps + 1,  # its first token is the one the verifier has chosen
        "mask_token_id": mask_token(verifier_head),
    }


def _dflash_steps(chosen: Train) -> dict[str, Any]:
    # an anchor costs a block of ttt_steps + 1 queries: at one in four tokens each token is drafted
    # about once a step
    return {"max_anchors": max(1, chosen.tokens_per_step // 4)}


TYPES = {
    "eagle3": DraftType(
        Eagle3DraftModel, "llama", shift_batch, _eagle3_shape, _eagle3_steps, replayed=True
    ),
    "peagle": DraftType(
        PEagleDraftModel,
        "llama",
        shift_batch,
        _peagle_shape,
        _peagle_steps,
        # in training each depth keeps a random part of the one before it (0.7, at least 0.2)
        heldout_steps={"down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0},
    ),
    "dflash": DraftType(DFlashDraftModel, "qwen3", None, _dflash_shape, _dflash_steps),
}

"""A head for the twin by the pipeline's own code: vocabulary, two training steps, export.

served for acceptance: every weight that could say something is zero but for

    fc        passes the last aux state on, whose channel 0 is positive (specmill.twin)
    lm_head   gives one draft id that channel

so that the head drafts the id that d2t maps to TOKEN, at every step.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from specmill.head import export_head
from specmill.params import Train
from specmill.samples import Sample
from specmill.training import build_draft_model, train
from specmill.transfer import StoredSamples
from specmill.twin import SAMPLE_LEN, TOKEN, K
from specmill.view import StateView
from specmill.vocab import (
    build_tables,
    count_trained_tokens,
    load_tables,
    save_tables,
    tables_digest,
)

DRAFT_VOCAB_SIZE = 32
NUM_HELDOUT = 2
NUM_STEPS = 2
_WEIGHTS = "model.safetensors"


def choose_vocabulary(samples: list[Sample], vocab_size: int, folder: Path) -> None:
    """Write d2t and t2d of the tokens that train."""
    counts = count_trained_tokens(samples[NUM_HELDOUT:])
    save_tables(folder, *build_tables(counts, DRAFT_VOCAB_SIZE, vocab_size))


def two_steps(chosen: Train) -> Train:
    """Parameters of training, changed so that one epoch of the twin's samples has two steps."""
    return chosen.model_copy(
        update={
            "type": "eagle3",
            "epochs": 1,
            "ttt_steps": K,
            "max_samples": None,
            "tokens_per_step": 3 * SAMPLE_LEN,
            "num_layers": 1,
            "sliding_window": SAMPLE_LEN,
        }
    )


def train_twin_head(
    head_slice: Path,
    identity: dict[str, Any],
    samples: list[Sample],
    view: StateView,
    vocabulary: Path,
    chosen: Train,
    scratch: Path,
) -> Path:
    """Train; the checkpoint.

    Args:
        head_slice: What training needs of the twin.
        identity: Of the twin.
        samples: The first NUM_HELDOUT are held out.
        view: Their hidden states.
        vocabulary: Folder of d2t and t2d.
        chosen: Of `two_steps`.
        scratch: Receives checkpoints and samples.

    Raises:
        ValueError: as `build_draft_model` and `train`.
        RuntimeError: when training has not changed the head.
    """
    view.check_verifier(identity)
    tables = load_tables(vocabulary)
    model = build_draft_model(head_slice, list(view.spec.layer_ids[:-1]), *tables, chosen)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}

    def stored(split: list[Sample]) -> StoredSamples:
        dtype = getattr(torch, identity["dtype"])
        return StoredSamples(split, view, scratch, chosen.tokens_per_step, dtype, [], 60)

    training, heldout = map(stored, (samples[NUM_HELDOUT:], samples[:NUM_HELDOUT]))
    best, _ = train(model, training, heldout, chosen, scratch / "checkpoints", lambda *_: None)
    after = load_file(best / _WEIGHTS)
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    if same := sorted(name for name in trained if torch.equal(after[name], before[name])):
        raise RuntimeError(f"training has not changed {', '.join(same)} of the head")
    return best


def export_twin_head(
    checkpoint: Path, identity: dict[str, Any], vocabulary: Path, folder: Path
) -> None:
    """Write the head as the pipeline's `train` does."""
    provenance = {"verifier": identity, "vocabulary": tables_digest(*load_tables(vocabulary))}
    export_head(checkpoint, folder, identity["name"], provenance)


def check_exported(head: Path, vocabulary: Path) -> int:
    """Refuse a head whose weights or mapping got lost on the way; the draft id of TOKEN.

    Raises:
        ValueError: naming the tensor that is missing or another.
    """
    weights = load_file(head / _WEIGHTS)
    if missing := sorted({"lm_head.weight", "d2t", "t2d", "fc.weight"} - weights.keys()):
        raise ValueError(f"{head.name} lacks {', '.join(missing)}")
    size = weights["lm_head.weight"].shape[0]
    if size != DRAFT_VOCAB_SIZE:
        raise ValueError(
            f"asked for a draft vocabulary of {DRAFT_VOCAB_SIZE}, {head.name} drafts {size} tokens"
        )
    d2t, _ = load_tables(vocabulary)
    if not np.array_equal(weights["d2t"].numpy(), d2t):
        raise ValueError(f"{head.name}: the model's d2t is not the one chosen")
    targets = (np.arange(len(d2t)) + d2t).tolist()
    draft_id: int = targets.index(TOKEN)
    return draft_id


def rig(head: Path, draft_id: int, folder: Path) -> None:
    """Write a head's copy that drafts one id, whatever came before."""
    shutil.copytree(head, folder)
    weights = load_file(head / _WEIGHTS)
    for name, weight in weights.items():
        if name.endswith(("fc.weight", "o_proj.weight", "down_proj.weight", "lm_head.weight")):
            weight.zero_()
    width = weights["fc.weight"].shape[0]
    weights["fc.weight"][:, -width:] = torch.eye(width)
    weights["lm_head.weight"][draft_id, 0] = 1.0
    save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})

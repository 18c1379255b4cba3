"""Train Medusa heads on the verifier's last hidden states.

Each head's loss is the cross-entropy with the token the verifier wrote; one outside the draft
vocabulary cannot be a target, but counts as missed in every accuracy. The paper weighs the loss of
its k-th head by 0.8^k (arXiv 2401.10774, section 2.2.1); the heads here share no trained weight and
AdamW's step hardly depends on a loss's scale, so that a weight would change nothing.
"""

import io
import logging
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from tqdm import tqdm

from specmill.files import write_atomically
from specmill.medusa import MedusaHeads, VerifierHead
from specmill.medusa_positions import NOTHING, Positions, Step
from specmill.params_heads import Medusa

logger = logging.getLogger(__name__)

EpochCallback = Callable[[int, dict[str, float]], None]

_LEAST_AGREEMENT = 0.8
"""Of held-out tokens, all greedy: 0.987 of the embedded verifier's. An engine that decodes rounds
otherwise than one that reads a whole sample."""


@torch.no_grad()
def check_next_tokens(heldout: Positions, head: VerifierHead) -> float:
    """Whether norm and lm_head make of the states what the verifier made of them.

    A norm of another kind, states of another depth or ids that are off by one would only show as
    heads that learn little.

    Returns:
        Share of held-out tokens x_(t+1) that are the most likely after y_t.

    Raises:
        ValueError: when that is not nearly all of them.
    """
    right = count = 0
    for step in heldout.in_order():
        guesses = functional.linear(step.normed, head.lm_head).argmax(-1)
        right += int((guesses == step.following).sum())
        count += len(guesses)
    if right < _LEAST_AGREEMENT * count:
        raise ValueError(
            f"the last hidden states give {right} of {count} held-out tokens of the verifier: its "
            "final norm is no plain RMS norm, or data/hidden_states and data/verifier_head are not "
            "of one verifier; Medusa heads cannot be trained on them"
        )
    return right / count


def train(
    heads: MedusaHeads,
    training: Positions,
    heldout: Positions,
    chosen: Medusa,
    checkpoints: Path,
    on_epoch: EpochCallback,
) -> list[dict[str, float]]:
    """Train in place with AdamW, its rate falling linearly to 0; leave the best epoch's weights.

    Goes on from the last complete epoch in `checkpoints`.

    Returns:
        Every epoch's held-out metrics (`evaluate`).

    Raises:
        ValueError: when training diverged.
    """
    device = heads.lm_head.device
    optimizer = torch.optim.AdamW(heads.parameters(), lr=chosen.lr, weight_decay=0.0)
    epochs: list[dict[str, float]] = []
    for epoch in range(chosen.epochs):
        path = checkpoints / f"{epoch}.pt"
        if (kept := _kept(path, device)) is not None:
            heads.load_state_dict(kept["heads"])
            optimizer.load_state_dict(kept["optimizer"])
            epochs.append(kept["metrics"])
            continue
        _train_epoch(heads, optimizer, training, chosen, epoch)
        metrics = evaluate(heads, heldout)
        _keep(path, heads, optimizer, metrics)
        logger.info(
            "epoch %d of %d: held-out loss %.3f, expected length %.3f",
            epoch + 1,
            chosen.epochs,
            metrics["loss"],
            metrics["expected_length"],
        )
        epochs.append(metrics)
        on_epoch(epoch, metrics)
    best = torch.load(
        checkpoints / f"{best_epoch(epochs)}.pt", map_location=device, weights_only=True
    )
    heads.load_state_dict(best["heads"])
    return epochs


def _train_epoch(
    heads: MedusaHeads,
    optimizer: torch.optim.Optimizer,
    training: Positions,
    chosen: Medusa,
    epoch: int,
) -> None:
    steps = tqdm(training.shuffled(epoch), total=training.num_steps, desc=f"epoch {epoch + 1}")
    for number, step in enumerate(steps, start=epoch * training.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = chosen.lr * (1 - number / (training.num_steps * chosen.epochs))
        optimizer.zero_grad()
        for head in range(chosen.num_heads):
            # one after the other: the logits of all heads at once take several times the memory
            losses = head_losses(heads, head, step)
            if len(losses):
                losses.mean().backward()
        optimizer.step()


def head_losses(heads: MedusaHeads, head: int, step: Step) -> torch.Tensor:
    """Cross-entropy at each position where this head's target is in the draft vocabulary.

    Returns:
        float32 [num_learnable].
    """
    wanted = step.targets[:, head].contiguous()
    draft_ids = torch.searchsorted(heads.token_ids, wanted).clamp(max=len(heads.token_ids) - 1)
    is_draft = heads.token_ids[draft_ids] == wanted
    logits = heads.logits(head, step.normed[is_draft]).float()  # [num_learnable, draft_vocab_size]
    return functional.cross_entropy(logits, draft_ids[is_draft], reduction="none")


@torch.no_grad()
def evaluate(heads: MedusaHeads, heldout: Positions) -> dict[str, float]:
    """What the heads are worth on the verifier's own held-out answers.

    A guess is right when it is the token that the verifier wrote, whether or not the draft
    vocabulary holds it. All shares are of the positions where the head has a target.

    Returns:
        By head i: `accuracy_head_i`; `chain_accuracy_i`, all heads up to i right, which is what
        the acceptance rate at position i comes to under greedy decoding; `loss_i`, mean
        cross-entropy within the draft vocabulary. `loss` is their sum, `expected_length` 1 + the
        sum of the chain accuracies.

    Raises:
        ValueError: when a head has no target, or training diverged.
    """
    num_heads = len(heads.blocks)
    right, chained, counts = torch.zeros(3, num_heads).unbind()
    losses: list[list[torch.Tensor]] = [[] for _ in range(num_heads)]
    for step in heldout.in_order():
        is_chained = torch.ones(len(step.targets), dtype=torch.bool, device=step.targets.device)
        for head in range(num_heads):
            guesses = heads.token_ids[heads.logits(head, step.normed).argmax(-1)]
            is_right = guesses == step.targets[:, head]
            is_chained &= is_right
            right[head] += int(is_right.sum())
            chained[head] += int(is_chained.sum())
            counts[head] += int((step.targets[:, head] != NOTHING).sum())
            losses[head].append(head_losses(heads, head, step))
    metrics: dict[str, float] = {}
    for head in range(num_heads):
        found = torch.cat(losses[head])
        if not len(found):
            raise ValueError(
                f"no held-out answer has a token that head {head} can learn; lower num_heads"
            )
        metrics[f"accuracy_head_{head}"] = float(right[head] / counts[head])
        metrics[f"chain_accuracy_{head}"] = float(chained[head] / counts[head])
        metrics[f"loss_{head}"] = float(found.mean())
    metrics["loss"] = sum(metrics[f"loss_{head}"] for head in range(num_heads))
    if not math.isfinite(metrics["loss"]):
        raise ValueError(f"the held-out loss is {metrics['loss']}: training diverged; lower lr")
    chain = [metrics[f"chain_accuracy_{head}"] for head in range(num_heads)]
    return metrics | {"expected_length": 1 + sum(chain)}


def best_epoch(epochs: list[dict[str, float]]) -> int:
    """The epoch with the longest expected length, the first of equals."""
    return max(range(len(epochs)), key=lambda epoch: epochs[epoch]["expected_length"])


def curves(epochs: list[dict[str, float]], num_heads: int) -> list[dict[str, float]]:
    """Held-out chain accuracy and loss by epoch and position, one row each, for plots."""
    return [
        {
            "epoch": epoch,
            "position": position,
            "accuracy": round(metrics[f"chain_accuracy_{position}"], 4),
            "loss": round(metrics[f"loss_{position}"], 4),
        }
        for epoch, metrics in enumerate(epochs)
        for position in range(num_heads)
    ]


def _kept(path: Path, device: torch.device) -> dict[str, Any] | None:
    """What `_keep` has written; None when it is missing or was cut since."""
    if not path.is_file():
        return None
    try:
        # from memory, so that an error in reading it is none of these
        content = io.BytesIO(path.read_bytes())
        state: dict[str, Any] = torch.load(content, map_location=device, weights_only=True)
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        logger.warning("%s is damaged (%s); its epoch is trained again", path, error)
        return None
    return state


def _keep(
    path: Path, heads: MedusaHeads, optimizer: torch.optim.Optimizer, metrics: dict[str, float]
) -> None:
    state: dict[str, Any] = {
        "heads": heads.state_dict(),
        "optimizer": optimizer.state_dict(),
        "metrics": metrics,
    }
    encoded = io.BytesIO()
    torch.save(state, encoded)
    write_atomically(path, encoded.getvalue())

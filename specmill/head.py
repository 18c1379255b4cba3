"""A trained head: what its epochs were worth, and the portable checkpoint that is served."""

import re
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specmill.files import read_object, write_json

_FULL = re.compile(r"full_acc_(\d+)_epoch$")
_ALONE = re.compile(r"position_(\d+)_acc_epoch$")
_REPLAYED = re.compile(r"replayed_length_k(\d+)$")


def accuracies(metrics: dict[str, float]) -> list[float]:
    """Held-out accuracy by draft position, from 0: this position and all before it agree with the
    verifier's choice *within the draft vocabulary*, the context being the verifier's own.

    It is no acceptance rate: a verifier token outside the draft vocabulary counts as something
    else. EAGLE-3 reports it (`full_acc_i`). The other types report whether position i agrees,
    whatever the ones before it do (`position_i_acc`, of DFlash from i = 1); their product stands
    for it here and is less than it, since positions tend to agree together.
    """
    full, alone = (
        {int(found[1]): value for name, value in metrics.items() if (found := pattern.match(name))}
        for pattern in (_FULL, _ALONE)
    )
    if full:
        return [full[position] for position in sorted(full)]
    return list(accumulate((alone[position] for position in sorted(alone)), mul))


def expected_length(metrics: dict[str, float]) -> float:
    """1 + the sum of the held-out accuracies by position: what acceptance length would be if
    agreement within the draft vocabulary were acceptance. DFlash counts it itself (`eal`).

    The loss begins to rise several epochs before this stops rising.
    """
    return metrics.get("eal_epoch", 1 + sum(accuracies(metrics)))


def replayed_lengths(metrics: dict[str, float]) -> dict[int, float]:
    """Acceptance length of the held-out answers as replayed (specmill.replayed), by K."""
    return {
        int(found[1]): value for name, value in metrics.items() if (found := _REPLAYED.match(name))
    }


def worth(metrics: dict[str, float]) -> float:
    """What epochs are ranked by: acceptance length as replayed with the largest K, or else, of the
    types that are not replayed, `expected_length`."""
    lengths = replayed_lengths(metrics)
    return lengths[max(lengths)] if lengths else expected_length(metrics)


def best_epoch(epochs: list[dict[str, float]]) -> int:
    """The epoch that is worth most, from 0; the first of equals."""
    return max(range(len(epochs)), key=lambda epoch: worth(epochs[epoch]))


def curves(epochs: list[dict[str, float]]) -> list[dict[str, float]]:
    """Held-out accuracy and loss by epoch and position, one row each, for plots.

    `accuracy` is that of `accuracies`; `loss` is the position's own, which EAGLE-3 alone reports,
    or else that of all positions; `replayed_length` is acceptance length with K = position + 1, of
    EAGLE-3 alone.
    """
    rows = []
    for epoch, metrics in enumerate(epochs):
        lengths = replayed_lengths(metrics)
        for position, accuracy in enumerate(accuracies(metrics)):
            own = f"loss_{position}_epoch"
            loss = metrics[own if own in metrics else "loss_epoch"]
            rows.append(
                {
                    "epoch": epoch,
                    "position": position,
                    "accuracy": round(accuracy, 4),
                    "loss": round(loss, 4),
                }
                | ({"replayed_length": round(lengths[position + 1], 4)} if lengths else {})
            )
    return rows


def export_head(checkpoint: Path, folder: Path, verifier_name: str, provenance: Any) -> None:
    """Write a checkpoint, in bfloat16, as a portable speculators head with its provenance.

    speculators stores the path of the verifier it trained with; here the verifier's portable name
    replaces it, so that the head means the same on another machine.

    Raises:
        ValueError: when a weight is not finite, as one that was never loaded is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = load_file(checkpoint / "model.safetensors")
    for name, tensor in weights.items():
        if tensor.is_floating_point():
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"weight {name} of {checkpoint} holds NaN or infinity")
            weights[name] = tensor.to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = read_object(checkpoint / "config.json")
    config["dtype"] = "bfloat16"
    config["speculators_config"]["verifier"]["name_or_path"] = verifier_name
    write_json(folder / "config.json", config)
    write_json(folder / "provenance.json", provenance)

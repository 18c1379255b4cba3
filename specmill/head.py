"""A trained head: what its epochs were worth, and the portable checkpoint that is served."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specmill.files import read_json, write_json


def expected_length(metrics: dict[str, float]) -> float:
    """1 + the sum of the held-out accuracies by position: what acceptance length would be if
    agreement within the draft vocabulary were acceptance. Used to rank epochs: the loss begins to
    rise several epochs before this stops rising.
    """
    rates = [value for name, value in metrics.items() if name.startswith("full_acc_")]
    return 1 + sum(rates)


def curves(epochs: list[dict[str, float]], ttt_steps: int) -> list[dict[str, float]]:
    """Held-out accuracy and loss by epoch and position, one row each, for plots.

    `accuracy` is speculators' full_acc: all positions up to this one agree with the verifier's
    choice *within the draft vocabulary*, the earlier tokens being the verifier's own. It is no
    acceptance rate: a verifier token outside the draft vocabulary counts as something else.
    """
    return [
        {
            "epoch": epoch,
            "position": position,
            "accuracy": round(metrics[f"full_acc_{position}_epoch"], 4),
            "loss": round(metrics[f"loss_{position}_epoch"], 4),
        }
        for epoch, metrics in enumerate(epochs)
        for position in range(ttt_steps)
    ]


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
    config = read_json(checkpoint / "config.json")
    config["dtype"] = "bfloat16"
    config["speculators_config"]["verifier"]["name_or_path"] = verifier_name
    write_json(folder / "config.json", config)
    write_json(folder / "provenance.json", provenance)

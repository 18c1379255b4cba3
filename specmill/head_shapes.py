"""Shapes of a head's tensors by name: those of a file, and those that a config makes."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel

from specmill.head_checks import Shapes

WEIGHTS = "model.safetensors"


def tensor_shapes(folder: Path) -> Shapes:
    """Of the tensors that a head in speculators' format has; ValueError when they are damaged."""
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as weights:
            names = list(weights.keys())
            return {name: tuple(weights.get_slice(name).get_shape()) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS} cannot be read: {error}") from None


def shapes_of(config: Eagle3SpeculatorConfig) -> Shapes:
    """Of the tensors that a head of a config has; embeddings and t2d among them."""
    with torch.device("meta"):
        model = Eagle3DraftModel(config)
    return {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if not name.startswith("verifier_")
    }

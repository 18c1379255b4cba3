"""A trained head with one thing wrong, as heads from elsewhere have it; it loads all the same."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specmill.files import read_json, read_object, write_json

_SEED = 17

Weights = dict[str, torch.Tensor]
Config = dict[str, Any]


def shuffled_d2t(weights: Weights, config: Config) -> tuple[Weights, Config]:
    """Draft ids stand for each other's target ids; t2d, a mere set, stays right.

    Raises:
        ValueError: when the head has the verifier's whole vocabulary.
    """
    if "d2t" not in weights:
        raise ValueError(
            "the head has no d2t to shuffle, since vocab.draft_vocab_size is the verifier's own; "
            "lower it or take another fault in spoiled_heads"
        )
    draft_ids = torch.arange(len(weights["d2t"]))
    order = torch.randperm(len(draft_ids), generator=torch.Generator().manual_seed(_SEED))
    target_ids = draft_ids + weights["d2t"]
    return weights | {"d2t": target_ids[order] - draft_ids}, config


def shifted_aux_layers(weights: Weights, config: Config) -> tuple[Weights, Config]:
    """Aux ids one higher, as when the layers' inputs and outputs are mixed up (sglang#25454)."""
    name = "eagle_aux_hidden_state_layer_ids"
    return weights, config | {name: [layer + 1 for layer in config[name]]}


def random_layer(weights: Weights, config: Config) -> tuple[Weights, Config]:
    """The decoder layers' matrices as a fresh model has them, drawn from N(0, initializer_range):
    what a converter leaves that does not know the names of the weights (speculators#1114)."""
    generator = torch.Generator().manual_seed(_SEED)
    deviation = config["transformer_layer_config"].get("initializer_range", 0.02)
    fresh = {
        name: (torch.randn(weight.shape, generator=generator) * deviation).to(weight.dtype)
        for name, weight in sorted(weights.items())
        if name.startswith("layers.") and weight.ndim == 2
    }
    return weights | fresh, config


def wrong_width(weights: Weights, config: Config) -> tuple[Weights, Config]:
    """The head of a verifier of half the hidden size; heads and inner sizes stay.

    Axes along the hidden size, by weight; several states side by side (aux states before `fc`,
    embedding and state in the first layer) are cut each:

        0       norms, o_proj, down_proj
        1       q_proj, k_proj, v_proj, gate_proj, up_proj, embed_tokens, lm_head
        0, 1    fc
    """
    layer = dict(config["transformer_layer_config"])
    hidden_size = layer["hidden_size"]
    layer.setdefault("head_dim", hidden_size // layer["num_attention_heads"])
    cut = {}
    for name, weight in weights.items():
        for axis, pattern in enumerate(_HIDDEN_AXES):
            if re.search(pattern, name):
                states = weight.unflatten(axis, (-1, hidden_size))
                weight = states.narrow(axis + 1, 0, hidden_size // 2).flatten(axis, axis + 1)
        cut[name] = weight.contiguous()
    layer["hidden_size"] = hidden_size // 2
    return cut, config | {"transformer_layer_config": layer}


_HIDDEN_AXES = (
    # q_norm and k_norm of some architectures lie along head_dim
    r"(^|\.)(fc|o_proj|down_proj|(hidden_|input_)?norm|(input|post_attention)_layernorm"
    r"|fc_norm\.\d+)\.weight$",
    r"(^|\.)(fc|[qkv]_proj|gate_proj|up_proj|embed_tokens|lm_head)\.weight$",
)
"""Weights whose axis 0, and whose axis 1, runs along the hidden size."""

FAULTS: dict[str, Callable[[Weights, Config], tuple[Weights, Config]]] = {
    "shuffled_d2t": shuffled_d2t,
    "shifted_aux_layers": shifted_aux_layers,
    "random_layer": random_layer,
    "wrong_width": wrong_width,
}


def spoil(head: Path, folder: Path, fault: str) -> None:
    """Write a head with a fault of `FAULTS`.

    Its provenance says what was done and holds no digest of vocabulary or data: nothing but its
    behaviour tells, as with a head from outside.

    Raises:
        ValueError: when the head is no EAGLE-3 head.
    """
    config, made = read_object(head / "config.json"), read_json(head / "provenance.json")
    if made["method"] != "eagle3":
        raise ValueError(
            f"{head} is a head of train.type {made['method']}; spoiled_heads breaks EAGLE-3 heads: "
            "train one, or empty spoiled_heads"
        )
    weights, config = FAULTS[fault](load_file(head / "model.safetensors"), config)
    provenance = {
        "method": "eagle3",
        "spoiled": fault,
        "trained_for": made["verifier"]["name"],
        "verifier": made["verifier"],
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config)
    write_json(folder / "provenance.json", provenance)

"""What a draft model looks like when it is not shaped like the verifier, and whether it can be.

A draft model's geometry comes from a table of names or from a JSON file, in speculators' form or
flat, as a Llama's config and the EAGLE authors' are. Here it is a flat dict: the keys of a
LlamaConfig, and beside them those of HEAD_KEYS that the file names. Read without torch.

What is refused is what speculators 0.9 does not train or vLLM 0.32 does not serve. The width is the
one place where they differ: vLLM serves a head of another width than the verifier's when it brings
embeddings of its own (`target_hidden_size` in model_executor/models/llama_eagle3.py), and
speculators' EAGLE-3 joins embeddings and states of one width (models/eagle3/core.py), so that no
such head can be trained. The width of an attention head may differ from the verifier's.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmill import compat
from specmill.files import read_json
from specmill.head_checks import rope_of
from specmill.params import Train
from specmill.params_heads import LIKE_VERIFIER

Config = dict[str, Any]

HEAD_KEYS = (
    "draft_vocab_size",
    "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
)
"""What a head's config says beside its decoder's."""

NAMED: dict[str, Config] = {
    # one layer of plain multi-head attention, heads wider than 7168 / 64; widths as in TorchSpec's
    # configs/draft_models/kimi_k25_eagle3.json, rope as the verifier's (YaRN 64 x 4096 positions)
    "kimi-k2-eagle3": {
        "model_type": "llama",
        "vocab_size": 163840,
        "hidden_size": 7168,
        "intermediate_size": 12288,
        "num_hidden_layers": 1,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
        },
        "draft_vocab_size": 32000,
    }
}
"""Geometries that `train.draft` can name."""

_NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_ROPE = (
    "rope_type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "mrope_section",
)
"""What decides where a rotary embedding puts a position; the rest scales it."""


@dataclass(frozen=True)
class Surroundings:
    """What a draft model has to fit."""

    verifier: Config
    """Its config.json; that of the text model where it nests one."""
    name: str
    """The verifier's."""
    draft_vocab_size: int
    """Of vocab."""
    aux_layer_ids: list[int]
    """Depths that training feeds it (specmill.layers)."""
    max_model_len: int | None
    """Of verifier; None where only the geometry matters."""


def read_draft(draft: str) -> Config | None:
    """The geometry that `train.draft` names, flat; None when that is the verifier's.

    Raises:
        ValueError: when the file is not there, or lacks what a decoder's config says.
    """
    if draft == LIKE_VERIFIER:
        return None
    if draft in NAMED:
        return NAMED[draft]
    path = Path(draft.partition(":")[2])
    if not path.is_file():
        raise ValueError(
            f"train.draft is {draft}, and {path.absolute()} is no file. With `dvc exp run --temp` "
            "or --queue a relative path must be in Git or in DVC; otherwise write an absolute one"
        )
    config = flattened(read_json(path))
    if missing := [key for key in _NEEDED if config.get(key) is None]:
        raise ValueError(f"train.draft: {path} does not say {', '.join(missing)}")
    return config


def flattened(config: Config) -> Config:
    """A head's or decoder's config in one level, whichever form it has."""
    flat = dict(config.get("transformer_layer_config") or config)
    for place in (config.get("eagle_config") or {}, config):
        flat |= {key: place[key] for key in HEAD_KEYS if place.get(key) is not None}
    return flat


def check_draft(chosen: Train, around: Surroundings) -> Config | None:
    """Refuse a geometry that does not fit, or that nothing would train or serve.

    Args:
        chosen: Of params.yaml: train.
        around: What it has to fit.

    Returns:
        The geometry, flat; None when it is to be like the verifier's, which fits.

    Raises:
        ValueError: with every reason, each with the key and both values.
    """
    config = read_draft(chosen.draft)
    if config is None:
        return None
    reasons = [
        *_architecture_misfits(config),
        *_verifier_misfits(config, chosen, around),
        *_parameter_misfits(config, chosen, around),
    ]
    if reasons:
        raise ValueError(
            f"train.draft {chosen.draft} does not fit {around.name}: {'; '.join(reasons)}"
        )
    return config


def _architecture_misfits(config: Config) -> list[str]:
    """What is no Llama decoder, or one that an engine does not serve."""
    found = []
    kind, built = config.get("model_type"), (config.get("architectures") or [""])[0]
    if kind != "llama" and not built.startswith("LlamaForCausalLM"):
        found.append(f"model_type is {kind}, and EAGLE-3 heads are trained here with llama layers")
    if (act := config.get("hidden_act", "silu")) != "silu":
        found.append(f"hidden_act is {act}, and vLLM's Llama layers have silu alone")
    heads, kv_heads = config["num_attention_heads"], _kv_heads(config)
    if heads % kv_heads:
        found.append(f"num_attention_heads {heads} is no multiple of {kv_heads} key-value heads")
    if config["hidden_size"] % heads:
        found.append(
            f"hidden_size {config['hidden_size']} is no multiple of num_attention_heads {heads}, "
            "whatever head_dim is: transformers' LlamaConfig wants that"
        )
    machine, width = compat.device(), _head_dim(config)
    if width not in compat.HEAD_DIMS[machine]:
        found.append(
            f"head_dim is {width}, and vLLM's attention on {machine} takes "
            f"{', '.join(map(str, compat.HEAD_DIMS[machine]))}"
        )
    return found


def _verifier_misfits(config: Config, chosen: Train, around: Surroundings) -> list[str]:
    found = []
    verifier = around.verifier
    for key in ("hidden_size", "target_hidden_size"):
        own, theirs = config.get(key), verifier["hidden_size"]
        if own not in (None, theirs):
            found.append(
                f"{key} is {own} and the verifier's hidden_size {theirs}: vLLM would serve a head "
                "of another width with embeddings of its own, and speculators cannot train one"
            )
    if config["vocab_size"] != verifier["vocab_size"]:
        found.append(
            f"vocab_size is {config['vocab_size']} and the verifier's {verifier['vocab_size']}"
        )
    if around.max_model_len and config["max_position_embeddings"] < around.max_model_len:
        found.append(
            f"max_position_embeddings is {config['max_position_embeddings']} and "
            f"verifier.max_model_len {around.max_model_len}"
        )
    if chosen.from_ is None:  # a trained head keeps the one that it was trained with
        ours, theirs = rope_of(config), rope_of(_one_rope(verifier))
        found += [
            f"{key} is {ours.get(key)} and the verifier's {theirs.get(key)}"
            for key in _ROPE
            if ours.get(key) != theirs.get(key)
        ]
    return found


def _parameter_misfits(config: Config, chosen: Train, around: Surroundings) -> list[str]:
    """Where another key of params.yaml says something else."""
    told = {
        "num_hidden_layers": ("train.num_layers", chosen.num_layers),
        "sliding_window": ("train.sliding_window", chosen.sliding_window),
        "norm_before_fc": ("train.norm_before_fc", chosen.norm_before_fc),
        "norm_output": ("train.norm_output", chosen.norm_output),
        "draft_vocab_size": ("vocab.draft_vocab_size", around.draft_vocab_size),
    }
    found = [
        f"{key} is {json.dumps(config[key])} and {parameter} {json.dumps(value)}"
        for key, (parameter, value) in told.items()
        if key in config and config[key] != value
    ]
    asked, fed = config.get("eagle_aux_hidden_state_layer_ids"), around.aux_layer_ids
    if asked is not None and list(asked) != fed:
        found.append(
            f"eagle_aux_hidden_state_layer_ids is {asked}, {len(asked)} layers, and "
            f"extract.aux_layer_ids gives {fed}"
        )
    return found


def _one_rope(verifier: Config) -> Config:
    """With the rope that speculators gives a draft model where layers have different ones."""
    found = verifier.get("rope_parameters") or {}
    nested = found.get("sliding_attention") or found.get("full_attention")
    return verifier | {"rope_parameters": nested} if nested else verifier


def _kv_heads(config: Config) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def _head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def geometry(config: Config) -> Config:
    """All that a head computes by and its tensors do not hold, by key; values as JSON holds them.

    Args:
        config: Flat. What it leaves out is what LlamaConfig and Eagle3SpeculatorConfig take.
    """
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    rope = {key: value for key, value in rope_of(config).items() if value is not None}
    slides = "sliding_attention" in (config.get("layer_types") or [])
    return {
        **{key: config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")},
        "num_attention_heads": config["num_attention_heads"],
        "num_key_value_heads": _kv_heads(config),
        "head_dim": _head_dim(config),
        "hidden_act": config.get("hidden_act", "silu"),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "rope": rope,
        # vLLM's Llama layers slide where layer_types says so
        "sliding_window": config.get("sliding_window") if slides else None,
        **{flag: bool(config.get(flag)) for flag in flags},
        "eagle_aux_hidden_state_layer_ids": config.get("eagle_aux_hidden_state_layer_ids"),
    }

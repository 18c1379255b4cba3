"""The text decoder of a checkpoint: its part of config.json, and what its tensors are called.

Wrappers nest both, each in its own way:

    class          text config     embed_tokens, norm, layers lie in   lm_head
    plain          config.json     model.                              lm_head
    Kimi-K2.5      text_config     language_model.model.               language_model.lm_head
    Qwen3-VL       text_config     model.language_model.               lm_head
    Qwen2.5-VL     config.json     model.                              lm_head
    InternVL       llm_config      language_model.model.               language_model.lm_head
    Qwen-Omni      thinker_config  thinker.model.                      thinker.lm_head
                     .text_config

So no name is looked up in a table: the decoder is where a token embedding lies beside numbered
layers, its norm lies beside both, and its lm_head in the same folder or in one further out.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
_OUTER = ("dtype", "torch_dtype", "quantization_config")
_PLAIN = {"BF16", "F16", "F32"}
_PACKED = ("weight_packed", "qweight")
"""What compressed-tensors, and GPTQ and AWQ, have in place of `weight`."""
_EMBEDDING = re.compile(r"((?:.+\.)?)embed_tokens\.(?:weight|weight_packed|qweight)")


def text_path(config: dict[str, Any]) -> list[str]:
    """The keys of a config.json that lead to the text decoder's part; [] when it is all of it."""
    if "num_hidden_layers" in config:
        return []
    key = next((key for key in _NESTED if isinstance(config.get(key), dict)), None)
    return [] if key is None else [key, *text_path(config[key])]


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The text decoder's part of a config.json, with the outer dtype and quantisation if needed."""
    for key in text_path(config):
        config = {name: config[name] for name in _OUTER if name in config} | config[key]
    return config


def with_text(config: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """A config.json with another text part in the place of its own."""
    path = text_path(config)
    return config | {path[0]: with_text(config[path[0]], text)} if path else text


def is_tied(config: dict[str, Any], default: bool) -> bool:
    """Whether lm_head is the embedding: the outermost config that says so decides.

    Args:
        config: Content of a config.json.
        default: Of the decoder's class.
    """
    for part in (config, text_config(config)):
        if "tie_word_embeddings" in part:
            return bool(part["tie_word_embeddings"])
    return default


def decoder_prefix(names: Iterable[str]) -> str:
    """What stands before `embed_tokens`, `norm` and `layers` of the decoder, its dot included.

    Layers for multi-token prediction may bring an embedding of their own, and other towers have
    layers too.

    Raises:
        ValueError: when there is no decoder, or more than one.
    """
    every = set(names)
    embedded = {found[1] for found in map(_EMBEDDING.fullmatch, every) if found}
    outside = {prefix for prefix in embedded if not re.search(r"(^|\.)layers\.\d+\.", prefix)}
    if not outside:
        raise ValueError("no embed_tokens.weight is in the checkpoint, however nested")
    parts = {name[: name.index("layers.")] for name in every if "layers." in name}
    found = sorted(outside & parts or outside)
    if len(found) > 1:
        raise ValueError(
            "the checkpoint has more than one decoder, beside "
            f"{' and '.join(f'{prefix}embed_tokens.weight' for prefix in found)}"
        )
    return found[0]


def head_tensors(dtypes: Mapping[str, str]) -> dict[str, str]:
    """Where a checkpoint keeps what training needs of it.

    Args:
        dtypes: Of every tensor by name, as safetensors calls them (`BF16`).

    Returns:
        Its own names by the plain decoder's: `model.embed_tokens.weight`, `model.norm.weight` and
        `lm_head.weight`, as far as they are there.

    Raises:
        ValueError: when there is no decoder, or when one of them is quantised.
    """
    prefix = decoder_prefix(dtypes)
    outwards = [prefix]
    while outwards[-1]:
        outwards.append(outwards[-1][: outwards[-1].rstrip(".").rfind(".") + 1])
    places = {
        "model.embed_tokens": [f"{prefix}embed_tokens"],
        "model.norm": [f"{prefix}norm"],
        "lm_head": [f"{place}lm_head" for place in outwards],
    }
    found = {}
    for standard, modules in places.items():
        for module in modules:
            _refuse_quantised(module, dtypes)
            if f"{module}.weight" in dtypes:
                found[f"{standard}.weight"] = f"{module}.weight"
                break
    return found


def _refuse_quantised(module: str, dtypes: Mapping[str, str]) -> None:
    packed = [f"{module}.{part}" for part in _PACKED if f"{module}.{part}" in dtypes]
    dtype = dtypes.get(f"{module}.weight", "F32")
    if not packed and dtype in _PLAIN:
        return
    tensor = packed[0] if packed else f"{module}.weight"
    raise ValueError(
        f"{tensor} is quantised ({dtypes[tensor]}), and training reads it as plain weights; take a "
        f"checkpoint whose quantiser left {module} out, as most do with `ignore` or "
        "`modules_to_not_convert`"
    )

"""How many bits a weight takes in memory, by component, from `dtype` and `quantization_config`.

The scales of a group are counted with its weights: INT4 in groups of 32 with a 16-bit scale is
4 + 16 / 32 = 4.5 bits. Routers and lm_head are taken as never quantised, which is how vLLM builds
them but for a GPTQ checkpoint that says otherwise.
"""

import re
from fnmatch import fnmatch
from typing import Any

from specmill.text_decoder import text_config

QUANTISED = {
    "attention": "model.layers.1.self_attn.o_proj",
    "dense": "model.layers.0.mlp.down_proj",
    "shared": "model.layers.1.mlp.shared_experts.down_proj",
    "routed": "model.layers.1.mlp.experts.0.down_proj",
}
"""A module of each component that a quantiser converts unless it is told not to. The layers with
dense MLPs are the first ones where there are experts too."""

_DTYPES = {"bfloat16": 16.0, "float16": 16.0, "float32": 32.0}
_WHOLE = {"fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4 + 8 / 32}
"""Methods with one form; MXFP4 has an 8-bit scale for 32 weights (OCP MX specification 1.0)."""
_LEFT_OUT = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules")


def bits_by_component(config: dict[str, Any], bits: float | None = None) -> dict[str, float]:
    """Bits of one weight, scales included, by component of `specmill.geometry`.

    Args:
        config: Content of a config.json.
        bits: Of the layers' matrices, instead of what the config says of them.

    Raises:
        ValueError: when the config does not say, or says it in a way that is not known here.
    """
    config = text_config(config)
    name = config.get("dtype") or config.get("torch_dtype")
    if name not in _DTYPES:
        raise ValueError(f"config.json: dtype is {name!r}; one of {', '.join(_DTYPES)} is needed")
    found = dict.fromkeys((*QUANTISED, "router", "lm_head"), _DTYPES[name])
    if bits is not None:
        return found | dict.fromkeys(QUANTISED, bits)
    quantised = config.get("quantization_config")
    if quantised is None:
        return found
    if not isinstance(quantised, dict):
        raise ValueError(f"config.json: quantization_config is {quantised!r}; an object is needed")
    left_out = [entry for key in _LEFT_OUT for entry in quantised.get(key) or []]
    return found | {
        component: _bits(quantised)
        for component, module in QUANTISED.items()
        if not any(_names(entry, module) for entry in left_out)
    }


def _names(entry: str, module: str) -> bool:
    """Whether an entry of an ignore list means this module, in any of the three ways in use."""
    names = (module, f"language_model.{module}")
    if entry.startswith("re:"):
        return any(re.match(entry.removeprefix("re:"), name) for name in names)
    if "*" in entry:
        return any(fnmatch(name, entry) or fnmatch(name, f"{entry}.*") for name in names)
    return any(f".{entry}." in f".{name}." for name in names)


def _bits(quantised: dict[str, Any]) -> float:
    method = quantised.get("quant_method")
    if method in _WHOLE:
        return _WHOLE[method]
    if method in ("gptq", "awq"):
        size = quantised["group_size"]
        # a group has a 16-bit scale and a zero point of as many bits as a weight
        bits = float(quantised["bits"])
        return bits + ((16 + bits) / size if size > 0 else 0.0)
    groups = [group["weights"] for group in (quantised.get("config_groups") or {}).values()]
    found = {_group_bits(weights) for weights in groups if weights}
    if len(found) != 1:
        raise ValueError(
            f"config.json: quantization_config of {method!r} says {sorted(found) or 'nothing'} of "
            "a weight's bits; say it with --bits, scales included"
        )
    return found.pop()


def _group_bits(weights: dict[str, Any]) -> float:
    """Of one group of compressed-tensors or ModelOpt."""
    bits, size = weights["num_bits"], weights.get("group_size")
    if not size or size < 0:
        return float(bits)  # a scale for a whole row or block is nothing
    # NVFP4 has 8-bit scales, integers 16-bit ones and a zero point where they are not symmetric
    scale = 8 if weights.get("type") == "float" else 16
    zero = 0 if weights.get("symmetric", True) else bits
    return float(bits + (scale + zero) / size)

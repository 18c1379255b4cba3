"""A verifier's config with everything made small that can be, and nothing else changed.

What decides which code an engine takes stays as it is: the class, the kind of attention (grouped or
latent, its head size and ranks, windows, rotary embedding), whether there are experts and shared
ones, tied embeddings, and how wrappers nest the text decoder. Counts and widths become small.
Left out, with a word: quantisation, whose kernels need the true widths, and the checkpoint's own
code.
"""

from typing import Any

from specmill.text_decoder import text_config, text_path, with_text

NUM_LAYERS = 7
"""The fewest with three different default depths (specmill.layers): 2, 3, 4."""
VOCAB_SIZE = 512
NUM_SPECIAL = 64
"""Ids below are for special tokens, of which configs name a dozen."""
_HIDDEN_SIZE = 256
_WIDTH = 128
_NUM_TOWER_LAYERS = 2
_MOST = {
    "n_routed_experts": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_topk": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_window_layers": NUM_LAYERS,
    "intermediate_size": _WIDTH,
    "moe_intermediate_size": _WIDTH,
    "shared_expert_intermediate_size": _WIDTH,
    "q_lora_rank": _WIDTH,
    "num_nextn_predict_layers": 0,
}
"""Largest values of keys whose number alone is made small."""
_LEFT_OUT = {
    "quantization_config": "quantisation: its kernels are not looked at",
    "auto_map": "the checkpoint's own code: what transformers and vLLM have is looked at",
}


def shrunk_config(config: dict[str, Any], dtype: str) -> tuple[dict[str, Any], list[str]]:
    """Make a config.json small.

    Args:
        config: Content of a verifier's config.json.
        dtype: Of the weights.

    Returns:
        The content of the twin's, and what was left out of it, a sentence each.

    Raises:
        ValueError: when the config does not say how deep, wide or split the decoder is.
    """
    old = text_config(config)
    text = _shrunk_text(old)
    left_out = [why for key, why in _LEFT_OUT.items() if key in old or key in config]
    small = with_text(config, text)
    nested = text_path(config)[:1]
    for key in small.keys() - {*nested, *_LEFT_OUT}:
        small[key] = _shrunk_tower(small[key], old, text)
    ranks = {value: rank for rank, value in enumerate(sorted(set(_special_ids(small))))}
    made = _cleaned(small, ranks, dtype)
    made["dtype"] = dtype
    return made, left_out


def _shrunk_text(text: dict[str, Any]) -> dict[str, Any]:
    num_layers = _need(text, "num_hidden_layers")
    small = {
        key: value[:NUM_LAYERS] if isinstance(value, list) and len(value) == num_layers else value
        for key, value in text.items()
    }
    for key, most in _MOST.items():
        if isinstance(small.get(key), int):
            small[key] = min(small[key], most)
    if "mlp_only_layers" in small:
        kept = [layer for layer in small["mlp_only_layers"] or [] if layer < NUM_LAYERS]
        small["mlp_only_layers"] = kept
    heads, hidden = _need(text, "num_attention_heads"), _need(text, "hidden_size")
    kv_heads = text.get("num_key_value_heads") or heads
    small["num_key_value_heads"] = min(kv_heads, 2)
    small["num_attention_heads"] = small["num_key_value_heads"] * min(heads // kv_heads, 2)
    own = text.get("head_dim") or text.get("kv_lora_rank")
    # a head size that is not said is the width of a head
    each = hidden // heads
    small["hidden_size"] = _HIDDEN_SIZE if own else small["num_attention_heads"] * each
    small["num_hidden_layers"] = min(num_layers, NUM_LAYERS)
    small["vocab_size"] = VOCAB_SIZE
    return small


def _shrunk_tower(part: Any, old: dict[str, Any], text: dict[str, Any]) -> Any:
    """Another tower of a wrapper: few layers, and what it hands over as wide as the decoder."""
    if not isinstance(part, dict):
        return part
    small = dict(part)
    for key, value in part.items():
        if key == "depth" or key.endswith("num_hidden_layers"):
            small[key] = min(value, _NUM_TOWER_LAYERS)
            if key.endswith("_num_hidden_layers"):  # transformers' name of Kimi-K2.5's
                small["num_hidden_layers"] = small[key]
        elif key.endswith("indexes"):
            small[key] = list(range(min(len(value), _NUM_TOWER_LAYERS)))
        elif key.endswith("_hidden_size") and value == old["hidden_size"]:
            small[key] = text["hidden_size"]
    return small


def _special_ids(part: dict[str, Any]) -> list[int]:
    """Every token id that a config names, parts within it included."""
    found: list[int] = []
    for key, value in part.items():
        if isinstance(value, dict):
            found += _special_ids(value)
        elif _names_tokens(key):
            found += [one for one in (value if isinstance(value, list) else [value]) if one]
    return found


def _names_tokens(key: str) -> bool:
    return key.endswith(("_token_id", "_token_ids", "_token_index"))


def _cleaned(part: dict[str, Any], ranks: dict[int, int], dtype: str) -> dict[str, Any]:
    """Special tokens renamed into the small vocabulary, without what is left out."""
    made: dict[str, Any] = {}
    for key, value in part.items():
        if key in _LEFT_OUT:
            continue
        if isinstance(value, dict):
            made[key] = _cleaned(value, ranks, dtype)
        elif key in ("dtype", "torch_dtype"):
            made[key] = dtype
        elif _names_tokens(key):
            several = isinstance(value, list)
            made[key] = (
                [ranks.get(one, one) for one in value] if several else ranks.get(value, value)
            )
        else:
            made[key] = value
    return made


def _need(text: dict[str, Any], key: str) -> int:
    value = text.get(key)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {key} is {value!r}; a number from 1 on is needed")
    return value

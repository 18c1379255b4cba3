"""What a model's config.json says of its weights: how many there are, and who reads them.

    component   weights                                       a step reads
    attention   projections of every layer                    all
    dense       MLPs of the layers without experts            all
    shared      experts that every token passes               all
    router      gates of the layers with experts              all
    lm_head     the output matrix, tied to the embedding too  all
    routed      the other experts                             those that its tokens are sent to

Left out: norms, biases, and the embedding, of which a step reads a row for every token.
Multi-token prediction layers of a checkpoint are no part of the verifier.
"""

from dataclasses import dataclass
from typing import Any

from specmill.text_decoder import text_config

DENSE = ("llama", "mistral", "qwen2", "qwen3")
MOE = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "glm4_moe")
MLA = ("deepseek_v2", "deepseek_v3", "kimi_k2")
"""Values of `model_type` whose layers hold what is counted here and nothing else of size."""

_MOST, _MOST_LAYERS = 10**9, 10**4
"""Beyond these a number of a config.json is a slip, and would be counted for hours."""

_NUM_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")


@dataclass(frozen=True)
class Experts:
    """The routed experts."""

    num: int
    """Of one layer."""
    top_k: int
    """Of one token."""
    num_layers: int
    """Layers that have them."""
    weights_each: int
    """Of one expert in one layer."""


@dataclass(frozen=True)
class Geometry:
    """Numbers of weights, not bytes: these depend on how a checkpoint is quantised."""

    hidden_size: int
    weights: dict[str, int]
    """Of all layers together, by component, without `routed`."""
    experts: Experts | None
    """None of a dense model."""
    kv_heads: int
    """Heads that the KV cache can be split by; 1 of MLA, whose latent serves all heads."""
    kv_values: int
    """Numbers that one layer keeps of one token."""
    attention_flop: int
    """Of one layer, for one query token and one token of its context."""
    windows: tuple[int | None, ...]
    """Tokens that each layer looks back; None where all."""

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.windows)

    @property
    def weights_per_token(self) -> int:
        """Weights that one token is multiplied with: the active parameters."""
        routed = self.experts
        active = routed.num_layers * routed.top_k * routed.weights_each if routed else 0
        return sum(self.weights.values()) + active

    def context_layers(self, context: int) -> int:
        """Tokens of context that all layers together look at, for a context of so many tokens."""
        return sum(context if window is None else min(context, window) for window in self.windows)


def read_geometry(config: dict[str, Any]) -> Geometry:
    """Count a model's weights.

    Args:
        config: Content of a config.json as transformers writes it.

    Raises:
        ValueError: naming a key that is missing, or an architecture that is not known here.
    """
    config = text_config(config)
    kind = config.get("model_type")
    if kind not in DENSE + MOE + MLA:
        known = ", ".join(DENSE + MOE + MLA)
        raise ValueError(f"config.json: model_type is {kind!r}; weights are counted of {known}")
    hidden, windows = _need(config, "hidden_size"), _windows(config)
    attention, kv_heads, kv_values, attention_flop = (_mla if kind in MLA else _gqa)(config)
    experts = _experts(config, len(windows))
    num_moe = experts.num_layers if experts else 0
    num_dense = len(windows) - num_moe
    weights = {
        "attention": len(windows) * attention,
        "dense": num_dense * 3 * hidden * _need(config, "intermediate_size") if num_dense else 0,
        "shared": num_moe * 3 * hidden * _shared_size(config),
        "router": num_moe * hidden * experts.num if experts else 0,
        "lm_head": hidden * _need(config, "vocab_size"),
    }
    return Geometry(hidden, weights, experts, kv_heads, kv_values, attention_flop, windows)


def eagle3_weights(config: dict[str, Any], draft_vocab_size: int) -> int:
    """Weights of an EAGLE-3 head of the verifier's own layer geometry, as speculators makes it.

    One decoder layer whose attention sees embedding and hidden state side by side, the projection
    of three hidden states to one, and an output matrix over the draft vocabulary
    (speculators.models.eagle3.core). Drafting one token reads all but the projection, which runs
    once a step: it is counted as read every time.
    """
    config = text_config(config)
    hidden = _need(config, "hidden_size")
    heads = _need(config, "num_attention_heads")
    kv_heads = _number(config, "num_key_value_heads") or heads
    head_dim = _number(config, "head_dim") or hidden // heads
    attention = 2 * hidden * (heads + 2 * kv_heads) * head_dim + heads * head_dim * hidden
    mlp = 3 * hidden * _need(config, "intermediate_size")
    return 3 * hidden * hidden + attention + mlp + hidden * draft_vocab_size


def _need(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or not 1 <= value <= _MOST:
        raise ValueError(f"config.json: {name} is {value!r}; a number from 1 on is needed")
    return value


def _number(config: dict[str, Any], name: str, default: int = 0) -> int:
    """A key that a config may lack or have as null."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or not 0 <= value <= _MOST:
        raise ValueError(f"config.json: {name} is {value!r}; a number from 0 on is needed")
    return value


def _list(config: dict[str, Any], name: str) -> list[Any]:
    """A key that a config may lack or have as null."""
    value = config.get(name) or []
    if not isinstance(value, list):
        raise ValueError(f"config.json: {name} is {value!r}; a list is needed")
    return value


def _gqa(config: dict[str, Any]) -> tuple[int, int, int, int]:
    """Attention weights of a layer, KV heads, numbers kept of a token, FLOP per pair of tokens."""
    hidden, heads = _need(config, "hidden_size"), _need(config, "num_attention_heads")
    kv_heads = _number(config, "num_key_value_heads") or heads
    head_dim = _number(config, "head_dim") or hidden // heads
    weights = hidden * (heads + 2 * kv_heads) * head_dim + heads * head_dim * hidden
    return weights, kv_heads, 2 * kv_heads * head_dim, 4 * heads * head_dim


def _mla(config: dict[str, Any]) -> tuple[int, int, int, int]:
    """The same of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    A decode step attends in the latent space, so that a token's rank + rope numbers serve as keys
    and its rank numbers as values of all heads.
    """
    hidden, heads = _need(config, "hidden_size"), _need(config, "num_attention_heads")
    rank, rope = _need(config, "kv_lora_rank"), _need(config, "qk_rope_head_dim")
    nope, value = _need(config, "qk_nope_head_dim"), _need(config, "v_head_dim")
    rank_q = _number(config, "q_lora_rank")
    if not rank_q:
        queries = hidden * heads * (nope + rope)
    else:
        queries = rank_q * (hidden + heads * (nope + rope))
    keys_values = hidden * (rank + rope) + rank * heads * (nope + value)
    weights = queries + keys_values + heads * value * hidden
    return weights, 1, rank + rope, 2 * heads * (2 * rank + rope)


def _experts(config: dict[str, Any], num_layers: int) -> Experts | None:
    if config["model_type"] in DENSE:
        return None
    names = [name for name in _NUM_EXPERTS if config.get(name)]
    if not names:
        raise ValueError(f"config.json: none of {', '.join(_NUM_EXPERTS)} is there")
    # Mixtral and gpt-oss have no dense MLP, and call an expert's width by its name
    size = _number(config, "moe_intermediate_size") or _need(config, "intermediate_size")
    first, step = (
        _number(config, "first_k_dense_replace"),
        _number(config, "decoder_sparse_step", 1) or 1,
    )
    every, without = _number(config, "moe_layer_freq", 1) or 1, _list(config, "mlp_only_layers")
    layers = [
        layer
        for layer in range(num_layers)
        if layer >= first
        and layer % every == 0
        and (layer + 1) % step == 0
        and layer not in without
    ]
    return Experts(
        num=_need(config, names[0]),
        top_k=_need(config, "num_experts_per_tok"),
        num_layers=len(layers),
        weights_each=3 * _need(config, "hidden_size") * size,
    )


def _shared_size(config: dict[str, Any]) -> int:
    """Width of all shared experts of a layer together."""
    if size := _number(config, "shared_expert_intermediate_size"):
        return size
    shared = _number(config, "n_shared_experts")
    return shared * _need(config, "moe_intermediate_size") if shared else 0


def _windows(config: dict[str, Any]) -> tuple[int | None, ...]:
    """How far each layer looks back."""
    num_layers = _need(config, "num_hidden_layers")
    window = _number(config, "sliding_window") or None
    kinds = _list(config, "layer_types")
    if num_layers > _MOST_LAYERS:
        raise ValueError(f"config.json: num_hidden_layers is {num_layers}: no model has as many")
    if not kinds:
        first = _number(config, "max_window_layers") if "use_sliding_window" in config else 0
        slides = window is not None and config.get("use_sliding_window", True)
        return tuple(window if slides and layer >= first else None for layer in range(num_layers))
    if unknown := [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]:
        raise ValueError(f"config.json: layer_types has {', '.join(map(str, unknown))}: not known")
    if len(kinds) != num_layers:
        raise ValueError(
            f"config.json: layer_types has {len(kinds)} entries, num_hidden_layers is {num_layers}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)

"""A dense Llama re-laid as a Mixtral: a small mixture of experts to try things on.

Embeddings, attention, norms and lm_head are copied as they are. Every expert is the layer's MLP
with noise of its own (specmill.noise), and a router drawn at random chooses among them:

    output(state) = sum over the top_k experts e of w_e(state) * expert_e(state)
    w(state)      = softmax over the top_k largest of router @ state

Weights that add up to 1 over equal experts give the dense MLP (transformers models/mixtral and
vLLM's renormalize both do so): without noise the outputs are the dense model's. With 3% the answers
are still language, and which expert is taken matters.

Nobody trained the routers. A trained mixture has its experts balanced by a loss, so that tokens
share fewer of them; how many are loaded here is measured (reports/routing.json).

    model.layers.N of the dense model       of the Mixtral, as the Hub has them; vLLM and
                                            transformers (conversion_mapping.py) read these names
    mlp.gate_proj                           block_sparse_moe.experts.E.w1
    mlp.up_proj                             block_sparse_moe.experts.E.w3
    mlp.down_proj                           block_sparse_moe.experts.E.w2
    post_attention_layernorm                the same, and sets the scale of block_sparse_moe.gate
"""

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specmill.cut import INDEX, copy_companions, weight_files
from specmill.files import write_json
from specmill.noise import drawn, noised
from specmill.params_experts import Experts
from specmill.verifier import model_path, obtain

logger = logging.getLogger(__name__)

_EXPERTS_MATRIX = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_LOGIT_SPREAD = 2.0
"""Standard deviation of a state's router logits, about. The largest of 8 is then 1.1 above the next
on average, so that the two weigh .76 and .24: neither alike nor one alone."""
_SHARED_KEYS = (
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "pad_token_id",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "use_cache",
    "vocab_size",
)
"""Keys that mean the same in both configs. Their defaults differ, so all are written out."""


def obtain_relaid(
    source: str, revision: str | None, dtype: str, experts: Experts, folder: Path
) -> dict[str, Any]:
    """Make a verifier usable from `folder` that is a dense one re-laid.

    Args:
        source: Of the dense model, as for `specmill.verifier.obtain`.
        revision: Likewise.
        dtype: Likewise.
        experts: How it is re-laid.
        folder: Receives the weights and what else the checkpoint has.

    Returns:
        `name`, which says what was done, and `origin`.

    Raises:
        ValueError: when the source does not exist or is no Llama that can be re-laid.
    """
    with tempfile.TemporaryDirectory() as scratch:
        dense = obtain(source, revision, dtype, Path(scratch))
        logger.info("re-laying %s as a mixture of %d experts", dense["name"], experts.num)
        relay(model_path(Path(scratch)), folder, experts)
    shape = f"{experts.num} experts, top {experts.top_k}, noise {experts.noise:g}"
    return {
        "name": f"{dense['name']} re-laid as {shape}",
        "origin": f"{dense['origin']}; MLPs copied to {shape}, seed {experts.seed}",
    }


def relay(model: Path, folder: Path, experts: Experts) -> None:
    """Write a Llama checkpoint as a Mixtral, file by file; the same bytes for the same seed.

    Args:
        model: A transformers checkpoint: config.json, *.safetensors, tokenizer.
        folder: Receives the checkpoint.
        experts: Their number, noise and seed.

    Raises:
        ValueError: when the model is no Llama, or has what a Mixtral has not.
    """
    config = relaid_config(model, experts)
    folder.mkdir(parents=True, exist_ok=True)
    copy_companions(model, folder)
    config.save_pretrained(folder)
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for file in weight_files(model):
        relaid = {
            name: tensor
            for dense_name, weight in load_file(file).items()
            for name, tensor in _relaid(dense_name, weight, experts)
        }
        save_file(relaid, folder / file.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(relaid, file.name)
        num_bytes += sum(tensor.nbytes for tensor in relaid.values())
    if (model / INDEX).is_file():
        metadata = {"total_size": num_bytes}
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})


def relaid_config(model: Path, experts: Experts) -> Any:
    """The MixtralConfig of a Llama checkpoint re-laid.

    Raises:
        ValueError: naming what a Mixtral cannot hold.
    """
    from transformers import AutoConfig, MixtralConfig

    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    fault = None
    if config.model_type != "llama":
        fault = f"it is a {config.model_type}"
    elif config.attention_bias or config.mlp_bias:
        fault = "its projections have biases"
    elif config.hidden_act != "silu":
        fault = f"its activation is {config.hidden_act}"
    elif getattr(config, "quantization_config", None):
        fault = "its weights are quantised"
    if fault:
        raise ValueError(
            "verifier.experts re-lays a Llama without biases, with SiLU and plain weights, but of "
            f"verifier.source {fault}; set verifier.experts: null or take another source"
        )
    return MixtralConfig(
        **{key: getattr(config, key) for key in _SHARED_KEYS},
        num_local_experts=experts.num,
        num_experts_per_tok=experts.top_k,
        architectures=["MixtralForCausalLM"],
    )


def _relaid(
    name: str, weight: torch.Tensor, experts: Experts
) -> Iterator[tuple[str, torch.Tensor]]:
    """What becomes of one tensor of the dense model."""
    place, _, part = name.removesuffix(".weight").rpartition(".")
    if part in _EXPERTS_MATRIX:
        moe = f"{place.removesuffix('mlp')}block_sparse_moe"
        for number in range(experts.num):
            copy = f"{moe}.experts.{number}.{_EXPERTS_MATRIX[part]}.weight"
            yield copy, noised(copy, weight, experts.noise, experts.seed)
        return
    yield name, weight
    if part == "post_attention_layernorm":
        gate = f"{place}.block_sparse_moe.gate.weight"
        yield gate, _router(gate, weight, experts)


def _router(name: str, norm: torch.Tensor, experts: Experts) -> torch.Tensor:
    """A router's matrix [num_experts, hidden_size], for states that come out of this norm.

    A normed state x * norm has a mean square x of 1, so its product with independent N(0, s^2) has
    a standard deviation of about s * |norm|.
    """
    values = drawn(name, torch.Size([experts.num, len(norm)]), experts.seed)
    return (values * _LOGIT_SPREAD / norm.float().norm()).to(norm.dtype)

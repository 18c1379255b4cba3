"""Medusa-1 heads: the tokens after the next, each guessed from the verifier's last hidden state.

The verifier's last hidden state y_t, *after the final norm*, gives token x_(t+1) through the
lm_head. Head i (from 0) puts residual blocks between the two and guesses one token further on each
(arXiv 2401.10774, section 2.1.1):

    head_i(y) = lm_head(block(... block(y)))        block(y) = y + SiLU(W y), W zero at first

so that an untrained head says what the verifier says next. The paper also trains a copy of the
lm_head per head; here all share the verifier's own, frozen, cut to the draft vocabulary: the only
form that vLLM serves with a cut vocabulary (model_executor/models/medusa.py, 0.32).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn import functional

from specmill.files import read_object, write_json
from specmill.params_heads import Medusa


@dataclass(frozen=True)
class VerifierHead:
    """What turns the verifier's last hidden state into its next token."""

    norm: torch.Tensor  # [hidden_size]
    eps: float
    lm_head: torch.Tensor  # [vocab_size, hidden_size]

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """RMS norm over the last dimension, computed in float32, in the dtype of `states`."""
        values = states.float()
        values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self.eps)
        return (values * self.norm.float()).to(states.dtype)


def load_verifier_head(folder: Path, dtype: torch.dtype, device: str) -> VerifierHead:
    """Read data/verifier_head, in `dtype`, to `device`.

    Raises:
        ValueError: when a tensor is missing, or the final norm is no RMS norm.
    """
    config = read_object(folder / "config.json")
    if "rms_norm_eps" not in config:
        raise ValueError(
            f"{folder}/config.json has no rms_norm_eps: Medusa heads are trained behind a final "
            "RMS norm only; remove the section of this verifier from params.yaml: medusa"
        )
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        missing = sorted({"lm_head.weight", "model.norm.weight"} - set(weights.keys()))
        if missing:
            raise ValueError(f"{folder} lacks {', '.join(missing)}; run `dvc repro -f verifier`")
        norm = weights.get_tensor("model.norm.weight")
        lm_head = weights.get_tensor("lm_head.weight")
    return VerifierHead(norm.to(device, dtype), config["rms_norm_eps"], lm_head.to(device, dtype))


def choose_tables(
    vocabulary: str, d2t: np.ndarray, t2d: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The mapping the heads are trained with: the draft vocabulary's, or every token to itself."""
    if vocabulary == "draft":
        return d2t, t2d
    return np.zeros(len(t2d), dtype=np.int64), np.ones(len(t2d), dtype=bool)


class MedusaHeads(torch.nn.Module):
    """Heads over a frozen lm_head.

    Args:
        lm_head: [draft_vocab_size, hidden_size], the verifier's rows of `token_ids`.
        token_ids: int64 [draft_vocab_size], the verifier token of each draft id, rising.
        num_heads: Heads.
        num_layers: Residual blocks per head.
    """

    lm_head: torch.Tensor
    token_ids: torch.Tensor

    def __init__(
        self, lm_head: torch.Tensor, token_ids: torch.Tensor, num_heads: int, num_layers: int
    ):
        super().__init__()
        self.register_buffer("lm_head", lm_head, persistent=False)
        self.register_buffer("token_ids", token_ids, persistent=False)
        size = lm_head.shape[1]
        self.blocks = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(num_layers, size, size)) for _ in range(num_heads)
        )

    def logits(self, head: int, normed: torch.Tensor) -> torch.Tensor:
        """Of one head, over the draft vocabulary.

        Args:
            head: From 0.
            normed: [num_positions, hidden_size], last hidden states after the final norm.

        Returns:
            [num_positions, draft_vocab_size], in the lm_head's dtype.
        """
        states = normed.float()
        for weight in self.blocks[head]:
            states = states + functional.silu(functional.linear(states, weight))
        return functional.linear(states.to(self.lm_head.dtype), self.lm_head)


def build_heads(head: VerifierHead, t2d: np.ndarray, chosen: Medusa) -> MedusaHeads:
    """Untrained heads over the verifier tokens that `t2d` marks, where `head` lies."""
    token_ids = torch.from_numpy(np.flatnonzero(t2d)).to(head.lm_head.device)
    heads = MedusaHeads(head.lm_head[token_ids], token_ids, chosen.num_heads, chosen.num_layers)
    heads.to(head.lm_head.device)
    return heads


def draw_blocks(heads: MedusaHeads, seed: int) -> None:
    """Draw the weights of untrained heads: of zeros, all of them would draft the same token."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for block in heads.blocks:
            block.normal_(generator=noise).mul_(block.shape[-1] ** -0.5)


_NOTHING_QUANTISED = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
"""vLLM 0.32 refuses an unquantised checkpoint with a parameter that was not loaded, and its Medusa
does not count the token_map it has loaded. A quantised checkpoint, even if nothing in it is, is not
looked at so closely (model_executor/model_loader/default_loader.py, load_weights)."""


def export_medusa(heads: MedusaHeads, vocab_size: int, folder: Path, provenance: Any) -> None:
    """Write the heads, in the lm_head's dtype, as the checkpoint that vLLM's Medusa loads.

    `lm_heads.0.weight` is the lm_head all heads share (`original_lm_head`). `token_map`, the
    verifier token of each draft id, is there only when the vocabulary is cut: vLLM reads it only
    then.

    Raises:
        ValueError: when a weight is not finite.
    """
    num_heads, (num_layers, hidden_size, _) = len(heads.blocks), heads.blocks[0].shape
    dtype = heads.lm_head.dtype
    weights = {"lm_heads.0.weight": heads.lm_head}
    for head, block in enumerate(heads.blocks):
        for layer in range(num_layers):
            weights[f"blocks.{head}.layers.{layer}.weight"] = block.detach()[layer].to(dtype)
    for name, tensor in weights.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"weight {name} holds NaN or infinity; lower lr")
    is_cut = len(heads.token_ids) < vocab_size
    if is_cut:
        weights["token_map"] = heads.token_ids
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: tensor.cpu().contiguous() for name, tensor in weights.items()}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "truncated_vocab_size": len(heads.token_ids),
        "num_heads": num_heads,
        "num_hidden_layers": num_layers,
        "original_lm_head": True,
    }
    if is_cut:
        config["quantization_config"] = _NOTHING_QUANTISED
    write_json(folder / "config.json", config)
    write_json(folder / "provenance.json", provenance)

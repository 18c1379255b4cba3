"""Artefacts with which methods draft on the sampling check's twin: random, but not hopeless.

Nothing is trained. Their drafts must be accepted sometimes and rejected sometimes; how often does
not matter, for a lossless method's samples have the same distribution with any draft. Tokens that
are likely in every context carry them: heads share the twin's lm_head, cut to its likeliest tokens.
"""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from specmill.cut import copy_companions
from specmill.head import export_head
from specmill.medusa import build_heads, draw_blocks, export_medusa, load_verifier_head
from specmill.params import Train
from specmill.params_heads import HeadType, Medusa
from specmill.sampling_twin import AUX_LAYER_IDS, DRAFT_VOCAB_SIZE, MAX_MODEL_LEN, likeliest_tokens
from specmill.training import build_draft_model
from specmill.vocab import build_tables, tables_digest

_SEED = 23
_NOISE = 0.3
"""Of the draft model's weights, in standard deviations of each matrix: about half of what it drafts
is accepted."""


class TwinDrafts:
    """Makes artefacts that fit a twin.

    Args:
        twin: Its checkpoint.
        identity: What `write_twin` returned.
        k: Draft tokens they must propose.
    """

    def __init__(self, twin: Path, identity: dict[str, Any], k: int):
        self._twin = twin
        self._identity = identity
        self._k = k

    def noised_copy(self, folder: Path) -> None:
        """The twin with noise on its weight matrices, as a draft model."""
        noise = torch.Generator().manual_seed(_SEED)
        weights = load_file(self._twin / "model.safetensors")
        for name, weight in weights.items():
            if weight.ndim == 2:
                drawn = torch.randn(weight.shape, generator=noise)
                weights[name] = weight + _NOISE * weight.std() * drawn
        folder.mkdir(parents=True)
        copy_companions(self._twin, folder)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    def head(self, kind: HeadType, folder: Path) -> None:
        """A random head of a type that speculators knows.

        Its projection of the verifier's states passes the last of them on, by which it knows the
        tokens that are always likely.
        """
        d2t, t2d = self._tables()
        model = build_draft_model(self._twin, AUX_LAYER_IDS, d2t, t2d, _shape(kind, self._k))
        width = self._identity["hidden_size"]
        with torch.no_grad():
            model.fc.weight.zero_()
            model.fc.weight[:, -width:] = torch.eye(width)
        with tempfile.TemporaryDirectory() as checkpoint:
            model.save_pretrained(checkpoint)
            export_head(
                Path(checkpoint), folder, self._identity["name"], self._provenance(d2t, t2d)
            )

    def medusa(self, folder: Path) -> None:
        """Heads whose residual blocks are random."""
        d2t, t2d = self._tables()
        chosen = Medusa(
            num_heads=self._k, num_layers=1, vocabulary="draft", epochs=1, lr=1.0,
            tokens_per_step=1, max_samples=None, seed=_SEED,
        )  # fmt: skip
        heads = build_heads(load_verifier_head(self._twin, torch.float32, "cpu"), t2d, chosen)
        draw_blocks(heads, _SEED)
        export_medusa(heads, len(t2d), folder, self._provenance(d2t, t2d))

    def _tables(self) -> tuple[np.ndarray, np.ndarray]:
        tokens = Counter(likeliest_tokens(DRAFT_VOCAB_SIZE))
        return build_tables(tokens, DRAFT_VOCAB_SIZE, self._identity["vocab_size"])

    def _provenance(self, d2t: np.ndarray, t2d: np.ndarray) -> dict[str, Any]:
        return {"verifier": self._identity, "vocabulary": tables_digest(d2t, t2d)}


def _shape(kind: HeadType, k: int) -> Train:
    """A head of one layer for K draft tokens; what only training reads has no meaning here."""
    return Train(
        type=kind, epochs=1, lr=1.0, optimizer="adamw", warmup_ratio=0.0, ttt_steps=k,
        ttt_step_loss_decay=1.0, loss="kl_div", max_samples=None, tokens_per_step=1, num_layers=1,
        sliding_window=MAX_MODEL_LEN, norm_before_fc=True, norm_output=True, seed=_SEED,
    )  # fmt: skip

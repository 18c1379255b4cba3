"""What step time is measured with: heads and models of the configured geometry, untrained.

A head's draft vocabulary is the verifier's first ids. Which ids it holds cannot matter: a draft id
becomes the verifier's by one addition, and how long lm_head takes depends on how many there are.
"""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specmill.curve_kinds import Kind
from specmill.cut import cut_model
from specmill.head import export_head
from specmill.medusa import (
    build_heads,
    choose_tables,
    draw_blocks,
    export_medusa,
    load_verifier_head,
)
from specmill.params import Train
from specmill.params_heads import DraftModel, Medusa
from specmill.training import build_draft_model
from specmill.vocab import build_tables, tables_digest

_SEED = 23


class CurveDrafts:
    """Makes what kinds draft with, for one verifier.

    Args:
        model: The verifier's checkpoint.
        head_slice: What training needs of it (data/verifier_head).
        identity: Its identity.json.
        aux_ids: Depths whose states an EAGLE head is fed.
        draft_vocab_size: Of `vocab`.
        most: Largest K to draft. Heads are built for it: how many tokens a head has learnt to draft
            is not in its geometry, and Medusa's first K of more heads are what K heads are.
    """

    def __init__(
        self,
        model: Path,
        head_slice: Path,
        identity: dict[str, Any],
        aux_ids: list[int],
        draft_vocab_size: int,
        most: int,
    ):
        self._model = model
        self._head_slice = head_slice
        self._identity = identity
        self._aux_ids = aux_ids
        self._draft_vocab_size = draft_vocab_size
        self._most = most

    def make(self, kind: Kind, folder: Path) -> Path:
        """Write what a kind drafts with to `folder`; where it lies.

        Raises:
            ValueError: when the geometry does not fit the verifier.
        """
        if isinstance(kind.shape, Train):
            self._head(kind.shape, folder)
        elif isinstance(kind.shape, Medusa):
            self._medusa(kind.shape, folder)
        elif isinstance(kind.shape, DraftModel):
            key = f"draft_models.{Path(kind.method.head).name}.num_layers"
            cut_model(self._model, folder, kind.shape.num_layers, key)
        else:
            return Path(kind.method.head)
        return folder

    def _head(self, shape: Train, folder: Path) -> None:
        d2t, t2d = self._tables()
        steps = shape.model_copy(update={"ttt_steps": self._most})
        model = build_draft_model(self._head_slice, self._aux_ids, d2t, t2d, steps)
        with tempfile.TemporaryDirectory() as checkpoint:
            model.save_pretrained(checkpoint)
            name = self._identity["name"]
            export_head(Path(checkpoint), folder, name, self._provenance(d2t, t2d))

    def _medusa(self, shape: Medusa, folder: Path) -> None:
        d2t, t2d = choose_tables(shape.vocabulary, *self._tables())
        dtype = getattr(torch, self._identity["dtype"])
        lm_head = load_verifier_head(self._head_slice, dtype, "cpu")
        enough = shape.model_copy(update={"num_heads": max(self._most, shape.num_heads)})
        heads = build_heads(lm_head, t2d, enough)
        draw_blocks(heads, _SEED)
        export_medusa(heads, len(t2d), folder, self._provenance(d2t, t2d))

    def _tables(self) -> tuple[np.ndarray, np.ndarray]:
        return build_tables(Counter(), self._draft_vocab_size, self._identity["vocab_size"])

    def _provenance(self, d2t: np.ndarray, t2d: np.ndarray) -> dict[str, Any]:
        return {"verifier": self._identity, "vocabulary": tables_digest(d2t, t2d)}

"""Why a head drafts badly: run it on stored hidden states with one thing mended at a time.

What makes clearly more drafts right (specmill.offline.clearly_more) is named as the likely cause,
and of several the one that makes most.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from specmill.files import read_object
from specmill.head_checks import aux_ids_of
from specmill.offline import Drafts, clearly_more, first_drafts, load_draft_model
from specmill.samples import Sample
from specmill.view import StateView

Found = tuple[dict[str, str], dict[str, Any] | None]
"""Likely causes of poor drafts by short key, and `offline` of an inspection."""
_Mended = tuple[float, dict[str, str]] | None
"""Share of right drafts with one thing mended, and that thing as a cause; None when it is not
clearly more."""


def try_offline(
    folder: Path,
    verifier: dict[str, Any],
    verifier_head: Path,
    view: StateView,
    heldout: list[Sample],
) -> Found:
    """Run a whole head on stored states, as it is and mended.

    Args:
        folder: The head, whose tensors fit its config and the verifier.
        verifier: identity.json.
        verifier_head: Its slice.
        view: Its hidden states of the held-out samples.
        heldout: Its greedy answers.
    """
    config = read_object(folder / "config.json")
    if view.online or config["transformer_layer_config"]["hidden_size"] != verifier["hidden_size"]:
        return {}, None  # no states, or a head that speculators' model cannot be
    trial = _Trial(folder, verifier, verifier_head, view, heldout)
    asked = sorted(set(aux_ids_of(config, verifier["num_layers"])))  # as vLLM feeds them
    if not set(asked) <= set(view.spec.layer_ids):
        return trial.without_its_states(asked), None
    drafts = trial.run(asked)
    hits = drafts.hits(trial.offsets)
    mended = [
        found
        for found in (
            trial.mapping(drafts, hits),
            trial.layers(asked, hits),
            trial.residual(asked, hits),
        )
        if found
    ]
    # a head damaged in one place may gain a little from a change in another
    causes = max(mended, key=lambda found: found[0])[1] if mended else _chance(drafts, hits)
    return causes, {
        "acceptance_rate_pos_0": round(_rate(hits), 4),
        "num_positions": len(hits),
        "layer_ids": asked,
    }


def read_tables(folder: Path) -> tuple[np.ndarray | None, np.ndarray | None]:
    """d2t, int64 [draft_vocab_size], and t2d, bool [vocab_size], where the head has them."""
    with safe_open(folder / "model.safetensors", framework="np") as weights:
        names = set(weights.keys())
        d2t = weights.get_tensor("d2t").astype(np.int64) if "d2t" in names else None
        t2d = weights.get_tensor("t2d").astype(bool) if "t2d" in names else None
    return d2t, t2d


class _Trial:
    """A head, loaded once, with the samples it is run on."""

    def __init__(
        self,
        folder: Path,
        verifier: dict[str, Any],
        verifier_head: Path,
        view: StateView,
        heldout: list[Sample],
    ):
        self._dtype = getattr(torch, verifier["dtype"])
        self._model = load_draft_model(folder, verifier_head, self._dtype)
        self._view = view
        self._heldout = heldout
        self._stored = list(view.spec.layer_ids[:-1])
        self._d2t, self._t2d = read_tables(folder)

    @property
    def offsets(self) -> torch.Tensor | None:
        """d2t as the head has it."""
        return None if self._d2t is None else torch.from_numpy(self._d2t)

    def run(self, layer_ids: list[int]) -> Drafts:
        """First drafts from the states of these layers."""
        drafts: Drafts = first_drafts(
            self._model, self._view, self._heldout, layer_ids, self._dtype
        )
        return drafts

    def mapping(self, drafts: Drafts, hits: torch.Tensor) -> _Mended:
        """With d2t made from t2d: draft ids are the members of t2d in rising order."""
        if self._d2t is None or self._t2d is None or int(self._t2d.sum()) != len(self._d2t):
            return None
        ordered = np.nonzero(self._t2d)[0] - np.arange(len(self._d2t))
        mended = drafts.hits(torch.from_numpy(ordered))
        if not clearly_more(mended, hits):
            return None
        return _rate(mended), {
            "mapping": (
                f"d2t was shuffled or lost: {_percent(hits)} of first drafts are right, and "
                f"{_percent(mended)} with d2t made from t2d in order; write nonzero(t2d) - arange "
                "into the checkpoint as d2t"
            )
        }

    def layers(self, asked: list[int], hits: torch.Tensor) -> _Mended:
        """With the states that are stored, where the head asks for others of them."""
        if asked == self._stored or len(asked) != len(self._stored):
            return None
        mended = self.run(self._stored).hits(self.offsets)
        if not clearly_more(mended, hits):
            return None
        return _rate(mended), {
            "aux_layers": (
                f"{_percent(mended)} of first drafts are right on states of layers {self._stored}, "
                f"and {_percent(hits)} on those of {asked}, which its config asks for: its ids "
                f"were counted otherwise than here (specmill/layers.py); {_CORRECT_IDS}"
            )
        }

    def without_its_states(self, asked: list[int]) -> dict[str, str]:
        """With the states that are stored, where those that the head asks for are not."""
        if len(asked) != len(self._stored):
            return {}
        drafts = self.run(self._stored)
        hits = drafts.hits(self.offsets)
        if not clearly_more(hits, drafts.constant_hits()):
            return {}
        return {
            "aux_layers": (
                f"{_percent(hits)} of first drafts are right on states of layers {self._stored}, "
                f"while its config asks for {asked}, which are not stored: perhaps its ids were "
                "counted otherwise than here (specmill/layers.py). Neighbouring layers are alike, "
                f"so compare: set extract.aux_layer_ids to {asked} and look again, or "
                f"{_CORRECT_IDS}"
            )
        }

    def residual(self, asked: list[int], hits: torch.Tensor) -> _Mended:
        """With the other norm_before_residual, which EAGLE's own configs do not name."""
        first = self._model.layers[0]
        own = bool(first.norm_before_residual)
        first.norm_before_residual = not own
        mended = self.run(asked).hits(self.offsets)
        first.norm_before_residual = own
        if not clearly_more(mended, hits):
            return None
        return _rate(mended), {
            "norm_before_residual": (
                f"{_percent(hits)} of first drafts are right with norm_before_residual {own}, as "
                f"it is served, and {_percent(mended)} with {not own}: set it so in the "
                "checkpoint's config, or as norm_before_residual of a head in `heads`"
            )
        }


_CORRECT_IDS = "correct them in the checkpoint's config, or as aux_layer_ids of a head in `heads`"


def _chance(drafts: Drafts, hits: torch.Tensor) -> dict[str, str]:
    constant = drafts.constant_hits()
    if clearly_more(hits, constant):
        return {}
    return {
        "chance": (
            f"{_percent(hits)} of first drafts are right, and always drafting the most frequent "
            f"token would give {_percent(constant)}: made for another verifier, tokenizer or chat "
            "template, trained too little, or damaged in a way that was not found"
        )
    }


def _rate(hits: torch.Tensor) -> float:
    return float(hits.float().mean())


def _percent(hits: torch.Tensor) -> str:
    return f"{_rate(hits):.1%}"

"""How often a head's first draft is right, from stored hidden states: no engine runs.

Aligned as training is (speculators.models.eagle3.data.shift_batch): for a sample x0 ... x9 with aux
states g0 ... g9, whose answer begins with x4,

    state fed               g0  g1  g2  g3  g4 ... g7
    token fed               x1  x2  x3  x4  x5 ... x8
    draft, to equal         x2  x3  x4  x5  x6 ... x9
    counted                             x       x        both tokens are the verifier's

A draft of token x5 is made when the verifier has just chosen x4, so the first token of an answer is
never drafted. Answers of held-out samples are greedy: what the verifier accepts is what it wrote.
That is acceptance at position 0, unlike speculators' accuracy, whose target is the best token
*within the draft vocabulary*. An engine drafts from fewer of these positions, those where a step
begins, so the figures are close but not the same.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel

from specmill import compat
from specmill.head_shapes import shapes_of
from specmill.samples import Sample
from specmill.states import restore
from specmill.view import StateView


@dataclass(frozen=True)
class Drafts:
    """First drafts at every position where an engine could make one."""

    draft_ids: torch.Tensor
    """int64 [num_positions], ids of the draft vocabulary."""
    emitted: torch.Tensor
    """int64 [num_positions], the verifier's own tokens there."""

    def hits(self, d2t: torch.Tensor | None) -> torch.Tensor:
        """Which are accepted, bool [num_positions].

        Args:
            d2t: Offsets, int64 [draft_vocab_size]; None when both vocabularies are one.
        """
        target_ids = self.draft_ids if d2t is None else self.draft_ids + d2t[self.draft_ids]
        return target_ids == self.emitted

    def constant_hits(self) -> torch.Tensor:
        """The same for drafting the most frequent token always: what nothing learnt gives."""
        return self.emitted == self.emitted.mode().values


def read_config(folder: Path) -> Eagle3SpeculatorConfig:
    """A head's config, ready to build its model for samples of any length.

    Its attention takes a dense mask on a GPU too: the FlexAttention of training wants lengths that
    are multiples of its blocks, and compiles.

    Raises:
        ValueError: when it is not one of an EAGLE-3 head.
    """
    try:
        config = Eagle3SpeculatorConfig.from_pretrained(folder)
    # transformers takes a config's numbers as they come, 0 attention heads too
    except (ValueError, TypeError, ArithmeticError, StrictDataclassError) as error:
        raise ValueError(f"its config makes no head: {error}") from None
    config.transformer_layer_config._attn_implementation = "sdpa"
    return config


def expected_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Tensors that a head of this config has; embeddings and t2d among them.

    Raises:
        ValueError: when its config is not one of an EAGLE-3 head.
    """
    return shapes_of(read_config(folder))


def load_draft_model(folder: Path, verifier_head: Path, dtype: torch.dtype) -> Eagle3DraftModel:
    """A head as speculators' model, with the verifier's embeddings where it has none.

    Raises:
        ValueError: when a tensor is missing.
    """
    model = Eagle3DraftModel(read_config(folder))
    weights = load_file(folder / "model.safetensors")
    if "embed_tokens.weight" not in weights:
        slice_ = load_file(verifier_head / "model.safetensors")
        weights["embed_tokens.weight"] = slice_["model.embed_tokens.weight"]
    missing, _ = model.load_state_dict(weights, strict=False)
    lost = [name for name in missing if not name.startswith("verifier_") and name != "t2d"]
    if lost:
        raise ValueError(f"{folder} lacks {', '.join(sorted(lost))}")
    return model.to(compat.device(), dtype).eval()


@torch.no_grad()
def chain_drafts(
    model: Eagle3DraftModel,
    view: StateView,
    sample: Sample,
    layer_ids: list[int],
    dtype: torch.dtype,
    most_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a head drafts at every position of a sample when each step is fed the sample's tokens.

    Args:
        model: The head.
        view: Holds the sample's states.
        sample: A greedy answer.
        layer_ids: The depths to feed, in the order of fc's input; each is stored.
        dtype: Of the model.
        most_k: Steps.

    Returns:
        Ids of the draft vocabulary, int64 [most_k, num_fed], and the tokens fed at step 0, int64
        [num_fed]: the sample's, from its second on. Both are on the CPU.
    """
    columns = [view.spec.layer_ids.index(number) for number in layer_ids]
    machine = compat.device()
    ids, stored, scales = view.load(sample.sample_key)
    states = restore(stored, scales, dtype)[:-1, columns].flatten(1)
    fed = ids[1:].long()
    with torch.compiler.set_stance("force_eager"):  # each length would be a compilation, on a GPU
        made: Any = model(
            hidden_states=states[None].to(machine),  # [1, num_fed, num_aux * hidden_size]
            input_ids=fed[None].to(machine),
            document_ids=torch.zeros(1, len(fed), dtype=torch.long, device=machine),
            position_ids=torch.arange(1, len(fed) + 1, device=machine)[None],
            ttt_steps=most_k,
        )
    return torch.cat(made).cpu(), fed


@torch.no_grad()
def first_drafts(
    model: Eagle3DraftModel,
    view: StateView,
    samples: Iterable[Sample],
    layer_ids: list[int],
    dtype: torch.dtype,
) -> Drafts:
    """What a head drafts first at every position of the samples' answers.

    Args:
        model: The head.
        view: Holds the samples' states.
        samples: Greedy answers.
        layer_ids: The depths to feed, in the order of fc's input; each is stored.
        dtype: Of the model.
    """
    drafts, emitted = [], []
    for sample in samples:
        made, fed = chain_drafts(model, view, sample, layer_ids, dtype, 1)
        answered = torch.from_numpy(sample.loss_mask).bool()
        counted = answered[1:-1] & answered[2:]
        drafts.append(made[0, :-1][counted])
        emitted.append(fed[1:][counted])
    return Drafts(torch.cat(drafts), torch.cat(emitted))


def clearly_more(hits: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether `hits` are more by over three standard errors (McNemar, Psychometrika 12, 1947).

    Positions where both are right, or both wrong, say nothing: of the others, b and c of them, the
    difference b - c has the standard error sqrt(b + c) when there is none.
    """
    gained, lost = int((hits & ~others).sum()), int((others & ~hits).sum())
    return gained - lost > 3 * math.sqrt(gained + lost)

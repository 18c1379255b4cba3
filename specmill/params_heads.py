"""Sections of params.yaml for what further rows serve: Medusa heads, draft models, other heads.

Each is a mapping from a name to how that artefact is made; empty by default, so that nothing is
trained or fetched that no row needs. A row names what it serves in `methods.NAME.head`.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from specmill.section import Count, Section, Seed, Size

HeadType = Literal["eagle3", "peagle", "dflash"]
LIKE_VERIFIER = "like-verifier"


def _known_draft(draft: str) -> str:
    kind, _, place = draft.partition(":")
    if draft not in (LIKE_VERIFIER, "kimi-k2-eagle3") and (kind != "file" or not place):
        raise ValueError(f"write {LIKE_VERIFIER}, kimi-k2-eagle3 or file:PATH")
    return draft


Draft = Annotated[str, AfterValidator(_known_draft)]
"""What a draft model is shaped like (specmill.draft_config)."""


class Medusa(Section):
    """Medusa-1 heads trained on the last hidden state, `models/medusa/NAME`."""

    num_heads: Count
    """Heads, which is the most tokens they can draft (K)."""
    num_layers: Count
    """Residual blocks per head."""
    vocabulary: Literal["draft", "full"]
    """Tokens the heads can propose: the draft vocabulary, or all of the verifier's."""
    epochs: Count
    lr: Annotated[float, Field(gt=0)]
    """Peak learning rate of AdamW; it falls linearly to 0."""
    tokens_per_step: Count
    """Trained positions in one optimizer step."""
    max_samples: Count | None
    """Training samples to use, the first of the file; null uses all."""
    seed: Seed
    """Of the order of positions."""


class Sibling(Section):
    """Another head trained on the same states, `models/siblings/NAME`; shaped like the verifier
    and trained from nothing, whatever `train.draft` and `train.from` say."""

    type: HeadType
    """What is trained (specmill.draft_types)."""
    epochs: Count
    lr: Annotated[float, Field(gt=0)]
    """Peak learning rate."""
    num_layers: Count
    """Decoder layers of the draft model."""
    max_samples: Count | None
    """Training samples to use, the first of the file; null uses all. Everything else is as in
    `train`."""


class DraftModel(Section):
    """The first layers of the verifier as a draft model, `models/draft/NAME`."""

    num_layers: Count
    """Decoder layers kept."""


class OutsideHead(Section):
    """A head that was trained elsewhere; one of `heads` becomes `models/heads/NAME`."""

    source: str
    """`folder:PATH` or `hub:ORG/NAME`, in speculators' format or the EAGLE authors'."""
    revision: str | None = None
    """Commit, tag or branch of a Hub head."""
    aux_layer_ids: list[Size] | None = None
    """Depths it was trained on (specmill.layers), whatever its own config says; null believes the
    config, or takes EAGLE-3's default three."""
    norm_before_residual: bool = False
    """Of an EAGLE head whose config does not say: normalise before the residual branch."""

    @model_validator(mode="after")
    def _source_has_a_kind(self) -> "OutsideHead":
        kind, _, place = self.source.partition(":")
        if kind not in ("folder", "hub") or not place:
            raise ValueError(f"source is {self.source!r}; write folder:PATH or hub:ORG/NAME")
        if self.revision is not None and kind != "hub":
            raise ValueError(f"revision is only for hub: sources, source is {self.source!r}")
        return self


def _lone_source(value: Any) -> Any:
    """A source alone is a head."""
    return {"source": value} if isinstance(value, str) else value


StartHead = Annotated[OutsideHead | None, BeforeValidator(_lone_source)]
"""The head that a training starts from; None draws a fresh one."""


class ForeignHead(Section):
    """A head trained on a noised copy of the verifier, `models/heads/NAME`: a head for another
    model, as one is found for a model's earlier version."""

    noise: Annotated[float, Field(gt=0)]
    """Standard deviation of the noise on every weight matrix, relative to the matrix's own."""
    max_samples: Count | None
    """Training samples to use, the first of the file; null uses all."""
    epochs: Count
    """Epochs; everything else is as in `train`, but for `train.from`."""
    seed: Seed
    """Of the noise."""


class SpoiledHead(Section):
    """The trained head, broken on purpose, `models/heads/NAME`: shows what the report makes of
    it."""

    fault: Literal["shuffled_d2t", "shifted_aux_layers", "random_layer", "wrong_width"]
    """What is wrong with it (specmill.spoiled)."""

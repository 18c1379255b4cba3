"""Which rows of `methods` share a step-time curve, and what that is measured with.

    row                     kind                     measured with
    none                    none                     the verifier alone
    ngram, suffix           tokens                   drafts at no cost (specmill/fixed_drafter.py)
    eagle3, peagle, dflash  the type                 a random head of the same geometry
    medusa                  medusa/NAME              random heads of the same geometry
    draft_model             draft_model/draft/NAME   the verifier's first layers
                            draft_model/verifier     the verifier itself

A step takes what its matrices take, whatever they hold, and it hardly depends on what is accepted:
nothing need be trained. A head from elsewhere (models/heads) has its own geometry, which is not
known before it is fetched: the one of `train` stands for it where it is served as EAGLE-3.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmill import paths
from specmill.params import TRAINED_HEAD, Method, Params, Train
from specmill.params_heads import DraftModel, Medusa
from specmill.section import DoesNotFit

NONE, TOKENS = "none", "tokens"

Shape = Train | Medusa | DraftModel | None

_SHAPED_BY: dict[type, set[str]] = {
    Train: {
        "type", "draft", "num_layers", "sliding_window", "norm_before_fc", "norm_output",
    },
    Medusa: {"num_heads", "num_layers", "vocabulary"},
    DraftModel: {"num_layers"},
}  # fmt: skip
"""Parameters that shape what is made; the others say how it is trained."""


@dataclass(frozen=True)
class Kind:
    """What rows that share a curve have in common."""

    name: str
    """As reports/curves.json calls it."""
    row: str
    """The first of those rows."""
    method: Method
    """Its entry of `methods`."""
    shape: Shape
    """What is made to measure with, untrained; None where there is nothing to make."""

    @property
    def label(self) -> str:
        """Its name in paths."""
        return self.name.replace("/", "-")

    @property
    def geometry(self) -> list[Any]:
        """All that its engines follow from, besides the verifier and K; as JSON holds it.

        How a row looks drafts up changes nothing of what they cost here, nor does how long or on
        what a head is trained.
        """
        settings = {} if self.name == TOKENS else self.method.settings
        shaped = None
        if self.shape is not None:
            shaped = self.shape.model_dump(include=_SHAPED_BY[type(self.shape)])
        return [self.name, settings, shaped]


def curve_kinds(params: Params) -> tuple[dict[str, Kind], dict[str, str]]:
    """The kind of every row that has one, and of the others the reason why not; by row.

    Rows of one kind have the same `Kind`.
    """
    kinds: dict[str, Kind] = {}
    without: dict[str, str] = {}
    by_name: dict[str, Kind] = {}
    for row, method in params.methods.items():
        try:
            name, shape = _name_and_shape(method, params)
        except DoesNotFit as reason:
            without[row] = str(reason)
        else:
            kinds[row] = by_name.setdefault(name, Kind(name, row, method, shape))
    return kinds, without


def kinds_to_measure(params: Params) -> list[list[Any]]:
    """The geometry of every kind that a row is of, by its name: while it is the same, step times
    need not be measured again, whatever else becomes of `methods`."""
    kinds = {kind.name: kind for kind in curve_kinds(params)[0].values()}
    return [kinds[name].geometry for name in sorted(kinds)]


def kinds_by_row(
    kinds: dict[str, Kind], without: dict[str, str], refused: dict[str, str]
) -> tuple[dict[str, str | None], dict[str, str]]:
    """What became of each row.

    Args:
        kinds: As `curve_kinds`.
        without: As `curve_kinds`.
        refused: Why a kind was not measured, by kind.

    Returns:
        The name of each row's kind, None where it has no curve; and of those the reason.
    """
    missing = {row: refused[kind.name] for row, kind in kinds.items() if kind.name in refused}
    reasons = without | missing
    return {
        row: None if row in reasons else kinds[row].name for row in sorted({*kinds, *without})
    }, reasons


def _name_and_shape(method: Method, params: Params) -> tuple[str, Shape]:
    folder, name = Path(method.head).parent, Path(method.head).name
    if method.method == "none":
        return NONE, None
    if method.method in ("ngram", "suffix"):
        return TOKENS, None
    if method.method == "draft_model" and Path(method.head) == paths.VERIFIER:
        return "draft_model/verifier", None
    if method.method == "draft_model" and folder == paths.DRAFT and name in params.draft_models:
        return f"draft_model/draft/{name}", params.draft_models[name]
    if method.method == "medusa" and folder == paths.MEDUSA and name in params.medusa:
        return f"medusa/{name}", params.medusa[name]
    if shape := _shape_of_head(method, params):
        differs = {
            f"{shape.num_layers}_layers": shape.num_layers != params.train.num_layers,
            shape.draft: shape.draft != params.train.draft,
        }
        return "/".join([method.method, *(what for what, does in differs.items() if does)]), shape
    raise DoesNotFit(
        f"params.yaml does not say what {method.head} looks like as {method.method}, and its step "
        "time is measured before it is there"
    )


def _shape_of_head(method: Method, params: Params) -> Train | None:
    """What the head that a row serves is made like; None where params.yaml does not say."""
    folder, name = Path(method.head).parent, Path(method.head).name
    sibling = params.siblings.get(name) if folder == paths.SIBLINGS else None
    if sibling is not None and sibling.type == method.method:
        return params.train.of_its_own(type=sibling.type, num_layers=sibling.num_layers)
    is_trained = method.head == TRAINED_HEAD and method.method == params.train.type
    is_outside = folder == paths.HEADS and method.method == "eagle3"
    if is_trained or is_outside:
        return params.train.model_copy(update={"type": method.method, "from_": None})
    return None

"""Which rows share a curve, on which engines it is measured, and what those draft with."""

from pathlib import Path
from typing import Any

import pytest

from specmill.curve_drafts import CurveDrafts
from specmill.curve_engines import (
    REFERENCE,
    Engine,
    engines_of,
    plan_engines,
    plan_groups,
    steering_flags,
)
from specmill.curve_kinds import Kind, curve_kinds, kinds_by_row, kinds_to_measure
from specmill.params import Method, Params
from specmill.params_file import load_params
from specmill.params_heads import DraftModel, Sibling
from specmill.plan import Run
from specmill.sampling_twin import AUX_LAYER_IDS, write_twin
from tests.waves import NGRAM, THREE, TOKENS
from tests.workspace import ROOT


@pytest.fixture
def every() -> Params:
    return load_params(ROOT / "profiles/all-methods.yaml")


def test_rows_that_draft_alike_share_a_kind(every: Params) -> None:
    kinds, without = curve_kinds(every)
    assert without == {}
    assert {row: kind.name for row, kind in kinds.items()} == {
        "none": "none",
        "ngram": "tokens",
        "ngram_1_2": "tokens",
        "ngram_3_5": "tokens",
        "suffix": "tokens",
        "eagle3": "eagle3",
        "peagle": "peagle",
        "dflash": "dflash",
        "medusa": "medusa/three_heads",
        "draft_model": "draft_model/draft/first_layers",
        "self_draft": "draft_model/verifier",
        "noised": "eagle3",
        "wrong_width": "eagle3",
        "shuffled_d2t": "eagle3",
        "shifted_aux_layers": "eagle3",
        "random_layer": "eagle3",
    }
    assert kinds["noised"] is kinds["eagle3"]
    assert kinds["peagle"].geometry[2]["type"] == "peagle"


def test_a_deeper_sibling_is_a_kind_of_its_own(every: Params) -> None:
    deeper = Sibling(type="dflash", epochs=1, lr=1e-3, num_layers=4, max_samples=None)
    changed = every.model_copy(update={"siblings": every.siblings | {"dflash": deeper}})
    kind = curve_kinds(changed)[0]["dflash"]
    assert (kind.name, kind.label, kind.geometry[2]["num_layers"]) == (
        "dflash/4_layers", "dflash-4_layers", 4,
    )  # fmt: skip


def test_another_shape_than_the_verifiers_is_the_trained_heads_alone(every: Params) -> None:
    sibling = Sibling(type="eagle3", epochs=1, lr=1e-3, num_layers=1, max_samples=None)
    row = every.methods["eagle3"].model_copy(update={"head": "models/siblings/plain"})
    train = every.train.model_copy(update={"draft": "kimi-k2-eagle3"})
    changed = every.model_copy(
        update={
            "train": train,
            "siblings": {"plain": sibling},
            "methods": {"eagle3": every.methods["eagle3"], "plain": row},
        }
    )
    kinds, without = curve_kinds(changed)
    assert without == {}
    assert {row: kind.name for row, kind in kinds.items()} == {
        "eagle3": "eagle3",
        "plain": "eagle3/like-verifier",
    }
    assert kinds["eagle3"].geometry[2]["draft"] == "kimi-k2-eagle3"
    assert kinds["plain"].geometry[2]["draft"] == "like-verifier"


@pytest.mark.parametrize(
    ("method", "head"),
    [
        ("medusa", "models/heads/noised"),
        ("peagle", "models/heads/noised"),
        ("dflash", "models/siblings/peagle"),
        ("peagle", "models/eagle3"),
        ("draft_model", "elsewhere/model"),
    ],
)
def test_a_head_whose_geometry_is_not_known_has_no_curve(
    every: Params, method: str, head: str
) -> None:
    row = Method(method=method, section="spec", head=head, settings={})
    kinds, without = curve_kinds(every.model_copy(update={"methods": {"row": row}}))
    assert kinds == {}
    assert without["row"].startswith(f"params.yaml does not say what {head} looks like as {method}")


def test_kinds_are_the_same_whatever_else_becomes_of_rows_and_trainings(every: Params) -> None:
    """Another window, learning rate, number of epochs or row of a kind that is there."""
    before = kinds_to_measure(every)
    names = [name for name, *_ in before]
    assert names == sorted(set(names))
    window = every.methods["ngram"].model_copy(
        update={"settings": {"prompt_lookup_min": 1, "prompt_lookup_max": 5}}
    )
    longer = every.medusa["three_heads"].model_copy(update={"epochs": 99, "lr": 1.0})
    changed = every.model_copy(
        update={
            "methods": every.methods | {"ngram": window, "again": window},
            "train": every.train.model_copy(update={"epochs": 99, "lr": 1.0, "ttt_steps": 7}),
            "medusa": every.medusa | {"three_heads": longer},
        }
    )
    assert kinds_to_measure(changed) == before


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("train", {"num_layers": 2}), ("train", {"draft": "kimi-k2-eagle3"}),
        ("train", {"norm_output": None}), ("train", {"sliding_window": 7}),
    ],
)  # fmt: skip
def test_another_shape_is_to_be_measured_anew(
    every: Params, section: str, change: dict[str, Any]
) -> None:
    shaped = getattr(every, section).model_copy(update=change)
    changed = every.model_copy(update={section: shaped})
    assert kinds_to_measure(changed) != kinds_to_measure(every)


def test_a_row_whose_engine_was_refused_has_no_kind_but_a_reason() -> None:
    none = Kind("none", "none", NGRAM, None)
    rows = {"ngram": TOKENS, "suffix": TOKENS, "none": none}
    assert kinds_by_row(rows, {"odd": "unknown"}, {"tokens": "no such class"}) == (
        {"ngram": None, "none": "none", "odd": None, "suffix": None},
        {"odd": "unknown", "ngram": "no such class", "suffix": "no such class"},
    )


def test_beside_puts_none_next_to_every_engine_and_bracket_before_all() -> None:
    other = Engine("eagle3", (1, 3), Run("eagle3", 3, 0, {}))
    assert plan_groups([THREE, other], "beside") == [[REFERENCE, THREE], [REFERENCE, other]]
    assert plan_groups([THREE, other], "bracket") == [[REFERENCE], [THREE], [other]]
    assert plan_groups([], "beside") == [[REFERENCE]]


def test_a_cpu_engine_serves_every_k_and_a_gpu_engine_one() -> None:
    configs: dict[int, dict[str, Any] | None] = {3: {"k": 3}, 1: {"k": 1}}
    assert engines_of(TOKENS, configs, "cpu") == [
        Engine("tokens", (0, 1, 3), Run("tokens", 3, 0, {"k": 3}))
    ]
    each = engines_of(TOKENS, configs, "cuda")
    assert each == [
        Engine("tokens", (1,), Run("tokens", 1, 0, {"k": 1})),
        Engine("tokens", (3,), Run("tokens", 3, 0, {"k": 3})),
        Engine("tokens", (0,), Run("tokens-empty", 3, 0, {
            "method": "custom_class", "model": "specmill.fixed_drafter.NoDrafts",
            "num_speculative_tokens": 3,
        })),
    ]  # fmt: skip
    assert [engine.name for engine in each] == ["tokens K=1", "tokens K=3", "tokens K=0"]
    assert steering_flags([THREE, *each]) == {
        "tokens_k3": ["--scheduler-cls", "specmill.steered.SteeredScheduler"]
    }


@pytest.mark.parametrize("method", ["medusa", "peagle"])
def test_methods_that_assert_their_k_have_an_engine_for_each_on_a_cpu_too(method: str) -> None:
    served = Method(method=method, section="spec", head="models/medusa/x", settings={})
    engines = engines_of(Kind(method, method, served, None), {1: {}, 3: {}}, "cpu")
    assert [engine.ks for engine in engines] == [(1,), (3,)]


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("twin")
    return folder, write_twin(folder)


def test_what_is_made_to_measure_with_passes_the_methods_own_checks(
    twin: tuple[Path, dict[str, Any]], every: Params, tmp_path: Path
) -> None:
    model, identity = twin
    drafts = CurveDrafts(model, model, identity, AUX_LAYER_IDS, 16, 8)
    few = {"first_layers": DraftModel(num_layers=2)}
    rows = {name: every.methods[name] for name in ("eagle3", "peagle", "dflash", "medusa")}
    kinds, without = curve_kinds(every.model_copy(update={"draft_models": few, "methods": rows}))
    assert without == {}
    engines, refused = plan_engines(
        kinds.values(), drafts, [1, 8], identity, "cpu", tmp_path / "made"
    )
    assert refused == {}
    assert [(engine.kind, engine.ks) for engine in engines] == [
        ("eagle3", (1, 8)), ("peagle", (1,)), ("peagle", (8,)), ("dflash", (1, 8)),
        ("medusa/three_heads", (1,)), ("medusa/three_heads", (8,)),
    ]  # fmt: skip
    told = engines[0].run.speculative_config
    assert told == {
        "method": "eagle3",
        "model": str(tmp_path / "made/eagle3"),
        "num_speculative_tokens": 8,
    }


def test_a_cut_draft_model_is_made_and_the_verifier_itself_is_not(
    twin: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    model, identity = twin
    drafts = CurveDrafts(model, model, identity, AUX_LAYER_IDS, 16, 8)
    served = Method(method="draft_model", section="spec", head="models/draft/two", settings={})
    cut = Kind("draft_model/draft/two", "two", served, DraftModel(num_layers=2))
    assert drafts.make(cut, tmp_path / "two") == tmp_path / "two"
    assert (tmp_path / "two/model.safetensors").is_file()
    itself = Kind("draft_model/verifier", "self", served.model_copy(
        update={"head": "models/verifier"}), None)  # fmt: skip
    assert drafts.make(itself, tmp_path / "none") == Path("models/verifier")
    assert not (tmp_path / "none").exists()

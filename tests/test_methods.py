import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specmill.methods import check_methods, eagle3, read_settings, speculative_configs
from specmill.params import Method, Params
from specmill.params_file import load_params
from specmill.section import DoesNotFit, NoSettings
from specmill.speculator import check_head
from specmill.vocab import build_tables, tables_digest
from tests.workspace import ROOT

NOTHING = NoSettings()
VERIFIER = {"name": "tiny", "fingerprint": "f1", "vocab_size": 10}


def write_json(path: Path, tree: dict[str, Any]) -> None:
    path.write_text(json.dumps(tree))


def proposing(k: int) -> dict[str, Any]:
    """What a speculators checkpoint says about the draft tokens it was trained to propose."""
    return {"speculators_config": {"proposal_methods": [{"speculative_tokens": k}]}}


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """A head as train writes it, with a draft vocabulary of the target ids 1, 7 and 9."""
    d2t, t2d = build_tables(Counter({1: 1, 7: 1, 9: 1}), 3, 10)
    folder = tmp_path / "head"
    folder.mkdir()
    config = {"speculators_model_type": "eagle3", "draft_vocab_size": 3, **proposing(3)}
    write_json(folder / "config.json", config)
    write_json(
        folder / "provenance.json",
        {
            "verifier": {"name": "tiny", "fingerprint": "f1"},
            "vocabulary": tables_digest(d2t, t2d),
        },
    )
    save_file(
        {"d2t": d2t, "t2d": t2d, "lm_head.weight": np.ones((3, 2), dtype=np.float32)},
        folder / "model.safetensors",
    )
    return folder


def rewrite_weights(head: Path, changes: dict[str, np.ndarray | None]) -> None:
    weights = load_file(head / "model.safetensors") | changes
    kept = {name: weight for name, weight in weights.items() if weight is not None}
    save_file(kept, head / "model.safetensors")


def mask(*ids: int) -> np.ndarray:
    found = np.zeros(10, dtype=bool)
    found[list(ids)] = True
    return found


def row(method: str, head: str = "head", **settings: Any) -> Method:
    section: Any = "bench" if method == "none" else "spec"
    return Method(method=method, section=section, head=head, settings=settings)


def test_none_serves_without_a_draft() -> None:
    assert speculative_configs("none", row("none"), [3], VERIFIER) == {3: None}


def test_ngram_takes_every_k_and_the_lookup_window() -> None:
    chosen = row("ngram", prompt_lookup_min=2, prompt_lookup_max=4)
    assert speculative_configs("lookup", chosen, [5, 1], VERIFIER) == {
        k: {
            "method": "ngram",
            "num_speculative_tokens": k,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        }
        for k in (5, 1)
    }


def test_a_lookup_window_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(ValueError, match=r"methods\.a\.settings: prompt_lookup_min 5 is above .*4"):
        read_settings("a", row("ngram", prompt_lookup_min=5, prompt_lookup_max=4))
    same = read_settings("a", row("ngram", prompt_lookup_min=4, prompt_lookup_max=4))
    assert same.prompt_lookup_min == 4


def test_a_setting_that_is_wrong_missing_or_misspelt_is_named() -> None:
    with pytest.raises(ValueError, match=r"methods\.a\.settings\.prompt_lookup_max: Input should"):
        read_settings("a", row("ngram", prompt_lookup_min=1, prompt_lookup_max="4"))
    with pytest.raises(
        ValueError, match=r"methods\.a\.settings\.prompt_lookup_min: Field required"
    ):
        read_settings("a", row("ngram", prompt_lookup_max=4))
    with pytest.raises(ValueError, match=r"settings\.prompt_lookup_mx: .*mean prompt_lookup_max\?"):
        read_settings("a", row("ngram", prompt_lookup_min=1, prompt_lookup_mx=4))
    with pytest.raises(ValueError, match=r"methods\.b\.settings\.x: .*; none has none"):
        read_settings("b", row("none", x=1))


def test_eagle3_takes_k_and_the_absolute_place_of_its_head(
    head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(head.parent)
    config = eagle3.speculative_config(2, NOTHING, Path("head"), VERIFIER)
    assert config == {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}


def test_a_head_of_another_verifier_is_refused_by_both_names(head: Path) -> None:
    check_head(head, VERIFIER)
    other = VERIFIER | {"name": "huge", "fingerprint": "f2"}
    with pytest.raises(ValueError, match="was trained for tiny, not huge"):
        eagle3.speculative_config(2, NOTHING, head, other)


@pytest.mark.parametrize("missing", ["d2t", "t2d"])
def test_a_head_without_its_mapping_is_refused(head: Path, missing: str) -> None:
    rewrite_weights(head, {missing: None})
    with pytest.raises(ValueError, match=f"lacks {missing}: ids would be misread"):
        check_head(head, VERIFIER)


def test_a_head_whose_d2t_holds_ids_instead_of_offsets_is_refused(head: Path) -> None:
    rewrite_weights(head, {"d2t": np.array([1, 7, 9])})
    with pytest.raises(ValueError, match="not the same mapping"):
        check_head(head, VERIFIER)


def test_a_head_with_a_consistent_mapping_that_it_did_not_train_with_is_refused(
    head: Path,
) -> None:
    # ids 1, 7, 8: d2t and t2d agree, only the provenance tells
    rewrite_weights(head, {"d2t": np.array([1, 6, 6]), "t2d": mask(1, 7, 8)})
    with pytest.raises(ValueError, match="is not the one it trained with"):
        check_head(head, VERIFIER)


def test_a_head_whose_config_names_another_size_is_refused(head: Path) -> None:
    write_json(head / "config.json", {"draft_vocab_size": 4})
    with pytest.raises(ValueError, match=r"expected \(4,\) and \(10,\)"):
        check_head(head, VERIFIER)


def test_a_head_with_the_full_vocabulary_needs_no_mapping(head: Path) -> None:
    write_json(head / "config.json", {"draft_vocab_size": 10})
    rewrite_weights(head, {"d2t": None, "t2d": None})
    check_head(head, VERIFIER)


def test_a_head_drafts_as_many_tokens_as_it_was_trained_to_and_no_more(head: Path) -> None:
    eagle3.speculative_config(3, NOTHING, head, VERIFIER)
    with pytest.raises(ValueError, match=r"spec\.tokens.* 4 draft tokens, .*at most 3.*ttt_steps"):
        eagle3.speculative_config(4, NOTHING, head, VERIFIER)


def inspected(head: Path, **changes: Any) -> None:
    """Make a head one from outside: what it is known by is its inspection."""
    (head / "provenance.json").unlink()
    found = {"trained_for": "older", "run_on": "tiny", "refused": None, **changes}
    write_json(head / "inspection.json", found)


def test_a_head_of_another_verifier_is_served_once_it_was_inspected_and_at_any_k(
    head: Path,
) -> None:
    with pytest.raises(ValueError, match="at most 3"):
        eagle3.speculative_config(7, NOTHING, head, VERIFIER)
    inspected(head)
    config = eagle3.speculative_config(7, NOTHING, head, VERIFIER)
    assert config == {"method": "eagle3", "model": str(head), "num_speculative_tokens": 7}


def test_a_head_that_its_inspection_refused_does_not_fit_for_that_reason(head: Path) -> None:
    inspected(head, refused="fc is too wide")
    with pytest.raises(DoesNotFit, match=r"^fc is too wide$"):
        eagle3.speculative_config(2, NOTHING, head, VERIFIER)


def test_an_inspection_for_another_verifier_is_no_reason_for_a_row(head: Path) -> None:
    inspected(head, run_on="huge", refused="too narrow")
    with pytest.raises(ValueError, match="was inspected for huge, not tiny") as raised:
        eagle3.speculative_config(2, NOTHING, head, VERIFIER)
    assert not isinstance(raised.value, DoesNotFit)


def test_a_head_that_nothing_is_known_of_is_refused_with_the_way_to_serve_it(head: Path) -> None:
    (head / "provenance.json").unlink()
    with pytest.raises(ValueError, match=r"no provenance\.json.*as source of an entry of `heads`"):
        eagle3.speculative_config(2, NOTHING, head, VERIFIER)


def test_a_trained_head_of_another_type_is_refused(head: Path) -> None:
    config = json.loads((head / "config.json").read_text())
    write_json(head / "config.json", config | {"speculators_model_type": "dflash"})
    with pytest.raises(ValueError, match="serve it with method dflash"):
        eagle3.speculative_config(2, NOTHING, head, VERIFIER)


def with_rows(**rows: Method) -> Params:
    return load_params(ROOT / "params.yaml").model_copy(update={"methods": rows})


def test_an_unknown_method_and_an_artefact_that_no_stage_makes_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_methods(with_rows(mine=row("eagle3", "models/eagle3")))
    with pytest.raises(
        ValueError, match=r"methods\.foo\.method: there is no method 'fo'; there are"
    ):
        check_methods(with_rows(foo=row("fo", "models/eagle3")))
    with pytest.raises(ValueError, match=r"methods\.mine\.head is models/medusa/a, which is not"):
        check_methods(with_rows(mine=row("medusa", "models/medusa/a")))
    (tmp_path / "own").mkdir()
    check_methods(with_rows(mine=row("eagle3", "own")))

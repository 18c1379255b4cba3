import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specmill.methods import METHODS, check_methods
from specmill.methods.eagle3 import check_head
from specmill.params import Method, NgramLookup, Spec
from specmill.vocab import build_tables, tables_digest

SPEC = Spec(tokens=3, sweep=[1], ngram=NgramLookup(prompt_lookup_min=2, prompt_lookup_max=4))
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
    write_json(folder / "config.json", {"draft_vocab_size": 3, **proposing(3)})
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


def test_none_serves_without_a_draft(tmp_path: Path) -> None:
    assert METHODS["none"](3, SPEC, tmp_path, VERIFIER) is None


def test_ngram_takes_k_and_the_lookup_window(tmp_path: Path) -> None:
    assert METHODS["ngram"](5, SPEC, tmp_path, VERIFIER) == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }


def test_eagle3_takes_k_and_the_absolute_place_of_its_head(
    head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(head.parent)
    config = METHODS["eagle3"](2, SPEC, Path("head"), VERIFIER)
    assert config == {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}


def test_a_head_of_another_verifier_is_refused_by_both_names(head: Path) -> None:
    check_head(head, VERIFIER)
    other = VERIFIER | {"name": "huge", "fingerprint": "f2"}
    with pytest.raises(ValueError, match="was trained for tiny, not huge"):
        METHODS["eagle3"](2, SPEC, head, other)


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
    METHODS["eagle3"](3, SPEC, head, VERIFIER)
    with pytest.raises(ValueError, match=r"spec\.tokens.* 4 draft tokens, .*at most 3.*ttt_steps"):
        METHODS["eagle3"](4, SPEC, head, VERIFIER)


def test_an_unknown_method_and_a_missing_head_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    known = {"eagle3": Method(section="spec", head="models/eagle3")}
    check_methods(known)
    with pytest.raises(ValueError, match=r"methods\.foo: there is no such method; there are none"):
        check_methods(known | {"foo": Method(section="spec", head="models/eagle3")})
    with pytest.raises(ValueError, match=r"methods\.eagle3\.head is nope/head, which is not there"):
        check_methods({"eagle3": Method(section="spec", head="nope/head")})

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from specmill.methods import suffix
from specmill.section import DoesNotFit

ROOT = Path(__file__).parents[1]
INSTALLED = importlib.util.find_spec("arctic_inference") is not None
needs_it = pytest.mark.skipif(not INSTALLED, reason="arctic_inference is not in this lock file")


def config(k: int, settings: dict[str, Any]) -> dict[str, Any]:
    return suffix.speculative_config(k, suffix.Settings(**settings), Path("identity.json"), {})


@needs_it
def test_without_settings_vllms_own_defaults_hold() -> None:
    assert config(5, {}) == {"method": "suffix", "num_speculative_tokens": 5}


@needs_it
def test_what_is_set_is_passed_on_and_zero_is_set() -> None:
    assert config(2, {"suffix_decoding_max_cached_requests": 0}) == {
        "method": "suffix",
        "num_speculative_tokens": 2,
        "suffix_decoding_max_cached_requests": 0,
    }


def test_without_arctic_inference_the_row_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(suffix, "find_spec", lambda name: None)
    with pytest.raises(DoesNotFit, match="arctic_inference, which is not installed; `make venv`"):
        config(3, {})


@pytest.mark.parametrize(
    "wrong",
    [
        {"suffix_decoding_max_tree_depth": 0},
        {"suffix_decoding_max_cached_requests": -1},
        {"suffix_decoding_max_spec_factor": 0.0},
        {"suffix_decoding_min_token_prob": 1.5},
        {"max_tree_depth": 8},
    ],
)
def test_a_setting_that_vllm_refuses_or_that_drafts_nothing_is_refused(
    wrong: dict[str, Any],
) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        suffix.Settings(**wrong)


def test_vllm_knows_every_setting_and_has_the_default_that_its_text_names() -> None:
    vllm = importlib.util.find_spec("vllm")  # found, not imported: that takes seconds
    assert vllm
    assert vllm.origin
    tree = ast.parse((Path(vllm.origin).parent / "config/speculative.py").read_text())
    defaults = {
        node.target.id: ast.literal_eval(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id.startswith("suffix_decoding_")
        and node.value
    }
    described = suffix.Settings.model_fields
    assert defaults.keys() == described.keys()
    for name, default in defaults.items():
        assert str(described[name].description).endswith(f"vLLM: {default}.")


def suffix_cache(**options: int) -> Any:
    """What vLLM's proposer keeps and asks."""
    module = pytest.importorskip("arctic_inference.suffix_decoding")
    return module.SuffixDecodingCache(**options)


@pytest.mark.parametrize(("max_cached_requests", "drafted"), [(10000, [14, 15]), (0, [])])
def test_another_requests_answer_is_drafted_from_unless_no_answers_are_kept(
    max_cached_requests: int, drafted: list[int]
) -> None:
    cache = suffix_cache(max_tree_depth=24, max_cached_requests=max_cached_requests)
    cache.start_request("first", [1, 2])
    cache.add_active_response("first", [11, 12, 13, 14, 15])
    cache.stop_request("first")
    cache.start_request("second", [3, 4])
    cache.add_active_response("second", [11, 12, 13])
    draft = cache.speculate("second", [3, 4, 11, 12, 13], max_spec_tokens=5)
    assert list(draft.token_ids) == drafted


def test_a_draft_has_at_most_as_many_tokens_as_were_matched_times_the_factor() -> None:
    cache = suffix_cache(max_tree_depth=24, max_cached_requests=0)
    cache.start_request("one", [7, 8, 21, 22, 23, 24, 25, 9, 7, 8])
    # two tokens, 7 and 8, are matched
    for factor, drafted in ((1.0, [21, 22]), (2.0, [21, 22, 23, 24]), (0.5, [21])):
        draft = cache.speculate("one", [9, 7, 8], max_spec_tokens=5, max_spec_factor=factor)
        assert list(draft.token_ids) == drafted


def test_the_lock_file_has_what_arctic_inference_is_built_with() -> None:
    lock = (ROOT / "requirements/cpu.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lock if not line.startswith("#"))
    assert "BUILT := arctic-inference\n" in (ROOT / "Makefile").read_text()
    assert pinned.keys() >= {"arctic-inference", "cmake", "ninja", "setuptools", "torch"}
    assert pinned["nanobind"] == "2.9.2"  # its pyproject.toml asks for exactly this one

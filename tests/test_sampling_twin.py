"""The twin that sampling is checked on, and what drafts on it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specmill import paths
from specmill.files import read_json, tree_digest
from specmill.methods import METHODS, draft_on_twin, speculative_configs
from specmill.params import Method
from specmill.sampling import K
from specmill.sampling_drafts import TwinDrafts
from specmill.sampling_twin import (
    DRAFT_VOCAB_SIZE,
    VOCAB_SIZE,
    likeliest_tokens,
    next_token_probabilities,
    prompts,
    token_biases,
    write_twin,
)
from specmill.section import NoSettings

WINDOW = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sampling") / "twin"
    return folder, write_twin(folder)


def test_the_twin_is_the_same_wherever_it_is_written(
    twin: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, identity = twin
    assert write_twin(tmp_path) == identity
    assert tree_digest(tmp_path) == tree_digest(folder)


def test_probabilities_are_those_of_a_plain_forward_pass(
    twin: tuple[Path, dict[str, Any]],
) -> None:
    answers = np.random.default_rng(0).integers(0, VOCAB_SIZE, (6, 3))
    prompt = prompts()[0]
    found = next_token_probabilities(twin[0], prompt, answers)
    model = AutoModelForCausalLM.from_pretrained(twin[0]).eval()
    for sample, answer in enumerate(answers.tolist()):
        for position in range(3):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *answer[:position]]])).logits[0, -1]
            expected = logits.softmax(-1).numpy()
            np.testing.assert_allclose(found[sample, position], expected, atol=1e-6)


def test_of_answers_of_one_token_the_prompt_alone_decides(
    twin: tuple[Path, dict[str, Any]],
) -> None:
    found = next_token_probabilities(twin[0], prompts()[1], np.array([[3], [5]]))
    assert found.shape == (2, 1, VOCAB_SIZE)
    np.testing.assert_array_equal(found[0], found[1])


def test_distributions_are_neither_flat_nor_one_hot_and_depend_on_the_context(
    twin: tuple[Path, dict[str, Any]],
) -> None:
    answers = np.random.default_rng(0).integers(0, VOCAB_SIZE, (50, 4))
    found = np.concatenate(
        [next_token_probabilities(twin[0], prompt, answers) for prompt in prompts()]
    ).reshape(-1, VOCAB_SIZE)
    entropy = -(found * np.log(found)).sum(axis=1).mean()
    assert 0.3 * np.log(VOCAB_SIZE) < entropy < 0.7 * np.log(VOCAB_SIZE)
    assert 0.2 < np.median(found.max(axis=1)) < 0.7
    assert len(np.unique(found.argmax(axis=1))) > 10


def test_tokens_of_large_bias_are_likely_in_every_context(
    twin: tuple[Path, dict[str, Any]],
) -> None:
    answers = np.random.default_rng(0).integers(0, VOCAB_SIZE, (50, 4))
    found = next_token_probabilities(twin[0], prompts()[0], answers).reshape(-1, VOCAB_SIZE)
    assert np.corrcoef(np.log(found).mean(axis=0), token_biases().numpy())[0, 1] > 0.6
    drafted = found[:, likeliest_tokens(DRAFT_VOCAB_SIZE)].sum(axis=1)
    assert drafted.mean() > 3 * DRAFT_VOCAB_SIZE / VOCAB_SIZE


def entry_of(method: str, head: Path) -> Method:
    settings = WINDOW if method == "ngram" else {}
    section: Any = "bench" if method == "none" else "spec"
    return Method(method=method, section=section, head=str(head), settings=settings)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_is_told_to_draft_on_the_twin(
    method: str, twin: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "VERIFIER", tmp_path / "none")
    folder, identity = twin
    draft = tmp_path / "draft"
    entry = entry_of(method, draft)
    draft_on_twin("row", entry, TwinDrafts(folder, identity, K), draft)
    told = speculative_configs("row", entry, [K], identity)[K]
    if method == "none":
        assert told is None
        return
    assert told is not None
    assert told["num_speculative_tokens"] == K
    assert ("model" in told) == draft.is_dir()
    # a method that serves an artefact and has none for the twin could not be checked
    takes_no_artefact = METHODS[method].Settings is not NoSettings
    assert draft.is_dir() != takes_no_artefact


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash"])
def test_a_random_head_drafts_from_a_vocabulary_of_its_own(
    kind: Any, twin: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    TwinDrafts(*twin, K).head(kind, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    tokens = torch.arange(DRAFT_VOCAB_SIZE) + weights["d2t"]
    assert tokens.tolist() == likeliest_tokens(DRAFT_VOCAB_SIZE)
    assert weights["d2t"].tolist() != [0] * DRAFT_VOCAB_SIZE
    assert read_json(tmp_path / "config.json")["draft_vocab_size"] == DRAFT_VOCAB_SIZE


def test_the_draft_model_often_but_not_always_thinks_as_the_twin_does(
    twin: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    TwinDrafts(*twin, K).noised_copy(tmp_path / "draft")
    answers = np.random.default_rng(0).integers(0, VOCAB_SIZE, (100, 4))
    ours, theirs = (
        next_token_probabilities(model, prompts()[0], answers).argmax(axis=-1)
        for model in (twin[0], tmp_path / "draft")
    )
    assert 0.4 < (ours == theirs).mean() < 0.95

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, PreTrainedTokenizerFast

from specmill import foreign
from specmill.foreign import noised_copy, noised_states
from specmill.params import Runtime
from specmill.params_heads import ForeignHead
from specmill.params_parallel import Parallel
from specmill.shards import StateSpec
from specmill.staging import Work
from specmill.states import stage
from specmill.verifier import identify
from tests.fakes import sample
from tests.staging_fakes import key_of, states_of

VOCAB_SIZE, HIDDEN_SIZE = 300, 100
MATRICES = {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate_proj.weight"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint in two files, as far as its weights are looked at."""
    folder = tmp_path / "model"
    LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=7,
        num_attention_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    ).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")),
        chat_template="{{ messages }}",
    ).save_pretrained(folder)
    drawn = torch.Generator().manual_seed(0)
    same = 3.0 + 0.5 * torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=drawn)
    save_file(
        {
            "model.embed_tokens.weight": same,
            "model.norm.weight": torch.randn(HIDDEN_SIZE, generator=drawn),
        },
        folder / "model-1.safetensors",
    )
    save_file(
        {
            "lm_head.weight": same.clone(),
            "model.layers.0.mlp.gate_proj.weight": torch.randn(400, HIDDEN_SIZE, generator=drawn),
            "model.layers.0.places": torch.arange(8).reshape(2, 4),
        },
        folder / "model-2.safetensors",
    )
    return folder


def weights(folder: Path) -> dict[str, np.ndarray]:
    return {
        name: weight
        for file in folder.glob("*.safetensors")
        for name, weight in load_file(file).items()
    }


@pytest.fixture
def verifier(model: Path) -> dict[str, Any]:
    return identify(model, {"name": "tiny", "origin": "folder"}, 64, "auto")


@pytest.fixture
def copied(
    model: Path, verifier: dict[str, Any], tmp_path: Path
) -> Callable[..., dict[str, np.ndarray]]:
    """Weights of a copy, noised in a folder of its own."""

    def make(noise: float = 0.1, seed: int = 3) -> dict[str, np.ndarray]:
        folder = tmp_path / f"copy-{len(list(tmp_path.iterdir()))}"
        noised_copy(model, folder, noise, seed, verifier)
        return weights(folder)

    return make


def test_every_matrix_and_nothing_else_gets_noise_of_the_share_asked_for(
    model: Path, copied: Callable[..., dict[str, np.ndarray]]
) -> None:
    clean, noised = weights(model), copied(noise=0.1)
    assert noised.keys() == clean.keys()
    for name in clean.keys() - MATRICES:
        assert np.array_equal(noised[name], clean[name]), name
    for name in MATRICES:
        noise = noised[name] - clean[name]
        # 30,000 values or more: their deviation is known to 1 in 250, their mean to 1 in 170 of it
        assert noise.std() / clean[name].std() == pytest.approx(0.1, rel=0.03), name
        assert abs(noise.mean()) < 0.03 * noise.std(), name


def test_no_two_matrices_get_the_same_noise(
    copied: Callable[..., dict[str, np.ndarray]],
) -> None:
    noised = copied()
    assert not np.allclose(noised["model.embed_tokens.weight"], noised["lm_head.weight"])


def test_the_same_seed_gives_the_same_copy_and_another_seed_another(
    copied: Callable[..., dict[str, np.ndarray]],
) -> None:
    first, again, other = copied(seed=3), copied(seed=3), copied(seed=4)
    for name in first:
        assert np.array_equal(first[name], again[name])
    for name in MATRICES:
        assert not np.allclose(first[name], other[name])


def test_the_copy_is_another_verifier_of_the_same_build(
    model: Path, verifier: dict[str, Any], tmp_path: Path
) -> None:
    found = noised_copy(model, tmp_path / "copy", 0.05, 3, verifier)
    assert found["name"] == "tiny + noise 0.05"
    assert found["fingerprint"] != verifier["fingerprint"]
    assert verifier["fingerprint"] in found["origin"]
    same = verifier.keys() - {"name", "fingerprint", "origin"}
    assert {name: found[name] for name in same} == {name: verifier[name] for name in same}


def runtime() -> Runtime:
    return Runtime.model_construct(extract_endpoints=["http://127.0.0.1:1"], extract_window=64)


def test_states_are_those_of_the_copy_for_the_same_tokens_and_no_server_is_asked(
    model: Path, verifier: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[Path, list[str]]] = []

    def engines(
        spec: StateSpec, model: Path, staging: Path, _: int, _parallel: Parallel, used: Runtime
    ) -> Callable[[Work], None]:
        def run(work: Work) -> None:
            started.append((model, used.extract_endpoints))
            while one := work.take("here"):
                path = staging / f"{one.sample_key}.safetensors"
                ids = one.input_ids.tolist()
                stage(path, spec, torch.from_numpy(one.input_ids), states_of(ids))
                work.staged("here", one, str(path))

            while not work.is_done:
                work.wait()

        return run

    monkeypatch.setattr(foreign, "engines", engines)
    spec = StateSpec(verifier["fingerprint"], (2, 7), hidden_size=3, dtype="bfloat16")
    samples = [sample([1], [2, 3]), sample([4], [5])]
    chosen = ForeignHead(noise=0.1, max_samples=None, epochs=1, seed=3)

    def run(name: str) -> tuple[dict[str, Any], Any]:
        return noised_states(
            model,
            verifier,
            chosen,
            samples,
            spec,
            tmp_path / name,
            store=tmp_path / "store",
            staging=tmp_path / "staging",
            parallel=Parallel(),
            runtime=runtime(),
        )

    copy, view = run("scratch")
    assert started == [(tmp_path / "scratch/model", [])]
    assert view.spec.verifier == copy["fingerprint"] != verifier["fingerprint"]
    assert view.spec.layer_ids == (2, 7)
    assert list(view.places) == [key_of([1, 2, 3]), key_of([4, 5])]
    ids, states, _ = view.load(key_of([4, 5]))
    assert ids.tolist() == [4, 5]
    assert torch.equal(states, states_of([4, 5]))
    slice_of_copy = weights(tmp_path / "scratch/verifier_head")
    noised = weights(tmp_path / "scratch/model")
    assert np.array_equal(slice_of_copy["lm_head.weight"], noised["lm_head.weight"])

    run("after an interruption")
    assert len(started) == 1  # the store has them

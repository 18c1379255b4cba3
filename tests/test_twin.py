from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from specmill.files import file_digest
from specmill.preflight_checks import own_states
from specmill.shrunk import NUM_SPECIAL, VOCAB_SIZE, shrunk_config
from specmill.twin import (
    NUM_SAMPLES,
    SAMPLE_LEN,
    TOKEN,
    draw_samples,
    is_wrapped,
    write_decoder,
    write_twin,
)
from specmill.verifier import identify, write_head_slice
from specmill.vocab import count_trained_tokens
from tests.verifiers import CLASSES, WRAPPERS


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen3",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("qwen3_moe", "deepseek")),
    ],
)
def test_it_says_its_token_whatever_comes_before_and_no_layer_leaves_states_alone(
    tmp_path: Path, name: str
) -> None:
    config, _ = shrunk_config(CLASSES[name], "float32")
    write_twin(config, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = [sample.input_ids.tolist() for sample in draw_samples()]
    assert (model(torch.tensor(ids)).logits.argmax(-1) == TOKEN).all()
    states = own_states(tmp_path, ids[0])  # [num_layers + 1, num_tokens, hidden_size]
    assert len(states) == 8
    changes = (states[1:] - states[:-1]).norm(dim=(1, 2)) / states[:-1].norm(dim=(1, 2))
    assert changes.min() > 0.3
    assert (states[..., 0] > 1).all()  # the channel that lm_head hears


def test_it_has_the_same_bytes_at_every_call(tmp_path: Path) -> None:
    config, _ = shrunk_config(CLASSES["llama"], "float32")
    for name in ("one", "two"):
        write_twin(config, tmp_path / name)
    digests = {file_digest(tmp_path / name / "model.safetensors") for name in ("one", "two")}
    assert len(digests) == 1


def test_a_class_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    config, _ = shrunk_config(CLASSES["llama"] | {"model_type": "gnarl"}, "float32")
    with pytest.raises(ValueError, match="gnarl"):
        write_twin(config, tmp_path)


def test_samples_have_its_token_in_every_answer_and_none_that_is_special() -> None:
    samples = draw_samples()
    assert len({sample.sample_key for sample in samples}) == NUM_SAMPLES
    for sample in samples:
        assert len(sample.input_ids) == SAMPLE_LEN
        assert TOKEN in sample.answer_token_ids
        assert NUM_SPECIAL <= sample.input_ids.min() <= sample.input_ids.max() < VOCAB_SIZE
    counts = count_trained_tokens(samples)
    assert counts[TOKEN] == max(counts.values())


@pytest.mark.parametrize(
    ("name", "decoder", "lm_head"),
    [
        pytest.param("kimi", "language_model.model.", "language_model.lm_head.weight",
                     marks=pytest.mark.slow),
        ("qwen3_vl", "model.language_model.", None),  # tied
        ("qwen2_5_vl", "model.", None),
    ],
)  # fmt: skip
def test_a_wrapper_is_nested_as_its_class_nests_it_and_its_slice_is_the_decoders(
    tmp_path: Path, name: str, decoder: str, lm_head: str | None
) -> None:
    write_twin(shrunk_config(WRAPPERS[name], "float32")[0], tmp_path / "twin")
    assert is_wrapped(tmp_path / "twin")
    weights = load_file(tmp_path / "twin/model.safetensors")
    assert f"{decoder}layers.6.self_attn.o_proj.weight" in weights
    identity = identify(tmp_path / "twin", {"name": name}, 64, "float32")
    assert (identity["num_layers"], identity["vocab_size"]) == (7, VOCAB_SIZE)
    write_head_slice(tmp_path / "twin", tmp_path / "slice")
    found = load_file(tmp_path / "slice/model.safetensors")
    assert torch.equal(found["model.norm.weight"], weights[f"{decoder}norm.weight"])
    own = lm_head or f"{decoder}embed_tokens.weight"
    assert torch.equal(found["lm_head.weight"], weights[own])
    ids = draw_samples()[0].input_ids.tolist()
    assert len(own_states(tmp_path / "twin", ids)) == 8
    # only Kimi-K2.5's decoder is a class of its own
    assert write_decoder(tmp_path / "twin", tmp_path / "decoder") == (name == "kimi")
    # what training reads of the slice
    config = AutoConfig.from_pretrained(tmp_path / "slice")
    assert config.get_text_config().num_hidden_layers == 7

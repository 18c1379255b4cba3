import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from speculators.train.cli import create_transformer_layer_config
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralForCausalLM

from specmill.cut import INDEX
from specmill.experts import experts_of
from specmill.params_experts import Experts
from specmill.relaid import obtain_relaid, relaid_config, relay
from specmill.verifier import identify, write_head_slice
from tests.llamas import NUM_LAYERS, VOCAB_SIZE, write_llama

FOUR = Experts(num=4, top_k=2, noise=0.0, seed=17)
IDS = torch.arange(2, 42).reshape(1, 40) % VOCAB_SIZE


def experts(**changes: Any) -> Experts:
    return FOUR.model_copy(update=changes)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: weight
        for file in folder.glob("*.safetensors")
        for name, weight in load_file(file).items()
    }


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "tiny")


@pytest.fixture
def relaid(dense: Path, tmp_path: Path) -> Callable[..., Path]:
    """The dense model re-laid, in a folder of its own."""

    def make(**changes: Any) -> Path:
        folder = tmp_path / f"relaid-{len(list(tmp_path.iterdir()))}"
        relay(dense, folder, experts(**changes))
        return folder

    return make


@pytest.mark.parametrize("tied", [True, False])
def test_equal_experts_give_the_dense_models_logits(tmp_path: Path, tied: bool) -> None:
    dense = write_llama(tmp_path / "dense", tie_word_embeddings=tied)
    relay(dense, tmp_path / "moe", FOUR)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    assert isinstance(model, MixtralForCausalLM)
    expected, found = logits(dense), logits(tmp_path / "moe")
    assert expected.std() > 0.5
    assert (found - expected).abs().max() < 1e-4


def test_with_noise_it_matters_which_experts_are_taken(
    dense: Path, relaid: Callable[..., Path]
) -> None:
    noised, other_routers = relaid(noise=0.3), relaid(noise=0.3, top_k=1)
    assert (logits(noised) - logits(dense)).abs().max() > 0.01
    assert (logits(noised) - logits(other_routers)).abs().max() > 0.01


def test_what_is_no_mlp_is_copied_and_every_mlp_becomes_experts_with_a_router(
    dense: Path, relaid: Callable[..., Path]
) -> None:
    before, after = weights(dense), weights(relaid())
    mlps = {name for name in before if ".mlp." in name}
    assert len(mlps) == 3 * NUM_LAYERS
    for name in before.keys() - mlps:
        assert torch.equal(after[name], before[name]), name
    places = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    made = {
        f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight": (
            f"model.layers.{layer}.mlp.{mlp}.weight"
        )
        for layer in range(NUM_LAYERS)
        for expert in range(4)
        for part, mlp in places.items()
    }
    for name, source in made.items():
        assert torch.equal(after[name], before[source]), name
    gates = {f"model.layers.{layer}.block_sparse_moe.gate.weight" for layer in range(NUM_LAYERS)}
    assert after.keys() == (before.keys() - mlps) | made.keys() | gates
    assert {tuple(after[name].shape) for name in gates} == {(4, 64)}


def test_every_expert_has_noise_of_its_own_of_the_share_asked_for(
    dense: Path, relaid: Callable[..., Path]
) -> None:
    clean = weights(dense)["model.layers.1.mlp.up_proj.weight"]
    after = weights(relaid(noise=0.03))
    name = "model.layers.1.block_sparse_moe.experts.{}.w3.weight"
    noise = torch.stack([after[name.format(expert)] - clean for expert in range(4)])
    # 6,144 values each: a deviation is known to 1 in 111, a correlation to 1 in 78
    for one in noise:
        assert one.std() / clean.std() == pytest.approx(0.03, rel=0.05)
    assert (torch.corrcoef(noise.flatten(1)) - torch.eye(4)).abs().max() < 0.06


def test_a_normed_states_router_logits_spread_by_two(tmp_path: Path) -> None:
    dense = write_llama(tmp_path / "dense", hidden_size=512, head_dim=256, num_hidden_layers=1)
    relay(dense, tmp_path / "moe", experts(num=64))
    after = weights(tmp_path / "moe")
    states = torch.randn(1000, 512, generator=torch.Generator().manual_seed(1))
    states /= states.pow(2).mean(dim=1, keepdim=True).sqrt()
    states *= after["model.layers.0.post_attention_layernorm.weight"]
    found = states @ after["model.layers.0.block_sparse_moe.gate.weight"].T
    assert found.std() == pytest.approx(2.0, rel=0.05)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(
    relaid: Callable[..., Path],
) -> None:
    first, again, other = relaid(noise=0.1), relaid(noise=0.1), relaid(noise=0.1, seed=18)
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (again / name).read_bytes(), name
    before, after = weights(first), weights(other)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".block_sparse_moe." in name}


def test_the_index_names_the_file_of_every_tensor(relaid: Callable[..., Path]) -> None:
    folder = relaid()
    index = json.loads((folder / INDEX).read_text())
    inside = {name: file.name for file in folder.glob("*.safetensors") for name in load_file(file)}
    assert index["weight_map"] == inside
    assert len(set(inside.values())) > 3
    size = sum(weight.nbytes for weight in weights(folder).values())
    assert index["metadata"]["total_size"] == size


def test_what_a_llamas_config_leaves_out_is_its_own_default_and_not_mixtrals(
    tmp_path: Path,
) -> None:
    old = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 10,
        "rope_theta": 12345.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(old))
    config = relaid_config(tmp_path, FOUR)
    assert config.num_key_value_heads == 4  # Mixtral's own is 8
    assert config.max_position_embeddings == 2048  # 131072
    assert config.rms_norm_eps == 1e-6  # 1e-5
    assert config.intermediate_size == 11008  # 14336
    assert config.head_dim == 16
    assert config.rope_parameters["rope_theta"] == 12345.0
    assert (config.num_local_experts, config.num_experts_per_tok) == (4, 2)
    assert config.architectures == ["MixtralForCausalLM"]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"model_type": "qwen2"}, "it is a qwen2"),
        ({"attention_bias": True}, "its projections have biases"),
        ({"mlp_bias": True}, "its projections have biases"),
        ({"hidden_act": "gelu"}, "its activation is gelu"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "its weights are quantised"),
    ],
)
def test_what_a_mixtral_cannot_hold_is_refused_before_anything_is_written(
    dense: Path, tmp_path: Path, changes: dict[str, Any], fault: str
) -> None:
    config = json.loads((dense / "config.json").read_text()) | changes
    (dense / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"verifier\.source {fault}; set verifier\.experts: null"):
        relay(dense, tmp_path / "moe", FOUR)
    assert not (tmp_path / "moe").exists()


def test_its_name_says_what_it_is_and_its_identity_how_many_experts_it_has(
    dense: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "verifier"
    described = obtain_relaid(f"folder:{dense}", None, "auto", experts(noise=0.03), folder)
    assert described == {
        "name": "tiny re-laid as 4 experts, top 2, noise 0.03",
        "origin": "folder; MLPs copied to 4 experts, top 2, noise 0.03, seed 17",
    }
    identity = identify(folder, described, 64, "auto")
    plain = identify(dense, {"name": "tiny", "origin": "folder"}, 64, "auto")
    assert identity["experts"] == {"num_experts": 4, "top_k": 2}
    assert "experts" not in plain
    assert identity["architecture"] == "MixtralForCausalLM"
    assert identity["fingerprint"] != plain["fingerprint"]
    same = plain.keys() - {"name", "origin", "fingerprint", "architecture"}
    assert {name: identity[name] for name in same} == {name: plain[name] for name in same}


def test_experts_are_found_under_the_names_that_models_give_them() -> None:
    class Config:
        def __init__(self, **keys: Any):
            self.__dict__ |= keys

    kimi = Config(n_routed_experts=384, num_experts_per_tok=8, n_shared_experts=1)
    qwen = Config(num_experts=128, num_experts_per_tok=8)
    assert experts_of(kimi) == {"num_experts": 384, "top_k": 8}
    assert experts_of(qwen) == {"num_experts": 128, "top_k": 8}
    assert experts_of(LlamaConfig()) is None
    assert experts_of(Config(num_experts=None, num_experts_per_tok=8)) is None
    assert experts_of(Config(n_routed_experts=8)) is None  # what it chooses is not known


def test_a_head_can_be_shaped_after_what_training_gets_of_it(
    relaid: Callable[..., Path], tmp_path: Path
) -> None:
    folder = relaid()
    write_head_slice(folder, tmp_path / "slice")
    found, whole = load_file(tmp_path / "slice" / "model.safetensors"), weights(folder)
    assert torch.equal(found["model.norm.weight"], whole["model.norm.weight"])
    assert torch.equal(found["lm_head.weight"], whole["model.embed_tokens.weight"])  # tied
    layer = create_transformer_layer_config(
        verifier_name_or_path=str(tmp_path / "slice"),
        num_layers=1,
        draft_arch="llama",
        hidden_act=None,
        sliding_window=64,
        full_attention_indices=[],
    )
    assert (layer.hidden_size, layer.intermediate_size, layer.head_dim) == (64, 96, 32)
    assert (layer.num_attention_heads, layer.num_key_value_heads) == (2, 1)
    assert layer.rope_parameters["rope_theta"] == 5000.0


def test_more_experts_for_a_token_than_there_are_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"top_k is 5, but there are 4 experts \(num\)"):
        Experts(num=4, top_k=5, noise=0.0, seed=1)

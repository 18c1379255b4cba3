"""What a checkpoint's names and config say of its text decoder."""

from typing import Any

import pytest

from specmill.text_decoder import decoder_prefix, head_tensors, is_tied, text_config, with_text
from tests.configs import KIMI_K25

LAYER = "layers.0.mlp.down_proj.weight"


def names(decoder: str, lm_head: str, *others: str) -> dict[str, str]:
    parts = [f"{decoder}{part}" for part in ("embed_tokens.weight", "norm.weight", LAYER)]
    return dict.fromkeys([*parts, lm_head, *others], "BF16")


@pytest.mark.parametrize(
    ("decoder", "lm_head"),
    [
        ("model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("thinker.model.", "thinker.lm_head.weight"),
        ("", "lm_head.weight"),
    ],
)
def test_lm_head_lies_beside_the_decoder_or_further_out(decoder: str, lm_head: str) -> None:
    tower = "visual.layers.0.norm.weight", "talker.lm_head.weight"
    assert head_tensors(names(decoder, lm_head, *tower)) == {
        "model.embed_tokens.weight": f"{decoder}embed_tokens.weight",
        "model.norm.weight": f"{decoder}norm.weight",
        "lm_head.weight": lm_head,
    }


def test_an_embedding_inside_a_layer_is_of_multi_token_prediction() -> None:
    # DeepSeek-V3's 61st layer brings all three again
    extra = [f"model.layers.61.{part}.weight" for part in ("embed_tokens", "shared_head.norm")]
    assert decoder_prefix(names("model.", "lm_head.weight", *extra)) == "model."


def test_an_embedding_without_layers_beside_it_is_no_decoder() -> None:
    found = decoder_prefix(
        names("model.language_model.", "lm_head.weight", "a.embed_tokens.weight")
    )
    assert found == "model.language_model."


def test_two_decoders_are_refused_by_their_names() -> None:
    both = names("thinker.model.", "thinker.lm_head.weight") | names("talker.model.", "x")
    with pytest.raises(ValueError, match=r"beside talker\.model\..* and thinker\.model\."):
        decoder_prefix(both)


def test_a_checkpoint_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no embed_tokens\.weight"):
        head_tensors({"transformer.wte.weight": "F32"})


@pytest.mark.parametrize(
    ("module", "tensors"),
    [
        ("lm_head", {"lm_head.weight_packed": "I32", "lm_head.weight_scale": "BF16"}),
        ("lm_head", {"lm_head.qweight": "I32", "lm_head.qzeros": "I32", "lm_head.scales": "F16"}),
        ("lm_head", {"lm_head.weight": "F8_E4M3", "lm_head.weight_scale": "BF16"}),
        ("model.embed_tokens", {"model.embed_tokens.weight_packed": "I32"}),
        ("model.embed_tokens", {"model.embed_tokens.weight": "U8"}),  # bitsandbytes
    ],
)
def test_a_quantised_head_tensor_is_refused_with_the_way_out(
    module: str, tensors: dict[str, str]
) -> None:
    whole = names("model.", "lm_head.weight")
    del whole[f"{module}.weight"]
    with pytest.raises(ValueError, match=rf"^{module}\.\w+ is quantised .* left {module} out"):
        head_tensors(whole | tensors)


def test_quantised_layers_do_not_matter() -> None:
    whole = names("model.", "lm_head.weight")
    del whole[f"model.{LAYER}"]
    whole |= {"model.layers.0.mlp.down_proj.weight_packed": "I32"}
    assert len(head_tensors(whole)) == 3


@pytest.mark.parametrize(
    "wrapped",
    [
        {"text_config": {"num_hidden_layers": 3}},
        {"llm_config": {"num_hidden_layers": 3}},
        {"thinker_config": {"text_config": {"num_hidden_layers": 3}, "audio_config": {}}},
        {"num_hidden_layers": 3, "text_config": {"num_hidden_layers": 9}},
        {"num_hidden_layers": 3},
    ],
)
def test_the_text_part_is_found_and_put_back_whatever_wraps_it(wrapped: dict[str, Any]) -> None:
    text = text_config(wrapped)
    assert text["num_hidden_layers"] == 3
    assert with_text(wrapped, text) == wrapped
    assert text_config(with_text(wrapped, text | {"num_hidden_layers": 2})) == text | {
        "num_hidden_layers": 2
    }


def test_the_outer_dtype_and_quantisation_hold_where_the_text_part_says_nothing() -> None:
    outer = {"dtype": "bfloat16", "quantization_config": {"quant_method": "awq"}}
    assert text_config({**outer, "text_config": {"num_hidden_layers": 3}}) == {
        **outer, "num_hidden_layers": 3,
    }  # fmt: skip
    own = text_config(KIMI_K25)["quantization_config"]
    assert own == KIMI_K25["text_config"]["quantization_config"]


def test_the_outermost_config_says_whether_the_embedding_is_the_lm_head_too() -> None:
    text = {"num_hidden_layers": 3, "tie_word_embeddings": True}
    assert is_tied({"text_config": text}, False)
    assert not is_tied({"text_config": text, "tie_word_embeddings": False}, True)
    assert is_tied({"num_hidden_layers": 3}, True)

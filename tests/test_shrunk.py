from typing import Any

import pytest

from specmill.shrunk import VOCAB_SIZE, shrunk_config
from specmill.text_decoder import text_config
from tests.configs import GPT_OSS_20B
from tests.verifiers import CLASSES, KIMI


def small(config: dict[str, Any]) -> dict[str, Any]:
    return text_config(shrunk_config(config, "float32")[0])


def test_grouped_attention_keeps_its_head_size_and_its_groups() -> None:
    llama = small(CLASSES["llama"])
    # 4096 / 32 heads = 128 a head; 4 query heads to a KV head before, 2 now
    assert (llama["num_attention_heads"], llama["num_key_value_heads"]) == (4, 2)
    assert llama["hidden_size"] == 4 * 128
    assert (llama["num_hidden_layers"], llama["vocab_size"]) == (7, VOCAB_SIZE)
    assert llama["rope_scaling"] == CLASSES["llama"]["rope_scaling"]
    qwen = small(CLASSES["qwen3"])
    assert (qwen["head_dim"], qwen["hidden_size"]) == (128, 256)
    assert qwen["tie_word_embeddings"]


def test_one_kv_head_for_all_and_one_for_each_stay_so() -> None:
    for kv_heads, expected in ((1, (2, 1)), (32, (2, 2))):
        text = small(CLASSES["llama"] | {"num_key_value_heads": kv_heads})
        assert (text["num_attention_heads"], text["num_key_value_heads"]) == expected


def test_latent_attention_keeps_its_ranks_which_kernels_are_made_for() -> None:
    deepseek, old = small(CLASSES["deepseek"]), CLASSES["deepseek"]
    for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"):
        assert deepseek[key] == old[key]
    # two groups of four experts, two of one group chosen; the first layer dense
    assert [deepseek[key] for key in ("n_routed_experts", "n_group", "topk_group")] == [8, 2, 1]
    assert (deepseek["num_experts_per_tok"], deepseek["first_k_dense_replace"]) == (2, 1)
    assert deepseek["num_nextn_predict_layers"] == 0


def test_a_mixture_stays_one_with_few_experts() -> None:
    for name, key in (("qwen3_moe", "num_experts"), ("mixtral", "num_local_experts")):
        text = small(CLASSES[name])
        assert (text[key], text["num_experts_per_tok"]) == (8, 2)
    assert small(CLASSES["qwen3_moe"] | {"mlp_only_layers": [0, 9]})["mlp_only_layers"] == [0]


def test_kinds_of_layers_stay_in_their_order() -> None:
    kinds = small(GPT_OSS_20B)["layer_types"]
    assert kinds == ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"]


def test_a_wrapper_keeps_its_nesting_and_hands_over_what_is_as_wide_as_the_decoder() -> None:
    config, left_out = shrunk_config(KIMI, "float32")
    text = config["text_config"]
    assert config["vision_config"] == {
        "vt_num_hidden_layers": 2, "num_hidden_layers": 2, "hidden_size": 1152,
        "text_hidden_size": text["hidden_size"],
    }  # fmt: skip
    assert (config["model_type"], text["model_type"]) == ("kimi_k25", "kimi_k2")
    assert "quantization_config" not in text
    assert "auto_map" not in config
    assert [word.split(":")[0] for word in left_out] == [
        "quantisation",
        "the checkpoint's own code",
    ]


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "fp8"])
def test_quantisation_is_left_out_and_said(method: str) -> None:
    quantised = CLASSES["llama"] | {"quantization_config": {"quant_method": method}}
    config, left_out = shrunk_config(quantised, "float32")
    assert "quantization_config" not in config
    assert left_out == ["quantisation: its kernels are not looked at"]
    assert shrunk_config(CLASSES["llama"], "float32")[1] == []


def test_special_tokens_are_renamed_into_the_vocabulary_equal_ones_alike() -> None:
    config = small(
        {
            **CLASSES["llama"],
            "bos_token_id": 9000,
            "eos_token_id": [9000, 70000],
            "pad_token_id": None,
        }
    )
    assert config["eos_token_id"] == [config["bos_token_id"], config["eos_token_id"][1]]
    assert len({*config["eos_token_id"]}) == 2
    assert max(config["eos_token_id"]) < 64
    assert config["pad_token_id"] is None


def test_a_config_that_does_not_say_how_deep_it_is_is_refused() -> None:
    with pytest.raises(ValueError, match="num_hidden_layers is None"):
        shrunk_config({"model_type": "gpt2", "n_layer": 12}, "float32")

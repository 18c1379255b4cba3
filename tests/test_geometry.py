from typing import Any

import pytest

from specmill.geometry import Geometry, eagle3_weights, read_geometry
from specmill.weight_bits import bits_by_component
from tests.configs import (
    DEEPSEEK_V3,
    GPT_OSS_20B,
    KIMI_K25,
    LLAMA_8B,
    MIXTRAL,
    QWEN_30B,
    Config,
)


def all_weights(geometry: Geometry, config: Config) -> int:
    """With the embedding, which no step reads whole."""
    routed = geometry.experts
    experts = routed.num_layers * routed.num * routed.weights_each if routed else 0
    return sum(geometry.weights.values()) + experts + config["vocab_size"] * geometry.hidden_size


@pytest.mark.parametrize(
    ("config", "parameters", "norms_and_biases"),
    [
        # norms: two a layer and the last; Qwen3 has two more of head_dim, DeepSeek two of its ranks
        (LLAMA_8B, 8_030_261_248, 65 * 4096),
        (MIXTRAL, 46_702_792_704, 65 * 4096),
        (QWEN_30B, 30_532_122_624, 48 * (2 * 2048 + 2 * 128) + 2048),
        (
            DEEPSEEK_V3,
            671_026_419_200,
            61 * (2 * 7168 + 1536 + 512) + 7168 + 58 * 256,  # and a bias for each expert
        ),
        (
            GPT_OSS_20B,
            20_914_757_184,
            # experts' biases, attention's, sinks, the routers', norms
            24 * 32 * 3 * 2880 + 24 * (80 * 64 + 2880) + 24 * 64 + 24 * 32 + 49 * 2880,
        ),
    ],
)
def test_what_is_counted_is_the_published_number_of_parameters_less_norms_and_biases(
    config: Config, parameters: int, norms_and_biases: int
) -> None:
    assert all_weights(read_geometry(config), config) == parameters - norms_and_biases


def test_active_parameters_are_those_of_the_models_name() -> None:
    # 905,969,664 attention + 12,582,912 router + 311,164,928 lm_head + 48 * 8 * 4,718,592 experts
    assert read_geometry(QWEN_30B).weights_per_token == 3_041_656_832


def test_kv_cache_is_two_vectors_of_each_kv_head_or_one_latent_of_all() -> None:
    llama, kimi = read_geometry(LLAMA_8B), read_geometry(KIMI_K25)
    assert (llama.kv_values, llama.kv_heads) == (2 * 8 * 128, 8)
    assert (kimi.kv_values, kimi.kv_heads) == (512 + 64, 1)


def test_attention_multiplies_a_query_with_each_key_and_each_value() -> None:
    # a query and a key of 128 numbers: 256 FLOP; the same for the value; 32 heads
    assert read_geometry(LLAMA_8B).attention_flop == 32 * (256 + 256)
    # in the latent space a key has 576 numbers and a value 512; 64 heads
    assert read_geometry(KIMI_K25).attention_flop == 64 * (2 * 576 + 2 * 512)


def test_layers_with_a_window_look_no_further_back() -> None:
    geometry = read_geometry(GPT_OSS_20B)
    assert geometry.context_layers(100) == 24 * 100
    assert geometry.context_layers(1000) == 12 * 128 + 12 * 1000


def test_a_window_that_is_not_used_is_none() -> None:
    assert read_geometry(QWEN_30B).context_layers(10_000) == 48 * 10_000
    used = QWEN_30B | {"use_sliding_window": True, "max_window_layers": 40}
    assert read_geometry(used).context_layers(10_000) == 40 * 10_000 + 8 * 4096


def test_dense_layers_among_moe_layers_are_counted_as_dense() -> None:
    config = QWEN_30B | {"mlp_only_layers": [0, 5], "decoder_sparse_step": 2}
    geometry = read_geometry(config)
    # of 48 layers every second one is an MoE layer, 1, 3, 5 ... and 5 is taken out
    assert geometry.experts is not None
    assert geometry.experts.num_layers == 23
    assert geometry.weights["dense"] == 25 * 3 * 2048 * 6144


def test_shared_experts_are_counted_by_their_common_width() -> None:
    config = QWEN_30B | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 5632}
    assert read_geometry(config).weights["shared"] == 48 * 3 * 2048 * 5632


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_experts": None}, "none of n_routed_experts, num_experts"),
        ({"layer_types": ["linear_attention"] * 48}, "layer_types has linear_attention"),
    ],
)
def test_a_config_that_cannot_be_counted_is_refused_by_the_key(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_geometry(QWEN_30B | change)


def test_an_eagle3_head_of_llama_has_the_weights_of_the_published_one() -> None:
    # fc 3 * 4096^2, q 8192 * 4096, k and v 8192 * 1024 each, o 4096^2, mlp 3 * 4096 * 14336 and
    # lm_head 4096 * 32000: yuhuili/EAGLE3-LLaMA3.1-Instruct-8B
    expected = 50_331_648 + 33_554_432 + 2 * 8_388_608 + 16_777_216 + 176_160_768 + 131_072_000
    assert eagle3_weights(LLAMA_8B, 32_000) == expected


def test_only_the_experts_of_kimi_are_quantised_and_their_scales_count() -> None:
    bits = bits_by_component(KIMI_K25)
    assert bits.pop("routed") == 4.5  # 4 + 16 / 32
    assert set(bits.values()) == {16.0}


def test_block_fp8_leaves_router_and_lm_head() -> None:
    bits = bits_by_component(DEEPSEEK_V3)
    assert bits == {"attention": 8, "dense": 8, "shared": 8, "routed": 8, "router": 16,
                    "lm_head": 16}  # fmt: skip


def test_globs_in_an_ignore_list_are_understood() -> None:
    bits = bits_by_component(GPT_OSS_20B)
    assert (bits["routed"], bits["attention"]) == (4.25, 16)  # 4 + 8 / 32


@pytest.mark.parametrize(
    ("quantised", "bits"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "awq", "bits": 8, "group_size": -1}, 8),
        (
            {
                "quant_method": "modelopt",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}
                },
            },
            4.5,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            8,
        ),
    ],
)
def test_a_weight_has_the_bits_of_its_form_and_of_its_scales(
    quantised: dict[str, Any], bits: float
) -> None:
    found = bits_by_component(LLAMA_8B | {"quantization_config": quantised})
    assert (found["dense"], found["lm_head"]) == (bits, 16)


def test_modules_that_are_named_stay_as_they_are() -> None:
    quantised = {
        "quant_method": "fp8",
        "ignored_layers": ["self_attn.o_proj", "model.layers.1.mlp.gate"],
    }
    bits = bits_by_component(QWEN_30B | {"quantization_config": quantised})
    assert (bits["attention"], bits["routed"]) == (16, 8)


def test_bits_that_are_given_replace_those_of_the_layers_alone() -> None:
    bits = bits_by_component(QWEN_30B, 4.5)
    layers = (bits["routed"], bits["attention"])
    assert (*layers, bits["lm_head"], bits["router"]) == (4.5, 4.5, 16, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": None}, "dtype is None"),
        ({"quantization_config": {"quant_method": "quip"}}, "'quip' says nothing.*--bits"),
    ],
)
def test_bits_that_the_config_does_not_say_are_asked_for(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        bits_by_component(LLAMA_8B | change)


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_a_wrapped_decoder_is_counted_whatever_its_part_of_the_config_is_called(key: str) -> None:
    wrapped = {"model_type": "wrapper", "vision_config": {"depth": 9}, key: LLAMA_8B}
    assert read_geometry(wrapped) == read_geometry(LLAMA_8B)
    assert eagle3_weights(wrapped, 32_000) == eagle3_weights(LLAMA_8B, 32_000)

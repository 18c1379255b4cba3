"""config.json of classes of verifiers as the Hub has them, as far as a twin is made of it."""

from tests.configs import DEEPSEEK_V3, KIMI_K25, LLAMA_8B, MIXTRAL, QWEN_30B, Config

_QWEN3_1B7: Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}

_ROUTING: Config = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}

CLASSES: dict[str, Config] = {
    "llama": LLAMA_8B
    | {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 131072,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen3": _QWEN3_1B7,
    "qwen3_moe": QWEN_30B
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "max_position_embeddings": 40960,
        "norm_topk_prob": True,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    "mixtral": MIXTRAL
    | {
        "architectures": ["MixtralForCausalLM"],
        "max_position_embeddings": 32768,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "deepseek": DEEPSEEK_V3
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "max_position_embeddings": 4096,
        "n_group": 8,
        "topk_group": 4,
        **_ROUTING,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
}

KIMI: Config = KIMI_K25 | {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "tie_word_embeddings": False,
    "text_config": KIMI_K25["text_config"] | {"n_group": 1, "topk_group": 1, **_ROUTING},
    "vision_config": {"vt_num_hidden_layers": 27, "text_hidden_size": 7168, "hidden_size": 1152},
    "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
    "media_placeholder_token_id": 163605,
    "eos_token_id": 163585,
    "pad_token_id": 163839,
}

QWEN3_VL: Config = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "tie_word_embeddings": True,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "text_config": {
        **{k: v for k, v in _QWEN3_1B7.items() if k not in ("architectures", "sliding_window")},
        "model_type": "qwen3_vl_text",
        "tie_word_embeddings": True,
        "rope_theta": 5000000,
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
            "rope_type": "default",
        },
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
"""Qwen3-VL-2B."""

QWEN25_VL: Config = {
    **{k: v for k, v in _QWEN3_1B7.items() if k not in ("head_dim", "vocab_size")},
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "vocab_size": 151936,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_start_token_id": 151652,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}
"""Qwen2.5-VL-3B, whose config is flat."""

WRAPPERS: dict[str, Config] = {"kimi": KIMI, "qwen3_vl": QWEN3_VL, "qwen2_5_vl": QWEN25_VL}

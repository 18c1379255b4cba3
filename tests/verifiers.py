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
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
}

KIMI: Config = KIMI_K25 | {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "tie_word_embeddings": False,
    "text_config": KIMI_K25["text_config"] | {"n_group": 1, "topk_group": 1},
    "vision_config": {"vt_num_hidden_layers": 27, "text_hidden_size": 7168, "hidden_size": 1152},
    "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
    "media_placeholder_token_id": 163605,
    "eos_token_id": 163585,
    "pad_token_id": 163839,
}

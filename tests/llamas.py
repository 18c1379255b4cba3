"""Tiny random Llamas, as checkpoints with a tokenizer: what several test files re-lay or serve."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE, NUM_LAYERS = 64, 3


def write_llama(folder: Path, **changes: Any) -> Path:
    """Write a Llama whose weights are large enough for every part of it to show in its logits."""
    values = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "float32",
    }
    config = LlamaConfig(**(values | changes))
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(std=1.0 if "embed" in name else weight.shape[1] ** -0.5)
    model.save_pretrained(folder, max_shard_size="40KB")
    tokens = {f"t{number}": number for number in range(VOCAB_SIZE)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(tokens, unk_token="t0")),
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    ).save_pretrained(folder)
    return folder

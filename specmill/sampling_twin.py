"""A small random model to sample from: what it must say is known exactly, token by token.

Its 64 tokens make every probability large enough to be counted. It is a Llama like any other, so
that the engine serves it by the code that serves a verifier. Its weights are drawn so that a
distribution is neither flat nor one-hot (the likeliest token has about 0.4, entropy is about half
of its most) and depends on the context, above all on the last token:

    logit(v) = bias(v) + w(v) h      bias and w from a normal; h the last layer's normed output

Llama's lm_head has no bias. The first channel of the residual stream makes one: every embedding
has the same value there, and no layer writes to it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from specmill.files import digest, file_digest

VOCAB_SIZE = 64
DRAFT_VOCAB_SIZE = 8
MAX_MODEL_LEN = 128
AUX_LAYER_IDS = [1, 2, 3]
_HIDDEN_SIZE = 64
_NUM_LAYERS = 4
_CONSTANT = 4.0  # of the first channel; the others of an embedding have variance 1
_LAYER_SCALE = 0.5  # of what a layer adds: less than the embedding, or all contexts are alike
_SPREAD = 2.0  # standard deviation of w(v) h and of bias(v), about
_SEED = 17
_MASK_TOKEN = VOCAB_SIZE - 1
"""What heads that draft in one pass put where a draft is wanted (draft_types.mask_token). Nothing
but the constant is in its embedding, so that a random head drafts likely tokens there."""

NUM_PROMPTS = 8
_PHRASE_LEN = 12
_NUM_PHRASES = 5
_PHRASE_TOKENS = 4
"""Different tokens in a prompt, which is one phrase said over and over. So few, and likely ones,
that the last tokens of an answer often stand somewhere in it, as n-gram and suffix drafts need."""


def write_twin(folder: Path) -> dict[str, Any]:
    """Write the twin in float32, without a tokenizer; the same bytes at every call.

    Returns:
        What identity.json says of a verifier, as far as methods read it.
    """
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=_HIDDEN_SIZE,
        intermediate_size=2 * _HIDDEN_SIZE,
        num_hidden_layers=_NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # the smallest that every attention backend of vLLM takes
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=_MASK_TOKEN,  # sampling ignores it
        dtype="float32",
    )
    model = LlamaForCausalLM(config).float()
    _draw_weights(model)
    model.save_pretrained(folder)
    return {
        "name": "sampling-twin",
        "fingerprint": digest([file_digest(folder / "model.safetensors"), config.to_dict()]),
        "hidden_size": _HIDDEN_SIZE,
        "num_layers": _NUM_LAYERS,
        "vocab_size": VOCAB_SIZE,
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
    }


@torch.no_grad()
def _draw_weights(model: LlamaForCausalLM) -> None:
    noise = torch.Generator().manual_seed(_SEED)
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            weight.fill_(1.0)  # norms
            continue
        # what goes in with variance 1 comes out with variance 1
        scale = 1.0 if "embed_tokens" in name else weight.shape[1] ** -0.5
        weight.normal_(generator=noise).mul_(scale)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.mul_(_LAYER_SCALE)
            weight[0] = 0.0
    model.model.embed_tokens.weight[:, 0] = _CONSTANT
    model.model.embed_tokens.weight[_MASK_TOKEN, 1:] = 0.0
    model.lm_head.weight.mul_(_SPREAD)
    model.lm_head.weight[:, 0] = token_biases() / _CONSTANT


def token_biases() -> torch.Tensor:
    """How much likelier a token is whatever the context, float32 [VOCAB_SIZE]."""
    noise = torch.Generator().manual_seed(_SEED + 1)
    return _SPREAD * torch.randn(VOCAB_SIZE, generator=noise)


def likeliest_tokens(count: int) -> list[int]:
    """The tokens of largest bias, rising ids; they are scattered over the vocabulary."""
    return sorted(token_biases().topk(count).indices.tolist())


def prompts() -> list[list[int]]:
    """The fixed prompts: NUM_PROMPTS lists of token ids."""
    draw = np.random.default_rng(_SEED)
    tokens = likeliest_tokens(_PHRASE_TOKENS)
    phrases = [draw.choice(tokens, _PHRASE_LEN).tolist() for _ in range(NUM_PROMPTS)]
    return [phrase * _NUM_PHRASES for phrase in phrases]


@torch.no_grad()
def next_token_probabilities(model: Path, prompt: list[int], answers: np.ndarray) -> np.ndarray:
    """What a model says of every token of answers to one prompt, given all before it.

    Args:
        model: A transformers checkpoint; computed in float32.
        prompt: Token ids.
        answers: int [num_samples, num_positions].

    Returns:
        float64 [num_samples, num_positions, vocab_size]; entry [s, i] is the distribution that
        `answers[s, i]` was to be drawn from.
    """
    network = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, trust_remote_code=False
    ).eval()
    cache = DynamicCache(config=network.config)
    first = network(torch.tensor([prompt]), past_key_values=cache).logits[:, -1:]
    cache.batch_repeat_interleave(len(answers))
    logits = first.expand(len(answers), 1, -1)  # [num_samples, 1, vocab_size]
    if answers.shape[1] > 1:
        later = network(torch.from_numpy(answers[:, :-1]), past_key_values=cache).logits
        logits = torch.cat([logits, later], dim=1)  # [num_samples, num_positions, vocab_size]
    probabilities: np.ndarray = logits.double().softmax(-1).numpy()
    return probabilities

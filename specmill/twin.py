"""A shrunken twin of a verifier: its class, random weights, seconds to make, served in seconds.

It is rigged to say one token, whatever came before, so that a draft of that token must be accepted:

    channel 0 of every embedding is CONSTANT, so large that no layer turns its sign
    lm_head gives TOKEN's row more of channel 0 than any other row

All other values are drawn so that every layer changes the states by about as much as they are, by
which a state of one layer is no other's.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
)

from specmill.files import write_json
from specmill.samples import Sample, make_sample
from specmill.shrunk import NUM_SPECIAL, VOCAB_SIZE
from specmill.text_decoder import decoder_prefix

TOKEN = 301
"""What it says."""
MAX_MODEL_LEN = 128
K = 3
"""Draft tokens of what it is served with."""
NUM_SAMPLES = 8
SAMPLE_LEN = 48
_CONSTANT = 16.0  # the other channels of an embedding have variance 1
_SEED = 17


def write_twin(config: dict[str, Any], folder: Path) -> None:
    """Write a checkpoint with a small tokenizer; the same bytes at every call.

    Args:
        config: Content of its config.json (specmill.shrunk).
        folder: Receives it.

    Raises:
        ValueError: when transformers does not know the class, or says of the config what is wrong.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    known = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    model = model_class(known).from_config(known, dtype=getattr(torch, config["dtype"]))
    _draw_weights(model)
    model.save_pretrained(folder)
    _mend_names(folder / "model.safetensors")
    # as the verifier has it, and not as this version of transformers writes it
    write_json(folder / "config.json", config)
    _write_tokenizer(folder)


def model_class(known: Any) -> Any:
    """The class of transformers that makes a decoder of a config, with the towers around it."""
    wraps = type(known) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if wraps else AutoModelForCausalLM


def is_wrapped(model: Path) -> bool:
    """Whether a checkpoint has more towers than its text decoder."""
    return (
        model_class(AutoConfig.from_pretrained(model, trust_remote_code=False))
        is AutoModelForImageTextToText
    )


def write_decoder(wrapper: Path, folder: Path) -> bool:
    """Write a twin of what a wrapper wraps, if a class of transformers is that alone.

    A wrapper itself is served with processors that want files of the verifier.
    """
    text = AutoConfig.from_pretrained(wrapper, trust_remote_code=False).get_text_config()
    alone = AutoModelForCausalLM._model_mapping.get(type(text), None)
    if alone is None:
        return False
    text.architectures = [alone.__name__]
    write_twin(json.loads(text.to_json_string(use_diff=False)), folder)
    return True


def _mend_names(file: Path) -> None:
    """Call the decoder's layers `layers`.

    transformers 5.19 renames the blocks of Kimi-K2.5's vision tower when it writes it, and the
    decoder's layers with them.
    """
    weights = load_file(file)
    prefix = decoder_prefix(weights)
    mended = {
        f"{prefix}layers.{name.removeprefix(blocks)}" if name.startswith(blocks) else name: tensor
        for blocks in [f"{prefix}blocks."]
        for name, tensor in weights.items()
    }
    if mended.keys() != weights.keys():
        save_file(mended, file, metadata={"format": "pt"})


@torch.no_grad()
def _draw_weights(model: Any) -> None:
    noise = torch.Generator().manual_seed(_SEED)
    embedding = model.get_input_embeddings().weight
    for weight in model.parameters():
        if weight.ndim > 1:  # norms and biases stay as the class makes them
            # what goes in with variance 1 comes out with variance 1
            scale = 1.0 if weight is embedding else weight.shape[-1] ** -0.5
            weight.normal_(generator=noise).mul_(scale)
    lm_head = model.get_output_embeddings().weight
    embedding[:, 0] = _CONSTANT
    lm_head[TOKEN, 0] = 6 * _CONSTANT


def _write_tokenizer(folder: Path) -> None:
    words = {f"t{number}": number for number in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template="{% for message in messages %}t3 {{ message['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}t4{% endif %}",
    ).save_pretrained(folder)


def draw_samples() -> list[Sample]:
    """Samples of scattered tokens, TOKEN among them; three quarters of each are its answer."""
    draw = np.random.default_rng(_SEED)
    common = np.append(draw.choice(np.arange(NUM_SPECIAL, VOCAB_SIZE), 47, replace=False), TOKEN)
    samples = []
    for _ in range(NUM_SAMPLES):
        ids = draw.choice(common, SAMPLE_LEN).tolist()
        ids[-1] = TOKEN
        samples.append(
            make_sample(
                ids[: SAMPLE_LEN // 4],
                ids[SAMPLE_LEN // 4 :],
                category="twin",
                source="drawn",
                split="train",
                turn=0,
                text="",
                finish_reason="length",
            )
        )
    return samples

"""Medusa: heads on the verifier's last hidden state guess the tokens after the next.

arXiv 2401.10774; vLLM serves the most likely token of each head as one chain, not the paper's tree
(vllm model_executor/models/medusa.py), on its V1 runner and without asynchronous scheduling. It
makes as many heads as K says and an lm_head that keeps whatever was in memory when the checkpoint
has none, so the checkpoint is compared with its own config and provenance before it is served.
"""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from specmill import compat
from specmill.files import read_json, read_object
from specmill.section import DoesNotFit, NoSettings
from specmill.vocab import tables_digest

Settings = NoSettings


def speculative_config(
    k: int, _settings: NoSettings, head: Path, verifier: dict[str, Any]
) -> dict[str, Any]:
    """vLLM's `medusa` with K draft tokens, one from each of the first K heads.

    Raises:
        DoesNotFit: when the heads were made for another verifier.
        ValueError: when there are fewer than K, when the checkpoint is not what its config and
            provenance say, or when vLLM would take its path for another method's.
    """
    place = str(head.absolute())
    compat.check_draft_path(place)
    config = read_object(head / "config.json")
    check_fit(head, config, verifier)
    if k > config["num_heads"]:
        raise ValueError(
            f"spec.tokens or spec.sweep asks for {k} draft tokens, but {head} has "
            f"{config['num_heads']} heads; lower it or train with a larger num_heads"
        )
    check_weights(head, config)
    return {"method": "medusa", "model": place, "num_speculative_tokens": k}


def draft_on_twin(make: Any, folder: Path) -> None:
    """What drafts in the sampling check: random heads (TwinDrafts)."""
    make.medusa(folder)


def check_fit(head: Path, config: dict[str, Any], verifier: dict[str, Any]) -> None:
    """Refuse heads of another verifier.

    Raises:
        DoesNotFit: naming what differs.
    """
    for key in ("hidden_size", "vocab_size"):
        if config[key] != verifier[key]:
            raise DoesNotFit(f"{head} has {key} {config[key]}, the verifier {verifier[key]}")
    trained_for = read_json(head / "provenance.json")["verifier"]
    if trained_for["fingerprint"] != verifier["fingerprint"]:
        raise DoesNotFit(f"{head} was trained for {trained_for['name']}, not {verifier['name']}")


def check_weights(head: Path, config: dict[str, Any]) -> None:
    """Refuse a checkpoint whose tensors are not those its config and provenance speak of.

    Raises:
        ValueError: naming the tensor.
    """
    size, vocab_size, hidden = (
        config[key] for key in ("truncated_vocab_size", "vocab_size", "hidden_size")
    )
    expected = {"lm_heads.0.weight": [size, hidden]} | {
        f"blocks.{number}.layers.{layer}.weight": [hidden, hidden]
        for number in range(config["num_heads"])
        for layer in range(config["num_hidden_layers"])
    }
    if size < vocab_size:
        expected["token_map"] = [size]
    token_ids = np.arange(vocab_size)
    with safe_open(head / "model.safetensors", framework="np") as weights:
        names = weights.keys()
        found = {name: weights.get_slice(name).get_shape() for name in names}
        for name, shape in expected.items():
            if found.get(name) != shape:
                raise ValueError(f"{head}: {name} is {found.get(name)}, config.json says {shape}")
        if "token_map" in expected:
            token_ids = weights.get_tensor("token_map")
    is_draft = np.zeros(vocab_size, dtype=bool)
    is_draft[token_ids] = True
    tables = token_ids - np.arange(size), is_draft
    if tables_digest(*tables) != read_json(head / "provenance.json")["vocabulary"]:
        raise ValueError(f"{head}: token_map is not the vocabulary the heads were trained with")

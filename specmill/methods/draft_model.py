"""A smaller model of the same vocabulary drafts (Leviathan et al., arXiv 2211.17192).

The head is a transformers checkpoint: one that draft_model@NAME has cut out of the verifier, one
from elsewhere, or models/verifier itself, whose drafts must all be accepted. vLLM gives it the
verifier's tensor parallelism and the shorter of both context lengths; it refuses another
vocabulary size when the engine starts, and does not look at what the ids mean.
"""

from pathlib import Path
from typing import Any

from specmill import compat, paths
from specmill.files import read_json, read_object
from specmill.section import DoesNotFit, NoSettings
from specmill.text_decoder import text_config

Settings = NoSettings


def speculative_config(
    k: int, _settings: NoSettings, head: Path, verifier: dict[str, Any]
) -> dict[str, Any]:
    """vLLM's `draft_model` with K draft tokens.

    Raises:
        DoesNotFit: when the draft model has another vocabulary than the verifier.
        ValueError: when vLLM would take its path for another method's.
    """
    from specmill.verifier import model_path  # which imports torch

    model = model_path(head)
    size = text_config(read_object(model / "config.json")).get("vocab_size")
    if size != verifier["vocab_size"]:
        raise DoesNotFit(
            f"{head} has a vocabulary of {size}, {verifier['name']} of {verifier['vocab_size']}"
        )
    if paths.VERIFIER.is_dir():  # the sampling check has a small verifier of its own
        check_tokens(model, model_path(paths.VERIFIER))
    place = str(model.absolute())
    compat.check_draft_path(place)
    return {
        "method": "draft_model",
        "model": place,
        "num_speculative_tokens": k,
    }


def draft_on_twin(make: Any, folder: Path) -> None:
    """What drafts in the sampling check: a noised copy of it (TwinDrafts)."""
    make.noised_copy(folder)


def check_tokens(draft: Path, verifier: Path) -> None:
    """Refuse a draft model in which an id stands for another token than in the verifier.

    Ids that only one of them has do no harm: they are never accepted. Folders without
    tokenizer.json cannot be compared.

    Raises:
        DoesNotFit: with the number of such ids and the first.
    """
    files = draft / "tokenizer.json", verifier / "tokenizer.json"
    if not all(file.is_file() for file in files):
        return
    ours, theirs = (_tokens(file) for file in files)
    other = sorted(number for number in ours.keys() & theirs if ours[number] != theirs[number])
    if other:
        first = other[0]
        raise DoesNotFit(
            f"{len(other)} token ids mean something else in {draft} than in the verifier: "
            f"{first} is {ours[first]!r} there and {theirs[first]!r} here"
        )


def _tokens(file: Path) -> dict[int, str]:
    """Token by id, from a tokenizer.json of the `tokenizers` package."""
    tree = read_json(file)
    vocab = tree["model"]["vocab"]
    pairs = (
        ((piece, number) for number, (piece, _score) in enumerate(vocab))
        if isinstance(vocab, list)  # of a Unigram model
        else vocab.items()
    )
    added = {token["id"]: token["content"] for token in tree.get("added_tokens", [])}
    return {number: piece for piece, number in pairs} | added

"""What is checked of a head that was trained here before it is served; read without torch."""

from pathlib import Path
from typing import Any

from safetensors import safe_open

from specmill.files import read_json, read_object
from specmill.vocab import check_tables, tables_digest


def check_trained(head: Path, method: str, k: int, verifier: dict[str, Any]) -> None:
    """Refuse a head of another type, verifier or vocabulary mapping, or one that drafts fewer.

    Raises:
        ValueError: naming what does not fit.
    """
    check_type(head, method)
    check_head(head, verifier)
    check_k(k, head)


def check_type(head: Path, method: str) -> None:
    """Refuse a head of another type than the method that is to serve it.

    vLLM takes the type from the checkpoint and how it drafts from what it is told: a head of
    another type loads, and drafts from weights that it leaves out or never had.

    Raises:
        ValueError: naming the method that serves it.
    """
    found = read_object(head / "config.json").get("speculators_model_type")
    if found != method:
        raise ValueError(f"{head} is a head of type {found}: serve it with method {found}")


def check_head(head: Path, verifier: dict[str, Any]) -> None:
    """Refuse a head made for another verifier or with another vocabulary mapping.

    Raises:
        ValueError: naming what does not fit.
    """
    if not (head / "provenance.json").is_file():
        raise ValueError(
            f"{head} does not say for which verifier it was trained (no provenance.json); name it "
            "as source of an entry of `heads`, and serve that (models/heads/NAME)"
        )
    config, provenance = read_object(head / "config.json"), read_json(head / "provenance.json")
    trained_for = provenance["verifier"]
    if trained_for["fingerprint"] != verifier["fingerprint"]:
        raise ValueError(f"{head} was trained for {trained_for['name']}, not {verifier['name']}")
    size = config["draft_vocab_size"]
    if size == verifier["vocab_size"]:
        return
    with safe_open(head / "model.safetensors", framework="np") as weights:
        missing = {"d2t", "t2d"} - set(weights.keys())
        if missing:
            raise ValueError(f"{head} lacks {', '.join(sorted(missing))}: ids would be misread")
        d2t, t2d = weights.get_tensor("d2t"), weights.get_tensor("t2d").astype(bool)
    check_tables(d2t, t2d, size, verifier["vocab_size"])
    if tables_digest(d2t, t2d) != provenance["vocabulary"]:
        raise ValueError(f"{head}: the vocabulary in the weights is not the one it trained with")


def check_k(k: int, head: Path) -> None:
    """Refuse more draft tokens than the head proposes.

    A speculators checkpoint says how many it was unrolled for in training; beyond that its inputs
    are ones it has never seen.

    Raises:
        ValueError: naming both numbers.
    """
    methods = read_object(head / "config.json")["speculators_config"]["proposal_methods"]
    allowed = max(method["speculative_tokens"] for method in methods)
    if k > allowed:
        raise ValueError(
            f"spec.tokens or spec.sweep asks for {k} draft tokens, but {head} drafts at most "
            f"{allowed}; lower it or train with more train.ttt_steps"
        )

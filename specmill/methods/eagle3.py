"""EAGLE-3: a one-layer draft model fed the verifier's hidden states (arXiv 2503.01840).

The head is the speculators checkpoint that train wrote. Before it is served, what silently ruins
acceptance is checked: that it was trained for this verifier, that its vocabulary mapping is in it,
and that this is the mapping its provenance names.
"""

from pathlib import Path
from typing import Any

from safetensors import safe_open

from specmill.files import read_json
from specmill.params import Spec
from specmill.vocab import check_tables, tables_digest


def speculative_config(k: int, _spec: Spec, head: Path, verifier: dict[str, Any]) -> dict[str, Any]:
    """vLLM's `eagle3` with K draft tokens.

    Raises:
        ValueError: when the head does not fit the verifier or its own provenance, or when K is more
            than it was trained to draft.
    """
    check_head(head, verifier)
    check_k(k, head)
    return {"method": "eagle3", "model": str(head.absolute()), "num_speculative_tokens": k}


def check_head(head: Path, verifier: dict[str, Any]) -> None:
    """Refuse a head made for another verifier or with another vocabulary mapping.

    Raises:
        ValueError: naming what does not fit.
    """
    config, provenance = read_json(head / "config.json"), read_json(head / "provenance.json")
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
    methods = read_json(head / "config.json")["speculators_config"]["proposal_methods"]
    allowed = max(method["speculative_tokens"] for method in methods)
    if k > allowed:
        raise ValueError(
            f"spec.tokens or spec.sweep asks for {k} draft tokens, but {head} drafts at most "
            f"{allowed}; lower it or train with more train.ttt_steps"
        )

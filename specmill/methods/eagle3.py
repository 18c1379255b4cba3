"""EAGLE-3: a one-layer draft model fed the verifier's hidden states (arXiv 2503.01840).

The head is a speculators checkpoint. Before it is served, what silently ruins acceptance is
checked. Of a head that train wrote: that it was trained for this verifier, that its vocabulary
mapping is in it, and that this is the mapping its provenance names. Of any other, which may have
been made for another verifier on purpose: that its inspection (stages head, foreign_head,
spoiled_head) did not refuse it; what else that found stands in its row.
"""

from pathlib import Path
from typing import Any

from safetensors import safe_open

from specmill.files import read_json
from specmill.head_facts import INSPECTION
from specmill.section import DoesNotFit, NoSettings
from specmill.speculator import check_type
from specmill.vocab import check_tables, tables_digest

Settings = NoSettings


def speculative_config(
    k: int, _settings: NoSettings, head: Path, verifier: dict[str, Any]
) -> dict[str, Any]:
    """vLLM's `eagle3` with K draft tokens.

    Raises:
        DoesNotFit: when the head's inspection refused it.
        ValueError: when a head trained here is of another type, does not fit the verifier or its
            own provenance, or when K is more than it was trained to draft.
    """
    if (head / INSPECTION).is_file():
        check_inspection(head, verifier)
    else:
        check_type(head, "eagle3")
        check_head(head, verifier)
        check_k(k, head)
    return {"method": "eagle3", "model": str(head.absolute()), "num_speculative_tokens": k}


def check_inspection(head: Path, verifier: dict[str, Any]) -> None:
    """Refuse a head that was refused when it was looked at.

    Raises:
        DoesNotFit: with the reason.
        ValueError: when it was looked at for another verifier.
    """
    inspection = read_json(head / INSPECTION)
    if inspection["run_on"] != verifier["name"]:
        raise ValueError(
            f"{head} was inspected for {inspection['run_on']}, not {verifier['name']}; run "
            "`dvc repro`, which inspects it again"
        )
    if inspection["refused"]:
        raise DoesNotFit(inspection["refused"])


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

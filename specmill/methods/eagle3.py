"""EAGLE-3: a one-layer draft model fed the verifier's hidden states (arXiv 2503.01840).

The head is a speculators checkpoint. Before it is served, what silently ruins acceptance is
checked. Of a head that train wrote: that it was trained for this verifier, that its vocabulary
mapping is in it, and that this is the mapping its provenance names. Of any other, which may have
been made for another verifier on purpose: that its inspection (stages head, foreign_head,
spoiled_head) did not refuse it; what else that found stands in its row.
"""

from pathlib import Path
from typing import Any

from specmill.files import read_json
from specmill.head_facts import INSPECTION
from specmill.section import DoesNotFit, NoSettings
from specmill.speculator import check_trained

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
        check_trained(head, "eagle3", k, verifier)
    return {"method": "eagle3", "model": str(head.absolute()), "num_speculative_tokens": k}


def draft_on_twin(make: Any, folder: Path) -> None:
    """What drafts in the sampling check: a random head (TwinDrafts)."""
    make.head("eagle3", folder)


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

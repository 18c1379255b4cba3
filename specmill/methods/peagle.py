"""P-EAGLE: an EAGLE-3 head that drafts all tokens in one pass (arXiv 2602.01469).

The first draft token is made as EAGLE-3 makes it; every further one stands on the mask token and a
learned state instead of the token and state before it. One pass per step instead of K, and less
accurate at later positions. vLLM serves it as `eagle3` with `parallel_drafting`, on its V1 runner.
"""

from pathlib import Path
from typing import Any

from specmill.section import NoSettings
from specmill.speculator import check_trained

Settings = NoSettings


def speculative_config(
    k: int, _settings: NoSettings, head: Path, verifier: dict[str, Any]
) -> dict[str, Any]:
    """vLLM's `eagle3` with parallel drafting and K draft tokens.

    Raises:
        ValueError: when the head is of another type, does not fit the verifier or its own
            provenance, or when K is more than it was trained to draft.
    """
    check_trained(head, "peagle", k, verifier)
    return {
        "method": "eagle3",
        "parallel_drafting": True,
        "model": str(head.absolute()),
        "num_speculative_tokens": k,
    }


def draft_on_twin(make: Any, folder: Path) -> None:
    """What drafts in the sampling check: a random head (TwinDrafts)."""
    make.head("peagle", folder)

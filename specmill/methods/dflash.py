"""DFlash: one pass over the verifier's states fills a block of mask tokens (arXiv 2602.06036).

The verifier's states are projected into the draft layers' KV cache; the token that the verifier has
chosen and K mask tokens are the queries. Embeddings are the verifier's own.
"""

from pathlib import Path
from typing import Any

from specmill.section import NoSettings
from specmill.speculator import check_trained

Settings = NoSettings


def speculative_config(
    k: int, _settings: NoSettings, head: Path, verifier: dict[str, Any]
) -> dict[str, Any]:
    """vLLM's `dflash` with K draft tokens.

    Raises:
        ValueError: when the head is of another type, does not fit the verifier or its own
            provenance, or when K is more than it was trained to draft.
    """
    check_trained(head, "dflash", k, verifier)
    return {
        "method": "dflash",
        "model": str(head.absolute()),
        "num_speculative_tokens": k,
    }


def draft_on_twin(make: Any, folder: Path) -> None:
    """What drafts in the sampling check: a random head (TwinDrafts)."""
    make.head("dflash", folder)

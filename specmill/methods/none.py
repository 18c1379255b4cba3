"""No speculation: the verifier alone, the reference of every ratio."""

from pathlib import Path
from typing import Any

from specmill.params import Spec


def speculative_config(_k: int, _spec: Spec, _head: Path, _verifier: dict[str, Any]) -> None:
    """Serve without a draft."""
    return None

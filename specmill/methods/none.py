"""No speculation: the verifier alone, the reference of every ratio."""

from pathlib import Path
from typing import Any

from specmill.section import NoSettings

Settings = NoSettings


def speculative_config(_k: int, _settings: Any, _head: Path, _verifier: dict[str, Any]) -> None:
    """Serve without a draft."""
    return None

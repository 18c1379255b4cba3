"""What is known of a head before it is served, for the row that serves it; read without torch."""

from pathlib import Path
from typing import Any

from specmill.files import read_json, read_object

INSPECTION = "inspection.json"
PROVENANCE = "provenance.json"


def head_facts(head: Path, verifier: dict[str, Any]) -> dict[str, Any]:
    """For whom a head was made, on what it runs, and what its inspection found.

    Args:
        head: What a row serves: a head's folder, or a file where there is none.
        verifier: identity.json.

    Returns:
        `trained_for` (a name; None when nobody says) and `run_on`; of an inspected head (stages
        head, foreign_head, spoiled_head) also `findings` (a sentence by short key) and
        `offline_acceptance_pos_0`, where it has any. Empty when nothing is known.
    """
    if (head / INSPECTION).is_file():
        inspection = read_json(head / INSPECTION)
        facts = {name: inspection[name] for name in ("trained_for", "run_on")}
        if inspection["findings"]:
            facts["findings"] = inspection["findings"]
        if inspection["offline"]:
            rate = inspection["offline"]["acceptance_rate_pos_0"]
            facts["offline_acceptance_pos_0"] = rate
        return facts
    if (head / PROVENANCE).is_file():
        return {"trained_for": trained_for(head), "run_on": verifier["name"]}
    return {}


def trained_for(head: Path) -> str | None:
    """Name of the verifier that a head was made for, by its provenance, else by its config."""
    if (head / PROVENANCE).is_file():
        about = read_json(head / PROVENANCE)
        if "trained_for" in about:  # then `verifier` may be the one it is to run on
            name: str | None = about["trained_for"]
            return name
        named = about.get("verifier") or {}
        return named.get("name")
    speculators = read_object(head / "config.json").get("speculators_config") or {}
    name = (speculators.get("verifier") or {}).get("name_or_path")
    # speculators keeps the path that it trained with, which names a folder of another machine
    return Path(name).name if name and Path(name).is_absolute() else name

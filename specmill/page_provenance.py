"""Section of the page with what stands behind the figures: machine, software, verifier, commits."""

from typing import Any

from specmill.blocks import Block, Bullets, Folded, Heading, blocks, inline, of, table
from specmill.notes import engine_table
from specmill.rows import Results, Row

_MACHINE = {
    "cpu_model": "processor",
    "num_usable_cores": "usable cores",
    "memory_gib": "memory, GiB",
    "machine": "machine, a salted digest",
}
_WAYS = {"beside": "both up", "bracket": "in turns"}
"""How a row and its baseline were up, by `bench.reference`."""
_VERIFIER = {
    "name": "name",
    "origin": "origin",
    "architecture": "architecture",
    "num_layers": "layers",
    "hidden_size": "hidden size",
    "vocab_size": "vocabulary",
    "dtype": "dtype",
    "fingerprint": "fingerprint of its files",
    "trust_remote_code": "runs code of its own repository",
}


def provenance_blocks(
    results: Results, hardware: dict[str, Any], verifier: dict[str, Any]
) -> list[Block]:
    """Tables of the machine, the verifier, the benches and their engines; what engines warned of.

    Args:
        results: reports/bench/NAME.json by name.
        hardware: reports/hardware.json.
        verifier: models/verifier/identity.json.
    """
    machine = _facts(hardware, _MACHINE)
    machine += [
        {"what": f"GPU {number}", "value": ", ".join(gpu.values())}
        for number, gpu in enumerate(hardware["gpus"])
    ]
    machine += [{"what": name, "value": version} for name, version in hardware["versions"].items()]
    two = [("what", of("what")), ("value", of("value"))]
    return [
        table(machine, "Machine and software", two),
        table(_facts(verifier, _VERIFIER), "Verifier", two),
        table(
            [
                {"row": name} | result["provenance"]
                for name, result in results.items()
                if "source" not in result  # those of other tools are among the remarks above
            ],
            "Benches",
            [
                ("row", of("row")),
                ("commit", lambda row: (row.get("code.commit") or "")[:12] or None),
                ("uncommitted changes", _changes),
                ("with its baseline", lambda row: _WAYS.get(row.get("reference", ""))),
                ("busy cores before", lambda row: row.get("busy_cores_before")),
            ],
        ),
        *blocks(engine_table(results)[1:], "How every engine ran"),
        *_warnings(results),
    ]


def _facts(record: dict[str, Any], names: dict[str, str]) -> list[Row]:
    """Named values; what the record does not tell is left out."""
    return [{"what": what, "value": record[name]} for name, what in names.items() if name in record]


def _changes(row: Row) -> str | None:
    dirty = row.get("code.dirty")
    return None if dirty is None else {"true": "yes", "false": "no"}[dirty]


def _warnings(results: Results) -> list[Block]:
    """What engines logged as a warning, each once by row."""
    found: list[Block] = []
    for name, result in results.items():
        engines = result["engine"].values()
        texts = dict.fromkeys(text for facts in engines for text in facts.get("warnings", []))
        if texts:
            found += [Heading(name), Bullets([inline(text) for text in texts])]
    return [Folded("Warnings in the engines' logs", found)] if found else []

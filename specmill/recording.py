"""What a bench measured, on disk: every table is a function of it.

data/bench/NAME/requests.parquet   one row per request (specmill/records.py)
                cells.json         cells with their counters, engine facts, divergences
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specmill.files import digest, read_json, read_kept, write_json
from specmill.plan import Cell, Run
from specmill.records import read_requests, write_requests

REQUESTS, CELLS = "requests.parquet", "cells.json"


@dataclass
class Recording:
    """A whole bench stage."""

    cells: list[dict[str, Any]] = field(default_factory=list)
    """As specmill/cells.py describes them."""
    servers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """How each engine ran (`compat.engine_facts`), by name."""
    divergences: list[dict[str, Any]] = field(default_factory=list)
    """First differences from the reference's outputs (specmill/lossless.py)."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why the engine did not start with a K, by K."""

    def write(self, folder: Path, method: str) -> None:
        """Write the recording of `method`, in place of an earlier one."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_requests(folder / REQUESTS, list(self._requests(method)))
        bare = [{n: v for n, v in cell.items() if n != "requests"} for cell in self.cells]
        rest = {
            "cells": bare,
            "servers": self.servers,
            "divergences": self.divergences,
            "refused": self.refused,
        }
        write_json(folder / CELLS, rest)

    def _requests(self, method: str) -> Iterator[dict[str, Any]]:
        for cell in self.cells:
            place = {name: cell[name] for name in _PLACE}
            for index, request in enumerate(cell["requests"]):
                yield {"method": method, **place, "index": index, **request}

    @classmethod
    def read(cls, folder: Path) -> "Recording":
        """Read what `write` wrote."""
        rest = read_json(folder / CELLS)
        by_cell: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in read_requests(folder / REQUESTS):
            by_cell.setdefault(tuple(row[name] for name in _KEY), []).append(
                {n: v for n, v in row.items() if n not in {"method", "index", *_PLACE}}
            )
        cells = [
            cell | {"requests": by_cell[tuple(cell[name] for name in _KEY)]}
            for cell in rest["cells"]
        ]
        return cls(cells, rest["servers"], rest["divergences"], rest["refused"])


_KEY = ("role", "k", "phase", "round", "number")
_PLACE = (
    *_KEY,
    "concurrency",
    "rate",
    "context",
    "category",
    "execution",
    "fresh_prompts",
)


class CellCache:
    """Finished cells of an interrupted stage, in a folder named by everything that shapes them."""

    def __init__(self, folder: Path, inputs: dict[str, Any]):
        self._folder = folder / digest(inputs)

    def get(self, unit: list[tuple[Run, Cell]]) -> list[dict[str, Any]] | None:
        """The records of a unit, which are kept together."""
        records: list[dict[str, Any]] | None = read_kept(self._path(unit))
        return records

    def put(self, unit: list[tuple[Run, Cell]], records: list[dict[str, Any]]) -> None:
        """Keep the records of a unit."""
        write_json(self._path(unit), records)

    def _path(self, unit: list[tuple[Run, Cell]]) -> Path:
        parts = [[run.role, run.k, run.phase, run.speculative_config, cell.key]
                 for run, cell in unit]  # fmt: skip
        return self._folder / f"{digest(parts)}.json"

    def servers(self) -> dict[str, dict[str, Any]]:
        """Facts of the engines that measured what is kept; without them nothing of it is used."""
        facts: dict[str, dict[str, Any]] | None = read_kept(self._folder / "servers.json")
        if facts is None:
            self.clear()
        return facts or {}

    def put_servers(self, facts: dict[str, dict[str, Any]]) -> None:
        """Keep the facts of all engines so far."""
        write_json(self._folder / "servers.json", facts)

    def clear(self) -> None:
        """Forget it all: the stage ended well, and its next execution measures again."""
        shutil.rmtree(self._folder, ignore_errors=True)

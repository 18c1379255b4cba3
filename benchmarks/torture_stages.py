"""Which stages are tortured, and how the work is counted that each has finished."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specmill.files import file_digest
from specmill.shards import SUFFIX, read_shard


def answers(folder: Path) -> set[str]:
    """Answers that are kept, by their place in the file."""
    path = folder / ".cache/responses/responses.jsonl"
    found = set()
    for number, line in enumerate(path.read_bytes().split(b"\n") if path.is_file() else []):
        try:
            found.add(f"{number} {json.loads(line)['key']}")
        except (ValueError, KeyError, TypeError):
            continue
    return found


def samples(folder: Path) -> set[str]:
    """Samples that are in a shard, or staged as a whole."""
    found = set()
    for place in (".cache/hidden_states", ".cache/staging"):
        for path in (folder / place).glob("[!.]*" + SUFFIX):
            try:
                found |= {row.sample_key for row in read_shard(path, named=False).rows}
            except (ValueError, FileNotFoundError):  # cut, or filed meanwhile
                continue
    return found


def epochs(folder: Path) -> set[str]:
    """Epochs that are complete: sealed, and all they hold is what it was then."""
    found = set()
    for seal in folder.glob(".cache/checkpoints/*/*/seal.json"):
        # neither links (epoch0_end, checkpoint_best) nor the samples as Arrow files beside them
        if not seal.parent.name.isdecimal():
            continue
        try:
            digests = json.loads(seal.read_bytes())
            if all(file_digest(seal.parent / name) == one for name, one in digests.items()):
                found.add(str(seal.parent))
        except (ValueError, FileNotFoundError):
            continue
    return found


def cells(folder: Path) -> set[str]:
    """Cells that are kept, with the execution that measured them."""
    found = set()
    for path in folder.glob(".cache/bench_cells/*/*.json"):
        if path.stem != "servers":
            try:
                kept = json.loads(path.read_bytes())
            except (ValueError, FileNotFoundError):
                continue
            found |= {f"{cell['execution']} {path.stem} {i}" for i, cell in enumerate(kept)}
    return found


def _answered(folder: Path, before: set[str], _: str) -> int:
    return len(answers(folder) - before)


def _extracted(_: Path, __: set[str], log: str) -> int:
    said = re.search(r"(\d+) of \d+ samples are to be extracted", log)
    return int(said[1]) if said else 0


def _trained(_: Path, __: set[str], log: str) -> int:
    return len(re.findall(r"epoch \d+ of \d+: held-out", log))


def _measured(folder: Path, before: set[str], _: str) -> int:
    path = folder / "data/bench/ngram/cells.json"
    kept = {name.split()[0] for name in before}
    found = json.loads(path.read_text())["cells"] if path.is_file() else []
    return sum(cell["execution"] not in kept for cell in found)


def _nothing(_: Path) -> set[str]:
    return set()


@dataclass(frozen=True)
class Kept:
    """What of a stage's work survives an interruption."""

    place: str
    """Where it writes while it runs; mounts and deletions strike there."""
    caches: tuple[str, ...] = ()
    """Folders that hold finished work, emptied before every try."""
    unit: str = "-"
    finished: Callable[[Path], set[str]] = _nothing
    """Names of the units that are finished and on the disk."""
    did: Callable[[Path, set[str], str], int] = lambda _folder, _before, _log: 0
    """Units that a run has done: by folder, what was finished before it, and its log."""
    has_engine: bool = False


STAGES = {
    "verifier": Kept("models"),
    "prepare": Kept(".cache/responses", (".cache/responses",), "answers", answers, _answered, True),
    "vocab": Kept("data"),
    "extract": Kept(
        ".cache/hidden_states",
        (".cache/hidden_states", ".cache/staging"),
        "samples",
        samples,
        _extracted,
    ),
    "train": Kept(".cache/checkpoints", (".cache/checkpoints",), "epochs", epochs, _trained),
    "bench@ngram": Kept(
        ".cache/bench_cells", (".cache/bench_cells",), "cells", cells, _measured, True
    ),
}
"""In the order of the pipeline."""

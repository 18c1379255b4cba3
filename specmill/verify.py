"""Reading every byte of a store or a view, and saying which samples are lost.

The time of damaged files is set to now, so that DVC looks at them again.
"""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from specmill.manifest import Manifest
from specmill.shards import Piece, Row, StateSpec, damaged_rows, is_whole, read_shard
from specmill.store import HiddenStateStore

Findings = tuple[list[tuple[StateSpec, Row]], int, list[str]]
"""The samples lost, with what they are; bytes read; a line for every file that is damaged."""


def check_store(store: HiddenStateStore) -> Findings:
    """Read every byte of a store."""
    damages = store.check(list(store.shards))
    for damage in damages:
        _touch(store.folder / damage.name)
    whats = [f"{damage.what}: {store.folder / damage.name}" for damage in damages]
    whats += [f"no shard: {store.folder / name}" for name in store.unreadable]
    return store.lost(damages), sum(s.num_bytes for s in store.shards.values()), whats


def _touch(file: Path) -> None:
    """Make DVC look at a file again; one that is gone or cannot be touched is as it is."""
    with contextlib.suppress(OSError):
        os.utime(file)


def check_view(folder: Path) -> Findings:
    """Read every byte that a view needs; raises ValueError when it has no readable manifest."""
    view = Manifest(folder)
    by_file: dict[Path, list[Piece]] = {}
    for piece in view.places.values():
        by_file.setdefault(piece.file, []).append(piece)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(partial(_check_file, view.spec), by_file, by_file.values()))
    lost: list[tuple[StateSpec, Row]] = []
    whats = []
    for file, (what, rows) in zip(by_file, found, strict=True):
        if what:
            whats.append(f"{what}: {file}")
            lost += [(view.spec, row) for row in rows]
            _touch(file)
    return lost, sum(file.stat().st_size for file in by_file if file.is_file()), whats


def _check_file(spec: StateSpec, file: Path, pieces: list[Piece]) -> tuple[str, list[Row]]:
    """What is wrong with a shard of a view, if anything is; and which of these samples are lost."""
    if not file.is_file():
        return "missing", [piece.row for piece in pieces]
    try:
        shard = read_shard(file)
    except ValueError:
        return "header", [piece.row for piece in pieces if not is_whole(piece, spec)]
    bad = set(damaged_rows(shard, file))
    whole = set(shard.pieces(file)) if shard.spec == spec else set()
    lost = [piece.row for piece in pieces if piece not in whole or piece.row in bad]
    return "samples" if bad or lost else "", lost

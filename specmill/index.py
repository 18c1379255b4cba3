"""index.jsonl: which sample lies in which shard, one line a shard, oldest first.

A line that is damaged is no line: it ends with a digest of itself. To make a shard's name from what
the line says it holds would do too, and takes seconds where there are 200,000 samples; lines of
earlier versions, which have no digest, are still read so.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specmill.files import write_atomically
from specmill.shards import Shard, describe, parse, recall

logger = logging.getLogger(__name__)


def append(path: Path, shard: Shard) -> None:
    """Add a shard's line and flush it to the disk; the caller holds the store's lock."""
    with path.open("a+b", buffering=0) as index:
        # a line that a crash has cut must not swallow this one
        index.seek(-1 if (length := index.tell()) else 0, os.SEEK_END)
        is_cut = bool(length) and index.read(1) != b"\n"
        index.write((b"\n" if is_cut else b"") + _line(shard))
        os.fsync(index.fileno())


def rewrite(path: Path, *, new: Iterable[Shard] = (), gone: Iterable[str] = ()) -> None:
    """Replace the index by one without damaged lines; the caller holds the store's lock."""
    known = read_index(path) | {shard.name: shard for shard in new}
    for name in gone:
        known.pop(name, None)
    write_atomically(path, b"".join(map(_line, known.values())))


_ENDING = b', "line": "'


def _line(shard: Shard) -> bytes:
    name, header_bytes = shard.called
    about = {"shard": name, "header_bytes": header_bytes, **describe(shard)}
    said = json.dumps(about).encode()[:-1]
    return said + _ENDING + _digest(said) + b'"}\n'


def _digest(said: bytes) -> bytes:
    return hashlib.sha256(said).hexdigest().encode()


def _shard(line: bytes) -> Shard | None:
    """The shard that a line tells of; None when the line is damaged."""
    said, mark, rest = line.rstrip().rpartition(_ENDING)
    try:
        if mark:
            fields: dict[str, Any] = json.loads(said + b"}")
            is_whole = rest == _digest(said) + b'"}'
            shard = recall(fields, fields.pop("shard"), fields.pop("header_bytes"))
        else:
            fields = json.loads(line)
            name = fields.pop("shard")
            shard = parse(fields)
            is_whole = shard.name == name
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return shard if is_whole else None


def read_index(path: Path) -> dict[str, Shard]:
    """Shards by name, oldest first; lines that are damaged are left."""
    found: dict[str, Shard] = {}
    for number, line in enumerate(path.read_bytes().splitlines() if path.is_file() else [], 1):
        if not line.strip():
            continue
        shard = _shard(line)
        if shard is None:
            logger.warning("line %d of %s is damaged; its shard is read instead", number, path)
            continue
        found.pop(shard.name, None)
        found[shard.name] = shard
    return found

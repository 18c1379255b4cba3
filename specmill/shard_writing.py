"""Writing a shard: under another name, flushed, renamed; what is there is whole."""

import fcntl
import os
import uuid
from collections.abc import Iterable
from pathlib import Path

from specmill.files import unheld
from specmill.shards import Piece, Shard, StateSpec


def write_shard(folder: Path, spec: StateSpec, pieces: Iterable[Piece]) -> Shard:
    """Write samples as one shard: under another name, flushed, renamed; what is there is whole.

    The kernel copies from file to file; no byte passes through this process. A sample that is given
    twice is written once.

    Raises:
        ValueError: when a source ends before its sample does.
    """
    pieces = list({piece.row.sample_key: piece for piece in pieces}.values())
    shard = Shard(spec, tuple(piece.row for piece in pieces))
    scratch = scratch_in(folder)
    try:
        with scratch.open("xb", buffering=0) as out:
            fcntl.flock(out, fcntl.LOCK_EX)  # says that somebody is writing it
            out.write(shard.header)
            for piece in pieces:
                _copy(piece, spec, out.fileno())
            scratch.chmod(0o444)
            os.fsync(out.fileno())
            os.replace(scratch, folder / shard.name)
    finally:
        scratch.unlink(missing_ok=True)
    flush(folder)
    return shard


def _copy(piece: Piece, spec: StateSpec, target: int) -> None:
    left, offset = piece.row.num_tokens * spec.bytes_per_token, piece.offset
    with piece.file.open("rb", buffering=0) as source:
        while left:
            copied = os.sendfile(target, source.fileno(), offset, left)
            if not copied:
                raise ValueError(
                    f"{piece.file} ends within sample {piece.row.sample_key[:12]}; "
                    "`python -m specmill.store verify` tells how much is lost"
                )
            left, offset = left - copied, offset + copied


def flush(path: Path) -> None:
    """Flush a file; or a folder, so that a rename in it outlives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def scratch_in(folder: Path) -> Path:
    """A name for a file that gets its own when it is whole."""
    return folder / f".{uuid.uuid4().hex}.tmp"


def abandoned(folder: Path) -> list[str]:
    """Names of files that `write_shard` had begun when its process was killed."""
    begun = folder.glob("." + 32 * "[0-9a-f]" + ".tmp")
    return [path.name for path in unheld(sorted(begun))]

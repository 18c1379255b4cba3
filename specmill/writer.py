"""Filling shards: samples are collected until there are enough for one, which is then written."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from specmill.shards import Piece, StateSpec

_MOST_SAMPLES = 50_000
"""Of a shard: safetensors reads headers of 100 MB at most, and a sample takes about 550 bytes."""


class ShardWriter:
    """Collects samples and writes a shard, in the background, when there are enough of them."""

    def __init__(self, add_shard: Callable[[list[Piece]], Any], spec: StateSpec, shard_bytes: int):
        """
        Args:
            add_shard: Makes a shard of some samples; returns when it is safe on the disk.
            spec: What their states are.
            shard_bytes: Size at which a shard is written.
        """
        self._add_shard = add_shard
        self._bytes_per_token = spec.bytes_per_token
        self._shard_bytes = shard_bytes
        self._pending: list[Piece] = []
        self._staged: list[Path] = []
        self._num_bytes = 0
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    def add(self, piece: Piece, *, staged: bool = False) -> None:
        """Queue a sample; a `staged` file is its own and is deleted once its shard is safe."""
        self._pending.append(piece)
        if staged:
            self._staged.append(piece.file)
        self._num_bytes += piece.row.num_tokens * self._bytes_per_token
        if self._num_bytes >= self._shard_bytes or len(self._pending) >= _MOST_SAMPLES:
            self._write_pending()

    def close(self) -> None:
        """Write what is queued and wait until it is safe."""
        try:
            self._write_pending()
            self._wait()
        finally:
            self._thread.shutdown()

    def _write_pending(self) -> None:
        self._wait()  # one at a time: whoever fills shards faster than the disk takes them waits
        if self._pending:
            self._writing = self._thread.submit(self._write, self._pending, self._staged)
        self._pending, self._staged, self._num_bytes = [], [], 0

    def _wait(self) -> None:
        if self._writing:
            self._writing.result()

    def _write(self, pieces: list[Piece], staged: list[Path]) -> None:
        self._add_shard(pieces)
        for path in staged:
            path.unlink()

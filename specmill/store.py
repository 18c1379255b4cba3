"""Hidden states by content: an append-only store of shards that grows, and the views cut from it.

    .cache/hidden_states/
        <digest>.safetensors   shards (specmill.shards), never changed
        index.jsonl            which sample lies in which shard (specmill.index)
    data/hidden_states/        a view: the shards one dataset needs, hard-linked, and manifest.json

A sample is kept under its token ids *and* its StateSpec, so another verifier, other layers or
another dtype never meet. The index only saves reading headers: a shard without a line is read. Two
stores are equal when their keys and checksums are, however the samples are spread over shards.

Run      python -m specmill.store --help
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from specmill import index
from specmill.files import locked, uncollected
from specmill.manifest import write_manifest
from specmill.shard_writing import flush, scratch_in, write_shard
from specmill.shards import SUFFIX, Piece, Row, Shard, StateSpec, damaged_rows, read_shard
from specmill.writer import ShardWriter

logger = logging.getLogger(__name__)

INDEX = "index.jsonl"
IN_USE = ".in_use"


@dataclass(frozen=True)
class Damage:
    """What is wrong with one shard."""

    name: str
    what: str
    """`missing`, `header` or `samples`."""
    rows: tuple[Row, ...]
    """The samples that cannot be read from it any more."""


class HiddenStateStore:
    """The store in one folder, which is made if need be."""

    @uncollected()
    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.shards: dict[str, Shard] = index.read_index(folder / INDEX)
        """Every shard the store knows by name, oldest first; also those that are gone."""
        self.unreadable: list[str] = []
        """Files that are named like shards and are none."""
        found = {}
        for path in sorted(folder.glob("[!.]*" + SUFFIX)):
            if path.name not in self.shards and path.is_file():
                try:
                    found[path.name] = read_shard(path)
                except ValueError as error:
                    logger.warning("%s; it is not used", error)
                    self.unreadable.append(path.name)
        if found:
            self.shards |= found
            try:
                with locked(folder / ".lock"):
                    index.rewrite(folder / INDEX, new=found.values())
            except OSError as error:  # read-only or full: what was read will do
                logger.warning("%s was not brought up to date: %s", folder / INDEX, error)
        self._find_samples()

    @classmethod
    @contextlib.contextmanager
    def alone(cls, folder: Path, *, wait: bool = True) -> Iterator["HiddenStateStore"]:
        """The store, while nobody else adds or removes; raises RuntimeError if not to `wait`."""
        with locked(folder / IN_USE, wait=wait):
            yield cls(folder)

    def holds(self, spec: StateSpec, sample_key: str) -> bool:
        """Whether the states of a sample are here."""
        return sample_key in self.places.get(spec, {})

    def pieces(self, spec: StateSpec, sample_keys: Iterable[str]) -> list[Piece]:
        """Where the bytes of these samples lie; raises KeyError for one that is not here."""
        here = self.places.get(spec, {})
        return [here[key] for key in sample_keys]

    def contents(self) -> dict[str, str]:
        """Checksum by store key of everything that is here: equal stores have equal contents."""
        return {
            spec.store_key(key): piece.row.checksum
            for spec, here in self.places.items()
            for key, piece in here.items()
        }

    def add(self, spec: StateSpec, pieces: Iterable[Piece]) -> str:
        """Copy samples into a new shard; its name."""
        shard = write_shard(self.folder, spec, pieces)
        self._append(shard)
        self._remember(shard)
        return shard.name

    def link(self, path: Path) -> None:
        """Take a shard that lies elsewhere: a hard link, or a copy across file systems."""
        shard = read_shard(path)
        _link(path, self.folder / path.name)
        self._append(shard)
        self._remember(shard)

    @contextlib.contextmanager
    def writer(self, spec: StateSpec, shard_bytes: int) -> Iterator[ShardWriter]:
        """A writer whose finished samples are kept even when the block ends by an exception."""
        writer = ShardWriter(partial(self.add, spec), spec, shard_bytes)
        try:
            yield writer
        finally:
            writer.close()

    def check(self, names: Iterable[str]) -> list[Damage]:
        """Read every byte of these shards, on all cores; what is wrong with them."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return [damage for damage in pool.map(self._check, names) if damage]

    def lost(self, damages: list[Damage]) -> list[tuple[StateSpec, Row]]:
        """The samples that no shard has whole any more."""
        bad = {(damage.name, row) for damage in damages for row in damage.rows}
        rows = {
            (self.shards[damage.name].spec, row.sample_key): row
            for damage in damages
            for row in damage.rows
        }
        for name, shard in self.shards.items():
            for row in shard.rows:
                if (name, row) not in bad:
                    rows.pop((shard.spec, row.sample_key), None)
        return [(spec, row) for (spec, _), row in rows.items()]

    def drop_damaged(self, spec: StateSpec, sample_keys: Iterable[str]) -> int:
        """Check the shards that hold these samples; forget what is damaged, keep what is not.

        Returns:
            Number of these samples that must be extracted again.
        """
        wanted = {key for key in sample_keys if self.holds(spec, key)}
        names = {
            name
            for name, shard in self.shards.items()
            if not (self.folder / name).is_file()
            or (shard.spec == spec and any(row.sample_key in wanted for row in shard.rows))
        }
        for damage in self.check(sorted(names)):
            logger.warning(
                "%s is damaged (%s): %d of its %d samples are lost",
                self.folder / damage.name,
                damage.what,
                len(damage.rows),
                len(self.shards[damage.name].rows),
            )
            self._replace(damage)
        return sum(not self.holds(spec, key) for key in wanted)

    def forget(self, names: Iterable[str]) -> None:
        """Delete shards and their lines in the index."""
        if not (gone := set(names)):
            return
        with locked(self.folder / ".lock"):
            # in this order: a file without a line is no harm, a line without a file looks like loss
            index.rewrite(self.folder / INDEX, gone=gone)
            for name in sorted(gone):
                (self.folder / name).unlink(missing_ok=True)
        self.shards = {name: shard for name, shard in self.shards.items() if name not in gone}
        self._find_samples()

    def write_view(
        self, folder: Path, spec: StateSpec, sample_keys: list[str], shard_bytes: int
    ) -> None:
        """Assemble a view of some samples, after compaction of shards it uses less than half of.

        Args:
            folder: Receives hard links (copies, across file systems) and manifest.json.
            spec: What the states are.
            sample_keys: In dataset order.
            shard_bytes: Size at which a shard made by compaction is closed.

        Raises:
            KeyError: when a sample is not in the store.
        """
        self.pieces(spec, sample_keys)  # all of them are here
        keys = set(sample_keys)
        mostly_unused, chosen = self._choose(spec, keys)
        if mostly_unused:
            with self.writer(spec, shard_bytes) as writer:
                for key in mostly_unused:
                    writer.add(chosen[key])
            _, chosen = self._choose(spec, keys)
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted({piece.file.name for piece in chosen.values()})
        for name in names:
            _link(self.folder / name, folder / name)
        write_manifest(folder, spec, [chosen[key] for key in sample_keys])
        for left in folder.glob("*" + SUFFIX):
            if left.name not in names:
                left.unlink()

    def _choose(self, spec: StateSpec, keys: set[str]) -> tuple[list[str], dict[str, Piece]]:
        """Of every sample the copy in the shard of which most is used; of equals, the oldest.

        Returns:
            Samples that lie in shards of which less than half is used, and every sample's copy.
        """

        def used(shard: Shard) -> float:
            tokens = sum(row.num_tokens for row in shard.rows)
            return sum(r.num_tokens for r in shard.rows if r.sample_key in keys) / tokens

        shards = [
            shard
            for name, shard in self.shards.items()
            if shard.spec == spec and (self.folder / name).is_file()
        ]
        shares = {shard.name: used(shard) for shard in shards}
        chosen: dict[str, Piece] = {}
        for shard in sorted(shards, key=lambda shard: -shares[shard.name]):
            for piece in shard.pieces(self.folder / shard.name):
                if piece.row.sample_key in keys:
                    chosen.setdefault(piece.row.sample_key, piece)
        return [key for key in chosen if shares[chosen[key].file.name] < 0.5], chosen

    def _check(self, name: str) -> Damage | None:
        shard, path = self.shards[name], self.folder / name
        if not path.is_file():
            return Damage(name, "missing", shard.rows)
        bad = tuple(damaged_rows(shard, path))
        try:
            read_shard(path)
        except ValueError:
            return Damage(name, "header", bad)
        return Damage(name, "samples", bad) if bad else None

    def _replace(self, damage: Damage) -> None:
        """Write what is whole of a damaged shard into a new one; its bytes alone are trusted."""
        shard, bad = self.shards[damage.name], set(damage.rows)
        whole = [p for p in shard.pieces(self.folder / damage.name) if p.row not in bad]
        # if its header alone is damaged, the new shard has its name and is in its place already
        if not whole or self.add(shard.spec, whole) != damage.name:
            self.forget([damage.name])

    def _find_samples(self) -> None:
        self.places: dict[StateSpec, dict[str, Piece]] = {}
        """Where the bytes of every sample that is here lie, by spec and sample key."""
        for name, shard in self.shards.items():
            if (self.folder / name).is_file():
                self._remember(shard)

    def _remember(self, shard: Shard) -> None:
        places = self.places.setdefault(shard.spec, {})
        # of two shards with the same sample the younger counts: compaction made it
        places.update((p.row.sample_key, p) for p in shard.pieces(self.folder / shard.name))

    def _append(self, shard: Shard) -> None:
        self.shards.pop(shard.name, None)
        self.shards[shard.name] = shard
        with locked(self.folder / ".lock"):
            index.append(self.folder / INDEX, shard)


def _link(source: Path, target: Path) -> None:
    source = source.resolve()  # never a link to a link, which may go
    scratch = scratch_in(target.parent)
    try:
        try:
            os.link(source, scratch)
        except OSError:  # another file system
            shutil.copy2(source, scratch)
        flush(scratch)
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)  # it is left where both are the same file already
    flush(target.parent)


if __name__ == "__main__":
    from specmill.store_commands import main

    main()

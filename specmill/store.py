"""Hidden states by content: an append-only store of shards, and views of it.

A shard is one safetensors file with many samples, named by the SHA-256 of its bytes. It is written
under another name, flushed, and renamed, so a shard that is there is whole. Its header (8 bytes of
length, then JSON) says which samples it holds, so the store is indexed without torch.

    .cache/hidden_states/<sha256>.safetensors
        states/<store_key>   bf16  [num_tokens, num_layers, hidden_size]
        ids/<store_key>      int32 [num_tokens]

A view (data/hidden_states) is what one dataset needs: the shards, hard-linked, and manifest.json,
which lists its samples in order. Two stores are equal when their manifests' keys and checksums are.
"""

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from specmill.files import digest, file_digest, read_json, write_json

logger = logging.getLogger(__name__)

STORE_FORMAT = 1
"""Raise it when extraction itself changes what it writes: it is part of every store key."""
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class StateSpec:
    """Everything besides the token ids that shapes a sample's hidden states."""

    verifier: str
    """Fingerprint of the verifier."""
    layer_ids: tuple[int, ...]
    """Stored depths: aux ids, then the last layer (specmill.layers)."""
    hidden_size: int
    dtype: str

    def store_key(self, sample_key: str) -> str:
        """Digest that names one sample's hidden states."""
        return digest(
            {
                "format": STORE_FORMAT,
                "sample": sample_key,
                "verifier": self.verifier,
                "layers": list(self.layer_ids),
                "dtype": self.dtype,
            }
        )


def check_states(
    spec: StateSpec, sent_ids: list[int], token_ids: torch.Tensor, states: torch.Tensor
) -> None:
    """Refuse hidden states that are not those of the ids sent.

    Args:
        spec: What was asked for.
        sent_ids: Token ids sent to the engine.
        token_ids: int64 [num_tokens], as the engine echoed them.
        states: [num_tokens, num_layers, hidden_size].

    Raises:
        ValueError: other ids, another shape or dtype, or a value that is not finite.
    """
    if token_ids.tolist() != sent_ids:
        raise ValueError(f"the engine echoed {len(token_ids)} other token ids than were sent")
    shape = (len(sent_ids), len(spec.layer_ids), spec.hidden_size)
    if tuple(states.shape) != shape:
        raise ValueError(f"hidden states are {tuple(states.shape)}, expected {shape}")
    if states.dtype != getattr(torch, spec.dtype):
        raise ValueError(f"hidden states are {states.dtype}, expected {spec.dtype}")
    if not bool(torch.isfinite(states).all()):
        raise ValueError("hidden states hold NaN or infinity")


class HiddenStateStore:
    """The growing store in one folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._shard_of: dict[str, str] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                held = samples_in(path)
            except ValueError:
                logger.warning("%s is damaged; what it held will be extracted again", path)
                path.unlink()
                continue
            self._shard_of.update(dict.fromkeys(held, path.name))

    def __contains__(self, store_key: str) -> bool:
        return store_key in self._shard_of

    @contextlib.contextmanager
    def writer(self, shard_bytes: int) -> Iterator["ShardWriter"]:
        """A writer whose finished samples are kept even when the block ends by an exception."""
        writer = ShardWriter(self, shard_bytes)
        try:
            yield writer
        finally:
            writer.close_shard()

    def drop_damaged(self, store_keys: list[str]) -> int:
        """Check the bytes of the shards that hold these samples; forget and delete bad ones.

        Returns:
            Number of these samples that are lost and must be extracted again.
        """
        needed = {self._shard_of[key] for key in store_keys if key in self._shard_of}
        damaged = {
            name for name in needed if f"{file_digest(self.folder / name)}.safetensors" != name
        }
        lost = sum(self._shard_of.get(key) in damaged for key in store_keys)
        for name in sorted(damaged):
            logger.warning("%s is damaged and will be extracted again", self.folder / name)
            (self.folder / name).unlink()
        self._shard_of = {key: name for key, name in self._shard_of.items() if name not in damaged}
        return lost

    def add_shard(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write one shard and index it."""
        scratch = self.folder / f".{os.getpid()}.tmp"
        save_file(tensors, scratch)
        with scratch.open("rb") as written:
            os.fsync(written.fileno())
        scratch.chmod(0o444)
        name = f"{file_digest(scratch)}.safetensors"
        os.replace(scratch, self.folder / name)
        self._shard_of.update(dict.fromkeys(samples_in(self.folder / name), name))

    def write_view(self, folder: Path, spec: StateSpec, samples: list[tuple[str, int]]) -> None:
        """Assemble a view of some samples.

        Args:
            folder: Receives hard links (copies, across file systems) and manifest.json.
            spec: What the states are.
            samples: (sample_key, num_tokens) in dataset order.

        Raises:
            KeyError: when a sample is not in the store.
        """
        folder.mkdir(parents=True, exist_ok=True)
        rows = []
        for sample_key, num_tokens in samples:
            key = spec.store_key(sample_key)
            rows.append(
                {
                    "sample_key": sample_key,
                    "store_key": key,
                    "num_tokens": num_tokens,
                    "shard": self._shard_of[key],
                }
            )
        shards = {}
        for name in sorted({str(row["shard"]) for row in rows}):
            source, target = self.folder / name, folder / name
            target.unlink(missing_ok=True)
            try:
                os.link(source, target)
            except OSError:
                shutil.copy2(source, target)
            shards[name] = {"bytes": source.stat().st_size}
        write_json(
            folder / MANIFEST,
            {
                "format": STORE_FORMAT,
                "verifier": spec.verifier,
                "layer_ids": list(spec.layer_ids),
                "hidden_size": spec.hidden_size,
                "dtype": spec.dtype,
                "shards": shards,
                "samples": rows,
            },
        )


class ShardWriter:
    """Collects verified samples and closes a shard when it is full."""

    def __init__(self, store: HiddenStateStore, shard_bytes: int):
        self._store = store
        self._shard_bytes = shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0

    def add(self, store_key: str, token_ids: list[int], states: torch.Tensor) -> None:
        """Queue one sample; states are [num_tokens, num_layers, hidden_size]."""
        self._pending[f"states/{store_key}"] = states.contiguous()
        self._pending[f"ids/{store_key}"] = torch.tensor(token_ids, dtype=torch.int32)
        self._pending_bytes += states.numel() * states.element_size()
        if self._pending_bytes >= self._shard_bytes:
            self.close_shard()

    def close_shard(self) -> None:
        """Write what is queued."""
        if self._pending:
            self._store.add_shard(self._pending)
        self._pending, self._pending_bytes = {}, 0


def samples_in(shard: Path) -> list[str]:
    """Store keys of the samples in a shard, read from its header alone.

    Raises:
        ValueError: when the file is cut or not a shard.
    """
    length = shard.stat().st_size
    with shard.open("rb") as handle:
        size = int.from_bytes(handle.read(8), "little")
        try:
            header = json.loads(handle.read(min(size, length)))
            end = (
                8
                + size
                + max(
                    entry["data_offsets"][1]
                    for name, entry in header.items()
                    if name != "__metadata__"
                )
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            end = None
    if end != length:
        raise ValueError(f"{shard} is damaged; delete it and run `dvc repro extract`")
    return [name.removeprefix("states/") for name in header if name.startswith("states/")]


class StateView:
    """Hidden states of one dataset, read sample by sample; checked before the first is read.

    Raises:
        ValueError: when a shard is missing or its bytes are not those its name promises.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifest: dict[str, Any] = read_json(folder / MANIFEST)
        self._row_of = {row["sample_key"]: row for row in self.manifest["samples"]}
        for name in self.manifest["shards"]:
            path = folder / name
            if not path.is_file() or f"{file_digest(path)}.safetensors" != name:
                state = "damaged" if path.is_file() else "missing"
                raise ValueError(
                    f"{path} is {state}; remove {folder} and run `dvc pull extract` "
                    "or `dvc repro -f extract`"
                )

    def __contains__(self, sample_key: str) -> bool:
        return sample_key in self._row_of

    def load(self, sample_key: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Read one sample.

        Returns:
            token ids int32 [num_tokens], states [num_tokens, num_layers, hidden_size].

        Raises:
            KeyError: when the view does not hold the sample.
        """
        row = self._row_of[sample_key]
        with safe_open(self.folder / row["shard"], framework="pt") as shard:
            return (
                shard.get_tensor(f"ids/{row['store_key']}"),
                shard.get_tensor(f"states/{row['store_key']}"),
            )

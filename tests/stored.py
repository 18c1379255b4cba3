"""Samples and stores for tests, made of bytes by hand: torch and the code under test have no part
in what is expected."""

import hashlib
import random
import struct
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from specmill.shards import Piece, Row, StateSpec
from specmill.store import HiddenStateStore

BF16 = StateSpec("fingerprint", (2, 4), hidden_size=4, dtype="bfloat16")
"""A token takes 4 (id) + 2 layers x 4 x 2 bytes = 20 bytes."""
FP8 = replace(BF16, dtype="float8_e4m3fn")
"""A token takes 2 x 4 (scales) + 4 (id) + 2 layers x 4 x 1 byte = 20 bytes too."""
TOKEN = 20


def sample_key(ids: list[int]) -> str:
    return hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids)).hexdigest()


def sample_bytes(spec: StateSpec, ids: list[int]) -> bytes:
    """Scales, ids and states, with states that no other sample or spec has."""
    noise = random.Random(f"{spec} {ids}")
    layers = len(spec.layer_ids)
    scales, width = (b"", 2)
    if spec.dtype == "float8_e4m3fn":
        scales, width = noise.randbytes(len(ids) * layers * 4), 1
    states = noise.randbytes(len(ids) * layers * spec.hidden_size * width)
    return scales + struct.pack(f"<{len(ids)}i", *ids) + states


def piece(folder: Path, spec: StateSpec, ids: list[int]) -> Piece:
    """A sample in a file of its own."""
    content = sample_bytes(spec, ids)
    row = Row(sample_key(ids), len(ids), hashlib.sha256(content).hexdigest())
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{row.checksum}.sample"
    file.write_bytes(content)
    return Piece(row, file, 0)


def add(store: HiddenStateStore, spec: StateSpec, samples: Iterable[list[int]]) -> str:
    """Put samples into one shard; its name."""
    folder = store.folder.parent / "made"
    return store.add(spec, [piece(folder, spec, ids) for ids in samples])


def expected(spec: StateSpec, samples: Iterable[list[int]]) -> dict[str, str]:
    """What a store of these samples contains."""
    return {
        spec.store_key(sample_key(ids)): hashlib.sha256(sample_bytes(spec, ids)).hexdigest()
        for ids in samples
    }


def shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Change one bit of a file in place, through whatever link it has."""
    path.chmod(0o644)
    with path.open("r+b") as handle:
        handle.seek(at if at >= 0 else path.stat().st_size + at)
        (byte,) = handle.read(1)
        handle.seek(-1, 1)
        handle.write(bytes([byte ^ 1 << bit]))

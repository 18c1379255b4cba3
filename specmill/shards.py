"""A shard: one safetensors file with many samples, named so that the name answers for every byte.

    <SHA-256 of header>.safetensors
        8 bytes   length of the header, little-endian
        header    JSON: what the states are, every sample's checksum, and where its tensors lie
        data      sample after sample:
                    scales/<sample_key>   F32  [num_tokens, num_layers]               fp8 only
                    ids/<sample_key>      I32  [num_tokens]
                    states/<sample_key>   BF16, F16, F32 or F8_E4M3
                                               [num_tokens, num_layers, hidden_size]

A sample's bytes are one range of the file, and its checksum is the SHA-256 of that range. The
header follows from the spec and the rows alone, so an index that lists them can be checked against
the name, the name against the header, and the header against the data. Samples are moved as bytes:
nothing here needs torch."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = 2
"""Raise it when extraction itself changes what it writes: it is part of every store key."""
SUFFIX = ".safetensors"
FP8 = "float8_e4m3fn"
_DTYPES = {
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "float32": ("F32", 4),
    FP8: ("F8_E4M3", 1),
}
_BLOCK = 1 << 22
_NAME = re.compile(r"[0-9a-f]{64}\.safetensors", re.ASCII)


@dataclass(frozen=True)
class StateSpec:
    """Everything besides the token ids that shapes a sample's hidden states."""

    verifier: str
    """Fingerprint of the verifier."""
    layer_ids: tuple[int, ...]
    """Stored depths: aux ids, then the last layer (specmill.layers)."""
    hidden_size: int
    dtype: str
    """Of the stored states, as torch calls it; `float8_e4m3fn` has a scale per token and layer."""

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"hidden states are kept as {', '.join(_DTYPES)}, not {self.dtype}")
        numbers = (*self.layer_ids, self.hidden_size)
        if not isinstance(self.verifier, str) or {*map(type, numbers)} != {int} or min(numbers) < 0:
            raise ValueError(f"no hidden states are of verifier, layers and size of {self}")

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "StateSpec":
        """From its JSON form."""
        return cls(**fields | {"layer_ids": tuple(fields["layer_ids"])})

    @property
    def bytes_per_token(self) -> int:
        """Bytes a token takes: layers x hidden size x bytes, its id (4), and 4 a layer for fp8."""
        scales = 4 * len(self.layer_ids) if self.dtype == FP8 else 0
        return len(self.layer_ids) * self.hidden_size * _DTYPES[self.dtype][1] + 4 + scales

    def store_key(self, sample_key: str) -> str:
        """Digest that names one sample's hidden states, of canonical JSON (specmill.files)."""
        before, after = self._around_a_key
        key = json.dumps(sample_key, ensure_ascii=False)
        return hashlib.sha256(f"{before}{key}{after}".encode()).hexdigest()

    @cached_property
    def _around_a_key(self) -> tuple[str, str]:
        fields = {"format": FORMAT, "sample": "", **asdict(self)}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        before, named, after = text.partition('"sample":')
        return before + named, after.removeprefix('""')

    def tensors(self, row: "Row") -> dict[str, tuple[str, list[int]]]:
        """Type and shape of a sample's tensors by name, in the order of their bytes."""
        tokens, layers = row.num_tokens, len(self.layer_ids)
        found = {f"scales/{row.sample_key}": ("F32", [tokens, layers])} if self.dtype == FP8 else {}
        return found | {
            f"ids/{row.sample_key}": ("I32", [tokens]),
            f"states/{row.sample_key}": (
                _DTYPES[self.dtype][0],
                [tokens, layers, self.hidden_size],
            ),
        }


class Row(NamedTuple):
    """One sample of a shard; a tuple, for there are hundreds of thousands."""

    sample_key: str
    num_tokens: int
    checksum: str
    """SHA-256 of the sample's bytes: scales, ids, states."""

    @classmethod
    def of(cls, fields: list[Any]) -> "Row":
        """From its JSON form, checked."""
        row = cls(*fields)
        if not isinstance(row.sample_key, str) or not isinstance(row.checksum, str):
            raise ValueError(f"a sample's key and checksum are text, not {row}")
        if type(row.num_tokens) is not int or row.num_tokens < 1:
            raise ValueError(f"a sample has a number of tokens from 1 on, not {row.num_tokens!r}")
        return row


class Piece(NamedTuple):
    """A sample's bytes in some file, to be copied into a shard."""

    row: Row
    file: Path
    offset: int


@dataclass(frozen=True)
class Shard:
    """What a shard holds; follows from its header, and its header from it."""

    spec: StateSpec
    rows: tuple[Row, ...]

    @property
    def name(self) -> str:
        """Its file's name."""
        return self.called[0]

    @cached_property
    def called(self) -> tuple[str, int]:
        """Its file's name, and the bytes of its header."""
        header = self.header
        return hashlib.sha256(header).hexdigest() + SUFFIX, len(header)

    @property
    def header(self) -> bytes:
        """The first bytes of its file: length, JSON, blanks up to a multiple of 8.

        Made anew each time: kept, it would take more memory than all else that is known of a shard.
        """
        about = json.dumps(describe(self), sort_keys=True)
        text: dict[str, Any] = {"__metadata__": {"specmill": about}}
        end = 0
        for row in self.rows:
            for name, (dtype, shape) in self.spec.tensors(row).items():
                start, end = end, end + _num_bytes(dtype, shape)
                text[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        encoded = json.dumps(text, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        return len(encoded).to_bytes(8, "little") + encoded

    @property
    def num_bytes(self) -> int:
        """Size of its file."""
        tokens = sum(row.num_tokens for row in self.rows)
        return self.called[1] + tokens * self.spec.bytes_per_token

    def pieces(self, file: Path) -> Iterator[Piece]:
        """Its samples with the places of their bytes in its file."""
        offset, each = self.called[1], self.spec.bytes_per_token
        for row in self.rows:
            yield Piece(row, file, offset)
            offset += row.num_tokens * each


def _num_bytes(dtype: str, shape: list[int]) -> int:
    size = {"I32": 4, **dict(_DTYPES.values())}[dtype]
    for length in shape:
        size *= length
    return size


def parse(about: dict[str, Any]) -> Shard:
    """A shard from its JSON form, as its header and the index keep it.

    Raises:
        ValueError, KeyError, TypeError: when it is none, or its `format` is not ours.
    """
    fields = dict(about)
    if fields.pop("format") != FORMAT:
        raise ValueError(f"format {about['format']}, this version reads {FORMAT}")
    rows = tuple(map(Row.of, fields.pop("samples")))
    return Shard(StateSpec.of(fields), rows)


def recall(about: dict[str, Any], name: str, header_bytes: int) -> Shard:
    """As `parse`, where the name and the header's length are known: to make them takes long."""
    shard = parse(about)
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a shard")
    vars(shard)["called"] = (name, header_bytes)
    return shard


def describe(shard: Shard) -> dict[str, Any]:
    """The JSON form of a shard."""
    rows = [[row.sample_key, row.num_tokens, row.checksum] for row in shard.rows]
    return {"format": FORMAT, **asdict(shard.spec), "samples": rows}


def read_shard(path: Path, *, named: bool = True) -> Shard:
    """Read a shard's header; its data is not looked at.

    Args:
        path: The file.
        named: Whether it carries the name of its content, as everything in a store does.

    Raises:
        ValueError: when it is no shard, was cut or lengthened, or its header or name was changed.
    """
    with path.open("rb") as handle:
        length = handle.read(8)
        encoded = length + handle.read(min(int.from_bytes(length, "little"), path.stat().st_size))
    try:
        metadata = json.loads(encoded[8:])["__metadata__"]["specmill"]
        shard = parse(json.loads(metadata))
        is_ours = shard.header == encoded
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged or no shard of this version ({error!r})") from None
    if not is_ours or (named and shard.name != path.name):
        raise ValueError(f"{path} is damaged: its header is not the one it was written with")
    if path.stat().st_size != shard.num_bytes:
        raise ValueError(
            f"{path} is damaged: {path.stat().st_size} bytes, {shard.num_bytes} were written"
        )
    return shard


def damaged_rows(shard: Shard, file: Path) -> list[Row]:
    """The samples whose bytes in `file` are not those that were written."""
    return [piece.row for piece in shard.pieces(file) if not is_whole(piece, shard.spec)]


def is_whole(piece: Piece, spec: StateSpec) -> bool:
    """Whether a sample's bytes match its checksum."""
    left = piece.row.num_tokens * spec.bytes_per_token
    found = hashlib.sha256()
    with piece.file.open("rb", buffering=0) as handle:
        handle.seek(piece.offset)
        while left and (block := handle.read(min(_BLOCK, left))):
            found.update(block)
            left -= len(block)
    return not left and found.hexdigest() == piece.row.checksum

"""Reading a view: the hidden states of one dataset as tensors.

Tensors are slices of the mapped file: nothing is copied until a batch is built from them. A
sample's bytes are compared with its checksum when it is first read."""

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from specmill.manifest import Manifest, way_out_of_damage
from specmill.shards import Piece, Row, read_shard


class StateView(Manifest):
    """Hidden states of one dataset, read sample by sample. Can be sent to another process.

    Raises:
        ValueError: when the manifest is missing, damaged or of another version.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._checked: set[str] = set()

    def load(self, sample_key: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Read one sample.

        Returns:
            token ids int32 [num_tokens]; states [num_tokens, num_layers, hidden_size] as stored;
            scales float32 [num_tokens, num_layers] when they are fp8, else None. All are maps of
            the file: do not write to them.

        Raises:
            KeyError: when the view does not hold the sample.
            ValueError: when its bytes, or its shard's header, are not those that were written.
            FileNotFoundError: when its shard is missing.
        """
        try:
            tensors = self._read(self.places[sample_key])
        except (ValueError, SafetensorError) as error:
            raise ValueError(f"{error}; {way_out_of_damage(self.folder)}") from None
        return tensors["ids"], tensors["states"], tensors.get("scales")

    def _read(self, piece: Piece) -> dict[str, torch.Tensor]:
        if piece.file not in self._handles:
            read_shard(piece.file)
            self._handles[piece.file] = safe_open(piece.file, framework="pt")
        handle = self._handles[piece.file]
        tensors = {
            name.split("/")[0]: handle.get_tensor(name) for name in self.spec.tensors(piece.row)
        }
        if piece.row.sample_key not in self._checked:
            check_bytes(piece.row, tensors, piece.file)
            self._checked.add(piece.row.sample_key)
        return tensors

    @cached_property
    def _handles(self) -> dict[Path, Any]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        # maps stay with their process
        return {name: value for name, value in self.__dict__.items() if name != "_handles"}


def check_bytes(row: Row, tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Compare a sample's tensors, in the order of their bytes, with its checksum.

    Raises:
        ValueError: naming sample and file.
    """
    found = hashlib.sha256()
    for tensor in tensors.values():
        found.update(tensor.reshape(-1).view(torch.uint8).numpy())
    if found.hexdigest() != row.checksum:
        raise ValueError(f"hidden states of sample {row.sample_key[:12]} in {file} are damaged")

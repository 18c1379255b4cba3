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
from specmill.shards import Piece, StateSpec, read_shard


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
        key = piece.row.sample_key
        tensors = read_row(
            self._handles[piece.file], self.spec, piece, check=key not in self._checked
        )
        self._checked.add(key)
        return tensors

    @cached_property
    def _handles(self) -> dict[Path, Any]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        # maps stay with their process
        return {name: value for name, value in self.__dict__.items() if name != "_handles"}


def read_row(
    handle: Any, spec: StateSpec, piece: Piece, *, check: bool = True
) -> dict[str, torch.Tensor]:
    """A sample's tensors from a shard that is open.

    Args:
        handle: `safetensors.safe_open` of the shard.
        spec: What it holds.
        piece: The sample; its file is named in the error.
        check: Whether to compare the bytes with the checksum.

    Returns:
        `ids`, `states` and, of fp8, `scales`.

    Raises:
        ValueError: naming sample and file, when its bytes are not those that were written.
    """
    row = piece.row
    tensors = {name.split("/")[0]: handle.get_tensor(name) for name in spec.tensors(row)}
    if check:
        found = hashlib.sha256()
        for tensor in tensors.values():  # in the order of their bytes
            found.update(tensor.reshape(-1).view(torch.uint8).numpy())
        if found.hexdigest() != row.checksum:
            raise ValueError(
                f"hidden states of sample {row.sample_key[:12]} in {piece.file} are damaged"
            )
    return tensors

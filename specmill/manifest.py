"""manifest.json: which samples a view holds, and where their bytes lie; read without torch.

data/hidden_states/
    <digest>.safetensors   shards; they may hold samples of no use here
    manifest.json          what the states are, the shards, and the samples in dataset order
"""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specmill.files import read_json, uncollected, write_atomically
from specmill.shards import FORMAT, SUFFIX, Piece, Row, Shard, StateSpec, read_shard

MANIFEST = "manifest.json"
_WAY_OUT = "`dvc pull extract` fetches it, `dvc repro extract` on the verifier's machine makes it"


def write_manifest(
    folder: Path, spec: StateSpec, pieces: list[Piece], *, online: bool = False
) -> None:
    """Write manifest.json; equal views, equal bytes.

    Args:
        folder: The view; it holds the shards.
        spec: What the states are.
        pieces: Where the samples lie in shards of these names, in dataset order.
        online: Whether the view holds nothing, because training asks a running verifier.
    """
    shards = sorted({piece.file.name for piece in pieces})
    number = {name: index for index, name in enumerate(shards)}
    manifest = {
        "format": FORMAT,
        **asdict(spec),
        "online": online,
        "shards": shards,
        # sample_key, num_tokens, checksum, index of its shard, offset in it
        "samples": [
            [
                piece.row.sample_key,
                piece.row.num_tokens,
                piece.row.checksum,
                number[piece.file.name],
                piece.offset,
            ]
            for piece in pieces
        ],
    }
    write_atomically(folder / MANIFEST, json.dumps(manifest, separators=(",", ":")).encode())


class Manifest:
    """What the view in a folder holds.

    Raises:
        ValueError: when manifest.json is missing, damaged or of another version.
    """

    @uncollected()
    def __init__(self, folder: Path):
        self.folder = folder
        path = folder / MANIFEST
        if not path.is_file():
            raise ValueError(f"{path} is missing; {_WAY_OUT}")
        fields: dict[str, Any] = read_json(path)
        if not isinstance(fields, dict):
            raise ValueError(f"{path} is damaged; {_WAY_OUT}")
        if fields.pop("format", None) != FORMAT:
            raise ValueError(f"{folder} was written by another version; run `dvc repro extract`")
        try:
            files = [folder / _plain(name) for name in fields.pop("shards")]
            samples = fields.pop("samples")
            self.online: bool = fields.pop("online")
            """Whether it holds no states, because a running verifier is asked for them."""
            self.spec = StateSpec.of(fields)
            self.places = {
                key: Piece(Row(key, num_tokens, checksum), files[_index(number)], _index(offset))
                for key, num_tokens, checksum, number, offset in samples
            }
            """Where each sample lies, by sample key, in dataset order."""
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise ValueError(f"{path} is damaged ({error!r}); {_WAY_OUT}") from None

    def check_verifier(self, identity: dict[str, Any]) -> None:
        """Refuse states of another verifier than the one with this identity.json.

        Raises:
            ValueError: naming both.
        """
        if self.spec.verifier != identity["fingerprint"]:
            raise ValueError(
                f"{self.folder} holds states of verifier {self.spec.verifier[:12]}, and "
                f"data/verifier_head is of {identity['name']} ({identity['fingerprint'][:12]}); "
                "pull or make both from one commit"
            )

    def files(self, sample_keys: Iterable[str]) -> list[Path]:
        """The shards that hold these samples, whether they are there or not.

        Raises:
            ValueError: with the number of samples that the view does not know.
        """
        keys = list(sample_keys)
        unknown = [key for key in keys if key not in self.places]
        if unknown:
            raise ValueError(
                f"{self.folder} holds no hidden states of {len(unknown)} of {len(keys)} samples, "
                f"the first {unknown[0][:12]}; run `dvc repro extract`"
            )
        return sorted({self.places[key].file for key in keys})

    def require(self, sample_keys: Iterable[str]) -> None:
        """Refuse to go on unless all these samples can be read: never train on less in silence.

        Raises:
            ValueError: with the number of samples that are missing, and the shard that is missing
                or whose header, name or length is wrong.
        """
        keys = list(sample_keys)
        files = self.files(keys)
        missing = {file for file in files if not file.is_file()}
        if missing:
            lost = sum(self.places[key].file in missing for key in keys)
            raise ValueError(
                f"hidden states of {lost} of {len(keys)} samples are missing: {len(missing)} of "
                f"{len(files)} shards are not in {self.folder}, the first {min(missing).name}; "
                f"{_WAY_OUT}; docs/rented-node.md says how to train on fewer"
            )
        for file in files:
            try:
                self._compare(read_shard(file), file, keys)
            except ValueError as error:
                lost = sum(self.places[key].file == file for key in keys)
                raise ValueError(
                    f"hidden states of {lost} of {len(keys)} samples cannot be read: {error}; "
                    f"{way_out_of_damage(self.folder)}"
                ) from None

    def _compare(self, shard: Shard, file: Path, sample_keys: list[str]) -> None:
        """Refuse a shard that does not hold these samples as the manifest says."""
        held = {piece.row.sample_key: piece for piece in shard.pieces(file)}
        wanted = {key: self.places[key] for key in sample_keys if self.places[key].file == file}
        if shard.spec != self.spec or not wanted.items() <= held.items():
            raise ValueError(f"{file} holds other states than {self.folder / MANIFEST} says")


def _index(number: int) -> int:
    """A place from 0 on; raises ValueError for what counts from the end or is none."""
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no place")
    return number


def _plain(name: str) -> str:
    """A shard's name; raises ValueError for a path, which would lead out of the view."""
    if not re.fullmatch(r"[0-9a-f]{64}" + re.escape(SUFFIX), name):
        raise ValueError(f"shard {name[:99]!r} is no file of the view")
    return name


def way_out_of_damage(folder: Path) -> str:
    """What to do about a view that holds other bytes than were written."""
    return (
        f"`python -m specmill.store verify {folder}` tells how much is lost. Remove the folder and "
        "run `dvc pull extract`, or `dvc repro extract` where they were extracted"
    )

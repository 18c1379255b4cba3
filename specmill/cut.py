"""The first layers of a decoder as a model of its own: a draft model that nobody trained.

A decoder's layers refine one residual stream, so its first layers, followed by its own final norm
and lm_head, already are a language model, if a poor one (early exit; LayerSkip, arXiv 2404.16710).
Checkpoints are copied as bytes, file by file: nothing is loaded, whatever the model's size or the
type of its weights.
"""

import json
import shutil
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from specmill.files import read_json, read_object, write_json
from specmill.text_decoder import decoder_prefix, text_path, with_text

INDEX = "model.safetensors.index.json"
_COPIED = ("*.json", "*.model", "*.jinja", "*.txt", "*.py")
_OURS = ("identity.json", "reference.json", "provenance.json")
_BLOCK = 1 << 24


def cut_model(model: Path, folder: Path, num_layers: int, key: str) -> None:
    """Write the first layers of a checkpoint, with embeddings, final norm, lm_head and tokenizer.

    Args:
        model: A transformers checkpoint: config.json, *.safetensors, tokenizer.
        folder: Receives the checkpoint.
        num_layers: Decoder layers kept.
        key: Name of that number in params.yaml, for messages.

    Raises:
        ValueError: when the model has no more layers than that, or is none that can be cut.
    """
    config = cut_config(read_object(model / "config.json"), num_layers, key)
    files = weight_files(model)
    names = (name for file in files for name in read_header(file)[0])
    prefix = f"{decoder_prefix(names)}layers."
    folder.mkdir(parents=True, exist_ok=True)
    copy_companions(model, folder)
    write_json(folder / "config.json", config)
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for file in files:
        kept = {
            name: tensor
            for name, tensor in read_header(file)[0].items()
            if _is_kept(name, prefix, num_layers)
        }
        if kept:
            num_bytes += copy_tensors(file, folder / file.name, kept)
            weight_map |= dict.fromkeys(kept, file.name)
    if (model / INDEX).is_file():
        metadata = {"total_size": num_bytes}
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})


def copy_companions(model: Path, folder: Path) -> None:
    """Copy what a checkpoint holds besides weights: configs, tokenizer, its index, its code.

    Raises:
        ValueError: when a link leads out of the checkpoint: a repository that was cloned can have
            one to any file of whoever cloned it, and copies are pushed.
    """
    own = model.resolve()
    if own.parent.name == "snapshots":  # of the Hub's cache, whose files are links into `blobs`
        own = own.parent.parent
    for pattern in _COPIED:
        for path in model.glob(pattern):
            if path.name in _OURS:
                continue
            if not path.resolve().is_relative_to(own):
                raise ValueError(f"{path} is a link out of {own}; put the file itself there")
            shutil.copyfile(path, folder / path.name)


def cut_config(config: dict[str, Any], num_layers: int, key: str) -> dict[str, Any]:
    """A model's config.json with fewer layers; lists with one entry per layer are cut too.

    Raises:
        ValueError: when the model has no more layers than that, or does not say how many it has.
    """
    text = reduce(getitem, text_path(config), config)
    if "num_hidden_layers" not in text:
        raise ValueError("config.json of the verifier has no num_hidden_layers: it cannot be cut")
    total = text["num_hidden_layers"]
    if num_layers >= total:
        raise ValueError(f"{key} is {num_layers}, but the verifier has {total} layers; take fewer")
    cut = {
        name: value[:num_layers] if isinstance(value, list) and len(value) == total else value
        for name, value in text.items()
    } | {"num_hidden_layers": num_layers}
    return with_text(config, cut)


def weight_files(model: Path) -> list[Path]:
    """The safetensors files of a checkpoint, those of its index if it has one.

    Raises:
        ValueError: when there are none, or one of the index is missing.
    """
    if (model / INDEX).is_file():
        names = sorted(set(read_json(model / INDEX)["weight_map"].values()))
        if outside := [name for name in names if name != Path(name).name]:
            raise ValueError(f"{model / INDEX} names {outside[0]!r}, which is no file beside it")
        files = [model / name for name in names]
    else:
        files = sorted(model.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise ValueError(f"{model} holds no {', '.join(missing) or '.safetensors weights'}")
    return files


def _is_kept(name: str, prefix: str, num_layers: int) -> bool:
    number = name.removeprefix(prefix).split(".")[0]
    return not name.startswith(prefix) or int(number) < num_layers


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Tensors of a safetensors file by name, in the order of their bytes, and where the bytes
    begin (8 bytes of length, little-endian, then the header as JSON, then the bytes)."""
    with file.open("rb") as source:
        length = int.from_bytes(source.read(8), "little")
        header = json.loads(source.read(length))
    header.pop("__metadata__", None)
    ordered = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    return dict(ordered), 8 + length


def copy_tensors(source: Path, target: Path, kept: dict[str, Any]) -> int:
    """Write a safetensors file of some of another's tensors; the number of their bytes.

    Args:
        source: The file they are in.
        target: The file to write.
        kept: Their entries in the header of `source` (`read_header`), in the order of their bytes.
    """
    start = read_header(source)[1]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in kept.items():
        begin, end = end, end + tensor["data_offsets"][1] - tensor["data_offsets"][0]
        header[name] = tensor | {"data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the bytes begin at a multiple of 8
    with source.open("rb") as reading, target.open("wb") as writing:
        writing.write(len(text).to_bytes(8, "little") + text)
        for tensor in kept.values():
            begin, until = tensor["data_offsets"]
            reading.seek(start + begin)
            for at in range(begin, until, _BLOCK):
                writing.write(reading.read(min(_BLOCK, until - at)))
    return end

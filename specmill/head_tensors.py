"""Tensors of a head that was trained elsewhere: read from whatever files they are in."""

import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from specmill.files import read_object
from specmill.section import DoesNotFit

Tensors = dict[str, torch.Tensor]

_COMPUTED = "rotary_emb.inv_freq"
"""Ends the name of a buffer that older checkpoints carry and every engine computes."""
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_WHOLE = (torch.int64, torch.int32)


def read_tensors(folder: Path) -> Tensors:
    """All tensors of a checkpoint, in one file or several, safetensors or torch's.

    Raises:
        ValueError: when there are none, when a file is damaged, or when one is missing.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    tensors: Tensors = {}
    for file in files:
        try:
            held = (
                load_file(file)
                if file.suffix == ".safetensors"
                else torch.load(file, map_location="cpu", weights_only=True)
            )
        except (SafetensorError, pickle.UnpicklingError, OSError, EOFError, RuntimeError) as error:
            raise ValueError(f"{file} cannot be read: {error}") from None
        tensors |= _tensors_by_name(held, file)
    if not tensors:
        raise ValueError(f"{folder} holds no weights (*.safetensors or pytorch_model*.bin)")
    for index in folder.glob("*.index.json"):
        listed = read_object(index).get("weight_map")
        if not isinstance(listed, dict):
            raise ValueError(f"{index} has no weight_map, an object; fetch it again")
        if absent := listed.keys() - tensors.keys():
            raise ValueError(
                f"{folder} lacks {len(absent)} tensors that {index.name} lists, the first "
                f"{min(absent)}; fetch it again"
            )
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(_COMPUTED)}


def _tensors_by_name(held: Any, file: Path) -> Tensors:
    """What a file held, which in torch's format may be anything."""
    if not isinstance(held, dict):
        raise ValueError(f"{file} holds a {type(held).__name__}, and no tensors by their names")
    if other := [name for name, tensor in held.items() if not isinstance(tensor, torch.Tensor)]:
        raise ValueError(f"{file} holds more than tensors by their names: {other[:3]}")
    return dict(held)


def check_types(tensors: Tensors, source: str) -> None:
    """Refuse weights that are no floats of 16 bits or more, and a d2t of no whole numbers.

    Raises:
        DoesNotFit: naming the tensors.
    """
    wrong = [
        f"{name} in {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in tensors.items()
        if name != "t2d" and tensor.dtype not in (_WHOLE if name == "d2t" else _FLOATS)
    ]
    if wrong:
        raise DoesNotFit(
            f"{source} holds {', '.join(wrong)}; weights are floats of 16 bits or more, and d2t is "
            "of whole numbers"
        )

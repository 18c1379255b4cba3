"""Hidden states as tensors and as bytes: what an engine hands over, and what is kept of it.

fp8 keeps each value as e4m3 (4 bits of exponent, 3 of mantissa, largest value 448) with one float32
scale per token and layer, so that the largest of a layer's values is kept exactly as far as e4m3
goes:

    scale  = max |states[token, layer, :]| / 448        float32
    stored = e4m3(states / scale)                       read back as stored * scale

hs_connectors' own fp8 has one scale per token over all layers; the residual stream grows by two
orders of magnitude from the first to the last layer, so early layers would lose their small values
there.
"""

import contextlib
import fcntl
import hashlib
import os
from pathlib import Path

import numpy as np
import torch

from specmill.samples import key_of
from specmill.shards import FP8, Row, Shard, StateSpec

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantise(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 of states [num_tokens, num_layers, hidden_size].

    Returns:
        e4m3 of the same shape, and float32 scales [num_tokens, num_layers]; a layer of zeros (or
        of values so small that float32 has no exact scale for them) has scale 1.
    """
    values = states.float()
    scales = values.abs().amax(-1) / _LARGEST
    is_exact = scales >= torch.finfo(torch.float32).tiny
    scales = torch.where(is_exact, scales, torch.ones_like(scales))
    return (values / scales.unsqueeze(-1)).to(torch.float8_e4m3fn), scales


def restore(states: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """States as they are trained on: `states` themselves, or what fp8 made of them, in `dtype`."""
    if scales is None:
        return states.to(dtype)
    return (states.float() * scales.unsqueeze(-1)).to(dtype)


def check_states(spec: StateSpec, token_ids: torch.Tensor, states: torch.Tensor) -> None:
    """Refuse hidden states that cannot be those of these tokens.

    Args:
        spec: What was asked for.
        token_ids: [num_tokens].
        states: [num_tokens, num_layers, hidden_size], as the engine computed them.

    Raises:
        ValueError: another shape or dtype, or a value that is not finite.
    """
    shape = (len(token_ids), len(spec.layer_ids), spec.hidden_size)
    if tuple(states.shape) != shape:
        raise ValueError(f"hidden states are {tuple(states.shape)}, expected {shape}")
    if spec.dtype != FP8 and states.dtype != getattr(torch, spec.dtype):
        raise ValueError(f"hidden states are {states.dtype}, expected {spec.dtype}")
    if not _is_finite(states):
        raise ValueError("hidden states hold NaN or infinity")


def _is_finite(states: torch.Tensor) -> bool:
    """torch.isfinite(states).all() from the bits, 40 times as fast on one core for bfloat16.

    A float is NaN or infinite when its exponent is all ones, that is, when its bits without the
    sign are no less than those of infinity.
    """
    bits = {2: torch.int16, 4: torch.int32}[states.element_size()]
    infinity = torch.tensor(torch.inf, dtype=states.dtype).view(bits).item()
    magnitudes = states.contiguous().view(bits).numpy() & np.iinfo(f"i{states.element_size()}").max
    return bool(magnitudes.size == 0 or magnitudes.max() < infinity)


def stage(path: Path, spec: StateSpec, token_ids: torch.Tensor, states: torch.Tensor) -> Row:
    """Write one sample as a shard of its own, whole or not at all; it is not named by content.

    Args:
        path: The file.
        spec: What is kept.
        token_ids: [num_tokens], any integer type.
        states: [num_tokens, num_layers, hidden_size], on the CPU.

    Raises:
        ValueError: when they are not states of these tokens (`check_states`).
    """
    check_states(spec, token_ids, states)
    ids = token_ids.to(torch.int32).contiguous()
    kept, scales = quantise(states) if spec.dtype == FP8 else (states.contiguous(), None)
    tensors = [tensor for tensor in (scales, ids, kept) if tensor is not None]
    blocks = [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in tensors]
    checksum = hashlib.sha256()
    for block in blocks:
        checksum.update(block)
    row = Row(key_of(ids.numpy()), len(ids), checksum.hexdigest())
    scratch = path.with_suffix(".tmp")
    with scratch.open("wb") as out:
        out.write(Shard(spec, (row,)).header)
        for block in blocks:
            out.write(block)
    scratch.replace(path)
    return row


def wait_for(path: Path) -> None:
    """Wait until the engine that stages `path` has let go of its lock, if it holds one."""
    lock = path.with_name(path.name + ".lock")
    with contextlib.suppress(FileNotFoundError):
        handle = os.open(lock, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)
        finally:
            os.close(handle)

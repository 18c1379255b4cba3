"""How fast this machine is, measured in seconds: memory, arithmetic, disk.

Nothing is looked up by a name, since machines of one name differ. Figures are the best of a few
tries, thus of a machine that does nothing else.
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

_TRIES = 5
_COPIED = 64 * 2**20  # numbers; far above any cache
_ROWS = {"cpu": 1024, "cuda": 8192}  # of a square matrix
_WRITTEN = 64 * 2**20


@dataclass(frozen=True)
class Speed:
    """What a machine was found to do."""

    bandwidth_bytes_per_s: float
    """Of the memory that an engine's weights lie in."""
    flop_per_s: float
    """Of matrix products in the type that the verifier is computed in."""
    read_bytes_per_s: float
    """Of the disk, past the page cache."""
    write_bytes_per_s: float


def measure(device: str, dtype: str, folder: Path) -> Speed:
    """Measure this machine.

    Args:
        device: `cpu` or `cuda`.
        dtype: What is computed in, as torch calls it.
        folder: Where the file that is written and read lies for a moment.
    """
    read, written = _disk(folder)
    return Speed(_bandwidth(device), _flop(device, getattr(torch, dtype)), read, written)


def _bandwidth(device: str) -> float:
    source = torch.ones(_COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED / _best(lambda: target.copy_(source), device)


def _flop(device: str, dtype: torch.dtype) -> float:
    rows = _ROWS[device]
    matrix = torch.ones(rows, rows, dtype=dtype, device=device)
    return 2 * rows**3 / _best(lambda: matrix @ matrix, device)


def _best(action: Callable[[], object], device: str) -> float:
    """Seconds of the fastest of several tries, without the first."""
    times = []
    for _ in range(_TRIES + 1):
        started = time.perf_counter()
        action()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _disk(folder: Path) -> tuple[float, float]:
    """Bytes a second, read and written."""
    block = os.urandom(_WRITTEN)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        started = time.perf_counter()
        file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - started
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        file.seek(0)
        while file.read(2**22):
            pass
        return _WRITTEN / (time.perf_counter() - started), _WRITTEN / written

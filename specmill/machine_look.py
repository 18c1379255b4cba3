"""What the doctor asks this machine, beside specmill/hardware.py: facts that change in an hour."""

import os
import re
import resource
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from specmill import compat
from specmill.hardware import describe_machine

_SHM = Path("/dev/shm")


@dataclass(frozen=True)
class MachineNow:
    """A machine at this moment."""

    hardware: dict[str, Any]
    """Of `describe_machine`."""
    device: str
    """`cpu` or `cuda`: what torch computes on."""
    native_dtype: str
    """What bfloat16 weights are computed in (`compat.compute_dtype`)."""
    torch_cuda: str | None
    """CUDA that torch was built for, such as `13.0`; None of a CPU build."""
    driver_cuda: str | None
    """The newest CUDA that the driver runs; None without one."""
    gpu_bytes: tuple[tuple[int, int], ...]
    """Memory of every GPU: all and free."""
    links: str
    """What `nvidia-smi topo -m` prints; empty with fewer than two GPUs."""
    available_bytes: int
    """Memory that programs can still have."""
    shm_bytes: int
    """Free in /dev/shm."""
    open_files: int
    """The limit that a process may raise itself to."""
    compiler: str | None
    """Where g++ is."""


def look() -> MachineNow:
    """Ask this machine; torch is imported."""
    import torch

    hardware, device = describe_machine(), compat.device()
    driver = re.search(r"CUDA Version: ([\d.]+)", _nvidia_smi())
    memory = _nvidia_smi("--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits")
    return MachineNow(
        hardware=hardware,
        device=device,
        native_dtype=compat.compute_dtype("bfloat16", device),
        torch_cuda=torch.version.cuda,
        driver_cuda=driver.group(1) if driver else None,
        gpu_bytes=tuple(
            (int(total) * 2**20, int(free) * 2**20)
            for total, free in re.findall(r"^(\d+), (\d+)$", memory, re.M)
        ),
        links=_nvidia_smi("topo", "-m") if len(hardware["gpus"]) > 1 else "",
        available_bytes=psutil.virtual_memory().available,
        shm_bytes=shutil.disk_usage(_SHM).free if _SHM.is_dir() else 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        compiler=shutil.which("g++", path=os.environ.get("PATH")),
    )


def _nvidia_smi(*words: str) -> str:
    """What it prints; empty where there is none or it fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *words], capture_output=True, text=True, check=True, timeout=30
        )
    except (FileNotFoundError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return ""
    return done.stdout

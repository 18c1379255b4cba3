"""What this machine is, as a tracked dependency: a result from another machine is another result.

Only facts that stay the same while the machine does: never clocks, load or free memory.
"""

import hashlib
import os
import platform
import subprocess
import uuid
from pathlib import Path
from typing import Any

from specmill.compat import engine_versions

_SALT = "specmill hardware"


def describe_machine() -> dict[str, Any]:
    """CPU, usable cores, memory, GPUs with driver, engine versions and a salted machine id.

    Takes well under a second: nothing heavy is imported.
    """
    return {
        "cpu_model": _cpu_model(),
        "cpu_features": _cpu_features(),
        "num_usable_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "gpus": _gpus(),
        "versions": engine_versions() | {"python": platform.python_version()},
        "machine": _machine_id(),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16")


def _cpu_features() -> list[str]:
    """Instructions that decide how fast a CPU engine is; machines of one model name differ here."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, listed = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return [feature for feature in _FEATURES if feature in listed.split()]
    return []


def _gpus() -> list[dict[str, str]]:
    """Name, memory and driver of each GPU as nvidia-smi tells them; empty without a GPU."""
    try:
        done = subprocess.run(
            [
                "nvidia-smi",
                "--query-gpu=name,memory.total,driver_version",
                "--format=csv,noheader",
            ],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        return []
    rows = [line.split(", ") for line in done.stdout.strip().splitlines()]
    return [{"name": name, "memory": memory, "driver": driver} for name, memory, driver in rows]


def _machine_id() -> str:
    """A short digest that tells machines apart without naming them."""
    for path in (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id")):
        if path.is_file() and path.read_text().strip():
            raw = path.read_text().strip()
            break
    else:
        raw = f"{uuid.getnode():x}"
    return hashlib.sha256(f"{_SALT}:{raw}".encode()).hexdigest()[:12]

"""The doctor on the machine: versions, GPUs and links, what engines need of the system."""

import re
import socket
import subprocess
import sys
from collections import Counter

from specmill import compat
from specmill.finding import Finding
from specmill.machine_look import MachineNow
from specmill.params import Params
from specmill.tested import TESTED, differences

_PYTHON = (3, 11)
_NETWORKS = re.compile(r"\bNV\d+\b")


def check_versions(machine: MachineNow) -> list[Finding]:
    """Installed versions against the tested ones, and torch's CUDA against the driver's."""
    versions, device = machine.hardware["versions"], machine.device
    has = ", ".join(f"{name} {version}" for name, version in versions.items())
    apart = differences(versions, device)
    found = [
        Finding("warning", "versions", ", ".join(apart),
                "the lock file has what was tested (make venv); docs/doctor.md has the table")
        if apart else Finding("ok", "versions", f"{has}: tested on {device}")
    ]  # fmt: skip
    if tuple(map(int, versions["python"].split(".")[:2])) < _PYTHON:
        found.append(Finding("problem", "python", versions["python"], "3.11 or newer is needed"))
    gpus = machine.hardware["gpus"]
    if gpus and device == "cpu":
        built = machine.torch_cuda or "no CUDA"
        found.append(
            Finding("problem", "cuda", f"{len(gpus)} GPU(s), but torch (built for {built}) sees "
                    "none", "make repro PROFILE=gpu, or CUDA_VISIBLE_DEVICES hides them")
        )  # fmt: skip
    if machine.torch_cuda and machine.driver_cuda:
        newer = int(machine.torch_cuda.split(".")[0]) > int(machine.driver_cuda.split(".")[0])
        text = f"torch is built for {machine.torch_cuda}, the driver runs {machine.driver_cuda}"
        do = "update the driver" if newer else ""
        found.append(Finding("problem" if newer else "ok", "cuda", text, do))
    if gpus:
        found.append(_driver(gpus[0]["driver"]))
    return found


def _driver(driver: str) -> Finding:
    tested = [row.driver for row in TESTED if row.driver]
    if driver.split(".")[0] in tested:
        return Finding("ok", "driver", f"{driver}: tested")
    return Finding("warning", "driver", f"{driver} (tested: {', '.join(tested)})",
                   "look at engine warnings in the first report")  # fmt: skip


def check_gpus(machine: MachineNow, params: Params) -> list[Finding]:
    """Names, number, free memory and links; nothing to say without a GPU."""
    gpus = machine.hardware["gpus"]
    if not gpus:
        cores = machine.hardware["num_usable_cores"]
        return [Finding("ok", "gpus", f"none; {cores} cores of {machine.hardware['cpu_model']}")]
    kinds = Counter(f"{gpu['name']} {gpu['memory']}" for gpu in gpus)
    has = ", ".join(f"{number} x {kind}" for kind, number in kinds.items())
    found = [Finding("ok", "gpus", has)]
    share = params.runtime.gpu_memory_utilization
    if machine.gpu_bytes:
        total, free = machine.gpu_bytes[0]
        if free < share * total:
            found.append(
                Finding("problem", "gpu memory", f"{free / 2**30:.1f} GiB of {total / 2**30:.1f} "
                        f"are free, an engine takes {share:.0%}", "end what uses the GPU, or lower "
                        "runtime.gpu_memory_utilization")
            )  # fmt: skip
    each = params.parallel.tensor_parallel_size
    for key, asked in _gpus_asked(params).items():
        if asked > len(gpus):
            found.append(Finding("problem", "gpus", f"{key} asks for {asked} GPUs, there are "
                                 f"{len(gpus)}", "lower it"))  # fmt: skip
    if machine.links:
        fast = bool(_NETWORKS.search(machine.links))
        kind = "NVLink" if fast else "PCIe only"
        found.append(Finding("ok", "links", f"{len(gpus)} GPUs, {kind}; an engine uses {each}"))
    return found


def _gpus_asked(params: Params) -> dict[str, int]:
    """GPUs that are used at once, by the parameter that says so."""
    parallel, runtime = params.parallel, params.runtime
    each = parallel.tensor_parallel_size
    asked = {
        "parallel.tensor_parallel_size x data_parallel_size": each * parallel.data_parallel_size,
        "runtime.train_processes": runtime.train_processes,
    }
    return asked


def check_dtype(machine: MachineNow, params: Params) -> list[Finding]:
    """Whether the verifier would be computed in a type that this CPU emulates."""
    asked, native = params.verifier.dtype, machine.native_dtype
    if native == "float32" and asked in ("bfloat16", "float16"):
        return [Finding("warning", "dtype", f"verifier.dtype {asked} is emulated by this CPU",
                        "verifier.dtype: auto takes float32, which is faster")]  # fmt: skip
    chosen = native if asked == "auto" else asked
    return [Finding("ok", "dtype", f"bfloat16 weights are computed in {chosen} ({asked})")]


def check_system(machine: MachineNow) -> list[Finding]:
    """Shared memory, open files, a port, and what a CPU engine is started with."""
    needed = compat.SHARED_MEMORY_BYTES
    found = [
        _at_least("/dev/shm", machine.shm_bytes, needed, "mount it larger (docker: --shm-size)")
    ]
    wanted = compat.OPEN_FILES
    limit = f"{machine.open_files} open files"
    found.append(
        Finding("ok", "open files", limit) if machine.open_files >= wanted
        else Finding("warning", "open files", f"{limit}; vLLM asks for {wanted}",
                     "ulimit -Hn; many requests in flight may fail")
    )  # fmt: skip
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
        found.append(Finding("ok", "ports", "a loopback port can be had"))
    except OSError as error:
        found.append(Finding("problem", "ports", f"no loopback port: {error}", "servers need one"))
    if machine.device == "cpu":
        found += [_openmp(), _compiler(machine.compiler)]
    return found


def _at_least(check: str, has: int, needed: int, do: str) -> Finding:
    text = f"{has / 2**20:,.0f} MiB free, an engine takes up to {needed / 2**20:,.0f}"
    return Finding("ok", check, text) if has >= needed else Finding("problem", check, text, do)


def _compiler(place: str | None) -> Finding:
    if place:
        return Finding("ok", "compiler", place)
    return Finding("problem", "compiler", "there is no g++, with which vLLM compiles on a CPU",
                   "apt-get install g++")  # fmt: skip


def _openmp() -> Finding:
    """Whether Intel's OpenMP is there and can be preloaded: the loader only warns when not."""
    try:
        preload = compat.engine_environment("cpu", 1)["LD_PRELOAD"]
    except (FileNotFoundError, ValueError) as error:
        return Finding("problem", "openmp", str(error), "make venv")
    said = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ""],
        env={"LD_PRELOAD": preload}, capture_output=True, text=True, check=False,
    ).stderr  # fmt: skip
    if "cannot be preloaded" in said:
        return Finding("problem", "openmp", said.strip().splitlines()[0],
                       "speculation is slow without it; make venv")  # fmt: skip
    return Finding("ok", "openmp", f"{preload} can be preloaded")

"""One stage run by several processes, as torchrun starts them: which one this is.

Only the first one, of all nodes, opens the stage: it holds the lock, writes results and speaks to
MLflow. The others compute what it shares out, and end with it.
"""

import os
import sys


def rank() -> int:
    """The number of this process among all of them, from 0; 0 where it is the only one."""
    return int(os.environ.get("RANK", 0)) if are_several() else 0


def local_rank() -> int:
    """The number of this process among those of its machine, from 0: that of its GPU."""
    return int(os.environ.get("LOCAL_RANK", 0))


def are_several() -> bool:
    """Whether torchrun started this process: it may still be the only one."""
    return "LOCAL_RANK" in os.environ


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; [] without one."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(number) for number in range(count)]


def gpu_bytes() -> int:
    """Memory of the first GPU that this process may use; the others are taken to be its like."""
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)


def check_gpus(needed: int, key: str) -> None:
    """Refuse to spread work over more GPUs than there are; a CPU can always be shared.

    Args:
        needed: How many.
        key: The parameter that asks for them.

    Raises:
        ValueError: naming both.
    """
    found = len(visible_gpus())
    if found and needed > found:
        raise ValueError(f"{key} asks for {needed} GPUs, and {found} can be used here; lower it")


def spread(processes: int, key: str) -> None:
    """Become torchrun with this program as `processes` processes of this machine.

    Returns where nothing is to be started: one process is asked for, or this is one of several,
    started by hand over several nodes, say, where the command line says how many.

    Args:
        processes: How many.
        key: The parameter that says so.

    Raises:
        ValueError: when there is no GPU for each.
    """
    if processes == 1 or are_several():
        return
    check_gpus(processes, key)
    module = sys.modules["__main__"].__spec__
    assert module is not None  # of `python -m`, as every stage is run
    cores = len(os.sched_getaffinity(0))
    # torchrun would give each process one thread, and say so at length
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = ["-m", module.name, *sys.argv[1:]]
    os.execv(torchrun[0], [*torchrun, f"--nproc-per-node={processes}", *program])

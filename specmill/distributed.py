"""Joining the other processes of a training: what depends on the version of speculators."""

import contextlib
import ctypes
import signal
from collections.abc import Iterator

from specmill import compat, processes

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Join the processes that torchrun has started, over NCCL on GPUs and gloo on CPUs.

    Alone, this does nothing. speculators (train/distributed.py, 0.9) keeps who is who in variables
    of its module, and refuses to fill them on a machine without an accelerator.
    """
    if not processes.are_several():
        yield
        return
    import torch
    import torch.distributed as dist
    from speculators.train import distributed

    # a torchrun that is killed outright would leave processes that wait for each other
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if compat.device() == "cuda":
        torch.cuda.set_device(processes.local_rank())
        # a compiled model is not to be cut up by gradient buckets: FlexAttention is an operation
        # of higher order, which torch's DDPOptimizer does not take in every version
        torch._dynamo.config.optimize_ddp = False
        distributed.maybe_setup_distributed()
    else:
        dist.init_process_group("gloo")
        distributed._rank, distributed._world_size = dist.get_rank(), dist.get_world_size()
        distributed._is_distributed = True
    yield
    # not after an error: torchrun ends the others, and NCCL would wait for them
    distributed.maybe_destroy_distributed()


@contextlib.contextmanager
def one_after_the_first() -> Iterator[None]:
    """Let the first process do something before the others do it."""
    import torch.distributed as dist

    is_first = processes.rank() == 0
    if dist.is_initialized() and not is_first:
        dist.barrier()
    yield
    if dist.is_initialized() and is_first:
        dist.barrier()

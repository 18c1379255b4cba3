"""Several servers of the verifier on this machine, started at once, that share one stage's work.

The answers of a small verifier, and the states of one, come no faster from a larger GPU: one
engine is held up by its own Python. So more engines than there are GPUs share them.
"""

import contextlib
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from specmill import compat
from specmill.engine_flags import parallel_flags, server_flags
from specmill.params import Params, Runtime
from specmill.processes import gpu_bytes, visible_gpus
from specmill.server import Server, starting

_KV_SHARE = 0.5
"""Of an engine's part of a shared GPU; the rest is for weights, activations and CUDA graphs."""


class Place(NamedTuple):
    """Where an engine runs."""

    gpus: list[str]
    """As CUDA_VISIBLE_DEVICES names them; [] on a CPU."""
    engines: int
    """How many run on these GPUs, itself included."""


def places(count: int, each: int, gpus: list[str]) -> list[Place]:
    """GPUs of `count` engines of `each` GPUs: of their own while there are enough, then shared.

    >>> places(3, 1, ["0", "1"])
    [Place(gpus=['0'], engines=2), Place(gpus=['1'], engines=1), Place(gpus=['0'], engines=2)]

    Args:
        count: Engines.
        each: GPUs that one is spread over.
        gpus: Those of this machine; [] on a CPU, which they always share.

    Raises:
        ValueError: when there are too few for a single one.
    """
    if not gpus:
        return [Place([], 1)] * count
    groups = [gpus[at : at + each] for at in range(0, len(gpus) - each + 1, each)]
    if not groups:
        raise ValueError(
            f"parallel.tensor_parallel_size (x data_parallel_size) asks for {each} GPUs, and "
            f"{len(gpus)} can be used here; lower it"
        )
    sharing = [ceil((count - number) / len(groups)) for number in range(len(groups))]
    return [
        Place(groups[number % len(groups)], sharing[number % len(groups)])
        for number in range(count)
    ]


@contextlib.contextmanager
def own_servers(
    model: Path, flags: list[str], count: int, each: int, runtime: Runtime, log: Path
) -> Iterator[list[Server]]:
    """Start `count` servers, all at once.

    Engines that share a GPU are told the size of their KV cache: one that measures what is free
    while others start would count their memory as its own.

    Args:
        model: The verifier's checkpoint.
        flags: Of each server, beyond those of every engine.
        count: Servers.
        each: GPUs that one is spread over.
        runtime: Of params.yaml.
        log: Receives a server's output; with several, `-0`, `-1` ... are put to its name.

    Yields:
        The servers, all healthy.

    Raises:
        ValueError: when there are too few GPUs for one.
        EngineRefused, RuntimeError: when one does not start.
    """
    with contextlib.ExitStack() as stack:
        waits = []
        for number, place in enumerate(places(count, each, visible_gpus())):
            share = runtime.gpu_memory_utilization / place.engines
            kv_cache = []
            if place.engines > 1:
                size = int(share * _KV_SHARE * gpu_bytes())
                kv_cache = server_flags({"kv_cache_memory_bytes": size})
            several = count > 1
            wait = starting(
                model,
                flags + kv_cache,
                log.with_stem(f"{log.stem}-{number}") if several else log,
                cpu_kv_cache_gib=runtime.cpu_kv_cache_gib,
                gpu_memory_utilization=share,
                startup_timeout_s=runtime.startup_timeout_s,
                label=f"{log.stem} {number + 1} of {count}" if several else log.stem,
                gpus=place.gpus if several else (),
            )
            waits.append(stack.enter_context(wait))
        yield [wait() for wait in waits]


def answering_servers(
    model: Path, verifier: dict[str, Any], params: Params, log: Path
) -> contextlib.AbstractContextManager[list[Server]]:
    """`own_servers` as `runtime.prepare_engines` and `parallel` ask for them, to write answers.

    Args:
        model: The verifier's checkpoint.
        verifier: Its identity.json.
        params: Of params.yaml.
        log: As `own_servers`.
    """
    parallel, runtime = params.parallel, params.runtime
    return own_servers(
        model,
        compat.verifier_arguments(verifier) + parallel_flags(model, verifier, parallel),
        runtime.prepare_engines,
        parallel.tensor_parallel_size * parallel.data_parallel_size,
        runtime,
        log,
    )

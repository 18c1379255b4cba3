"""The engines that compute hidden states: one inside this process, or running servers."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from specmill import compat, paths
from specmill.engine_flags import parallel_settings, server_flags
from specmill.extract_engines import extraction_settings
from specmill.extract_servers import drive_servers
from specmill.own_servers import own_servers
from specmill.params import Runtime
from specmill.params_parallel import Parallel
from specmill.samples import Sample
from specmill.shards import StateSpec
from specmill.staging import Work
from specmill.verifier import model_path

logger = logging.getLogger(__name__)

_HERE = "this process"


_DIED = "the engine died ({}); what it had finished is kept, run the same command again"


def engines(
    spec: StateSpec,
    folder: Path,
    staging: Path,
    verifier: dict[str, Any],
    parallel: Parallel,
    runtime: Runtime,
) -> Callable[[Work], None]:
    """What does the work: the servers in runtime.extract_endpoints, our own, or an engine in here.

    Args:
        spec: What is kept.
        folder: Where the verifier is kept.
        staging: Receives the states.
        verifier: Its identity.json.
        parallel: Of params.yaml.
        runtime: Of params.yaml.
    """

    def run(work: Work) -> None:
        if runtime.extract_endpoints:
            work_at(runtime.extract_endpoints, work, runtime.request_timeout_s)
            return
        model = model_path(folder)
        settings = extraction_settings(spec, staging, verifier)
        settings |= parallel_settings(model, verifier, parallel)
        if runtime.extract_engines > 1:
            flags = [*server_flags(settings), "--disable-uvicorn-access-log"]
            count, each = runtime.extract_engines, parallel.tensor_parallel_size
            log = paths.ROOT / "logs" / "extract.log"
            with own_servers(model, flags, count, each, runtime, log) as servers:
                keys = {server.url: server.api_key for server in servers}
                work_at(list(keys), work, runtime.request_timeout_s, keys)
            return
        with local_engine(model, settings, runtime) as engine:
            work_here(engine, work)

    return run


@contextlib.contextmanager
def local_engine(model: Path, settings: dict[str, Any], runtime: Runtime) -> Iterator[Any]:
    """vLLM's LLMEngine, its workers in processes below this one."""
    os.environ.update(compat.engine_environment(compat.device(), runtime.cpu_kv_cache_gib))
    from vllm import LLM

    llm = LLM(
        model=str(model),
        gpu_memory_utilization=runtime.gpu_memory_utilization,
        disable_log_stats=True,
        **settings,
    )
    try:
        yield llm.llm_engine
    finally:
        llm.llm_engine.engine_core.shutdown()


def work_here(engine: Any, work: Work) -> None:
    """Let an engine of this process do the work.

    Raises:
        RuntimeError: when the engine dies.
    """

    def check_alive() -> None:
        # vLLM notices a core that was killed, but leaves whoever is in `step` waiting for it
        if engine.engine_core.resources.engine_dead:
            raise RuntimeError(_DIED.format("its core process is gone"))

    _supervise(work, lambda: _drive_here(engine, work), check_alive)


def work_at(
    endpoints: list[str], work: Work, timeout_s: float, keys: Mapping[str, str] | None = None
) -> None:
    """Let running servers share the work; what one that dies had under way goes to the others.

    Args:
        endpoints: Base URLs, started by `python -m specmill.serve_states`.
        work: The samples.
        timeout_s: Longest time one request may take; a server that takes longer counts as dead.
        keys: API key by base URL; None takes SPECMILL_API_KEY, if there is one, for all.

    Raises:
        ValueError: when a server refuses a request, or is not there at the start.
        RuntimeError: when none is left.
    """
    shared = os.environ.get(compat.API_KEY, "")
    keys = keys or dict.fromkeys(endpoints, shared)
    _supervise(work, lambda: asyncio.run(drive_servers(keys, work, timeout_s)), lambda: None)


def _supervise(work: Work, drive: Callable[[], None], check_alive: Callable[[], None]) -> None:
    """Drive engines in a thread, so that nothing in them keeps this process from ending.

    Signals reach the main thread alone: an event loop in which one raises may never end, and an
    engine that hangs would not notice what goes wrong while filing.
    """
    with ThreadPool(1) as pool:  # of a daemon
        driving = pool.apply_async(drive)
        while not (work.is_done or driving.ready()):
            work.wait()
            if not driving.ready():
                check_alive()
        driving.get()


def _drive_here(engine: Any, work: Work) -> None:
    from vllm import SamplingParams
    from vllm.v1.engine.exceptions import EngineDeadError

    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    flying: dict[str, Sample] = {}
    try:
        while not work.is_done:
            while sample := work.take(_HERE):
                flying[sample.sample_key] = sample
                ids = {"prompt_token_ids": sample.input_ids.tolist()}
                engine.add_request(sample.sample_key, ids, params)
            if not flying:
                work.wait()
            for output in engine.step() if flying else ():
                if output.finished:
                    path = output.kv_transfer_params["hidden_states_path"]
                    work.staged(_HERE, flying.pop(output.request_id), path)
    except EngineDeadError as error:
        raise RuntimeError(_DIED.format(error)) from None

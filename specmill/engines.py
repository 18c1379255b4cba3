"""The engines that compute hidden states: one inside this process, or running servers."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import httpx

from specmill import compat, paths
from specmill.engine_flags import parallel_settings, server_flags
from specmill.extract_engines import extraction_settings
from specmill.own_servers import own_servers
from specmill.params import Runtime
from specmill.params_parallel import Parallel
from specmill.samples import Sample
from specmill.shards import StateSpec
from specmill.staging import Work, being_written
from specmill.verifier import model_path

logger = logging.getLogger(__name__)

_HERE = "this process"
_MOMENT_S = 0.02


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
    _supervise(work, lambda: asyncio.run(_drive_servers(keys, work, timeout_s)), lambda: None)


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


async def _drive_servers(keys: Mapping[str, str], work: Work, timeout_s: float) -> None:
    async with contextlib.AsyncExitStack() as stack:
        clients = {url: await _connect(stack, url, key, timeout_s) for url, key in keys.items()}
        try:
            async with asyncio.TaskGroup() as group:
                for url, client in clients.items():
                    group.create_task(_drive(url, client, work, timeout_s))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
    if not work.is_done:
        raise RuntimeError(
            "none of runtime.extract_endpoints is left; what they had finished is kept: start one "
            "(python -m specmill.serve_states), then run the same command again"
        )


async def _connect(
    stack: contextlib.AsyncExitStack, url: str, key: str, timeout_s: float
) -> httpx.AsyncClient:
    """A client of a server that is there."""
    try:
        client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout_s, connect=10),
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )
        status = (await (await stack.enter_async_context(client)).get("/health")).status_code
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise ValueError(
            f"runtime.extract_endpoints names {url}, where no server answers ({error}); start one "
            "with `python -m specmill.serve_states`, or set the list to []"
        ) from None
    if status != 200:
        raise ValueError(f"runtime.extract_endpoints names {url}, which is not healthy ({status})")
    return client


async def _drive(url: str, client: httpx.AsyncClient, work: Work, timeout_s: float) -> None:
    """Keep one server busy until everything is filed or it is dead."""
    asked: dict[asyncio.Task[str], Sample] = {}
    try:
        while not work.is_done:
            while sample := work.take(url):
                asked[asyncio.create_task(_ask(client, work, sample, timeout_s))] = sample
                await asyncio.sleep(0)  # servers take turns
            if not asked:  # the rest is with others, who may die yet
                await asyncio.sleep(_MOMENT_S)
                continue
            done, _ = await asyncio.wait(
                asked, timeout=_MOMENT_S, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                path = task.result()
                work.staged(url, asked.pop(task), path)
    except httpx.TransportError as error:
        logger.warning("%s is gone (%r); the others take over its samples", url, error)
        await _stop(asked)
        # what it is still writing need not be computed again; a lock may hang as its holder does
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for unfinished in being_written(work.staging):
                    await _written(work, str(unfinished))
        await asyncio.wrap_future(work.pick_up())
        work.give_back(url, asked.values())
    finally:
        await _stop(asked)


async def _stop(tasks: Iterable[asyncio.Task[str]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _written(work: Work, path: str) -> None:
    while not work.is_written(path):
        await asyncio.sleep(_MOMENT_S)


async def _ask(client: httpx.AsyncClient, work: Work, sample: Sample, timeout_s: float) -> str:
    """Have a server stage a sample; where, when it is there."""
    try:
        async with asyncio.timeout(timeout_s):
            path = await _answer(client, sample)
            await _written(work, path)
            return path
    except TimeoutError:
        raise httpx.ReadTimeout(f"nothing within {timeout_s:g} s") from None


async def _answer(client: httpx.AsyncClient, sample: Sample) -> str:
    """Send a sample's ids; the path where the server stages its states."""
    reply = await client.post(
        "/v1/completions",
        json={
            "model": "verifier",
            "prompt": sample.input_ids.tolist(),
            "max_tokens": 1,
            "temperature": 0,
        },
    )
    if reply.status_code >= 500:
        raise httpx.RemoteProtocolError(f"status {reply.status_code}: {reply.text[:200]}")
    if reply.status_code != 200:
        raise ValueError(
            f"{client.base_url} refused sample {sample.sample_key[:12]} "
            f"({len(sample.input_ids)} tokens) with status {reply.status_code}: {reply.text[:300]}"
        )
    try:
        return str(reply.json()["kv_transfer_params"]["hidden_states_path"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{client.base_url} hands no hidden states out; start it with "
            "`python -m specmill.serve_states`"
        ) from None

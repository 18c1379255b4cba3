"""Running servers that share an extraction: asked for samples, listened to until they are filed.

Each takes samples from one queue (specmill.staging), so a slow one gets fewer; what one that dies
had under way goes to the others.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import aiohttp

from specmill.samples import Sample
from specmill.staging import Work, being_written

logger = logging.getLogger(__name__)

_MOMENT_S = 0.02


async def drive_servers(keys: Mapping[str, str], work: Work, timeout_s: float) -> None:
    """Have servers do the work.

    Args:
        keys: API key of each by its base URL; empty where it has none.
        work: The samples.
        timeout_s: Longest time an answer, or writing what it tells of, may take; a server that
            takes longer counts as dead.

    Raises:
        ValueError: when a server refuses a request, or is not there at the start.
        RuntimeError: when none is left.
    """
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
) -> aiohttp.ClientSession:
    """A client of a server that is there."""
    client = aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=10),
        trust_env=False,
        # no keep-alive: a request that meets a server closing an idle connection fails
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
    )
    await stack.enter_async_context(client)
    try:
        async with client.get(f"{url.rstrip('/')}/health") as reply:
            status = reply.status
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ValueError(
            f"runtime.extract_endpoints names {url}, where no server answers ({error!r}); start "
            "one with `python -m specmill.serve_states`, or set the list to []"
        ) from None
    if status != 200:
        raise ValueError(f"runtime.extract_endpoints names {url}, which is not healthy ({status})")
    return client


class _Gone(Exception):
    """A server that is to be asked for nothing more."""


class _Staging(NamedTuple):
    """What a server has answered for and is writing."""

    sample: Sample
    path: str
    until: float
    """When it counts as hanging, by the monotonic clock."""


async def _drive(url: str, client: aiohttp.ClientSession, work: Work, timeout_s: float) -> None:
    """Keep one server busy until everything is filed or it is dead.

    Servers write about in the order of their answers, so that only the oldest is looked at: to look
    for each request again and again took longer than the requests.
    """
    asked: dict[asyncio.Task[str], Sample] = {}
    staging: deque[_Staging] = deque()
    try:
        while not work.is_done:
            while sample := work.take(url):
                asked[asyncio.create_task(_ask(url, client, sample, timeout_s))] = sample
                await asyncio.sleep(0)  # servers take turns
            _file_written(url, staging, work)
            if not asked:  # the rest is being written, or with others, who may die yet
                await asyncio.sleep(_MOMENT_S)
                continue
            done, _ = await asyncio.wait(
                asked, timeout=_MOMENT_S, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                path, until = task.result(), time.monotonic() + timeout_s
                staging.append(_Staging(asked.pop(task), path, until))
    except _Gone as error:
        logger.warning("%s is gone (%s); the others take over its samples", url, error)
        await _stop(asked)
        # what it is still writing need not be computed again; a lock may hang as its holder does
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for unfinished in being_written(work.staging):
                    await _written(work, str(unfinished))
        await asyncio.wrap_future(work.pick_up())
        work.give_back(url, [*asked.values(), *(one.sample for one in staging)])
    finally:
        await _stop(asked)


def _file_written(url: str, staging: deque[_Staging], work: Work) -> None:
    """File what a server has written, oldest first.

    Raises:
        _Gone: when it has been writing for too long.
    """
    while staging:
        oldest = staging[0]
        if not work.is_written(oldest.path):
            if time.monotonic() > oldest.until:
                raise _Gone(f"{oldest.path} is not written in time")
            return
        staging.popleft()
        work.staged(url, oldest.sample, oldest.path)


async def _stop(tasks: Iterable[asyncio.Task[str]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _written(work: Work, path: str) -> None:
    while not work.is_written(path):
        await asyncio.sleep(_MOMENT_S)


async def _ask(url: str, client: aiohttp.ClientSession, sample: Sample, timeout_s: float) -> str:
    """Send a sample's ids; the path where the server stages its states.

    Raises:
        _Gone: when it answers with a fault of its own, or not in time.
        ValueError: when it refuses the sample, or stages no states.
    """
    body = {
        "model": "verifier",
        "prompt": sample.input_ids.tolist(),
        "max_tokens": 1,
        "temperature": 0,
    }
    try:
        async with client.post(f"{url.rstrip('/')}/v1/completions", json=body) as reply:
            status, content = reply.status, await reply.text(errors="replace")
    except TimeoutError:
        raise _Gone(f"nothing within {timeout_s:g} s") from None
    except aiohttp.ClientError as error:
        raise _Gone(repr(error)) from None
    if status >= 500:
        raise _Gone(f"status {status}: {content[:200]}")
    if status != 200:
        raise ValueError(
            f"{url} refused sample {sample.sample_key[:12]} "
            f"({len(sample.input_ids)} tokens) with status {status}: {content[:300]}"
        )
    try:
        return str(json.loads(content)["kv_transfer_params"]["hidden_states_path"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{url} hands no hidden states out; start it with `python -m specmill.serve_states`"
        ) from None

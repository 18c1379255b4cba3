"""Our client of a vLLM server: exact token ids in and out, times measured at the socket."""

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm

from specmill import compat
from specmill.server import Server

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Answer:
    """One completion with the exact ids the server saw and made."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str


@dataclass(frozen=True)
class TimedAnswer:
    """One streamed completion; times in seconds of the same monotonic clock."""

    token_ids: list[int]
    finish_reason: str
    sent_at: float
    chunk_times: list[float]
    """Arrival of each chunk that carried tokens."""
    chunk_sizes: list[int]
    """Tokens in each of those chunks; speculation puts several in one."""


class Client:
    """An HTTP client of one server, to be used as an async context manager.

    Args:
        server: Whom to ask.
        timeout_s: Longest time without a byte from the server, seconds.
    """

    def __init__(self, server: Server, timeout_s: float):
        self._url = server.url
        self._http = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {server.api_key}"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=timeout_s),
            trust_env=False,  # a proxy must not see loopback requests and their key
            # no keep-alive: a request that meets the server closing an idle connection fails, and
            # on loopback a new connection costs less than a millisecond
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *details: Any) -> None:
        await self._http.close()

    async def chat(self, messages: list[dict[str, Any]], sampling: dict[str, Any]) -> Answer:
        """Answer a conversation; the server applies the chat template.

        Args:
            messages: In OpenAI's form, tool-call arguments as objects.
            sampling: Further fields of the request.

        Raises:
            RuntimeError: when the server refuses or leaves the token ids out.
        """
        body = {
            "model": "verifier",
            "messages": [_as_openai(message) for message in messages],
            "return_token_ids": True,
            **sampling,
        }
        with _named_failures():
            async with self._http.post(f"{self._url}/v1/chat/completions", json=body) as reply:
                data = _checked(reply.status, await reply.read())
        choice = data["choices"][0]
        if not data.get("prompt_token_ids") or choice.get("token_ids") is None:
            raise RuntimeError(_NO_IDS)
        return Answer(
            prompt_token_ids=data["prompt_token_ids"],
            token_ids=choice["token_ids"],
            text=choice["message"]["content"] or "",
            finish_reason=choice["finish_reason"],
        )

    async def complete_timed(
        self, prompt_token_ids: list[int], sampling: dict[str, Any]
    ) -> TimedAnswer:
        """Stream a completion of exact prompt ids and note when each chunk came.

        A chunk's time is when the bytes that end it are in our hands, before they are parsed;
        chunks that come in one read have one time. It is late by what the event loop does for
        other streams in the same turn: benchmarks/client.py measures that.

        Raises:
            RuntimeError: when the server refuses, leaves the token ids out, fails on the way or
                ends the stream early, and when the connection breaks or nothing comes in time.
        """
        body = {
            "model": "verifier",
            "prompt": prompt_token_ids,
            "stream": True,
            "return_token_ids": True,
            **sampling,
        }
        stream = CompletionStream()
        sent_at = time.monotonic()
        with _named_failures():
            async with self._http.post(f"{self._url}/v1/completions", json=body) as reply:
                if reply.status != 200:
                    _checked(reply.status, await reply.read())
                async for piece in reply.content.iter_any():
                    stream.take(piece, time.monotonic())
        if stream.finish_reason is None or not stream.ids:
            raise RuntimeError(f"the server's stream ended early, after {len(stream.ids)} tokens")
        return TimedAnswer(stream.ids, stream.finish_reason, sent_at, stream.times, stream.sizes)

    async def top_logprobs(self, prompt_token_ids: list[int], count: int) -> dict[int, float]:
        """The likeliest next tokens after exact prompt ids.

        Returns:
            Log probability (nats) by token id, of the `count` likeliest.
        """
        body = {
            "model": "verifier",
            "prompt": prompt_token_ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "logprobs": count,
            "return_tokens_as_token_ids": True,
        }
        with _named_failures():
            async with self._http.post(f"{self._url}/v1/completions", json=body) as reply:
                data = _checked(reply.status, await reply.read())
        (likely,) = data["choices"][0]["logprobs"]["top_logprobs"]
        return {int(name.removeprefix("token_id:")): value for name, value in likely.items()}

    async def counters(self) -> dict[str, float]:
        """The engine's cumulative counters of speculation and steps; sums of several (data
        parallelism), which each have their own.

        Returns:
            `num_drafts`, `num_draft_tokens`, `num_accepted_tokens`, `accepted_at_0` ... and
            `engine_steps`. What the engine does not export is absent, not 0.
        """
        with _named_failures():
            async with self._http.get(f"{self._url}/metrics") as reply:
                if reply.status != 200:
                    _checked(reply.status, await reply.read())
                text = await reply.text()
        names = {full: short for short, full in compat.SPEC_COUNTERS.items()}
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if family.name in names and sample.name.endswith("_total"):
                    name = names[family.name]
                elif family.name == compat.SPEC_PER_POSITION and sample.name.endswith("_total"):
                    name = f"accepted_at_{sample.labels['position']}"
                elif sample.name == f"{compat.ENGINE_STEPS}_count":
                    name = "engine_steps"
                else:
                    continue
                found[name] = found.get(name, 0) + sample.value
        return found


class CompletionStream:
    """A streamed completion as far as it has come: server-sent events of vLLM."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.times: list[float] = []
        self.sizes: list[int] = []
        self.finish_reason: str | None = None
        self._rest = b""

    def take(self, piece: bytes, arrived_at: float) -> None:
        """Take bytes as they came: they may end several events, or none.

        Split as bytes: a piece may end inside a character, and str.splitlines would also split at
        characters that JSON may hold as they are, as U+2028.

        Args:
            piece: The next bytes.
            arrived_at: When they came, seconds of the monotonic clock.

        Raises:
            RuntimeError: when an event is an error, no JSON, or without token ids.
        """
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            name, _, value = line.partition(b":")
            if name == b"data" and (value := value.strip()) != b"[DONE]":
                self._take_event(value, arrived_at)

    def _take_event(self, content: bytes, arrived_at: float) -> None:
        data = _checked(200, content)
        if not data["choices"]:
            return
        choice = data["choices"][0]
        if "token_ids" not in choice:
            raise RuntimeError(_NO_IDS)
        if choice["token_ids"]:
            self.ids += choice["token_ids"]
            self.times.append(arrived_at)
            self.sizes.append(len(choice["token_ids"]))
        self.finish_reason = choice["finish_reason"] or self.finish_reason


def _as_openai(message: dict[str, Any]) -> dict[str, Any]:
    """The protocol wants tool-call arguments as JSON text; chat templates want objects."""
    if "tool_calls" not in message:
        return message
    calls = [
        call
        | {
            "function": call["function"]
            | {"arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}
        }
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


_NO_IDS = (
    "the server left the token ids out of its answer; this vLLM does not know return_token_ids "
    "(tested versions: specmill/tested.py)"
)


@contextlib.contextmanager
def _named_failures() -> Iterator[None]:
    """Say what a broken connection or a time-out means for the user."""
    try:
        yield
    except TimeoutError:
        raise RuntimeError(
            "the server did not answer in runtime.request_timeout_s; see its log in logs/"
        ) from None
    except aiohttp.ClientError as error:
        raise RuntimeError(
            f"the connection to the server broke ({error!r}); see its log in logs/"
        ) from None


def _checked(status: int, content: bytes) -> dict[str, Any]:
    try:
        data = json.loads(content)
    except json.JSONDecodeError:
        data = {"error": content[:500].decode(errors="replace")}
    if status != 200 or "error" in data:
        told = f"the server answered with status {status}: {data.get('error', data)}"
        # a refusal says all itself; an engine that died within a stream has begun with 200
        raise RuntimeError(told if 400 <= status < 500 else f"{told}; see its log in logs/")
    return dict(data)


async def run_closed_loop(
    items: Sequence[Item],
    work: Callable[[Item], Awaitable[Result]],
    concurrency: int,
    *,
    progress: str | None = None,
) -> list[Result]:
    """Apply `work` to every item with `concurrency` of them in flight; results in item order.

    The first failure cancels the rest and is raised.
    """
    queue = iter(enumerate(items))
    results: dict[int, Result] = {}
    bar = tqdm(total=len(items), desc=progress, disable=progress is None)

    async def worker() -> None:
        for index, item in queue:
            results[index] = await work(item)
            bar.update()

    with bar:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(items))):
                    group.create_task(worker())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
    return [results[index] for index in range(len(items))]

"""A server that streams completions in vLLM's words and computes nothing.

It writes what vLLM 0.32 writes to `/v1/completions` with `stream`: uvicorn's headers, one HTTP
chunk per event, one event per engine step. Like an engine, it gives every stream one chunk per
step, one stream after the other. Each chunk has two tokens: its number in the stream, from 0, and
the time just before it was written, in microseconds of the monotonic clock, which is the same clock
for every process of a machine. A reader of the token ids knows so how late it is.

Run      python -m benchmarks.stub_server --steps-per-s 156.25
         says its port on standard output and serves until it is terminated
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

TOKENS_PER_CHUNK = 2

_HEADERS = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 03:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\nconnection: close\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


@dataclass(eq=False)
class Stream:
    """One request that is being answered."""

    writer: asyncio.StreamWriter
    body: dict[str, Any]
    done: asyncio.Event = field(default_factory=asyncio.Event)
    number: int = 0
    """Chunks written."""

    def step(self) -> None:
        """Write the next chunk, and the end of the stream after the last."""
        num_chunks = self.body["max_tokens"] // TOKENS_PER_CHUNK
        last = self.number + 1 == num_chunks
        self.writer.write(_framed(event(self.body, self.number, last)))
        self.number += 1
        if last:
            if self.body.get("stream_options", {}).get("include_usage"):
                self.writer.write(_framed(_usage(self.body)))
            self.writer.write(_framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            self.done.set()


def event(body: dict[str, Any], number: int, last: bool) -> bytes:
    """A server-sent event with two tokens: `number` and the time now, microseconds."""
    prompt, ids = "null", "null"
    if body.get("return_token_ids"):
        ids = f"[{number},{time.monotonic_ns() // 1000}]"
        if number == 0:
            prompt = json.dumps(body["prompt"], separators=(",", ":"))
    reason = '"length"' if last else "null"
    fingerprint = ',"system_fingerprint":"vllm-0.32.0-e71bf8ad"' if last else ""
    return (
        'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1796000000,'
        '"model":"verifier","choices":[{"index":0,"text":" two words","logprobs":null,'
        f'"finish_reason":{reason},"stop_reason":null,"prompt_token_ids":{prompt},'
        f'"token_ids":{ids}}}]{fingerprint}}}\n\n'
    ).encode()


def _usage(body: dict[str, Any]) -> bytes:
    prompt, output = len(body["prompt"]), body["max_tokens"]
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}
    data = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1796000000}
    data |= {"model": "verifier", "choices": [], "usage": usage}
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def _framed(content: bytes) -> bytes:
    """One chunk of HTTP/1.1's chunked transfer coding (RFC 9112, 7.1)."""
    return b"%x\r\n%b\r\n" % (len(content), content)


async def _steps(streams: set[Stream], step_s: float) -> None:
    """Step at fixed times; a step that comes late does not move the next one."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        due += step_s
        await asyncio.sleep(due - loop.time())
        for stream in list(streams):
            stream.step()
            if stream.done.is_set():
                streams.remove(stream)


async def serve(steps_per_s: float) -> None:
    """Serve on a free port of 127.0.0.1, one request a connection, until cancelled."""
    streams: set[Stream] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if head.startswith(b"post /v1/completions "):
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
            stream = Stream(writer, json.loads(await reader.readexactly(length)))
            writer.write(_HEADERS)
            streams.add(stream)
            await stream.done.wait()
        else:
            writer.write(_NOT_FOUND)
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
        sys.stdout.flush()
        await _steps(streams, 1 / steps_per_s)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps-per-s", type=float, required=True)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(parser.parse_args().steps_per_s))

"""The bench's client against a server that costs next to nothing: is the client the bottleneck?

A stub in a process of its own (benchmarks.stub_server) streams chunks to concurrent requests of
Client.complete_timed, every stream one chunk per step, as an engine does. For each rate:

    offered      chunks a second that the stub was asked for
    written      chunks a second that it wrote, by the times in the token ids
    handled      chunks a second, from the first request until the last chunk arrived
    lag          arrival by our client less the time just before the chunk was written, per chunk
    client CPU   share of one core that the client took

Run      python -m benchmarks.client --json FILE
"""

import argparse
import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.stub_server import TOKENS_PER_CHUNK
from specmill import compat
from specmill.client import Client, TimedAnswer, run_closed_loop
from specmill.files import machine_lock, write_json
from specmill.server import Server


@contextlib.contextmanager
def stub(steps_per_s: float) -> Iterator[Server]:
    """A stub server in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.stub_server", "--steps-per-s", str(steps_per_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            yield Server(f"http://127.0.0.1:{port}", "key", Path("no.log"), 0.0)
        finally:
            process.terminate()


async def ask(
    server: Server, streams: int, num_chunks: int, num_requests: int | None = None
) -> list[TimedAnswer]:
    """So many requests, one per stream unless said otherwise, `streams` of them at once."""
    sampling = {"max_tokens": num_chunks * TOKENS_PER_CHUNK, "temperature": 0.0}
    async with Client(server, timeout_s=60) as client:
        return await run_closed_loop(
            range(num_requests or streams),
            lambda _: client.complete_timed(list(range(100)), sampling),
            streams,
        )


def measure(rate: float, streams: int, seconds: float) -> dict[str, Any]:
    """The figures of one rate: chunks a second over all streams."""
    steps = rate / streams
    num_chunks = round(seconds * steps)
    with stub(steps) as server:
        asyncio.run(ask(server, streams, 10))  # unmeasured
        cpu = time.process_time()
        answers = asyncio.run(ask(server, streams, num_chunks))
        cpu = time.process_time() - cpu
    written = [np.array(answer.token_ids[1::2]) / 1e6 for answer in answers]
    for answer in answers:
        if answer.token_ids[::2] != list(range(num_chunks)):
            raise ValueError("token ids are missing or out of order")
    lag_ms = 1000 * np.concatenate(
        [np.array(answer.chunk_times) - at for answer, at in zip(answers, written, strict=True)]
    )
    sent_at = min(answer.sent_at for answer in answers)
    wall_s = max(answer.chunk_times[-1] for answer in answers) - sent_at
    writing_s = max(at[-1] for at in written) - min(at[0] for at in written)
    return {
        "offered": rate,
        "streams": streams,
        "chunks": streams * num_chunks,
        "written": streams * num_chunks / writing_s,
        "handled": streams * num_chunks / wall_s,
        "lag_ms_p50": float(np.percentile(lag_ms, 50)),
        "lag_ms_p99": float(np.percentile(lag_ms, 99)),
        "lag_ms_max": float(lag_ms.max()),
        "client_cpu": cpu / wall_s,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, one line per rate."""
    lines = [
        "| offered/s | written/s | handled/s | lag p50 | p99 | max, ms | client CPU |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        "| {offered:,.0f} | {written:,.0f} | {handled:,.0f} | {lag_ms_p50:.2f} | {lag_ms_p99:.2f} "
        "| {lag_ms_max:.2f} | {client_cpu:.0%} |".format(**row)
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rates", type=float, nargs="+", default=[2500, 5000, 10000, 20000, 40000])
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--json", type=Path, help="the table's figures")
    options = parser.parse_args()
    with machine_lock(alone=True):
        rows = [measure(rate, options.streams, options.seconds) for rate in options.rates]
    print(table(rows))
    if options.json:
        write_json(options.json, {"rows": rows, "versions": compat.engine_versions()})


if __name__ == "__main__":
    main()

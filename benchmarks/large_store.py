"""A store of very many samples: is memory flat, does it open at once?

Samples of a few tokens with tiny vectors are staged, filed and read as a stage does, so that what
is measured is the bookkeeping, not the bytes. Every figure is of a process of its own; CPU seconds
stand beside those of the clock, for others may use the machine:

    fill      samples through ShardWriter into shards, a view at the end
    read      every sample of the view through StateView in an order drawn at random, checksums too
    open      the view's manifest, and the store with its index
    command   `python -m specmill.store ls` and `stats`, whole
    client    requests of specmill.client.Client to a stub server, at a high rate

Memory is the resident set less what is mapped from files, which the kernel can take back.

Run      python -m benchmarks.large_store --samples 200000 --requests 50000 --json FILE
"""

import argparse
import asyncio
import hashlib
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from specmill.files import write_json
from specmill.manifest import Manifest
from specmill.samples import key_of
from specmill.shards import Piece, Row, StateSpec
from specmill.store import HiddenStateStore

SPEC = StateSpec("large", (2, 5), 8, "bfloat16")
NUM_TOKENS = 16
_SHARD_BYTES = 256 * 2**10
"""About 450 samples, as shards of 512 MiB have of real ones; more shards, more files."""
_SHARES = (0.1, 0.5, 1.0)
_BLOCK = 1000
"""Samples a file that is copied from: a file for each would measure the file system."""


def memory_mb() -> float:
    """Of this process, without pages of files; Linux."""
    used = psutil.Process().memory_info()
    return (used.rss - used.shared) / 1e6


def samples(count: int) -> Iterator[tuple[Row, bytes]]:
    """Rows and bytes of samples whose ids count up."""
    states = np.zeros(NUM_TOKENS * SPEC.bytes_per_token - 4 * NUM_TOKENS, np.uint8).tobytes()
    for number in range(count):
        ids = np.arange(NUM_TOKENS, dtype="<i4") + number
        content = ids.tobytes() + states
        yield Row(key_of(ids), NUM_TOKENS, hashlib.sha256(content).hexdigest()), content


def fill(folder: Path, count: int) -> dict[str, Any]:
    """Fill a store and cut a view of all of it."""
    store = HiddenStateStore(folder / "store")
    made, memory, started = samples(count), {}, time.monotonic()
    stops = {round(share * count): share for share in _SHARES}
    keys = []
    with store.writer(SPEC, _SHARD_BYTES) as writer:
        for block in range(0, count, _BLOCK):
            rows = [next(made) for _ in range(min(_BLOCK, count - block))]
            file = folder / "staged" / f"{block}"
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(b"".join(content for _, content in rows))
            for at, (row, content) in enumerate(rows):
                writer.add(Piece(row, file, at * len(content)))
            keys += [row.sample_key for row, _ in rows]
            if len(keys) in stops:
                memory[f"{stops[len(keys)]:.0%}"] = memory_mb()
    seconds = time.monotonic() - started
    store.write_view(folder / "view", SPEC, keys, _SHARD_BYTES)
    viewing = time.monotonic() - started - seconds
    return {"memory_mb": memory, "seconds": seconds, "view_s": viewing, "shards": len(store.shards)}


def read(folder: Path, _: int) -> dict[str, Any]:
    """Read every sample, as training does."""
    from specmill.view import StateView

    view = StateView(folder / "view")
    order = list(view.places)
    random.Random(0).shuffle(order)
    stops = {round(share * len(order)): share for share in _SHARES}
    memory, started = {"0%": memory_mb()}, time.monotonic()
    for number, key in enumerate(order, 1):
        view.load(key)
        if number in stops:
            memory[f"{stops[number]:.0%}"] = memory_mb()
    return {"memory_mb": memory, "seconds": time.monotonic() - started}


def opening(folder: Path, _: int) -> dict[str, Any]:
    """Open manifest and index."""
    found = {}
    for name, open_it in (
        ("manifest", lambda: Manifest(folder / "view")),
        ("index", lambda: HiddenStateStore(folder / "store")),
    ):
        before, started, cpu = memory_mb(), time.monotonic(), time.process_time()
        held = open_it()
        found[f"{name}_s"] = time.monotonic() - started
        found[f"{name}_cpu_s"] = time.process_time() - cpu
        found[f"{name}_mb"] = memory_mb() - before
        del held
    return found


def command(folder: Path, _: int) -> dict[str, Any]:
    """The store's own commands, from start to end."""
    found = {}
    for name in ("ls", "stats"):
        words = [sys.executable, "-m", "specmill.store", "--store", str(folder / "store"), name]
        started, cpu = time.monotonic(), _children_s()
        subprocess.run(words, check=True, capture_output=True)
        found[f"{name}_s"] = time.monotonic() - started
        found[f"{name}_cpu_s"] = _children_s() - cpu
    return found


def _children_s() -> float:
    """CPU seconds of processes that were started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def client(_: Path, count: int) -> dict[str, Any]:
    """Open files, sockets and memory of the bench's client, before and after many requests."""
    from benchmarks.client import ask, stub

    def state() -> dict[str, float]:
        process = psutil.Process()
        return {
            "memory_mb": memory_mb(),
            "open_files": process.num_fds(),
            "sockets": len(process.net_connections()),
            "threads": process.num_threads(),
        }

    streams, found = 64, {}
    with stub(400) as server:
        asyncio.run(ask(server, streams, 2))
        found["before"], started, done = state(), time.monotonic(), 0
        for share in _SHARES:
            while done < share * count:
                asyncio.run(ask(server, streams, 2, 16 * streams))
                done += 16 * streams
            found[f"{share:.0%}"] = state()
        seconds = time.monotonic() - started
    return {"requests": done, "requests_per_s": done / seconds, **found}


PARTS = {"fill": fill, "read": read, "open": opening, "command": command, "client": client}


def main() -> None:
    """Measure and print; each part is this program again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--json", type=Path, help="the figures")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    count = {"client": chosen.requests}.get(chosen.part, chosen.samples)
    if chosen.part:
        print(json.dumps(PARTS[chosen.part](chosen.folder, count)))
        return
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in chosen.parts:
            words = [sys.executable, "-m", "benchmarks.large_store", "--part", part]
            words += ["--folder", folder, "--samples", str(chosen.samples)]
            words += ["--requests", str(chosen.requests)]
            done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
            found[part] = json.loads(done.stdout.splitlines()[-1])
            print(part, json.dumps(found[part], indent=2), flush=True)
    if chosen.json:
        write_json(chosen.json, {"samples": chosen.samples} | found)


if __name__ == "__main__":
    main()

"""Stand-ins for engines that stage hidden states: one inside the process, and HTTP servers.

Both do what specmill.connector does inside vLLM: the lock is held before a request is answered, the
states are written later, by a thread, and the lock is given up when they are there.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import random
import signal
import socket
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import torch
from safetensors.torch import load_file

from specmill.engines import work_at
from specmill.extract import extract_missing
from specmill.samples import Sample
from specmill.shards import StateSpec
from specmill.staging import Work
from specmill.states import stage
from specmill.store import HiddenStateStore
from tests.fakes import sample

SPEC = StateSpec("fingerprint", (2, 4), hidden_size=3, dtype="bfloat16")
SAMPLES = [sample([number], [number + 1, number + 2]) for number in range(0, 50, 10)]
DEADLINE_S = 30
"""Nothing here takes a second; what takes this long hangs."""


def numbered(count: int) -> list[Sample]:
    """Different samples of 2 to 9 tokens."""
    return [sample([number], [number % 128] * (1 + number % 8)) for number in range(count)]


def states_of(ids: list[int]) -> torch.Tensor:
    """[num_tokens, 2 layers, 3]: what only this token at this depth has, exact in bfloat16."""
    grid = [[[layer, token // 128, token % 128] for layer in (1, 2)] for token in ids]
    return torch.tensor(grid, dtype=torch.bfloat16)


def key_of(ids: list[int]) -> str:
    return hashlib.sha256(b"".join(one.to_bytes(4, "little") for one in ids)).hexdigest()


def contents_of(samples: list[Sample], spec: StateSpec = SPEC) -> dict[str, str]:
    """What a store's `contents` must be: SHA-256 of ids, then states, by store key."""
    found = {}
    for one in samples:
        ids = one.input_ids.tolist()
        data = one.input_ids.astype("<i4").tobytes()
        data += states_of(ids).view(torch.int16).numpy().tobytes()
        found[spec.store_key(key_of(ids))] = hashlib.sha256(data).hexdigest()
    return found


def shards_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def kept_in(folder: Path) -> dict[str, tuple[list[int], torch.Tensor]]:
    """Ids and states by sample key, as safetensors itself reads the shards of a store."""
    found = {}
    for path in shards_in(folder):
        tensors = load_file(path)
        for name in tensors:
            kind, key = name.split("/")
            if kind == "ids":
                found[key] = (tensors[name].tolist(), tensors[f"states/{key}"])
    return found


def wait_until(condition: Callable[[], Any]) -> None:
    """Wait for something that is certain to come."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.002)


class Journal:
    """What engines did, in order; threads and processes write into one file."""

    def __init__(self, path: Path):
        self.path = path
        path.touch()

    def note(self, what: str, key: str) -> None:
        with self.path.open("ab", buffering=0) as out:
            out.write(f"{what} {key}\n".encode())

    def read(self) -> list[tuple[str, str]]:
        lines = self.path.read_text().splitlines()
        return [(line.split()[0], line.split()[1]) for line in lines]

    def keys(self, what: str) -> list[str]:
        return [key for kind, key in self.read() if kind == what]

    def asked_when_finished(self) -> list[str]:
        """Samples that were asked for although an engine had staged them completely."""
        finished: set[str] = set()
        again = []
        for what, key in self.read():
            if what == "staged":
                finished.add(key)
            elif what == "asked" and key in finished:
                again.append(key)
        return again


@dataclass
class Staging:
    """Stages as specmill.connector does."""

    folder: Path
    journal: Journal
    spec: StateSpec = SPEC

    def begin(self) -> tuple[Path, int]:
        """A request's path, and its lock, which is held."""
        path = self.folder / f"cmpl-{uuid.uuid4().hex}.safetensors"
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return path, lock

    def write(self, path: Path, lock: int, ids: list[int], how: str = "") -> None:
        """Write what was asked for, or something else, and give the lock up."""
        written = ids[::-1] if how == "other ids" else ids
        states = states_of(written)
        if how == "NaN":
            states[0, 0, 0] = float("nan")
        if how == "other shape":
            states = states[:, :1]
        try:
            if how != "nothing":
                stage(path, self.spec, torch.tensor(written), states)
                self.journal.note("staged", key_of(written))
        except ValueError as error:
            path.with_suffix(".error").write_text(str(error))
        finally:
            os.close(lock)


@dataclass
class Output:
    """As vLLM's RequestOutput."""

    request_id: str
    kv_transfer_params: dict[str, str] | None
    finished: bool = True


class FakeEngine:
    """As vLLM's LLMEngine: two requests a step, written `delay_s` later by a thread."""

    def __init__(self, folder: Path, delay_s: float = 0.0):
        self.staging = Staging(folder, Journal(folder.with_name("journal")))
        self.delay_s = delay_s
        self.how: dict[str, str] = {}
        """What goes wrong, by sample key; see `Staging.write`."""
        self.asked: list[str] = []
        self.num_asked_tokens = 0
        self.before_step: Callable[[int], None] = lambda number: None
        """Called with the number of the step, from 0."""
        self.before_write: Callable[[str], None] = lambda key: None
        """Called with a sample's key, by the thread that writes it."""
        self.num_steps = 0
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_dead=False))
        self._waiting: list[tuple[str, list[int], Path, int]] = []
        self._threads: list[threading.Thread] = []

    def add_request(self, request_id: str, prompt: dict[str, list[int]], params: Any) -> None:
        ids = prompt["prompt_token_ids"]
        assert params.max_tokens == 1
        assert request_id == key_of(ids)
        self.asked.append(request_id)
        self.num_asked_tokens += len(ids)
        self.staging.journal.note("asked", request_id)
        self._waiting.append((request_id, ids, *self.staging.begin()))

    def step(self) -> list[Output]:
        number, self.num_steps = self.num_steps, self.num_steps + 1
        self.before_step(number)
        now, self._waiting = self._waiting[:2], self._waiting[2:]
        for request_id, ids, path, lock in now:
            thread = threading.Thread(target=self._write, args=(path, lock, ids, request_id))
            thread.start()
            self._threads.append(thread)
        unfinished = [Output(request_id, None, False) for request_id, *_ in self._waiting]
        return [*unfinished, *(Output(key, {"hidden_states_path": str(p)}) for key, _, p, _ in now)]

    def shut_down(self) -> None:
        """End as a process does: what it held is free."""
        for thread in self._threads:
            thread.join()
        for *_, lock in self._waiting:
            os.close(lock)
        self._waiting = []

    def _write(self, path: Path, lock: int, ids: list[int], key: str) -> None:
        time.sleep(self.delay_s)
        self.before_write(key)
        self.staging.write(path, lock, ids, self.how.get(key, ""))


class FakeServer:
    """As `python -m specmill.serve_states`; a thread stages while another answers."""

    def __init__(self, staging: Staging, seed: int = 0, longest_delay_s: float = 0.003):
        self.staging = staging
        self.how: dict[str, str] = {}
        """What goes wrong, by sample key: see `_answer` and `Staging.write`."""
        self.asked: list[str] = []
        """Sample keys, in the order of arrival."""
        self.keys: set[str | None] = set()
        """Authorization headers seen."""
        self.dies_at: int | None = None
        """The request, from 0, at which the server is dead for it and all others."""
        self.url = ""
        self.share_of_slow_writes = 0.0
        """These take so long that another extraction can begin meanwhile."""
        self.closing = threading.Event()
        self._random = random.Random(seed)
        self._longest_delay_s = longest_delay_s
        self._is_dead = False
        self._num_accepted = self._num_ended = 0
        self._begun: set[int] = set()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    @contextlib.contextmanager
    def serve(self, port: int = 0) -> Iterator["FakeServer"]:
        """Listen on 127.0.0.1; at the end everything asked for is staged."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                fake._send(self, 200, b"")

            def do_POST(self) -> None:
                sent = self.rfile.read(int(self.headers["Content-Length"]))
                if len(sent) < int(self.headers["Content-Length"]):
                    return  # the client is gone
                body = json.loads(sent)
                assert self.path == "/v1/completions"
                assert (body["model"], body["max_tokens"]) == ("verifier", 1)
                fake.keys.add(self.headers["Authorization"])
                fake._answer(self, body["prompt"])

        class Http(ThreadingHTTPServer):
            request_queue_size = 128
            daemon_threads = False  # their end is waited for

            def process_request(self, request: Any, client_address: Any) -> None:
                fake._num_accepted += 1
                super().process_request(request, client_address)

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    with fake._lock:
                        fake._begun.discard(threading.get_ident())
                        fake._num_ended += 1

            def handle_error(self, request: Any, client_address: Any) -> None:
                assert isinstance(sys.exc_info()[1], OSError)  # the client is gone

        with Http(("127.0.0.1", port), Handler) as http:
            self.url = f"http://127.0.0.1:{http.server_port}"
            listening = threading.Thread(target=http.serve_forever, args=(0.01,))
            listening.start()
            try:
                yield self
            finally:
                self.closing.set()
                http.shutdown()
                listening.join()
        for thread in self._threads:
            thread.join()

    def wait_for(self, num_asked: int) -> None:
        """Wait until so many samples were asked for."""
        wait_until(lambda: len(self.asked) >= num_asked)

    def settle(self) -> None:
        """Wait until what clients have sent so far has its lock, or is known to be cut."""
        httpx.get(f"{self.url}/health", trust_env=False)  # accepted after all of it

        def is_read() -> bool:
            with self._lock:
                return self._num_accepted - self._num_ended == len(self._begun)

        wait_until(is_read)

    def _answer(self, handler: BaseHTTPRequestHandler, ids: list[int]) -> None:
        key = key_of(ids)
        with self._lock:
            path, lock = self.staging.begin()
            self._begun.add(threading.get_ident())
            self.staging.journal.note("asked", key)
            self._is_dead = self._is_dead or len(self.asked) == self.dies_at
            self.asked.append(key)
            wait_s = [self._random.uniform(0, self._longest_delay_s) for _ in range(2)]
            if self._random.random() < self.share_of_slow_writes:
                wait_s[1] += 0.4
        how = "dead" if self._is_dead else self.how.get(key, "")
        if how == "staged, then dead":
            self._is_dead = True
            self.staging.write(path, lock, ids)
            how = "dead"
        elif how in ("dead", "hangs") or how.isdecimal():
            os.close(lock)
        if how == "hangs":
            self.closing.wait(DEADLINE_S)
        if how in ("dead", "hangs"):
            _reset(handler)
        elif how.isdecimal():
            self._send(handler, int(how), b"no thanks")
        else:
            time.sleep(wait_s[0])
            self._stage(handler, ids, how, path, lock, wait_s[1])

    def _stage(
        self,
        handler: BaseHTTPRequestHandler,
        ids: list[int],
        how: str,
        path: Path,
        lock: int,
        wait_s: float,
    ) -> None:
        thread = threading.Thread(target=self._write, args=(wait_s, path, lock, ids, how))
        thread.start()
        self._threads.append(thread)
        told = {
            "elsewhere": str(self.staging.folder.parent / "elsewhere.safetensors"),
            "dots": f"{self.staging.folder}/../elsewhere.safetensors",
        }.get(how, str(path))
        reply = {"choices": [], "kv_transfer_params": {"hidden_states_path": told}}
        if how == "no states":
            del reply["kv_transfer_params"]
        self._send(handler, 200, b"<html>" if how == "no JSON" else json.dumps(reply).encode())

    def _write(self, wait_s: float, path: Path, lock: int, ids: list[int], how: str) -> None:
        time.sleep(wait_s)
        if how == "holds its lock":
            self.closing.wait(DEADLINE_S)
        self.staging.write(path, lock, ids, how)

    def _send(self, handler: BaseHTTPRequestHandler, status: int, content: bytes) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)


def _reset(handler: BaseHTTPRequestHandler) -> None:
    linger = struct.pack("ii", 1, 0)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    handler.close_connection = True


@dataclass
class Workplace:
    """A store and a staging folder."""

    folder: Path
    shard_bytes: int = 10**6
    window: int = 1000

    @property
    def staging(self) -> Path:
        return self.folder / "staging"

    @property
    def store(self) -> HiddenStateStore:
        """The store, opened anew."""
        return HiddenStateStore(self.folder / "store")

    @property
    def journal(self) -> Journal:
        return Journal(self.folder / "journal")

    def kept(self) -> set[str]:
        """Keys of the samples in the store."""
        return set(kept_in(self.folder / "store"))

    def staged(self) -> list[str]:
        """Names of the files in the staging folder."""
        return sorted(path.name for path in self.staging.iterdir())

    def server(self, spec: StateSpec = SPEC, **more: Any) -> FakeServer:
        self.staging.mkdir(exist_ok=True)
        return FakeServer(Staging(self.staging, self.journal, spec), **more)

    def engine(self, **more: Any) -> FakeEngine:
        self.staging.mkdir(exist_ok=True)
        return FakeEngine(self.staging, **more)

    def extract(
        self, run: Callable[[Work], None], samples: list[Sample] = SAMPLES, spec: StateSpec = SPEC
    ) -> int:
        """Number of tokens extracted now."""
        return extract_missing(
            samples,
            spec,
            self.store,
            run,
            shard_bytes=self.shard_bytes,
            staging=self.staging,
            window=self.window,
        )


def at(*urls: str, timeout_s: float = DEADLINE_S) -> Callable[[Work], None]:
    """Work done by servers."""
    return lambda work: work_at(list(urls), work, timeout_s)


def extract_in_child(place: Workplace, urls: list[str], num_samples: int) -> None:
    """Extract as the stage does, in a process that is going to be killed."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    place.extract(at(*urls), numbered(num_samples))


def serve_in_child(place: Workplace, port: int, seed: int) -> None:
    """Serve in a process that is going to be killed."""
    with place.server(seed=seed).serve(port):
        threading.Event().wait()

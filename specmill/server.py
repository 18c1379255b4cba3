"""A vLLM server for the length of a `with` block: started, awaited, stopped by its process id."""

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict, Unpack

import httpx
import psutil
from tqdm import tqdm

from specmill import compat

_STOP_GRACE_S = 30
_PORT_ATTEMPTS = 3
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Server:
    """A healthy server."""

    url: str
    api_key: str
    log: Path
    startup_s: float
    pid: int = 0

    def pause(self) -> None:
        """Take the CPU from its engine until `resume`: even an idle one spins for a second.

        The API server itself goes on and keeps its connections.
        """
        for child in psutil.Process(self.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                child.suspend()

    def resume(self) -> None:
        """Let its engine go on."""
        for child in psutil.Process(self.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.resume()


class EngineRefused(RuntimeError):
    """The engine ended by itself while it started: it was told something it cannot do."""

    def __init__(self, message: str, reason: str):
        super().__init__(message)
        self.reason = reason
        """The last error in its log, one line."""


class Limits(TypedDict):
    """Of `starting`, what is given by name."""

    cpu_kv_cache_gib: int
    """KV cache of a CPU engine, GiB."""
    gpu_memory_utilization: float
    """Share of GPU memory the engine may take."""
    startup_timeout_s: int
    """Longest time until the server must be healthy, seconds."""
    label: str
    """Shown while the server starts."""
    gpus: NotRequired[Sequence[str]]
    """What it sees of the GPUs, as CUDA_VISIBLE_DEVICES names them; () shows it all."""


@contextlib.contextmanager
def serve(
    model: Path, arguments: list[str], log: Path, **limits: Unpack[Limits]
) -> Iterator[Server]:
    """Serve `model` on a free loopback port behind a random API key; as `starting`, and waits."""
    with starting(model, arguments, log, **limits) as wait:
        yield wait()


@contextlib.contextmanager
def starting(
    model: Path, arguments: list[str], log: Path, **limits: Unpack[Limits]
) -> Iterator[Callable[[], Server]]:
    """Start to serve `model`, so that several servers can start at a time.

    Args:
        model: Folder of the verifier.
        arguments: Server flags beyond those of every engine.
        log: Receives the server's output.
        limits: Of the engine, and of the start.

    Yields:
        A function that waits until the server is healthy.

    Raises:
        EngineRefused: when the server ends by itself; quotes its last lines.
        RuntimeError: when it is killed or not healthy in time.
    """
    machine, key = compat.device(), secrets.token_urlsafe(24)
    flags = [*compat.engine_arguments(machine, limits["gpu_memory_utilization"]), *arguments]
    engine = compat.engine_environment(machine, limits["cpu_kv_cache_gib"], "fork")
    environment = _environment(engine, key, limits.get("gpus", ()))
    log.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:

        def start() -> tuple[int, subprocess.Popen[bytes]]:
            port = _free_port()
            process = _start(compat.server_command(model, port, flags), environment, log)
            stack.callback(_stop, process)
            return port, process

        started = time.monotonic()
        first = start()

        def wait() -> Server:
            port, process = first
            for attempt in range(1, _PORT_ATTEMPTS + 1):
                url = f"http://127.0.0.1:{port}"
                try:
                    _wait_until_healthy(process, url, log, limits)
                    break
                except RuntimeError:
                    # a free port can be taken before the server has it
                    if compat.PORT_IN_USE not in _tail(log) or attempt == _PORT_ATTEMPTS:
                        raise
                port, process = start()
            stack.enter_context(_resumed_when_orphaned(process.pid))
            return Server(url, key, log, time.monotonic() - started, process.pid)

        yield wait


def _environment(engine: dict[str, str], key: str, gpus: Sequence[str]) -> dict[str, str]:
    """This process's, with the API key in it: a command line is public."""
    seen = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    return os.environ | engine | {"VLLM_API_KEY": key} | seen


def _start(command: list[str], environment: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
    prctl = ctypes.CDLL(None).prctl
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
            # a stage that is killed outright takes its server with it
            preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_healthy(
    process: subprocess.Popen[bytes], url: str, log: Path, limits: Limits
) -> None:
    timeout_s, label = limits["startup_timeout_s"], limits["label"]
    deadline = time.monotonic() + timeout_s
    form = "{desc}: {elapsed}"
    with (
        tqdm(desc=f"starting vLLM ({label})", unit="s", bar_format=form) as bar,
        httpx.Client(base_url=url, timeout=5, trust_env=False) as client,  # dear to make
    ):
        while time.monotonic() < deadline:
            if process.poll() is not None:
                message = (
                    f"vLLM ended with status {process.returncode} while starting ({label}); "
                    f"the end of {log}:\n{_tail(log)}"
                )
                if process.returncode < 0:  # killed, as by the kernel when memory is short
                    raise RuntimeError(message)
                raise EngineRefused(message, compat.engine_error(log.read_text(errors="replace")))
            with contextlib.suppress(httpx.TransportError):
                if client.get("/health").status_code == 200:
                    return
            time.sleep(0.5)
            bar.update(0.5)
    raise RuntimeError(
        f"vLLM ({label}) was not healthy after {timeout_s} s (runtime.startup_timeout_s); "
        f"the end of {log}:\n{_tail(log)}"
    )


_RESUME = """
import os, signal, sys
signal.sigwait([signal.SIGTERM])
os.killpg(int(sys.argv[1]), signal.SIGCONT)
"""


@contextlib.contextmanager
def _resumed_when_orphaned(group: int) -> Iterator[None]:
    """Have a paused engine go on when this process is killed outright: it could not end."""
    prctl = ctypes.CDLL(None).prctl

    def prepare() -> None:
        # blocked before it can come: SIGTERM is what the guard waits for, also while it starts
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _RESUME, str(group)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # DVC reads a stage's output to its end
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=prepare,
    )
    try:
        yield
    finally:
        guard.kill()
        guard.wait()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and whatever it started: politely, then the whole process group."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGCONT)  # a paused engine would not hear of it
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path, lines: int = 25) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])

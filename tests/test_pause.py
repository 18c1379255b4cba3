"""A paused engine: a real process group whose worker computes without end."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from specmill.server import Server
from tests.workspace import ROOT

pytestmark = pytest.mark.slow

# Stands for vLLM: an API server with an engine in a process of its own that spins even when it is
# idle. Told to end, it ends its engine and waits for it, as vLLM does.
FAKE = """
import http.server, os, signal, sys

engine = os.fork()
if engine == 0:
    while True:
        pass

def end(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one may come for each thread of the stage
    os.kill(engine, signal.SIGTERM)
    os.waitpid(engine, 0)
    print("ended with its engine", flush=True)
    os._exit(0)

signal.signal(signal.SIGTERM, end)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

print("engine", engine, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

# A stage that serves it, pauses it, says so, and waits.
STAGE = """
import sys, time
from pathlib import Path
from specmill import compat
from specmill.server import serve

program, log = sys.argv[1:]
compat.device = lambda: "cuda"
compat.server_command = lambda model, port, flags: [sys.executable, program, str(port)]
with serve(Path("m"), [], Path(log), cpu_kv_cache_gib=1, gpu_memory_utilization=0.5,
           startup_timeout_s=60, label="fake") as server:
    print("server", server.pid, flush=True)
    for line in sys.stdin:
        getattr(server, line.strip())()
        print("done", flush=True)
"""


class Stage:
    """The stage as a process, and those that it started."""

    def __init__(self, folder: Path):
        (folder / "fake.py").write_text(FAKE)
        self.log = folder / "server.log"
        self._process = subprocess.Popen(
            [sys.executable, "-c", STAGE, str(folder / "fake.py"), str(self.log)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.server = psutil.Process(int(self._said("server")))
        (self.engine,) = self.server.children()
        started = psutil.Process(self._process.pid).children()
        self.started = [*started, self.engine]

    def _said(self, word: str) -> str:
        assert self._process.stdout
        first, _, rest = self._process.stdout.readline().partition(" ")
        assert first.strip() == word
        return rest

    def tell(self, method: str) -> None:
        """Have it call a method of its Server."""
        assert self._process.stdin
        self._process.stdin.write(f"{method}\n")
        self._process.stdin.flush()
        self._said("done")

    def end(self) -> int:
        """Let it leave its block."""
        assert self._process.stdin
        self._process.stdin.close()
        return self._process.wait()

    def kill(self) -> None:
        """End it outright."""
        self._process.kill()
        self._process.wait()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.kill()
    for process in stage.started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def comes_true(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_paused_engine_uses_no_cpu_time_until_it_is_resumed(stage: Stage) -> None:
    before = cpu_s(stage.engine)
    assert comes_true(lambda: cpu_s(stage.engine) > before)
    stage.tell("pause")
    assert comes_true(lambda: stage.engine.status() == psutil.STATUS_STOPPED)
    paused = cpu_s(stage.engine)
    time.sleep(0.3)
    assert cpu_s(stage.engine) == paused
    stage.tell("resume")
    assert comes_true(lambda: cpu_s(stage.engine) > paused)


def test_the_api_server_goes_on_while_its_engine_is_paused(stage: Stage) -> None:
    stage.tell("pause")
    assert comes_true(lambda: stage.engine.status() == psutil.STATUS_STOPPED)
    assert stage.server.status() != psutil.STATUS_STOPPED


def test_pausing_and_resuming_twice_is_as_once(stage: Stage) -> None:
    for _ in range(2):
        stage.tell("pause")
    assert comes_true(lambda: stage.engine.status() == psutil.STATUS_STOPPED)
    for _ in range(2):
        stage.tell("resume")
    assert comes_true(lambda: stage.engine.status() != psutil.STATUS_STOPPED)


def test_a_paused_server_ends_politely_with_its_block(stage: Stage) -> None:
    stage.tell("pause")
    assert stage.end() == 0
    assert comes_true(lambda: all(is_gone(process) for process in stage.started))
    assert "ended with its engine" in stage.log.read_text()


def test_a_paused_server_ends_too_when_its_stage_is_killed_outright(stage: Stage) -> None:
    stage.tell("pause")
    assert comes_true(lambda: stage.engine.status() == psutil.STATUS_STOPPED)
    stage.kill()
    # the engine goes on and hears that it shall end, for which the server waits
    assert comes_true(lambda: all(is_gone(process) for process in stage.started))
    assert len(stage.started) == 3  # server, engine, and what lets them go on
    assert "ended with its engine" in stage.log.read_text()


def test_a_worker_that_ends_meanwhile_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Worker:
        def __init__(self, name: str):
            self._name = name

        def suspend(self) -> None:
            self._hear("pause")

        def resume(self) -> None:
            self._hear("resume")

        def _hear(self, word: str) -> None:
            if self._name == "gone":
                raise psutil.NoSuchProcess(1)
            told.append(f"{word} {self._name}")

    class Parent:
        def __init__(self, pid: int):
            assert pid == 7

        def children(self, recursive: bool) -> list[Worker]:
            assert recursive
            return [Worker("gone"), Worker("here")]

    monkeypatch.setattr(psutil, "Process", Parent)
    server = Server("http://127.0.0.1:1", "key", Path("no.log"), 0.0, 7)
    server.pause()
    server.resume()
    assert told == ["pause here", "resume here"]

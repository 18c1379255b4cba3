import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from specmill import compat, own_servers
from specmill.fleet import server_starter
from specmill.params import Runtime
from specmill.params_parallel import Parallel
from specmill.plan import Run
from specmill.server import EngineRefused, serve
from tests.benched import bench_section

# Stands for vLLM: takes the port, then what it does, then the flags it was given.
FAKE = """
import http.server, json, os, signal, sys, time

port, behaviour, *flags = sys.argv[1:]
print("flags", json.dumps(flags))
print("key", os.environ["VLLM_API_KEY"])
print("gpus", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
print("command", open("/proc/self/cmdline").read().replace("\\0", " "), flush=True)
if behaviour == "port taken" and not os.path.exists("tried"):
    open("tried", "w").close()
    print("[Errno 98] error while attempting to bind: address already in use", flush=True)
    sys.exit(1)
if behaviour == "port always taken":
    print("[Errno 98] error while attempting to bind: address already in use", flush=True)
    sys.exit(1)
if behaviour == "dies":
    print("CUDA out of memory, or so", flush=True)
    sys.exit(3)
if behaviour == "refuses":
    sys.exit("ValueError: no such head")
if behaviour == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
if behaviour == "forks":
    ready, tell = os.pipe()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("child", os.getpid(), flush=True)
        os.write(tell, b".")
        time.sleep(600)
    os.read(ready, 1)
unhealthy = [503, 503] if behaviour == "warms up" else []

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.path == "/health" and behaviour != "never healthy"
        self.send_response(unhealthy.pop() if unhealthy else 200 if known else 404)
        self.end_headers()

print("serving", os.getpid(), flush=True)
http.server.HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


class Fakes:
    """Makes `serve` start a fake that behaves in a given way."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.log = folder / "deep" / "server.log"
        self._program = folder / "fake_vllm.py"
        self._program.write_text(FAKE)
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(compat, "device", lambda: "cuda")  # no library to preload
        # a fake is up at once, and not to be waited for as long as a vLLM
        monkeypatch.setattr(time, "sleep", lambda seconds, sleep=time.sleep: sleep(seconds / 25))
        self.started: list[int] = []
        """Process ids of the fakes."""
        started = self.started
        program = str(self._program)

        class Noted(subprocess.Popen[bytes]):
            def __init__(self, *args: Any, **options: Any):
                super().__init__(*args, **options)
                if program in args[0]:  # and not what lets a paused engine go on
                    started.append(self.pid)

        monkeypatch.setattr(subprocess, "Popen", Noted)
        self.behave("serves")

    def behave(self, behaviour: str) -> None:
        def command(model: Path, port: int, arguments: list[str]) -> list[str]:
            return [sys.executable, str(self._program), str(port), behaviour, *arguments]

        self._monkeypatch.setattr(compat, "server_command", command)

    def serve(self, timeout_s: int = 30) -> Any:
        return serve(
            Path("models/verifier"),
            ["--max-model-len", "64"],
            self.log,
            cpu_kv_cache_gib=1,
            gpu_memory_utilization=0.5,
            startup_timeout_s=timeout_s,
            label="fake",
        )

    def logged(self, word: str) -> str:
        """What the fake wrote after `word`."""
        for line in self.log.read_text().splitlines():
            if line.startswith(f"{word} "):
                return line.removeprefix(f"{word} ")
        raise AssertionError(f"no {word!r} in {self.log.read_text()}")


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(tmp_path, monkeypatch)


def is_running(pid: int) -> bool:
    """Whether a process still runs; one that only waits to be collected does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def ends(pid: int) -> bool:
    """Whether a process ends; a killed one may take a moment."""
    deadline = time.monotonic() + 20
    while is_running(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_healthy_server_is_yielded_with_its_address_and_log(fakes: Fakes) -> None:
    with fakes.serve() as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert server.log == fakes.log
        assert server.startup_s > 0
        assert is_running(int(fakes.logged("serving")))
    assert not is_running(int(fakes.logged("serving")))


def test_the_key_is_random_and_in_the_environment_but_on_no_command_line(fakes: Fakes) -> None:
    with fakes.serve() as server:
        first = server.api_key
        assert fakes.logged("key") == first
        assert first not in fakes.logged("command")
    with fakes.serve() as server:
        assert server.api_key != first


def test_the_flags_of_the_device_come_before_those_of_the_caller(fakes: Fakes) -> None:
    with fakes.serve():
        flags = json.loads(fakes.logged("flags"))
    assert flags == ["--gpu-memory-utilization", "0.5", "--max-model-len", "64"]


def test_a_server_that_is_not_healthy_yet_is_waited_for(fakes: Fakes) -> None:
    fakes.behave("warms up")
    with fakes.serve() as server:
        assert "503" in server.log.read_text()


def test_a_server_that_ends_while_starting_is_an_error_that_quotes_its_log(fakes: Fakes) -> None:
    fakes.behave("dies")
    with (
        pytest.raises(RuntimeError, match=r"(?s)ended with status 3 .*CUDA out of memory, or so"),
        fakes.serve(),
    ):
        raise AssertionError("a dead server was yielded")


def test_a_server_that_ends_by_itself_has_its_reason_and_one_that_was_killed_has_none(
    fakes: Fakes,
) -> None:
    fakes.behave("refuses")
    with pytest.raises(EngineRefused) as caught, fakes.serve():
        raise AssertionError("a dead server was yielded")
    assert caught.value.reason == "ValueError: no such head"
    fakes.behave("is killed")
    with pytest.raises(RuntimeError, match="status -9") as killed, fakes.serve():
        raise AssertionError("a dead server was yielded")
    assert not isinstance(killed.value, EngineRefused)


def test_a_server_that_is_not_healthy_in_time_is_ended(fakes: Fakes) -> None:
    fakes.behave("never healthy")
    with (
        pytest.raises(RuntimeError, match=r"not healthy after 1 s \(runtime\.startup_timeout_s\)"),
        fakes.serve(timeout_s=1),
    ):
        raise AssertionError("an unhealthy server was yielded")
    (pid,) = fakes.started
    assert not is_running(pid)


def test_children_that_ignore_sigterm_end_with_the_block(fakes: Fakes) -> None:
    fakes.behave("forks")
    with fakes.serve():
        child = int(fakes.logged("child"))
        assert is_running(child)
    assert not is_running(int(fakes.logged("serving")))
    assert ends(child)


def test_the_server_ends_when_the_block_raises(fakes: Fakes) -> None:
    with pytest.raises(RuntimeError, match="measurement failed"), fakes.serve():
        raise RuntimeError("measurement failed")
    assert not is_running(int(fakes.logged("serving")))


def test_a_server_killed_from_outside_leaves_no_children(fakes: Fakes) -> None:
    fakes.behave("forks")
    with fakes.serve():
        child = int(fakes.logged("child"))
        os.kill(int(fakes.logged("serving")), 9)
        assert ends(int(fakes.logged("serving")))
    assert ends(child)


RUNTIME = Runtime(
    cpu_kv_cache_gib=1,
    gpu_memory_utilization=0.5,
    request_concurrency=1,
    prepare_engines=1,
    extract_window=1,
    extract_endpoints=[],
    extract_engines=1,
    train_processes=1,
    data_workers=0,
    startup_timeout_s=30,
    request_timeout_s=30,
    tracking_uri=None,
    register_head=None,
)


# two engines side by side share the memory that one has alone
@pytest.mark.parametrize(("reference", "share"), [("beside", "0.25"), ("bracket", "0.5")])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_bench_server_has_the_flags_every_method_shares_and_its_speculation(
    fakes: Fakes, tmp_path: Path, enforce_eager: bool, reference: str, share: str
) -> None:
    bench = bench_section(reference=reference, enforce_eager=enforce_eager)
    verifier = {"max_model_len": 64, "dtype": "float32"}
    logs = tmp_path / "logs"
    start = server_starter("ngram", Path("m"), verifier, bench, Parallel(), RUNTIME, logs)
    shared = ["--gpu-memory-utilization", share, "--max-model-len", "64", "--dtype", "float32"]
    shared += ["--enforce-eager"] if enforce_eager else []
    with start(Run("reference", None, 0, None), "reference_k0_0") as wait:
        fakes.log = wait().log
        assert json.loads(fakes.logged("flags")) == shared
    with start(Run("method", 3, 1, {"method": "ngram"}), "method_k3_1") as wait:
        fakes.log = wait().log
        assert json.loads(fakes.logged("flags")) == [
            *shared,
            "--speculative-config",
            '{"method": "ngram"}',
        ]
    assert sorted(os.listdir(tmp_path / "logs")) == [
        "bench-ngram-method_k3_1.log",
        "bench-ngram-reference_k0_0.log",
    ]


def test_a_bench_server_is_spread_over_gpus_as_params_say(fakes: Fakes, tmp_path: Path) -> None:
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_text('{"num_attention_heads": 6}')
    verifier = {"max_model_len": 64, "dtype": "float32"}
    spread = Parallel(tensor_parallel_size=2, data_parallel_size=3)
    logs = tmp_path / "logs"
    start = server_starter("none", model, verifier, bench_section(), spread, RUNTIME, logs)
    with start(Run("reference", None, 0, None), "reference_k0_0") as wait:
        fakes.log = wait().log
        flags = json.loads(fakes.logged("flags"))
    assert flags[-4:] == ["--tensor-parallel-size", "2", "--data-parallel-size", "3"]


def test_servers_that_start_together_each_see_their_own_gpus(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fakes write what they see into their logs."""
    monkeypatch.setattr(own_servers, "visible_gpus", lambda: ["4", "5", "6", "7"])
    log = tmp_path / "extract.log"
    with own_servers.own_servers(Path("m"), ["--enforce-eager"], 2, 2, RUNTIME, log) as servers:
        assert len({server.url for server in servers}) == 2
        assert len({server.api_key for server in servers}) == 2
        seen = []
        for number in range(2):
            fakes.log = tmp_path / f"extract-{number}.log"
            seen.append(fakes.logged("gpus"))
            assert json.loads(fakes.logged("flags"))[2:] == ["--enforce-eager"]
    assert seen == ["4,5", "6,7"]
    assert len(fakes.started) == 2
    assert not any(is_running(pid) for pid in fakes.started)


def test_more_servers_than_gpus_share_their_memory_and_know_their_kv_cache(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1,000 bytes half may be taken (RUNTIME): 250 each of two, 500 of one alone."""
    monkeypatch.setattr(own_servers, "visible_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(own_servers, "gpu_bytes", lambda: 1000)
    with own_servers.own_servers(Path("m"), [], 3, 1, RUNTIME, tmp_path / "prepare.log"):
        flags, seen = [], []
        for number in range(3):
            fakes.log = tmp_path / f"prepare-{number}.log"
            flags.append(json.loads(fakes.logged("flags")))
            seen.append(fakes.logged("gpus"))
    assert seen == ["0", "1", "0"]
    shared = ["--gpu-memory-utilization", "0.25", "--kv-cache-memory-bytes", "125"]
    assert flags == [shared, ["--gpu-memory-utilization", "0.5"], shared]


def test_a_lone_server_keeps_its_log_and_all_gpus(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_servers, "visible_gpus", lambda: ["0", "1"])
    fakes.log = tmp_path / "prepare.log"
    with own_servers.own_servers(Path("m"), [], 1, 1, RUNTIME, fakes.log):
        assert fakes.logged("gpus") == "all"
        assert json.loads(fakes.logged("flags")) == ["--gpu-memory-utilization", "0.5"]


@pytest.mark.parametrize(
    ("count", "each", "gpus", "expected"),
    [
        (3, 1, ["0", "1"], [(["0"], 2), (["1"], 1), (["0"], 2)]),
        (2, 2, ["0", "1", "2"], [(["0", "1"], 2), (["0", "1"], 2)]),
        (4, 1, ["0"], [(["0"], 4)] * 4),
        (2, 1, [], [([], 1)] * 2),
    ],
)
def test_engines_have_gpus_of_their_own_while_there_are_enough(
    count: int, each: int, gpus: list[str], expected: list[tuple[list[str], int]]
) -> None:
    assert own_servers.places(count, each, gpus) == expected


def test_an_engine_that_needs_more_gpus_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match=r"asks for 4 GPUs, and 2 can be used"):
        own_servers.places(1, 4, ["0", "1"])


def test_a_port_that_was_taken_meanwhile_is_replaced_by_another(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fakes.behave("port taken")
    with fakes.serve() as server:
        assert server.url.startswith("http://127.0.0.1:")
    assert len(fakes.started) == 2
    assert not any(is_running(pid) for pid in fakes.started)


def test_ports_that_are_always_taken_end_with_the_servers_own_words(fakes: Fakes) -> None:
    fakes.behave("port always taken")
    with pytest.raises(RuntimeError, match="address already in use"), fakes.serve():
        pass
    assert len(fakes.started) == 3

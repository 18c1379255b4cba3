"""Sampling the twin over HTTP from an engine that transformers stands in for."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specmill import compat, sampling
from specmill.params import Runtime
from specmill.params_file import load_params
from specmill.sampling import check_both_fates, check_lossless
from specmill.sampling_twin import prompts, write_twin
from specmill.server import Server
from tests.workspace import ROOT

NUM_SAMPLES = 2048  # fewer than are taken of a real engine
COUNTERS = {"num_drafts": 3000, "num_draft_tokens": 6000, "num_accepted_tokens": 1500}
AT = [1200, 300]
SPECULATION = {"method": "some", "num_speculative_tokens": sampling.K}


class FakeEngine:
    """Answers completions as transformers samples them, at a temperature of its own if told."""

    def __init__(self, model: Path, temperature: float | None = None):
        self._model = AutoModelForCausalLM.from_pretrained(model).eval()
        self._temperature = temperature
        self._drawn: dict[tuple[int, ...], Iterator[list[int]]] = {}
        self._lock = threading.Lock()
        self.requests: list[dict[str, Any]] = []
        self.flags: list[str] = []

    @contextlib.contextmanager
    def serve(self, _model: Path, flags: list[str], log: Path, **_: Any) -> Iterator[Server]:
        self.flags = flags
        log.write_text("Using the V1 model runner\n")
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._send(engine.metrics())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._send(json.dumps({"choices": engine.answer(body)}))

            def _send(self, text: str) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
            thread = threading.Thread(target=http.serve_forever, args=(0.01,))
            thread.start()
            yield Server(f"http://127.0.0.1:{http.server_port}", "key", log, 0.0)
            http.shutdown()
            thread.join()

    def answer(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The next of the prompt's samples, all of which are drawn when it first comes."""
        told = body["prompt"]
        with self._lock:  # torch draws from one generator
            self.requests.append(body)
            if tuple(told) not in self._drawn:
                made = self._model.generate(
                    torch.tensor([told] * (NUM_SAMPLES // len(prompts()))),
                    do_sample=True,
                    temperature=self._temperature or body["temperature"],
                    top_k=0,
                    max_new_tokens=body["max_tokens"],
                    eos_token_id=None,
                    pad_token_id=0,
                )
                self._drawn[tuple(told)] = iter(made[:, len(told) :].tolist())
            return [{"token_ids": next(self._drawn[tuple(told)])} for _ in range(body["n"])]

    def metrics(self) -> str:
        """What one sampling with a method gains, after its first answer."""
        lines = []
        for name, value in COUNTERS.items():
            full = f"{compat.SPEC_COUNTERS[name]}_total"
            lines += [f"# TYPE {full} counter", f"{full} {value * bool(self.requests)}"]
        full = f"{compat.SPEC_PER_POSITION}_total"
        lines.append(f"# TYPE {full} counter")
        for position, value in enumerate(AT):
            lines.append(f'{full}{{position="{position}"}} {value * bool(self.requests)}')
        return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sampling") / "twin"
    write_twin(folder)
    return folder


@pytest.fixture
def runtime() -> Runtime:
    return load_params(ROOT / "params.yaml").runtime


def check(
    engine: FakeEngine,
    twin: Path,
    speculation: dict[str, Any] | None,
    runtime: Runtime,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Any]:
    monkeypatch.setattr(sampling, "serve", engine.serve)
    monkeypatch.setattr(sampling, "NUM_SAMPLES", NUM_SAMPLES)
    torch.manual_seed(0)
    return check_lossless(twin, speculation, twin.parent / "log", runtime)


def test_an_engine_that_samples_as_it_should_is_lossless(
    twin: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(twin)
    result = check(engine, twin, SPECULATION, runtime, monkeypatch)
    assert result["lossless"]
    assert result["p_value"] > 1e-3
    assert result["num_samples"] == NUM_SAMPLES
    assert result["num_drafts"] == 3000
    assert result["acceptance_length"] == 1.5
    assert result["acceptance_rate"] == 0.25
    assert json.loads(engine.flags[engine.flags.index("--speculative-config") + 1]) == SPECULATION
    # the engine seeds the samples of a request with its seed and the numbers after it
    seeds = [
        body["seed"] + i for body in engine.requests if "seed" in body for i in range(body["n"])
    ]
    assert len(set(seeds)) == len(seeds) == NUM_SAMPLES / 2
    assert all(body["ignore_eos"] for body in engine.requests)


def test_an_engine_that_is_a_little_too_sure_is_not(
    twin: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = check(FakeEngine(twin, temperature=0.85), twin, None, runtime, monkeypatch)
    assert not result["lossless"]
    assert result["p_value"] < 1e-9
    assert result["acceptance_length"] is None


@pytest.mark.parametrize(
    "counts",
    [{}, {"num_drafts": 5000}, {"num_drafts": 5000, "accepted_at_0": 99},
     {"num_drafts": 5000, "accepted_at_0": 4901}],
)  # fmt: skip
def test_samples_with_hardly_a_draft_of_either_fate_are_refused(counts: dict[str, int]) -> None:
    with pytest.raises(RuntimeError, match="draft_on_twin"):
        check_both_fates(counts)


def test_samples_with_drafts_of_both_fates_are_taken() -> None:
    check_both_fates({"num_drafts": 5000, "accepted_at_0": 100})

"""Extraction against the engine alone and against speculators' command line, paired in one run.

    plain        the engine's own prefill of the same samples, nothing extracted: the limit
    here         an engine inside the process (specmill.engines.work_here): `dvc repro extract`
    server       servers and our client (specmill.engines.work_at): runtime.extract_endpoints, or
                 runtime.extract_engines where `--engines` is more than one; those share the GPUs
    speculators  a server with the same settings and vLLM's connector, and
                 `speculators generate-offline-data`

Every variant starts an engine of its own, answers a few samples unmeasured and is timed from the
first request until everything is safe: shards flushed, or speculators' files in place. Rounds go
forwards and backwards in turn. Needs models/verifier and data/prepared (`dvc repro prepare`).

Run      python -m benchmarks.extraction --samples 160 --rounds 2 --json FILE
"""

import argparse
import contextlib
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from specmill import compat, paths
from specmill.engine_flags import server_flags
from specmill.engines import local_engine, work_at, work_here
from specmill.extract_engines import extraction_settings
from specmill.files import read_json, write_json
from specmill.layers import states_of
from specmill.own_servers import own_servers
from specmill.params import Runtime
from specmill.params_file import load_params
from specmill.samples import Sample, read_samples
from specmill.server import serve
from specmill.shards import StateSpec
from specmill.staging import Work
from specmill.store import HiddenStateStore
from specmill.verifier import model_path

WARM_UP = 8


class Bench:
    """What every variant shares."""

    def __init__(
        self,
        samples: list[Sample],
        spec: StateSpec,
        runtime: Runtime,
        verifier: dict[str, Any],
        engines: int = 1,
    ):
        self.engines = engines
        self.warm, self.samples = samples[:WARM_UP], samples[WARM_UP:]
        self.num_tokens = sum(len(sample.input_ids) for sample in self.samples)
        self.spec, self.runtime, self.verifier = spec, runtime, verifier

    def settings(self, folder: Path) -> dict[str, Any]:
        """Engine settings of extraction, staged in `folder`."""
        return extraction_settings(self.spec, folder / "staging", self.verifier)

    def extract(self, samples: list[Sample], folder: Path, run: Callable[[Work], None]) -> float:
        """Seconds from the first request until everything is in shards."""
        store = HiddenStateStore(folder / "store")
        started = time.monotonic()
        with store.writer(self.spec, 2**29) as writer:
            work = Work(samples, self.spec, writer, folder / "staging", self.runtime.extract_window)
            run(work)
            work.close()
        return time.monotonic() - started

    def server(self, folder: Path, settings: dict[str, Any]) -> Any:
        """A server with these settings."""
        (folder / "staging").mkdir(parents=True)
        return serve(
            model_path(paths.VERIFIER),
            [*server_flags(settings), "--disable-uvicorn-access-log"],
            folder / "server.log",
            cpu_kv_cache_gib=self.runtime.cpu_kv_cache_gib,
            gpu_memory_utilization=self.runtime.gpu_memory_utilization,
            startup_timeout_s=self.runtime.startup_timeout_s,
            label="extraction",
        )


def plain(bench: Bench, folder: Path) -> float:
    """The engine's own prefill."""
    from vllm import SamplingParams

    settings = bench.settings(folder)
    del settings["speculative_config"], settings["kv_transfer_config"]
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    with local_engine(model_path(paths.VERIFIER), settings, bench.runtime) as engine:
        seconds = 0.0
        for samples in (bench.warm, bench.samples):
            started = time.monotonic()
            for sample in samples:
                ids = {"prompt_token_ids": sample.input_ids.tolist()}
                engine.add_request(sample.sample_key, ids, params)
            while engine.has_unfinished_requests():
                engine.step()
            seconds = time.monotonic() - started
    return seconds


def here(bench: Bench, folder: Path) -> float:
    """Our extraction inside the process."""
    (folder / "staging").mkdir(parents=True)
    settings = bench.settings(folder)
    with local_engine(model_path(paths.VERIFIER), settings, bench.runtime) as engine:
        bench.extract(bench.warm, folder, lambda work: work_here(engine, work))
        return bench.extract(bench.samples, folder, lambda work: work_here(engine, work))


def server(bench: Bench, folder: Path) -> float:
    """Our extraction through servers."""
    (folder / "staging").mkdir(parents=True)
    flags = [*server_flags(bench.settings(folder)), "--disable-uvicorn-access-log"]
    model, log = model_path(paths.VERIFIER), folder / "server.log"
    with own_servers(model, flags, bench.engines, 1, bench.runtime, log) as servers:
        keys = {one.url: one.api_key for one in servers}

        def run(work: Work) -> None:
            work_at(list(keys), work, bench.runtime.request_timeout_s, keys)

        bench.extract(bench.warm, folder, run)
        return bench.extract(bench.samples, folder, run)


def speculators(bench: Bench, folder: Path) -> float:
    """speculators' extraction, at the concurrency that suits it best here (32 is its default)."""
    settings = bench.settings(folder)
    transfer = settings["kv_transfer_config"]
    transfer["kv_connector"] = "ExampleConnector"
    transfer["kv_connector_module_path"] = "benchmarks.example_connector"
    del transfer["kv_connector_extra_config"]["states"]
    seconds = 0.0
    with bench.server(folder, settings) as served:
        for name, samples in (("warm", bench.warm), ("timed", bench.samples)):
            rows = {
                "input_ids": [sample.input_ids for sample in samples],
                "loss_mask": [sample.loss_mask.astype(bool) for sample in samples],
                "seq_len": [len(sample.input_ids) for sample in samples],
            }
            Dataset.from_dict(rows).with_format("torch").save_to_disk(folder / name)
            seconds = _generate_offline_data(served, folder / name, len(samples))
    return seconds


def _generate_offline_data(served: Any, data: Path, num_samples: int) -> float:
    """Run speculators' command; seconds of its own progress, without its imports."""
    # its clients say EMPTY as their key, the server wants its own
    code = (
        "import os, time, openai\n"
        "from speculators.cli import app\n"
        "for kind in (openai.OpenAI, openai.AsyncOpenAI):\n"
        "    def init(self, *, _init=kind.__init__, api_key=None, **more):\n"
        "        _init(self, api_key=os.environ['OPENAI_API_KEY'], **more)\n"
        "    kind.__init__ = init\n"
        "started = time.monotonic()\n"
        "try:\n    app()\n"
        "finally:\n    print('seconds', time.monotonic() - started)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "generate-offline-data", "--endpoint", f"{served.url}/v1",
         "--preprocessed-data", str(data), "--concurrency", "32", "--fail-on-error"],
        env=os.environ | {"OPENAI_API_KEY": served.api_key},
        capture_output=True, text=True,
    )  # fmt: skip
    written = len(list((data / "hidden_states").glob("hs_*.safetensors")))
    if done.returncode or written != num_samples:
        raise RuntimeError(
            f"speculators wrote {written} of {num_samples} samples:\n{done.stdout}\n{done.stderr}"
        )
    return float(done.stdout.split("seconds")[-1])


VARIANTS = {"plain": plain, "here": here, "server": server, "speculators": speculators}


def randomised(samples: list[Sample], count: int, vocab_size: int) -> list[Sample]:
    """As many samples as a fast machine needs: real lengths, random ids."""
    chance = np.random.default_rng(0)
    return [
        dataclasses.replace(
            samples[number % len(samples)],
            input_ids=chance.integers(
                0, vocab_size, len(samples[number % len(samples)].input_ids), dtype=np.int32
            ),
        )
        for number in range(count)
    ]


def table(seconds: dict[str, list[float]], num_tokens: int) -> str:
    """Markdown: tokens a second, median and spread, and the ratio to `plain` pair by pair."""
    lines = ["| variant | tokens/s | spread | of plain |", "| --- | ---: | ---: | ---: |"]
    for name, times in seconds.items():
        rates = [num_tokens / t for t in times]
        pairs = zip(seconds.get("plain", []), times, strict=False)
        shares = sorted(100 * plain_s / own for plain_s, own in pairs)
        share = f"{statistics.median(shares):.1f}%" if shares else ""
        lines.append(
            f"| {name} | {statistics.median(rates):,.0f} | {min(rates):,.0f} - {max(rates):,.0f} "
            f"| {share} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=160)
    parser.add_argument(
        "--random", action="store_true", help="random ids in samples of the real lengths, repeated"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--engines", type=int, default=1, help="servers of the variant server")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--dtype", choices=("auto", "fp8_e4m3"), default="auto")
    parser.add_argument("--json", type=Path, help="raw seconds")
    options = parser.parse_args()
    verifier, params = read_json(paths.IDENTITY), load_params(paths.PARAMS)
    samples = read_samples(paths.PREPARED / "train.parquet")
    if options.random:
        samples = randomised(samples, options.samples + WARM_UP, verifier["vocab_size"])
    samples = samples[: options.samples + WARM_UP]
    spec = states_of(verifier, None, options.dtype)
    bench = Bench(samples, spec, params.runtime, verifier, options.engines)
    seconds: dict[str, list[float]] = {name: [] for name in options.variants}
    for number in range(options.rounds):
        for name in options.variants[:: -1 if number % 2 else 1]:
            with contextlib.ExitStack() as stack:
                scratch = tempfile.TemporaryDirectory(dir=paths.CACHE)
                folder = Path(stack.enter_context(scratch))
                took = VARIANTS[name](bench, folder)
            seconds[name].append(took)
            print(f"{name}: {bench.num_tokens / took:,.0f} tokens/s", flush=True)
    print(table(seconds, bench.num_tokens))
    if options.json:
        write_json(
            options.json,
            {
                "seconds": seconds,
                "num_tokens": bench.num_tokens,
                "num_samples": len(bench.samples),
                "dtype": spec.dtype,
                "engines": bench.engines,
                "versions": compat.engine_versions(),
            },
        )


if __name__ == "__main__":
    main()

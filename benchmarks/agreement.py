"""Our client against vLLM's own serving benchmark, in turns at one running server.

    ours      specmill.client.run_closed_loop over Client.complete_timed, as the bench stages do
    theirs    `vllm bench serve` (benchmarks.vllm_serve), a process of its own, its own figures

Both send the same bench prompts in the same order, greedy, with the same number in flight and the
same output lengths (end of sequence ignored). The server has prefix caching off: prompts come
again in every run, and the one who comes second must not find them. It answers a wave that is not
measured first. Figures are taken as vLLM takes them: output tokens over wall seconds; median time
to the first token; medians of the time between chunks (its ITL) and per output token after the
first (its TPOT). Ratios are of a run of ours to the run of theirs right after it. Needs
models/verifier and data/prepared (`dvc repro prepare`).

Run      python -m benchmarks.agreement --rounds 5 --json FILE
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from specmill import compat, paths
from specmill.client import Client, TimedAnswer, run_closed_loop
from specmill.files import machine_lock, read_json, write_json
from specmill.params_file import load_params
from specmill.samples import read_samples
from specmill.server import Server, serve
from specmill.verifier import load_tokenizer, model_path

FIGURES = ("output_tokens_per_s", "ttft_ms", "chunk_ms", "itl_ms")


class Load:
    """What both send: texts whose token ids, as the server makes them, are known."""

    def __init__(self, count: int, max_tokens: int, concurrency: int):
        samples = read_samples(paths.PREPARED / "bench.parquet")
        tokenizer = load_tokenizer(paths.VERIFIER)
        every = max(1, len(samples) // count)
        self.texts = [
            tokenizer.decode(sample.prompt_token_ids) for sample in samples[::every][:count]
        ]
        self.ids: list[list[int]] = [tokenizer(text).input_ids for text in self.texts]
        self.decode = tokenizer.decode
        self.max_tokens, self.concurrency = max_tokens, concurrency


def ours(server: Server, load: Load, timeout_s: float) -> list[TimedAnswer]:
    """One run of our client."""
    sampling = {"max_tokens": load.max_tokens, "temperature": 0.0, "ignore_eos": True}

    async def run() -> list[TimedAnswer]:
        async with Client(server, timeout_s) as client:
            return await run_closed_loop(
                load.ids, lambda ids: client.complete_timed(ids, sampling), load.concurrency
            )

    return asyncio.run(run())


def figures(answers: list[TimedAnswer]) -> dict[str, float]:
    """The figures of a run of ours, by vLLM's definitions."""
    start = min(answer.sent_at for answer in answers)
    wall_s = max(answer.chunk_times[-1] for answer in answers) - start
    gaps = [b - a for answer in answers for a, b in pairwise(answer.chunk_times)]
    per_token = [
        (answer.chunk_times[-1] - answer.chunk_times[0]) / (len(answer.token_ids) - 1)
        for answer in answers
    ]
    return {
        "output_tokens_per_s": sum(len(answer.token_ids) for answer in answers) / wall_s,
        "ttft_ms": 1000 * median(answer.chunk_times[0] - answer.sent_at for answer in answers),
        "chunk_ms": 1000 * median(gaps),
        "itl_ms": 1000 * median(per_token),
    }


def theirs(server: Server, load: Load, folder: Path) -> dict[str, Any]:
    """One run of vLLM's benchmark: the result that it saves.

    Raises:
        RuntimeError: when it fails, or has other prompts or outputs than ours.
    """
    rows = [{"prompt": text, "output_tokens": load.max_tokens} for text in load.texts]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.vllm_serve", "--backend", "openai",
         "--base-url", server.url, "--model", "verifier",
         "--tokenizer", str(model_path(paths.VERIFIER)), "--dataset-name", "custom",
         "--dataset-path", str(folder / "prompts.jsonl"), "--skip-chat-template",
         "--disable-shuffle", "--custom-output-len", "-1", "--num-prompts", str(len(rows)),
         "--max-concurrency", str(load.concurrency), "--ignore-eos", "--temperature", "0",
         "--save-result", "--save-detailed", "--result-dir", str(folder),
         "--result-filename", "result.json"],
        env=os.environ | {"OPENAI_API_KEY": server.api_key, "NO_PROXY": "127.0.0.1"},
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"vllm bench serve failed:\n{done.stdout}\n{done.stderr}")
    result = read_json(folder / "result.json")
    wanted = ([len(ids) for ids in load.ids], [load.max_tokens] * len(rows))
    if (result["input_lens"], result["output_lens"]) != wanted:
        raise RuntimeError("vllm bench serve sent other prompts or got other lengths than ours")
    return dict(result)


def their_figures(result: dict[str, Any]) -> dict[str, float]:
    """The same figures from a saved result."""
    names = ("output_throughput", "median_ttft_ms", "median_itl_ms", "median_tpot_ms")
    return {name: result[theirs] for name, theirs in zip(FIGURES, names, strict=True)}


@contextlib.contextmanager
def running_server() -> Iterator[tuple[Server, float]]:
    """A server of the verifier without prefix caching, and the time-out of its requests."""
    params, verifier = load_params(paths.PARAMS), read_json(paths.IDENTITY)
    flags = ["--max-model-len", str(verifier["max_model_len"]), "--no-enable-prefix-caching"]
    if params.bench.enforce_eager:
        flags.append("--enforce-eager")
    with serve(
        model_path(paths.VERIFIER),
        flags,
        paths.ROOT / "logs/agreement.log",
        cpu_kv_cache_gib=params.runtime.cpu_kv_cache_gib,
        gpu_memory_utilization=params.runtime.gpu_memory_utilization,
        startup_timeout_s=params.runtime.startup_timeout_s,
        label="agreement",
    ) as server:
        yield server, params.runtime.request_timeout_s


def compare(load: Load, rounds: int) -> list[dict[str, Any]]:
    """Run in turns: one record per round."""
    records = []
    with running_server() as (server, timeout_s), tempfile.TemporaryDirectory() as scratch:
        ours(server, load, timeout_s)  # unmeasured
        for _ in range(rounds):
            answers = ours(server, load, timeout_s)
            result = theirs(server, load, Path(scratch))
            texts = [load.decode(answer.token_ids) for answer in answers]
            same = [a == b for a, b in zip(texts, result["generated_texts"], strict=True)]
            record = {
                "ours": figures(answers),
                "theirs": their_figures(result),
                "same_texts": sum(same) / len(same),
            }
            print(json.dumps(record), flush=True)
            records.append(record)
    return records


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: medians, and the ratio of ours to theirs round by round."""
    lines = ["| | ours | theirs | ratio | spread |", "| --- | ---: | ---: | ---: | ---: |"]
    for name in FIGURES:
        mine, other = ([record[side][name] for record in records] for side in ("ours", "theirs"))
        ratios = [a / b for a, b in zip(mine, other, strict=True)]
        lines.append(
            f"| {name} | {median(mine):.1f} | {median(other):.1f} | {median(ratios):.3f} "
            f"| {min(ratios):.3f} - {max(ratios):.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--json", type=Path, help="every round's figures")
    options = parser.parse_args()
    load = Load(options.prompts, options.max_tokens, options.concurrency)
    with machine_lock(alone=True):
        records = compare(load, options.rounds)
    print(table(records))
    if options.json:
        write_json(
            options.json,
            {
                "records": records,
                "num_prompts": len(load.texts),
                "max_tokens": load.max_tokens,
                "concurrency": load.concurrency,
                "versions": compat.engine_versions(),
            },
        )


if __name__ == "__main__":
    main()

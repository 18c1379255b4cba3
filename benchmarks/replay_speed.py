"""How long replaying prompt lookup takes: every window and every K over recorded answers.

Goes through answers of a file of samples, over and over when it has fewer, until it has seen
`--tokens` answer tokens, in one process with one thread. vLLM's proposer is compiled once before.

    seconds      median of `--repeats` passes, with the fastest and the slowest
    windows, ks  what each pass goes through: all windows up to 5 tokens, all K up to 8

Run      taskset -c 0 python -m benchmarks.replay_speed --json FILE
"""

import argparse
import itertools
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from specmill import paths
from specmill.files import machine_lock, write_json
from specmill.replay import window_rows
from specmill.samples import Sample, read_samples


def enough(samples: list[Sample], num_tokens: int) -> list[Sample]:
    """Samples with so many answer tokens together, the last one cut."""
    chosen: list[Sample] = []
    for sample in itertools.cycle(samples):
        answered = int(sample.loss_mask.sum())
        if answered > num_tokens:
            kept = len(sample.input_ids) - (answered - num_tokens)
            sample = replace(
                sample, input_ids=sample.input_ids[:kept], loss_mask=sample.loss_mask[:kept]
            )
        chosen.append(sample)
        num_tokens -= min(answered, num_tokens)
        if num_tokens == 0:
            return chosen
    raise ValueError("the file has no samples")


def measure(samples: list[Sample], max_len: int, repeats: int) -> dict[str, Any]:
    """Seconds of several passes over all of the samples."""
    window_rows(samples[:1], max_len, max_len)  # numba compiles
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        rows = window_rows(samples, max_len, max_len)
        seconds.append(time.perf_counter() - begun)
    return {
        "answer_tokens": int(sum(one.loss_mask.sum() for one in samples)),
        "windows": len({(row["prompt_lookup_min"], row["prompt_lookup_max"]) for row in rows}),
        "ks": len({row["k"] for row in rows}),
        "seconds": {
            "median": statistics.median(seconds), "least": min(seconds), "most": max(seconds),
        },
    }  # fmt: skip


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--samples", type=Path, default=paths.PREPARED / "bench.parquet")
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--max-len", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with machine_lock(alone=True):
        chosen = enough(read_samples(options.samples), options.tokens)
        found = measure(chosen, options.max_len, options.repeats)
    print(found)
    if options.json:
        write_json(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

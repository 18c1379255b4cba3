"""Answer the prompts with the verifier: samples to train on, to validate on and to bench.

Reads    data/prompts/train.jsonl, bench.jsonl     user turns by category, disjoint
         models/verifier
Writes   data/prepared/train.parquet, heldout.parquet, bench.parquet   samples (specmill.samples)
Metrics  reports/prepare.json   samples kept and dropped by reason; token counts
Params   prepare

Run      dvc repro prepare
"""

import asyncio
from functools import partial

from specmill import paths
from specmill.files import read_json
from specmill.generate import generate
from specmill.prepare import plan_jobs, split_and_filter
from specmill.prompts import read_prompts
from specmill.responses import ResponseCache
from specmill.samples import write_samples
from specmill.server import serve
from specmill.stage import open_stage
from specmill.verifier import model_path


def main() -> None:
    """Run the stage."""
    with open_stage("prepare", ["prepare"]) as stage:
        chosen, runtime = stage.params.prepare, stage.params.runtime
        verifier = read_json(paths.IDENTITY)
        jobs = plan_jobs(
            read_prompts(paths.PROMPTS / "train.jsonl"),
            read_prompts(paths.PROMPTS / "bench.jsonl"),
            chosen,
        )
        start_server = partial(
            serve,
            model_path(paths.VERIFIER),
            ["--max-model-len", str(verifier["max_model_len"])],
            paths.ROOT / "logs" / "prepare.log",
            cpu_kv_cache_gib=runtime.cpu_kv_cache_gib,
            gpu_memory_utilization=runtime.gpu_memory_utilization,
            startup_timeout_s=runtime.startup_timeout_s,
            label="answers",
        )
        conversations, num_generated = asyncio.run(
            generate(
                jobs,
                verifier,
                ResponseCache(paths.CACHE / "responses" / "responses.jsonl"),
                start_server,
                concurrency=runtime.request_concurrency,
                timeout_s=runtime.request_timeout_s,
                source="data/prompts",
            )
        )
        splits, counts = split_and_filter(
            conversations, chosen.min_tokens, verifier["max_model_len"]
        )
        for split, samples in splits.items():
            write_samples(paths.PREPARED / f"{split}.parquet", samples)
        stage.write_metrics(paths.REPORTS / "prepare.json", counts)
        stage.tracker.log_metrics({"num_generated": num_generated})


if __name__ == "__main__":
    main()

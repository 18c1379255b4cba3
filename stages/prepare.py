"""Answer the prompts with the verifier: samples to train on, to validate on and to bench.

Reads    params.prepare.dataset, bench    conversations; reports/sources.json stands for them
         models/verifier
Writes   data/prepared/train.parquet, heldout.parquet, bench.parquet   samples (specmill.samples)
Metrics  reports/prepare.json   rows read, samples kept and dropped by reason; token counts
Params   prepare, parallel

Run      dvc repro prepare             (python -m specmill.samples show 0)
"""

import asyncio
from functools import partial

from specmill import paths
from specmill.files import read_json
from specmill.generate import generate
from specmill.own_servers import answering_servers
from specmill.prepare import dataset_samples, pick_conversations, plan_jobs, split_and_filter
from specmill.responses import ResponseCache
from specmill.samples import Sample, write_samples
from specmill.stage import open_stage
from specmill.verifier import load_tokenizer, model_path


def main() -> None:
    """Run the stage."""
    with open_stage("prepare", ["prepare", "parallel"]) as stage:
        chosen, runtime = stage.params.prepare, stage.params.runtime
        verifier, model = read_json(paths.IDENTITY), model_path(paths.VERIFIER)
        picked = pick_conversations(chosen)
        metrics: dict[str, object] = {"sources": picked.sources}
        recorded: list[list[Sample]] = []
        if chosen.responses == "dataset":
            recorded, refused = dataset_samples(
                picked.training, load_tokenizer(paths.VERIFIER), chosen.chat_template_kwargs
            )
            metrics |= refused
        log = paths.ROOT / "logs" / "prepare.log"
        start_servers = partial(answering_servers, model, verifier, stage.params, log)
        answered, asked = asyncio.run(
            generate(
                plan_jobs(picked, chosen),
                verifier,
                ResponseCache(paths.CACHE / "responses" / "responses.jsonl"),
                start_servers,
                chosen.chat_template_kwargs,
                concurrency=runtime.request_concurrency,
                timeout_s=runtime.request_timeout_s,
                strict=chosen.strict,
            )
        )
        splits, counts = split_and_filter(
            recorded + answered, chosen.min_tokens, verifier["max_model_len"]
        )
        for split, samples in splits.items():
            write_samples(paths.PREPARED / f"{split}.parquet", samples)
        metrics["num_too_long"] = asked["num_too_long"]
        stage.write_metrics(paths.REPORTS / "prepare.json", metrics | counts)
        stage.tracker.log_metrics({"num_generated": asked["num_generated"]})


if __name__ == "__main__":
    main()

"""Keep the verifier's hidden states for every sample.

Reads    data/prepared/train.parquet, heldout.parquet, bench.parquet
         models/verifier
Writes   data/hidden_states     what trains and validates: hard-linked view, with manifest, of the
                                store in .cache
         data/bench_states      the answers to the bench's prompts, for replay
Metrics  reports/extract.json   samples, tokens, layers, bytes
Params   extract, parallel

Run      dvc repro extract
"""

from specmill import paths
from specmill.engines import engines
from specmill.extract import extract_missing
from specmill.files import read_json
from specmill.layers import states_of
from specmill.manifest import write_manifest
from specmill.samples import read_samples
from specmill.stage import open_stage
from specmill.store import HiddenStateStore


def main() -> None:
    """Run the stage."""
    with open_stage("extract", ["extract", "parallel"]) as stage:
        chosen, runtime = stage.params.extract, stage.params.runtime
        parallel = stage.params.parallel
        verifier = read_json(paths.IDENTITY)
        spec = states_of(verifier, chosen.aux_layer_ids, chosen.dtype)
        train, heldout, bench = (
            read_samples(paths.PREPARED / f"{split}.parquet")
            for split in ("train", "heldout", "bench")
        )
        views = {paths.HIDDEN_STATES: train + heldout, paths.BENCH_STATES: bench}
        samples = train + heldout + bench
        num_tokens = sum(len(sample.input_ids) for sample in samples)
        if chosen.mode == "online":
            for folder in views:
                write_manifest(folder, spec, [], online=True)
            num_extracted = 0
        else:
            with HiddenStateStore.alone(paths.STORE) as store:
                num_extracted = extract_missing(
                    samples,
                    spec,
                    store,
                    engines(spec, paths.VERIFIER, paths.STAGING, verifier, parallel, runtime),
                    shard_bytes=chosen.shard_mib * 2**20,
                    staging=paths.STAGING,
                    window=runtime.extract_window,
                )
                for folder, seen in views.items():
                    keys = list(dict.fromkeys(sample.sample_key for sample in seen))
                    store.write_view(folder, spec, keys, chosen.shard_mib * 2**20)
        stage.write_metrics(
            paths.REPORTS / "extract.json",
            {
                "num_samples": len(samples),
                "num_tokens": num_tokens,
                "layer_ids": list(spec.layer_ids),
                "bytes_per_token": spec.bytes_per_token,
                "gigabytes": round(num_tokens * spec.bytes_per_token / 1e9, 3),
            },
        )
        stage.tracker.log_metrics({"num_tokens_extracted_now": num_extracted})


if __name__ == "__main__":
    main()

"""Keep the verifier's hidden states for every training and held-out sample.

Reads    data/prepared/train.parquet, heldout.parquet
         models/verifier
Writes   data/hidden_states     hard-linked view, with manifest, of the store in .cache
Metrics  reports/extract.json   samples, tokens, layers, bytes
Params   extract

Run      dvc repro extract
"""

from specmill import paths
from specmill.extract import extract_missing
from specmill.files import read_json
from specmill.layers import aux_layer_ids, stored_layer_ids
from specmill.samples import read_samples
from specmill.stage import open_stage
from specmill.store import HiddenStateStore, StateSpec
from specmill.verifier import model_path


def main() -> None:
    """Run the stage."""
    with open_stage("extract", ["extract"]) as stage:
        chosen, runtime = stage.params.extract, stage.params.runtime
        verifier = read_json(paths.IDENTITY)
        layers = stored_layer_ids(
            aux_layer_ids(chosen.aux_layer_ids, verifier["num_layers"]), verifier["num_layers"]
        )
        spec = StateSpec(
            verifier["fingerprint"], tuple(layers), verifier["hidden_size"], verifier["dtype"]
        )
        samples = [
            sample
            for split in ("train", "heldout")
            for sample in read_samples(paths.PREPARED / f"{split}.parquet")
        ]
        store = HiddenStateStore(paths.CACHE / "hidden_states")
        num_extracted = extract_missing(
            samples,
            spec,
            store,
            model_path(paths.VERIFIER),
            max_model_len=verifier["max_model_len"],
            shard_bytes=chosen.shard_mib * 2**20,
            batch=runtime.extract_batch,
            staging=paths.CACHE / "staging",
            cpu_kv_cache_gib=runtime.cpu_kv_cache_gib,
            gpu_memory_utilization=runtime.gpu_memory_utilization,
        )
        store.write_view(
            paths.HIDDEN_STATES,
            spec,
            [(sample.sample_key, len(sample.input_ids)) for sample in samples],
        )
        num_tokens = sum(len(sample.input_ids) for sample in samples)
        stage.write_metrics(
            paths.REPORTS / "extract.json",
            {"num_samples": len(samples), "num_tokens": num_tokens, "layer_ids": layers},
        )
        stage.tracker.log_metrics({"num_tokens_extracted_now": num_extracted})


if __name__ == "__main__":
    main()

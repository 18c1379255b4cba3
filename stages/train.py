"""Train the EAGLE-3 head on the verifier's hidden states.

Reads    data/prepared/train.parquet, heldout.parquet   what trains and what validates
         data/hidden_states, data/vocab, data/verifier_head; never models/verifier
Writes   models/eagle3                    speculators checkpoint with provenance.json
         reports/plots/train.json         held-out accuracy and loss by epoch and position
Metrics  reports/train.json               the best epoch
Params   train

Run      dvc repro train
"""

import shutil
from dataclasses import asdict

import torch

from specmill import compat, paths
from specmill.files import digest, read_json, write_json
from specmill.head import curves, expected_length, export_head
from specmill.revision import code_state
from specmill.samples import check_apart, read_samples
from specmill.stage import open_stage
from specmill.training import build_draft_model, train
from specmill.transfer import StoredSamples
from specmill.view import StateView
from specmill.vocab import load_tables, tables_digest


def main() -> None:
    """Run the stage."""
    with open_stage("train", ["train"]) as stage:
        chosen, runtime = stage.params.train, stage.params.runtime
        verifier = read_json(paths.HEAD_IDENTITY)
        view = StateView(paths.HIDDEN_STATES)
        view.check_verifier(verifier)
        d2t, t2d = load_tables(paths.VOCAB)
        samples = [
            read_samples(paths.PREPARED / "train.parquet")[: chosen.max_samples],
            read_samples(paths.PREPARED / "heldout.parquet"),
        ]
        check_apart(*samples)
        provenance = {
            "method": "eagle3",
            "params": chosen.model_dump(),
            "states": asdict(view.spec),
            "data": digest([[sample.sample_key for sample in split] for split in samples]),
            "vocabulary": tables_digest(d2t, t2d),
            "verifier": verifier,
            "versions": compat.engine_versions(),
        }
        checkpoints = paths.CACHE / "checkpoints" / digest(provenance)
        training, heldout = (
            StoredSamples(
                split,
                view,
                checkpoints.with_suffix(".samples") / name,
                chosen.tokens_per_step,
                getattr(torch, verifier["dtype"]),
                runtime.extract_endpoints,
                runtime.request_timeout_s,
            )
            for name, split in zip(("train", "heldout"), samples, strict=True)
        )
        aux_ids = list(view.spec.layer_ids[:-1])
        model = build_draft_model(paths.VERIFIER_HEAD, aux_ids, d2t, t2d, chosen)
        best, epochs = train(
            model, training, heldout, chosen, checkpoints, stage.log_epoch, runtime.data_workers
        )
        export_head(best, paths.EAGLE3, verifier["name"], provenance | code_state())
        write_json(paths.REPORTS / "plots" / "train.json", curves(epochs, chosen.ttt_steps))
        stage.write_metrics(
            paths.REPORTS / "train.json",
            {
                "best_epoch": int(best.name),
                "num_epochs": len(epochs),
                "num_samples": len(training),
                "expected_length": round(expected_length(epochs[int(best.name)]), 4),
                **epochs[int(best.name)],
            },
        )
        shutil.rmtree(checkpoints)
        shutil.rmtree(checkpoints.with_suffix(".samples"))


if __name__ == "__main__":
    main()

"""Train the EAGLE-3 head on the verifier's hidden states.

Reads    data/prepared/train.parquet, heldout.parquet   what trains and what validates
         data/hidden_states, data/vocab, data/verifier_head; never models/verifier's weights
Writes   models/eagle3                    speculators checkpoint with provenance.json
         reports/plots/train.json         held-out accuracy and loss by epoch and position
Metrics  reports/train.json               the best epoch
Params   train

Run      dvc repro train
"""

import shutil

import torch

from specmill import compat, paths
from specmill.files import digest, read_json, write_json
from specmill.head import curves, expected_length, export_head
from specmill.revision import code_state
from specmill.samples import read_samples
from specmill.stage import open_stage
from specmill.store import StateView
from specmill.training import StoredSamples, build_draft_model, train
from specmill.vocab import load_tables, tables_digest


def main() -> None:
    """Run the stage."""
    with open_stage("train", ["train"]) as stage:
        chosen, verifier = stage.params.train, read_json(paths.IDENTITY)
        view = StateView(paths.HIDDEN_STATES)
        d2t, t2d = load_tables(paths.VOCAB)
        training, heldout = (
            StoredSamples(
                read_samples(paths.PREPARED / f"{split}.parquet"),
                view,
                chosen.tokens_per_step,
                getattr(torch, verifier["dtype"]),
            )
            for split in ("train", "heldout")
        )
        provenance = {
            "method": "eagle3",
            "params": chosen.model_dump(),
            "layer_ids": view.manifest["layer_ids"],
            "data": digest([training.sample_keys, heldout.sample_keys]),
            "vocabulary": tables_digest(d2t, t2d),
            "verifier": verifier,
            "versions": compat.engine_versions(),
        }
        checkpoints = paths.CACHE / "checkpoints" / digest(provenance)
        model = build_draft_model(
            paths.VERIFIER_HEAD, view.manifest["layer_ids"][:-1], d2t, t2d, chosen
        )
        best, epochs = train(model, training, heldout, chosen, checkpoints, stage.log_epoch)
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


if __name__ == "__main__":
    main()

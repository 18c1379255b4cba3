"""Train Medusa heads on the verifier's last hidden states.

Reads    data/prepared/train.parquet, heldout.parquet   what trains and what validates
         data/hidden_states, data/vocab, data/verifier_head; never models/verifier
Writes   models/medusa/NAME                 checkpoint that vLLM loads, with provenance.json
         reports/plots/medusa_NAME.json     held-out accuracy and loss by epoch and position
Metrics  reports/medusa/NAME.json           the best epoch
Params   medusa

Run      dvc repro train_medusa@NAME        (python -m stages.train_medusa NAME)
"""

import shutil
import sys
from dataclasses import asdict

import torch

from specmill import compat, paths
from specmill.files import digest, read_json, write_json
from specmill.medusa import build_heads, choose_tables, export_medusa, load_verifier_head
from specmill.medusa_positions import Positions
from specmill.medusa_training import best_epoch, check_next_tokens, curves, train
from specmill.revision import code_state
from specmill.samples import check_apart, digest_of, read_samples
from specmill.section import entry
from specmill.stage import open_stage
from specmill.view import StateView
from specmill.vocab import load_tables, tables_digest


def main(name: str) -> None:
    """Run the stage for the entry `name` of `medusa`."""
    with open_stage(f"train_medusa@{name}", ["medusa"]) as stage:
        chosen = entry("medusa", stage.params.medusa, name)
        verifier = read_json(paths.HEAD_IDENTITY)
        view = StateView(paths.HIDDEN_STATES)
        view.check_verifier(verifier)
        tables = choose_tables(chosen.vocabulary, *load_tables(paths.VOCAB))
        samples = [
            read_samples(paths.PREPARED / "train.parquet")[: chosen.max_samples],
            read_samples(paths.PREPARED / "heldout.parquet"),
        ]
        check_apart(*samples)
        provenance = {
            "method": "medusa",
            "params": chosen.model_dump(),
            "states": asdict(view.spec),
            "data": digest([digest_of(split) for split in samples]),
            "vocabulary": tables_digest(*tables),
            "verifier": verifier,
            "versions": compat.engine_versions(),
        }
        dtype = getattr(torch, verifier["dtype"])
        head = load_verifier_head(paths.VERIFIER_HEAD, dtype, compat.device())
        training, heldout = (Positions(split, view, head, chosen) for split in samples)
        agreement = check_next_tokens(heldout, head)
        heads = build_heads(head, tables[1], chosen)
        checkpoints = paths.CACHE / "checkpoints" / digest(provenance)
        epochs = train(heads, training, heldout, chosen, checkpoints, stage.log_epoch)
        export_medusa(heads, verifier["vocab_size"], paths.MEDUSA / name, provenance | code_state())
        write_json(
            paths.REPORTS / "plots" / f"medusa_{name}.json", curves(epochs, chosen.num_heads)
        )
        best = best_epoch(epochs)
        stage.write_metrics(
            paths.REPORTS / "medusa" / f"{name}.json",
            {
                "best_epoch": best,
                "num_epochs": len(epochs),
                "num_samples": len(samples[0]),
                "next_token_agreement": round(agreement, 4),
                **epochs[best],
            },
        )
        shutil.rmtree(checkpoints)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m stages.train_medusa NAME (an entry of params.yaml: medusa)")
    main(sys.argv[1])

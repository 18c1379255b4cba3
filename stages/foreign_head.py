"""Train a head for a noised copy of the verifier and look at it with the verifier's own eyes.

Reads    models/verifier               weights, where the reference says they lie
         data/prepared/train.parquet, heldout.parquet    the verifier's answers
         data/hidden_states, data/verifier_head          what the head meets when it is served
         data/vocab
Writes   models/heads/NAME             a head with provenance.json and inspection.json
Metrics  reports/heads/NAME.json       the inspection
Params   train, foreign_heads

Run      dvc repro foreign_head@NAME   (python -m stages.foreign_head NAME)
"""

import shutil
import sys
from dataclasses import asdict

import torch

from specmill import compat, paths
from specmill.files import digest, read_json, write_json
from specmill.foreign import noised_states
from specmill.head import export_head
from specmill.head_facts import INSPECTION
from specmill.inspection import inspect_head
from specmill.revision import code_state
from specmill.samples import check_apart, digest_of, read_samples
from specmill.stage import open_stage
from specmill.training import build_draft_model, train
from specmill.transfer import StoredSamples
from specmill.verifier import model_path
from specmill.view import StateView
from specmill.vocab import load_tables, tables_digest


def main(name: str) -> None:
    """Run the stage for the head `name`."""
    with open_stage(f"foreign_head@{name}", ["train", "foreign_heads"]) as stage:
        if name not in stage.params.foreign_heads:
            raise ValueError(f"foreign_heads has no {name!r} (params.yaml)")
        foreign, runtime = stage.params.foreign_heads[name], stage.params.runtime
        chosen = stage.params.train.model_copy(
            update={"type": "eagle3"} | foreign.model_dump(include={"epochs", "max_samples"})
        )
        verifier, clean = read_json(paths.HEAD_IDENTITY), StateView(paths.HIDDEN_STATES)
        clean.check_verifier(verifier)
        d2t, t2d = load_tables(paths.VOCAB)
        samples = [
            read_samples(paths.PREPARED / "train.parquet")[: foreign.max_samples],
            read_samples(paths.PREPARED / "heldout.parquet"),
        ]
        check_apart(*samples)
        scratch = paths.CACHE / "foreign" / name
        shutil.rmtree(scratch, ignore_errors=True)  # of a run that was interrupted
        noised, view = noised_states(
            model_path(paths.VERIFIER),
            verifier,
            foreign,
            [sample for split in samples for sample in split],
            clean.spec,
            scratch,
            store=paths.STORE,
            staging=paths.STAGING,
            runtime=runtime,
        )
        provenance = {
            "method": "eagle3",
            "params": chosen.model_dump() | {"noise": foreign.noise, "noise_seed": foreign.seed},
            "states": asdict(view.spec),
            "data": digest([digest_of(split) for split in samples]),
            "vocabulary": tables_digest(d2t, t2d),
            "verifier": noised,
            "versions": compat.engine_versions(),
        }
        checkpoints = paths.CACHE / "checkpoints" / digest(provenance)
        place, dtype = scratch / "samples", getattr(torch, noised["dtype"])
        length, timeout_s = chosen.tokens_per_step, runtime.request_timeout_s
        training, heldout = (
            StoredSamples(split, view, place, length, dtype, [], timeout_s) for split in samples
        )
        aux_ids = list(view.spec.layer_ids[:-1])
        model = build_draft_model(scratch / "verifier_head", aux_ids, d2t, t2d, chosen)
        best, _ = train(
            model, training, heldout, chosen, checkpoints, stage.log_epoch, runtime.data_workers
        )
        folder = paths.HEADS / name
        export_head(best, folder, noised["name"], provenance | code_state())
        inspection = inspect_head(folder, verifier, paths.VERIFIER_HEAD, clean, samples[1])
        write_json(folder / INSPECTION, inspection)
        stage.write_metrics(paths.REPORTS / "heads" / f"{name}.json", inspection)
        shutil.rmtree(checkpoints)
        shutil.rmtree(scratch)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m stages.foreign_head NAME (of params.yaml: foreign_heads)")
    main(sys.argv[1])

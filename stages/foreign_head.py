"""Train a head for a noised copy of the verifier and look at it with the verifier's own eyes.

Reads    models/verifier               weights, where the reference says they lie
         data/prepared/train.parquet, heldout.parquet    the verifier's answers
         data/hidden_states, data/verifier_head          what the head meets when it is served
         data/vocab
Writes   models/heads/NAME             a head with provenance.json and inspection.json
Metrics  reports/heads/NAME.json       the inspection
Params   train, foreign_heads, parallel

Run      dvc repro foreign_head@NAME   (python -m stages.foreign_head NAME)
"""

import shutil
import sys

from specmill import paths
from specmill.files import read_json, write_json
from specmill.foreign import noised_states
from specmill.head_facts import INSPECTION
from specmill.inspection import inspect_head
from specmill.section import entry
from specmill.stage import open_stage
from specmill.train_head import check_model, drop_checkpoints, fit_head, read_splits
from specmill.verifier import model_path
from specmill.view import StateView


def main(name: str) -> None:
    """Run the stage for the head `name`."""
    with open_stage(f"foreign_head@{name}", ["train", "foreign_heads", "parallel"]) as stage:
        foreign = entry("foreign_heads", stage.params.foreign_heads, name)
        chosen = stage.params.train.model_copy(
            update={"type": "eagle3", "from_": None}
            | foreign.model_dump(include={"epochs", "max_samples"})
        )
        verifier, clean = read_json(paths.HEAD_IDENTITY), StateView(paths.HIDDEN_STATES)
        clean.check_verifier(verifier)
        check_model(chosen, paths.VERIFIER_HEAD, clean)
        samples = read_splits(chosen)
        scratch, folder = paths.CACHE / "foreign" / name, paths.HEADS / name
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
            parallel=stage.params.parallel,
            runtime=stage.params.runtime,
        )
        best, _ = fit_head(
            stage,
            chosen,
            samples,
            noised,
            scratch / "verifier_head",
            view,
            folder,
            noise=foreign.noise,
            noise_seed=foreign.seed,
        )
        inspection = inspect_head(folder, verifier, paths.VERIFIER_HEAD, clean, samples[1])
        write_json(folder / INSPECTION, inspection)
        stage.write_metrics(paths.REPORTS / "heads" / f"{name}.json", inspection)
        drop_checkpoints(best)
        shutil.rmtree(scratch)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m stages.foreign_head NAME (of params.yaml: foreign_heads)")
    main(sys.argv[1])

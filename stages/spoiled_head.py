"""Break the trained head on purpose and look at what came of it.

Reads    models/eagle3
         data/prepared/heldout.parquet, data/hidden_states, data/verifier_head   to look at it
Writes   models/heads/NAME             a head with provenance.json and inspection.json
Metrics  reports/heads/NAME.json       the inspection
Params   spoiled_heads

Run      dvc repro spoiled_head@NAME   (python -m stages.spoiled_head NAME)
"""

import sys

from specmill import paths
from specmill.files import read_json, write_json
from specmill.head_facts import INSPECTION
from specmill.inspection import inspect_head
from specmill.samples import read_samples
from specmill.section import entry
from specmill.spoiled import spoil
from specmill.stage import open_stage
from specmill.view import StateView


def main(name: str) -> None:
    """Run the stage for the head `name`."""
    with open_stage(f"spoiled_head@{name}", ["spoiled_heads"]) as stage:
        fault = entry("spoiled_heads", stage.params.spoiled_heads, name).fault
        folder, verifier = paths.HEADS / name, read_json(paths.HEAD_IDENTITY)
        view = StateView(paths.HIDDEN_STATES)
        view.check_verifier(verifier)
        spoil(paths.EAGLE3, folder, fault)
        heldout = read_samples(paths.PREPARED / "heldout.parquet")
        inspection = inspect_head(folder, verifier, paths.VERIFIER_HEAD, view, heldout)
        write_json(folder / INSPECTION, inspection)
        stage.write_metrics(paths.REPORTS / "heads" / f"{name}.json", inspection)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m stages.spoiled_head NAME (of params.yaml: spoiled_heads)")
    main(sys.argv[1])

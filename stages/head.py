"""Fetch a head that was trained elsewhere, bring it into speculators' format and look at it.

Reads    the head's folder, or the Hugging Face Hub
         data/prepared/heldout.parquet, data/hidden_states   what it is tried on
         data/verifier_head          what it must fit
Writes   models/heads/NAME           speculators checkpoint, provenance.json, inspection.json; only
                                     the last two when it does not fit, which then say why
Metrics  reports/heads/NAME.json     the inspection
Params   heads.NAME

Run      dvc repro head@NAME         (python -m stages.head NAME)
"""

import shutil
import sys

from specmill import compat, paths
from specmill.files import read_json, write_json
from specmill.head_facts import INSPECTION, PROVENANCE
from specmill.inspection import inspect_head, refusal
from specmill.outside import convert, fetch, name_of_verifier
from specmill.samples import read_samples
from specmill.section import DoesNotFit, entry
from specmill.stage import open_stage
from specmill.view import StateView


def main(name: str) -> None:
    """Run the stage for the head `name`."""
    with open_stage(f"head@{name}", ["heads"]) as stage:
        chosen, folder = entry("heads", stage.params.heads, name), paths.HEADS / name
        verifier = read_json(paths.HEAD_IDENTITY)
        view = StateView(paths.HIDDEN_STATES)
        view.check_verifier(verifier)
        source, origin = fetch(chosen, f"heads.{name}.source")
        trained_for = name_of_verifier(source)
        shutil.rmtree(folder, ignore_errors=True)
        provenance = {
            "method": "eagle3",
            "params": chosen.model_dump(),
            "origin": origin,
            "converted_from": None,
            "trained_for": trained_for,
            "verifier": verifier,
            "versions": compat.engine_versions(),
        }
        try:
            provenance["converted_from"] = convert(
                source, chosen, verifier, paths.VERIFIER_HEAD, folder
            )
            write_json(folder / PROVENANCE, provenance)
            heldout = read_samples(paths.PREPARED / "heldout.parquet")
            inspection = inspect_head(folder, verifier, paths.VERIFIER_HEAD, view, heldout)
        except DoesNotFit as reason:
            write_json(folder / PROVENANCE, provenance)
            inspection = refusal(trained_for, verifier, str(reason))
        write_json(folder / INSPECTION, inspection)
        stage.write_metrics(paths.REPORTS / "heads" / f"{name}.json", inspection)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m stages.head NAME (an entry of params.yaml: heads)")
    main(sys.argv[1])

"""Cut a draft model out of the verifier: its first layers.

Reads    models/verifier              weights and tokenizer, where the reference says they lie
Writes   models/draft/NAME            a transformers checkpoint with provenance.json
Params   draft_models

Run      dvc repro draft_model@NAME   (python -m stages.draft_model NAME)
"""

import sys

from specmill import paths
from specmill.cut import cut_model
from specmill.files import read_json, write_json
from specmill.section import entry
from specmill.stage import open_stage
from specmill.verifier import model_path


def main(name: str) -> None:
    """Run the stage for the draft model `name`."""
    with open_stage(f"draft_model@{name}", ["draft_models"]) as stage:
        chosen = entry("draft_models", stage.params.draft_models, name)
        folder = paths.DRAFT / name
        cut_model(
            model_path(paths.VERIFIER),
            folder,
            chosen.num_layers,
            f"draft_models.{name}.num_layers",
        )
        write_json(
            folder / "provenance.json",
            {
                "method": "draft_model",
                "params": chosen.model_dump(),
                "verifier": read_json(paths.IDENTITY),
            },
        )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m stages.draft_model NAME (an entry of params.yaml: draft_models)")
    main(sys.argv[1])

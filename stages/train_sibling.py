"""Train another head on the same states, to stand beside the first in the comparison.

Reads    data/prepared/train.parquet, heldout.parquet   what trains and what validates
         data/hidden_states, data/vocab, data/verifier_head; never models/verifier
Writes   models/siblings/NAME               speculators checkpoint with provenance.json
         reports/plots/sibling_NAME.json    held-out accuracy and loss by epoch and position
Metrics  reports/siblings/NAME.json         the best epoch
Params   train, siblings.NAME, whose keys win

Run      dvc repro train_sibling@NAME       (python -m stages.train_sibling NAME)
"""

import sys

from specmill import paths
from specmill.section import entry
from specmill.stage import open_stage
from specmill.train_head import train_head


def main(name: str) -> None:
    """Run the stage for the entry `name` of `siblings`."""
    with open_stage(f"train_sibling@{name}", ["train", "siblings"], spread=True) as stage:
        sibling = entry("siblings", stage.params.siblings, name)
        train_head(
            stage,
            stage.params.train.of_its_own(**sibling.model_dump()),
            paths.SIBLINGS / name,
            plots=paths.REPORTS / "plots" / f"sibling_{name}.json",
            metrics=paths.REPORTS / "siblings" / f"{name}.json",
        )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m stages.train_sibling NAME (an entry of params.yaml: siblings)")
    main(sys.argv[1])

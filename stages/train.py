"""Train a head, EAGLE-3 unless train.type says otherwise, on the verifier's hidden states.

Reads    data/prepared/train.parquet, heldout.parquet   what trains and what validates
         data/hidden_states, data/vocab, data/verifier_head; never models/verifier
Writes   models/eagle3                    speculators checkpoint with provenance.json
         reports/plots/train.json         held-out accuracy and loss by epoch and position
Metrics  reports/train.json               the best epoch
Params   train

Run      dvc repro train
"""

from specmill import paths
from specmill.stage import open_stage
from specmill.train_head import train_head


def main() -> None:
    """Run the stage."""
    with open_stage("train", ["train"], spread=True) as stage:
        train_head(
            stage,
            stage.params.train,
            paths.EAGLE3,
            plots=paths.REPORTS / "plots" / "train.json",
            metrics=paths.REPORTS / "train.json",
        )


if __name__ == "__main__":
    main()

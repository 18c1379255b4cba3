"""Choose the draft vocabulary from the tokens that train, and write its two tables.

Reads    data/prepared/train.parquet, heldout.parquet
         models/verifier/identity.json   vocabulary size
Writes   data/vocab/d2t.npy     int64 [draft_vocab_size]   offsets
         data/vocab/t2d.npy     bool [target_vocab_size]   membership
Metrics  reports/vocab.json     coverage of trained tokens, and of held-out ones
Params   vocab

Run      dvc repro vocab
"""

from specmill import paths
from specmill.files import read_json
from specmill.samples import read_samples
from specmill.stage import open_stage
from specmill.vocab import build_tables, count_trained_tokens, coverage, save_tables


def main() -> None:
    """Run the stage."""
    with open_stage("vocab", ["vocab"]) as stage:
        size = stage.params.vocab.draft_vocab_size
        counts = count_trained_tokens(read_samples(paths.PREPARED / "train.parquet"))
        heldout = count_trained_tokens(read_samples(paths.PREPARED / "heldout.parquet"))
        d2t, t2d = build_tables(counts, size, read_json(paths.IDENTITY)["vocab_size"])
        save_tables(paths.VOCAB, d2t, t2d)
        stage.write_metrics(
            paths.REPORTS / "vocab.json",
            {
                "draft_vocab_size": size,
                "num_distinct_trained_tokens": len(counts),
                "coverage": round(coverage(counts, t2d), 4),
                "heldout_coverage": round(coverage(heldout, t2d), 4),
            },
        )


if __name__ == "__main__":
    main()

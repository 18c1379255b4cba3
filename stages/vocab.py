"""Choose the draft vocabulary from the tokens that train, or take that of the head that training
goes on from, and write its two tables.

Reads    data/prepared/train.parquet, heldout.parquet
         data/verifier_head     vocabulary size; what a head must fit
         the head of train.from, whose content reports/start_source.json tells
Writes   data/vocab/d2t.npy     int64 [draft_vocab_size]   offsets
         data/vocab/t2d.npy     bool [target_vocab_size]   membership
         data/vocab/head        the head of train.from, where there is one
Metrics  reports/vocab.json     coverage of trained tokens, and of held-out ones
Params   vocab, train.from

Run      dvc repro vocab
"""

from specmill import paths
from specmill.files import read_json
from specmill.samples import read_samples
from specmill.stage import open_stage
from specmill.start_head import take_head
from specmill.vocab import build_tables, count_trained_tokens, coverage, save_tables


def main() -> None:
    """Run the stage."""
    with open_stage("vocab", ["vocab"]) as stage:
        size, start = stage.params.vocab.draft_vocab_size, stage.params.train.from_
        verifier = read_json(paths.HEAD_IDENTITY)
        counts = count_trained_tokens(read_samples(paths.PREPARED / "train.parquet"))
        heldout = count_trained_tokens(read_samples(paths.PREPARED / "heldout.parquet"))
        if start is None:
            d2t, t2d = build_tables(counts, size, verifier["vocab_size"])
        else:
            d2t, t2d = take_head(start, size, verifier, paths.VERIFIER_HEAD, paths.START)
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

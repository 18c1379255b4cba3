"""A prepared sample as text, with what is trained marked.

Run      python -m specmill.samples show 0
"""

import argparse
import itertools
import sys
from typing import Any

from specmill import paths
from specmill.samples import Sample, read_samples
from specmill.tables import visible
from specmill.verifier import load_tokenizer


def marked_text(sample: Sample, tokenizer: Any, opening: str, closing: str) -> str:
    """The sample as text, special tokens included, every trained stretch between two marks."""
    pieces = []
    pairs = zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True)
    for trained, run in itertools.groupby(pairs, key=lambda pair: pair[1]):
        text = visible(tokenizer.decode([token for token, _ in run], skip_special_tokens=False))
        pieces.append(f"{opening}{text}{closing}" if trained else text)
    return "".join(pieces)


def _show(number: int, split: str) -> str:
    path = paths.PREPARED / f"{split}.parquet"
    if not path.is_file():
        raise ValueError(f"{path} is not there; run `dvc repro prepare`")
    samples = read_samples(path)
    if not 0 <= number < len(samples):
        raise ValueError(f"{path} has samples 0 to {len(samples) - 1}, there is no {number}")
    sample = samples[number]
    marks = ("\x1b[7m", "\x1b[0m") if sys.stdout.isatty() else (">>>", "<<<")
    trained = int(sample.loss_mask.sum())
    return (
        f"{path}, sample {number} of {len(samples)}: {sample.sample_key[:12]}, {sample.category}, "
        f"from {sample.source}, turn {sample.turn + 1}, ends by {sample.finish_reason}\n"
        f"{len(sample.input_ids)} tokens, {trained} of them trained"
        f"{'' if sys.stdout.isatty() else ' (between >>> and <<<)'}\n\n"
        f"{marked_text(sample, load_tokenizer(paths.VERIFIER), *marks)}\n"
    )


def main(arguments: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m specmill.samples", description="Look at prepared samples."
    )
    commands = parser.add_subparsers(required=True)
    show = commands.add_parser("show", help="print a sample's text, what is trained marked")
    show.add_argument("number", type=int, metavar="N", help="row of the file, from 0")
    show.add_argument("--split", choices=("train", "heldout", "bench"), default="train")
    chosen = parser.parse_args(arguments)
    try:
        sys.stdout.write(_show(chosen.number, chosen.split))
    except (ValueError, OSError) as error:
        sys.exit(str(error))

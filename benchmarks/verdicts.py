"""How often the bench's verdict is wrong, on what it recorded of two equal servers.

`bench@none` measures the verifier beside itself, so that every ratio of its pairs is noise. Pairs
are drawn from it with replacement; a pair's two halves are exchanged at random, which for equal
servers makes as likely a recording. What all pairs have in common, a server's luck in starting, is
gone by that: verdicts are judged with the allowance for it that the bench makes.

    false positives   draws that are called faster or slower
    found             draws of which the method's half was made 10% faster, called faster

Needs data/bench/none (`dvc repro bench@none`).

Run      python -m benchmarks.verdicts [--recording data/bench/none] [--draws 400] [--json FILE]
"""

import argparse
import sys
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from specmill import paths
from specmill.files import write_json
from specmill.intervals import FASTER, UNDECIDED, paired_ratio
from specmill.pairs import START_SPREAD, pair_up
from specmill.plan import Load
from specmill.recording import Recording

EFFECT = 1.1
PAIRS = (6, 8, 12, 14, 28, 42)


def noise(recording: Recording) -> dict[str, np.ndarray]:
    """Log ratios of all pairs, float64 [num_pairs], by load."""
    found: dict[str, list[float]] = {}
    for pair in pair_up(recording.cells):
        cell = pair.method
        load = Load(cell["concurrency"], cell["rate"]).label
        found.setdefault(load, []).append(float(np.log(pair.ratio)))
    return {load: np.array(logs) for load, logs in found.items()}


def judge(logs: np.ndarray, num_pairs: int, draws: int) -> dict[str, Any]:
    """Share of wrong and of right verdicts over seeded draws of `num_pairs` pairs."""
    allowance = log(1 + START_SPREAD)
    random = np.random.default_rng(17)
    wrong = found = 0
    for _ in range(draws):
        drawn = random.choice(logs, num_pairs) * random.choice([-1.0, 1.0], num_pairs)
        wrong += paired_ratio(list(np.exp(drawn)), allowance).verdict not in (None, UNDECIDED)
        found += paired_ratio(list(EFFECT * np.exp(drawn)), allowance).verdict == FASTER
    return {"num_pairs": num_pairs, "false_positives": wrong / draws, "found": found / draws}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--recording", type=Path, default=paths.BENCH_RAW / "none")
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    sys.stdout.write("load | recorded pairs | spread | pairs | false positives | 10% found\n")
    for load, logs in noise(Recording.read(options.recording)).items():
        spread = float(np.quantile(logs, 0.75) - np.quantile(logs, 0.25))
        for num_pairs in PAIRS:
            row = {"load": load, "recorded": len(logs), "interquartile_range": round(spread, 4)}
            row |= judge(logs, num_pairs, options.draws)
            rows.append(row)
            sys.stdout.write(
                f"{load} | {len(logs)} | {spread:.1%} | {num_pairs} | "
                f"{row['false_positives']:.1%} | {row['found']:.0%}\n"
            )
    if options.json:
        write_json(options.json, {"draws": options.draws, "rows": rows})


if __name__ == "__main__":
    main()

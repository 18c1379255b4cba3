"""Reading a view of the store against reading its files plainly, paired in one run.

    plain      every shard from start to end with read(2): the limit
    first      every sample through StateView.load, its bytes compared with its checksum
    again      every sample once more: maps of the file, every byte touched once
    batch      every sample again, copied into batches as training does (CollateFn of speculators)

Samples come in an order drawn at random, as training asks for them. Files are read once before, so
that all variants find them in memory: what is compared is the work, not the disk.

Run      python -m benchmarks.store_read --view data/hidden_states --rounds 5
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from specmill import paths
from specmill.files import write_json
from specmill.states import restore
from specmill.view import StateView


def plain(view: StateView) -> float:
    """Seconds to read every shard."""
    started = time.monotonic()
    for file in sorted({place.file for place in view.places.values()}):
        with file.open("rb", buffering=0) as handle:
            while handle.read(1 << 22):
                pass
    return time.monotonic() - started


def load_all(view: StateView, order: list[str], use: Callable[[torch.Tensor], object]) -> float:
    """Seconds to load every sample and `use` its states."""
    started = time.monotonic()
    for key in order:
        _, states, scales = view.load(key)
        use(states if scales is None else restore(states, scales, torch.bfloat16))
    return time.monotonic() - started


def touch(states: torch.Tensor) -> object:
    """Read every byte."""
    return states.reshape(-1).view(torch.uint8).view(torch.int64).sum()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--view", type=Path, default=paths.HIDDEN_STATES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="raw seconds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {name: [] for name in ("plain", "first", "again", "batch")}
    spec = StateView(options.view).spec
    batch = torch.empty((8192, len(spec.layer_ids), spec.hidden_size), dtype=torch.bfloat16)

    def copy(states: torch.Tensor) -> object:
        return batch[: len(states)].copy_(states)

    plain(StateView(options.view))
    for number in range(options.rounds):
        view = StateView(options.view)
        order = list(view.places)
        random.Random(number).shuffle(order)
        seconds["plain"].append(plain(view))
        seconds["first"].append(load_all(view, order, lambda _: None))
        seconds["again"].append(load_all(view, order, touch))
        seconds["batch"].append(load_all(view, order, copy))
    tokens = sum(place.row.num_tokens for place in view.places.values())
    gigabytes = tokens * spec.bytes_per_token / 1e9
    print(f"{tokens:,} tokens, {spec.dtype}, {gigabytes:.3f} GB, {len(order)} samples")
    print("| variant | GB/s | spread | of plain |\n| --- | ---: | ---: | ---: |")
    for name, times in seconds.items():
        rates = [gigabytes / t for t in times]
        share = statistics.median(p / t for p, t in zip(seconds["plain"], times, strict=True))
        print(
            f"| {name} | {statistics.median(rates):.2f} | {min(rates):.2f} - {max(rates):.2f} "
            f"| {100 * share:.0f}% |"
        )
    size = sum(f.stat().st_size for f in {place.file for place in view.places.values()})
    print(f"bytes a token: {size / tokens:.1f} on the disk, {spec.bytes_per_token} by the formula")
    if options.json:
        write_json(options.json, {"seconds": seconds, "gigabytes": gigabytes, "num_bytes": size})


if __name__ == "__main__":
    main()

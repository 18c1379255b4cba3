"""Training of an EAGLE-3 head by the stage and by speculators' own command, paired in one run.

    here         what `dvc repro train` calls (benchmarks.two_gpus has it), states from the view
    speculators  `speculators train` on the same samples and states as its own extraction leaves
                 them: a dataset, and a safetensors file per sample

Same samples, states, draft vocabulary, tokens a step, TTT steps, loss and optimizer. Two epochs:
the first one compiles, the steps of the last are timed, from the first one's end to the last one's.
Rounds go forwards and backwards in turn. speculators reads with `--workers` processes (its default
is 12), the stage with runtime.data_workers.

Needs a GPU, without which speculators' command does not train, and what `dvc repro extract vocab`
makes. Disk: the states once more, in .cache.

Run      python -m benchmarks.training --samples 3000 --rounds 2 --json FILE
"""

import argparse
import json
import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from safetensors.torch import save_file

from benchmarks.two_gpus import Steps, trained
from specmill import compat, paths
from specmill.files import read_json, write_json
from specmill.hardware import describe_machine
from specmill.params import Train
from specmill.params_file import load_params
from specmill.samples import Sample
from specmill.states import restore
from specmill.train_head import read_splits
from specmill.verifier import model_path
from specmill.view import StateView

_EPOCHS = 2


def hand_over(samples: list[Sample], view: StateView, dtype: torch.dtype, folder: Path) -> None:
    """Write samples and states as `speculators train` reads them.

    Args:
        samples: Those that train, then those that validate.
        view: Their states.
        dtype: Of the written states.
        folder: Receives the dataset, `hidden_states/hs_N.safetensors` and the vocabulary's tables.
    """
    rows = {
        "input_ids": [sample.input_ids.tolist() for sample in samples],
        "loss_mask": [sample.loss_mask.astype(int).tolist() for sample in samples],
        "seq_len": [len(sample.input_ids) for sample in samples],
    }
    dataset = Dataset.from_dict(rows).with_format("torch")
    dataset.save_to_disk(str(folder))
    (folder / "hidden_states").mkdir()
    for number, sample in enumerate(samples):
        ids, states, scales = view.load(sample.sample_key)
        tensors = {"token_ids": ids.long(), "hidden_states": restore(states, scales, dtype)}
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            folder / "hidden_states" / f"hs_{number}.safetensors",
        )
    for name in ("d2t", "t2d"):
        table = np.load(paths.VOCAB / f"{name}.npy", allow_pickle=False)
        size = len(np.load(paths.VOCAB / "d2t.npy", allow_pickle=False))
        np.save(folder / f"{name}-{size}.npy", table)


def arguments(
    chosen: Train, folder: Path, counts: tuple[int, int], layer_ids: list[int], workers: int
) -> list[str]:
    """Of `speculators train`, for what params.yaml asks of the stage.

    Args:
        chosen: Section `train`.
        folder: Of `hand_over`.
        counts: Samples that train, and that validate.
        layer_ids: Aux layers.
        workers: Reading processes.
    """
    training, heldout = counts
    size = len(np.load(paths.VOCAB / "d2t.npy", allow_pickle=False))
    dtype = read_json(paths.IDENTITY)["dtype"]
    flags: dict[str, Any] = {
        "verifier-name-or-path": model_path(paths.VERIFIER),
        "data-path": folder,
        "save-path": folder / "checkpoints",
        "log-dir": folder / "logs",
        "speculator-type": "eagle3",
        "draft-arch": "llama",
        "num-layers": chosen.num_layers,
        "draft-vocab-size": size,
        "total-seq-len": chosen.tokens_per_step,
        "train-data-ratio": (training + 0.5) / (training + heldout),
        "hidden-states-dtype": dtype,
        "num-workers": workers,
        "on-missing": "raise",
        "loss-implementation": compat.loss_implementation(compat.device()),
        "loss-fn": chosen.loss,
        "ttt-steps": chosen.ttt_steps,
        "ttt-step-loss-decay": chosen.ttt_step_loss_decay,
        "optimizer": chosen.optimizer,
        "lr": chosen.lr,
        "muon-lr": chosen.lr,
        "scheduler-type": "linear",
        "scheduler-warmup-ratio": chosen.warmup_ratio,
        "epochs": _EPOCHS,
        "sliding-window": chosen.sliding_window,
        "seed": chosen.seed,
    }
    found = [f"--{name}={value}" for name, value in flags.items()]
    return [*found, "--target-layer-ids", *map(str, layer_ids)]


def train_there(folder: Path) -> None:
    """speculators' command with the arguments in `folder`, and when each of its steps ended."""
    from speculators.train.cli import main as speculators_train
    from speculators.train.config import TrainConfig

    steps = Steps()
    logger = logging.getLogger("speculators.metrics")
    logger.setLevel(logging.INFO)
    logger.addHandler(steps)
    with compat.trainable_without_accelerator():
        speculators_train(TrainConfig.resolve(read_json(folder / "arguments.json")))
    write_json(folder / "found.json", {"steps": steps.seen})


def by_speculators(folder: Path, asked: list[str], num_tokens: int) -> dict[str, Any]:
    """Tokens/s of the last epoch of `speculators train`.

    Raises:
        RuntimeError: when it ended otherwise than well.
    """
    write_json(folder / "arguments.json", asked)
    done = subprocess.run([sys.executable, "-m", "benchmarks.training", "--there", str(folder)])
    if done.returncode:
        raise RuntimeError(f"speculators train ended with {done.returncode}")
    last = [step for step in read_json(folder / "found.json")["steps"] if step[0] == _EPOCHS - 1]
    per_step = num_tokens / len(last)
    return {
        "tokens_per_s": per_step * (len(last) - 1) / (last[-1][1] - last[0][1]),
        "losses": [loss for *_, loss in last],
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--samples", type=int, default=400, help="the first ones")
    parser.add_argument("--tokens-per-step", type=int, help="instead of train.tokens_per_step")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=12, help="of speculators")
    parser.add_argument("--json", type=Path, help="receives what was found, after every run")
    parser.add_argument("--there", type=Path, help=argparse.SUPPRESS)  # of a process that trains
    options = parser.parse_args()
    if options.there:
        train_there(options.there)
        return
    params = load_params(paths.PARAMS)
    changed: dict[str, Any] = {"max_samples": options.samples}
    if options.tokens_per_step:
        changed["tokens_per_step"] = options.tokens_per_step
    chosen = params.train.model_copy(update=changed)
    training, heldout = read_splits(chosen)
    num_tokens = sum(min(len(one.input_ids), chosen.tokens_per_step) for one in training)
    found: dict[str, Any] = {
        "machine": describe_machine(),
        "versions": compat.engine_versions(),
        "num_samples": len(training),
        "num_tokens": num_tokens,
        "workers": {"here": params.runtime.data_workers, "speculators": options.workers},
        "tokens_per_s": {"here": [], "speculators": []},
        "last_loss": {"here": [], "speculators": []},
    }
    view = StateView(paths.HIDDEN_STATES)
    dtype = getattr(torch, read_json(paths.IDENTITY)["dtype"])
    with tempfile.TemporaryDirectory(dir=paths.CACHE) as scratch:
        for number in range(options.rounds):
            for variant in ("here", "speculators")[:: -1 if number % 2 else 1]:
                folder = Path(scratch) / f"{variant}-{number}"
                if variant == "here":
                    run = trained(1, folder, options)
                else:
                    hand_over(training + heldout, view, dtype, folder)
                    counts = (len(training), len(heldout))
                    layers = list(view.spec.layer_ids[:-1])
                    asked = arguments(chosen, folder, counts, layers, options.workers)
                    run = by_speculators(folder, asked, num_tokens)
                found["tokens_per_s"][variant].append(run["tokens_per_s"])
                found["last_loss"][variant].append(run["losses"][-1])
                if options.json:
                    write_json(options.json, found)
    here, there = (median(found["tokens_per_s"][name]) for name in ("here", "speculators"))
    found["ratio"] = here / there
    print(json.dumps(found, indent=1))
    if options.json:
        write_json(options.json, found)


if __name__ == "__main__":
    main()

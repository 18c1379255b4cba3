"""What a second GPU gives: training, extraction, and whether tensor parallelism changes states.

    train     tokens/s and the loss of every step, with 1 and 2 processes at the same batch
    resume    the losses of a training that one process began, that was killed, and that two went
              on with; and the other way round
    extract   samples/s with one engine and with two, each on a GPU of its own; starts not counted
    tensor    ||x' - x|| / ||x|| by layer: states of one engine over two GPUs beside those of one,
              and, for scale, those of the two engines of `extract` beside those of its one

The inputs are the pipeline's: samples, states, vocabulary and the verifier of params.yaml
(`dvc repro vocab` makes them). `train` runs anywhere, on a CPU over gloo; `extract` on a CPU needs
memory for two engines; `tensor` needs two GPUs. A verifier with an odd number of attention heads,
as SmolLM2-135M with nine, takes part in `tensor` without its last group of them.

Run      python -m benchmarks.two_gpus --json FILE
         python -m benchmarks.two_gpus --parts train --samples 8 --tokens-per-step 256
"""

import argparse
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.extraction import WARM_UP, Bench
from specmill import compat, paths, processes
from specmill.cut import copy_companions, weight_files
from specmill.distributed import process_group
from specmill.engine_flags import parallel_settings, server_flags
from specmill.engines import work_at
from specmill.files import read_json, write_json
from specmill.hardware import describe_machine
from specmill.layers import states_of
from specmill.own_servers import own_servers
from specmill.params import Params
from specmill.params_file import load_params
from specmill.params_parallel import Parallel
from specmill.samples import Sample, read_samples
from specmill.states import restore
from specmill.store import HiddenStateStore
from specmill.train_head import read_splits, training_inputs
from specmill.training import train
from specmill.verifier import model_path
from specmill.view import StateView

_EPOCHS = 2
"""The last one is timed: the first one compiles."""


class Steps(logging.Handler):
    """Epoch, time in seconds and loss of every step that speculators reports."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, float, float]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a step; other records are none."""
        if isinstance(record.msg, dict) and "train" in record.msg:
            step = record.msg
            self.seen.append((step["epoch"], time.monotonic(), step["train"]["loss"]))


def train_here(options: argparse.Namespace) -> None:
    """Train as one of the processes that share it; the first one prints what came of it."""
    params, verifier = load_params(paths.PARAMS), read_json(paths.HEAD_IDENTITY)
    changed = {"epochs": _EPOCHS, "max_samples": options.samples}
    if options.tokens_per_step:
        changed["tokens_per_step"] = options.tokens_per_step
    chosen = params.train.model_copy(update=changed)
    logger, steps = logging.getLogger("speculators.metrics"), Steps()
    logger.setLevel(logging.INFO)
    logger.addHandler(steps)
    view, samples = StateView(paths.HIDDEN_STATES), read_splits(chosen)
    with process_group():
        model, training, heldout = training_inputs(
            chosen, samples, verifier, paths.VERIFIER_HEAD, view, options.folder, params.runtime
        )
        checkpoints = options.folder / "checkpoints"
        workers = params.runtime.data_workers
        _, epochs = train(model, training, heldout, chosen, checkpoints, lambda *_: None, workers)
    if processes.rank() == 0:
        last = [at for epoch, at, _ in steps.seen if epoch == _EPOCHS - 1]
        num_tokens = sum(min(n, chosen.tokens_per_step) for n in training.approx_lengths)
        per_step = num_tokens / len(last)
        found = {
            "tokens_per_s": per_step * (len(last) - 1) / (last[-1] - last[0]),
            "tokens_per_step": per_step,
            "losses": [loss for *_, loss in steps.seen],
            "heldout_losses": [one["loss_epoch"] for one in epochs],
        }
        write_json(options.folder / "found.json", found)


def started(
    count: int, folder: Path, options: argparse.Namespace
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """`train_here` by so many processes, in a group of their own."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    program = ["-m", "benchmarks.two_gpus", "--folder", str(folder)]
    sizes = ["--samples", str(options.samples)]
    sizes += ["--tokens-per-step", str(options.tokens_per_step or 0)]
    cores = len(os.sched_getaffinity(0))
    environment = {"OMP_NUM_THREADS": str(max(1, cores // count))} | os.environ
    return subprocess.Popen(
        [sys.executable, *(torchrun if count > 1 else []), *program, *sizes],
        env=environment,
        start_new_session=True,
    )


def trained(count: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What `train_here` found, with so many processes.

    Raises:
        RuntimeError: when it failed.
    """
    with started(count, folder, options) as process:
        if process.wait():
            raise RuntimeError(f"training with {count} processes ended with {process.returncode}")
    found: dict[str, Any] = read_json(folder / "found.json")
    return found


def training_part(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Loss curves and speeds of one process and of two."""
    found: dict[str, Any] = {
        str(count): trained(count, scratch / f"train-{count}", options) for count in (1, 2)
    }
    one, two = (found[count]["losses"] for count in ("1", "2"))
    differences = [abs(b - a) / abs(a) for a, b in zip(one, two, strict=True)]
    return found | {
        "largest_relative_difference_of_a_loss": max(differences),
        "speed_up": found["2"]["tokens_per_s"] / found["1"]["tokens_per_s"],
    }


def resumed_part(
    options: argparse.Namespace, scratch: Path, undisturbed: dict[str, Any]
) -> dict[str, Any]:
    """Trainings killed after an epoch, with which another number of processes went on."""
    found: dict[str, Any] = {}
    for first, second in ((1, 2), (2, 1)):
        folder = scratch / f"train-{first}-then-{second}"
        with started(first, folder, options) as process:
            while not (folder / "checkpoints" / "0" / "seal.json").is_file():  # written last
                if process.poll() is not None:
                    raise RuntimeError(f"training with {first} processes ended before an epoch did")
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGKILL)
        seen = trained(second, folder, options)
        pairs = zip(undisturbed["losses"][-len(seen["losses"]) :], seen["losses"], strict=True)
        found[f"{first} then {second}"] = seen | {
            "largest_relative_difference_of_a_loss": max(abs(b - a) / abs(a) for a, b in pairs)
        }
    return found


def with_even_heads(model: Path, folder: Path) -> Path:
    """The checkpoint, or a copy without the last group of heads where their number is odd."""
    config = read_json(model / "config.json")
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % 2 == 0:
        return model
    width = config.get("head_dim") or config["hidden_size"] // heads
    queries, keys = (groups - 1) * (heads // groups) * width, (groups - 1) * width
    folder.mkdir()
    copy_companions(model, folder)
    for file in weight_files(model):
        weights = load_file(file)
        for name, weight in weights.items():
            if name.endswith("q_proj.weight"):
                weights[name] = weight[:queries].contiguous()
            elif name.endswith(("k_proj.weight", "v_proj.weight")):
                weights[name] = weight[:keys].contiguous()
            elif name.endswith("o_proj.weight"):
                weights[name] = weight[:, :queries].contiguous()
        save_file(weights, folder / file.name, metadata={"format": "pt"})
    left = {"num_attention_heads": queries // width, "num_key_value_heads": groups - 1}
    write_json(folder / "config.json", config | left | {"head_dim": width})
    return folder


def extracted(
    params: Params,
    model: Path,
    samples: list[Sample],
    folder: Path,
    engines: int,
    parallel: Parallel,
) -> tuple[float, HiddenStateStore]:
    """Samples/s of engines that are up, and the store that has the states."""
    verifier = read_json(paths.IDENTITY)
    spec = states_of(verifier, params.extract.aux_layer_ids, params.extract.dtype)
    runtime = params.runtime.model_copy(update={"extract_engines": engines})
    bench = Bench(samples, spec, runtime, verifier)
    (folder / "staging").mkdir(parents=True)
    settings = bench.settings(folder) | parallel_settings(model, verifier, parallel)
    flags = server_flags(settings)
    each = parallel.tensor_parallel_size
    with own_servers(model, flags, engines, each, runtime, folder / "extract.log") as servers:
        keys = {server.url: server.api_key for server in servers}

        def run(work: Any) -> None:
            work_at(list(keys), work, runtime.request_timeout_s, keys)

        bench.extract(bench.warm, folder, run)
        seconds = bench.extract(bench.samples, folder, run)
    return len(bench.samples) / seconds, HiddenStateStore(folder / "store")


def differences(
    params: Params, samples: list[Sample], stores: list[HiddenStateStore], scratch: Path
) -> dict[str, float]:
    """||x' - x|| / ||x|| over all samples, by layer id; the first store has x."""
    verifier = read_json(paths.IDENTITY)
    spec = states_of(verifier, params.extract.aux_layer_ids, params.extract.dtype)
    keys = [sample.sample_key for sample in samples[WARM_UP:]]
    views = []
    for number, store in enumerate(stores):
        folder = Path(tempfile.mkdtemp(dir=scratch)) / str(number)
        store.write_view(folder, spec, keys, 2**29)
        views.append(StateView(folder))
    off = torch.zeros(len(spec.layer_ids), dtype=torch.float64)
    size = torch.zeros_like(off)
    for key in keys:
        first, other = (
            restore(states, scales, torch.float32).double()
            for _, states, scales in (view.load(key) for view in views)
        )
        off += (other - first).square().sum(dim=(0, 2))
        size += first.square().sum(dim=(0, 2))
    relative = (off / size).sqrt().tolist()
    return {str(layer): value for layer, value in zip(spec.layer_ids, relative, strict=True)}


def engine_parts(
    parts: list[str], num_samples: int, scratch: Path
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Extraction by one engine and two, and over two GPUs; each part as it is done."""
    params, model = load_params(paths.PARAMS), model_path(paths.VERIFIER)
    samples = read_samples(paths.PREPARED / "train.parquet")[: num_samples + WARM_UP]
    one_gpu, two_gpus = Parallel(), Parallel(tensor_parallel_size=2)
    for part, engines, parallel in (("extract", 2, one_gpu), ("tensor", 1, two_gpus)):
        if part in parts:
            folder = scratch / part
            place = model if part == "extract" else with_even_heads(model, scratch / "even")
            rate, one = extracted(params, place, samples, folder / "one", 1, one_gpu)
            faster, two = extracted(params, place, samples, folder / "two", engines, parallel)
            yield (
                part,
                {
                    "num_samples": len(samples) - WARM_UP,
                    "samples_per_s": {"1": rate, "2": faster},
                    "speed_up": faster / rate,
                    "difference_by_layer": differences(params, samples, [one, two], scratch),
                },
            )


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.two_gpus",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = ("train", "resume", "extract", "tensor")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--samples", type=int, default=400, help="of each part, the first ones")
    parser.add_argument(
        "--tokens-per-step", type=int, default=0, help="instead of train.tokens_per_step"
    )
    parser.add_argument("--json", type=Path, help="receives what was found, after every part")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of a process that trains
    options = parser.parse_args()
    if options.folder:
        train_here(options)
        return
    found: dict[str, Any] = {"machine": describe_machine(), "device": compat.device()}

    def keep(part: str, measured: dict[str, Any]) -> None:
        found[part] = measured
        if options.json:  # what was measured stays when a machine is taken away
            write_json(options.json, found)

    with tempfile.TemporaryDirectory(dir=paths.CACHE) as scratch:
        for part, measured in engine_parts(options.parts, options.samples, Path(scratch)):
            keep(part, measured)
        if {"train", "resume"} & set(options.parts):
            keep("train", training_part(options, Path(scratch)))
        if "resume" in options.parts:
            keep("resume", resumed_part(options, Path(scratch), found["train"]["1"]))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

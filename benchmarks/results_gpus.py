"""Tables and the picture of docs/results.md on a decode step of an 8B model and on two GPUs.

From reports/gpu/two-gpus: `benchmarks.decode_step` on one GPU and on two, `benchmarks.two_gpus`.
"""

from statistics import median
from typing import Any

from benchmarks.decode_step import LLAMA_8B
from specmill import paths
from specmill.canvas import Target, canvas, legend
from specmill.files import read_json
from specmill.geometry import read_geometry
from specmill.roofline import Link, all_reduce_ms

FOLDER = paths.ROOT / "reports" / "gpu" / "two-gpus"
PICTURE = paths.ROOT / "docs" / "decode_step.svg"
_KINDS = {
    "matrix products": "#0072B2",
    "attention": "#56B4E9",
    "norms, activations, rope": "#009E73",
    "choosing tokens": "#E69F00",
    "copies": "#CC79A7",
    "other": "#888888",
}
_IDLE = "nothing to do"

Run = dict[str, Any]


def runs_of(gpus: int) -> list[Run]:
    """Every load and K on so many GPUs, in this order."""
    name = "decode_step.json" if gpus == 1 else f"decode_step_x{gpus}.json"
    found: list[Run] = read_json(FOLDER / name)["runs"]
    return sorted(found, key=lambda run: (run["batch"], run["k"]))


def _step(run: Run) -> float:
    """Milliseconds of a step without a profiler: the middle one of three."""
    return float(median(run["step_ms"]))


def drafting_steps() -> list[str]:
    """What the GPU does in a step of an 8B model, with drafts and without."""
    lines = [
        "| requests | K | step, ms | of `none`'s | GPU busy | " + " | ".join(_KINDS) + " |",
        "| ---: | ---: | ---: | ---: | ---: |" + " ---: |" * len(_KINDS),
    ]
    runs = runs_of(1)
    plain = {run["batch"]: _step(run) for run in runs if not run["k"]}
    for run in runs:
        kinds = run["traced"]["by_kind"]
        each = " | ".join(f"{kinds[kind]:.2f}" for kind in _KINDS)
        lines.append(
            f"| {run['batch']} | {run['k']} | {_step(run):.2f} "
            f"| {_step(run) / plain[run['batch']]:.2f} | {run['traced']['busy']:.2f} | {each} |"
        )
    return lines


def draw(target: Target = PICTURE) -> None:
    """Bars of the same: a step's kernels by kind, and the time in which the GPU has none."""
    runs = runs_of(1)
    title = "A decode step of an 8B Llama on one H200, by kind of kernel"
    with canvas(target, (8.5, 4.2), title) as figure:
        axes = figure.subplots()
        loads = sorted({run["batch"] for run in runs})
        places = [index + loads.index(run["batch"]) for index, run in enumerate(runs)]  # gaps
        left = [0.0] * len(runs)
        for kind, colour in _KINDS.items():
            widths = [run["traced"]["by_kind"][kind] for run in runs]
            axes.barh(places, widths, left=left, color=colour, label=kind)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        idle = [max(0.0, run["traced"]["step"] - run["traced"]["busy"]) for run in runs]
        axes.barh(places, idle, left=left, color="white", edgecolor="#888888", label=_IDLE)
        names = [f"{run['batch']} in flight, K={run['k']}" for run in runs]
        axes.set_yticks(places, names)
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds, in a trace of 32 steps")
        axes.spines[["top", "right"]].set_visible(False)
        legend(figure, [axes], loc="outside lower center")


def own_link() -> Link:
    """The link as the engine's own all-reduces have it.

    Its latency is of the step that moves least (K = 0, one request), the wait for the other GPU
    left out; NCCL's bandwidth is kept.
    """
    (bandwidth,) = (
        link["bandwidth_bytes_per_s"]
        for link in read_json(FOLDER / "decode_step_x2.json")["links"].values()
    )
    traced = runs_of(2)[0]["traced"]
    moved_us = 1e6 * LLAMA_8B["hidden_size"] * 2 / bandwidth
    each_us = 1e3 * traced["all_reduce_least"] / traced["all_reduces"]
    return Link(bandwidth, each_us - moved_us)


def all_reduces() -> list[str]:
    """Share of all-reduces in a step over two GPUs, and what two links foresee of it."""
    lines = [
        "| requests | K | step on one GPU, ms | on two | times as fast | all-reduces "
        "| they take, ms | of the step | foreseen by NCCL's link | by the engine's own |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    one = {(run["batch"], run["k"]): _step(run) for run in runs_of(1)}
    geometry, link = read_geometry(LLAMA_8B), own_link()
    for run in runs_of(2):
        traced, alone = run["traced"], one[run["batch"], run["k"]]
        foreseen = all_reduce_ms(geometry, link, 2, run["batch"] * (run["k"] + 1))
        lines.append(
            f"| {run['batch']} | {run['k']} | {alone:.2f} | {_step(run):.2f} "
            f"| {alone / _step(run):.2f} | {traced['all_reduces']:.0f} "
            f"| {traced['all_reduce_least']:.2f} | {traced['all_reduce_least'] / _step(run):.0%} "
            f"| {run['foreseen_ms']:.2f} | {foreseen:.2f} |"
        )
    return lines


def two_gpus() -> list[str]:
    """Training with two processes, and states of an engine over two GPUs."""
    train = read_json(FOLDER / "train_x2.json")["train"]
    tensor = read_json(FOLDER / "tensor_x2.json")
    layers = tensor["tensor"]["difference_by_layer"]
    rates = [train[count]["tokens_per_s"] for count in ("1", "2")]
    rows = (
        ("training, tokens/s", "1.8 times", *(f"{rate:,.0f}" for rate in rates)),
        (
            "extraction by one engine over both, samples/s",
            "-",
            *(f"{tensor['tensor']['samples_per_s'][count]:,.0f}" for count in ("1", "2")),
        ),
    )
    speed_ups = (train["speed_up"], tensor["tensor"]["speed_up"])
    numbered = sorted((int(layer), value) for layer, value in layers.items())
    apart = ", ".join(f"{value:.2%} at {layer}" for layer, value in numbered)
    return [
        "| what | wanted | one GPU | two | times as fast |",
        "| --- | --- | ---: | ---: | ---: |",
        *(
            f"| {' | '.join(row)} | {speed_up:.2f} |"
            for row, speed_up in zip(rows, speed_ups, strict=True)
        ),
        "",
        f"Losses of the {len(train['1']['losses'])} steps with two processes differ by "
        f"{train['largest_relative_difference_of_a_loss']:.2%} at most from those with one.",
        f"States of {tensor['num_samples']} samples over two GPUs differ from those of one by",
        f"||x' - x|| / ||x||, by layer: {apart}.",
    ]

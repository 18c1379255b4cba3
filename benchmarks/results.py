"""docs/results.md and the README's tables from the raw results: no figure of them is typed.

Run      python -m benchmarks.results
"""

from pathlib import Path
from typing import Any

from benchmarks.results_gpus import all_reduces, drafting_steps, draw, own_link, two_gpus
from benchmarks.results_methods import (
    SWEEP,
    foreseen,
    goals,
    overview,
    replayed,
    step_kinds,
)
from benchmarks.results_stages import extraction, states, timeline
from specmill import paths
from specmill.files import read_json
from specmill.samples import ALL
from specmill.tables import change, figure

_GPU = paths.ROOT / "reports" / "gpu"
_FEW, _MANY = _GPU / "demo-h200-739-answers", SWEEP
_LENGTH = "acceptance_length"

Rows = list[dict[str, Any]]


_README = paths.ROOT / "README.md"
_MARKS = {
    "results": ("<!-- results -->\n", "<!-- end of results -->\n"),
    "cpu": ("<!-- results on a CPU -->\n", "<!-- end of results on a CPU -->\n"),
}


def main() -> None:
    """Write the page, its picture, and the tables in the README."""
    draw()
    (paths.ROOT / "docs" / "results.md").write_text(text())
    _README.write_text(with_tables(_README.read_text()))


def with_tables(readme: str) -> str:
    """The README with the tables of methods on a GPU and on two CPU cores.

    The latter from a copy in reports/cpu: reports/bench is another with every run of a user's.
    """
    readme = _between("results", overview(), readme)
    return _between("cpu", overview(paths.ROOT / "reports" / "cpu"), readme)


def _between(marks: str, lines: list[str], readme: str) -> str:
    begin, end = _MARKS[marks]
    before, rest = readme.split(begin)
    _, after = rest.split(end)
    return before + begin + "\n".join(lines) + "\n" + end + after


def text() -> str:
    """The whole page."""
    few, many = (_rows(folder) for folder in (_FEW, _MANY))
    engine = next(iter(read_json(_MANY / "bench_eagle3.json")["engine"].values()))
    versions = read_json(_MANY / "hardware.json")["versions"]
    return _PAGE.format(
        vllm=versions["vllm"],
        speculators=versions["speculators"],
        dtype=engine["dtype"],
        graphs=engine["cudagraph_mode"],
        heads="\n".join(_heads(few, many)),
        surface="\n".join(_surface(many)),
        steps="\n".join(_steps(many)),
        types="\n".join(_types(many)),
        timeline="\n".join(timeline()),
        extraction="\n".join(extraction()),
        overview="\n".join(overview()),
        goals="\n".join(goals()),
        replayed="\n".join(replayed()),
        foreseen="\n".join(foreseen()),
        kinds="\n".join(step_kinds()),
        states=states(),
        drafting="\n".join(drafting_steps()),
        reduces="\n".join(all_reduces()),
        own_latency=own_link().latency_us,
        two_gpus="\n".join(two_gpus()),
    )


_PAGE = """\
# Results on a GPU

Written by `python -m benchmarks.results` from `reports/gpu`; what was tried on the way is in the
[log](log.md). SmolLM2-135M-Instruct on one NVIDIA H200, vLLM {vllm}, speculators {speculators},
greedy, {dtype}, CUDA graphs ({graphs}), `profiles/demo-h200.yaml`. Each row beside a
`none` of its own on the same GPU; intervals are 95%.

Two runs, hours apart, with the same head. A (`reports/gpu/demo-h200`) has K = 1, 3 and 5 and the
stages' times, B (`reports/gpu/demo-h200-decision`) n-gram, `none`, replay, prediction and the
trace. *Does it pay* and *What was known before* are of B, *More of the verifier's own answers*, *K
by load* and *Acceptance length by prompt type* of A, the best K under *What was wanted* of both.

## Does it pay

{overview}

At one request EAGLE-3 shows no difference; at 8 and 32 it costs, and n-gram at every load. Sampled
answers were not checked on this machine. EAGLE-3 with K by the load was not served: vLLM 0.26 ends
with an assertion where a schedule has a K below its largest (negative sizes of CUDA graphs for the
drafts; 0.32 has other code there, not tried on a GPU).

## What was wanted

{goals}

## More of the verifier's own answers

{heads}

The bench's prompts are written by hand and share no template with what trains, so that acceptance
is lower than on held-out prompts of the same sources.

## What it gives: K by load

{surface}

K = 1 has two rounds instead of three: the machine's time was over.

Where it loses, a step costs more than it brings, and the first token comes later. Medians; `none`
is the one beside it:

{steps}

A draft is one more layer, but launched and scheduled like a step of its own: drafting K tokens
costs a step of `none` again for one request, two for 32. Answers are short (`bench.max_tokens`), so
that the first token weighs too.

What the GPU does in a step of `none`, in ms (`python -m benchmarks.decode_step`); the rest of a
step it waits for the host. Steps with its drafts were not traced:

{kinds}

An 8B Llama with random weights and a random head of one layer (draft vocabulary of 32,000) keeps
the GPU busy instead, so that there a draft step costs what its kernels take, most of it matrix
products. All in ms; the kernels' are of a trace, in which a step takes a little longer:

{drafting}

![Bars of a step's kernels by kind, for 1, 8 and 32 requests and K from 0 to 5](decode_step.svg)

## What was known before

Answers that were served, walked through again without a server (`replay`), up to the first token
that differs:

{replayed}

Prediction from replay and step times (`curves`), before anything of it was served:

{foreseen}

Most at 32 requests: a server that is busy sends the tokens of several steps of `none` as one chunk,
which was timed as one step (1.32 tokens a step at 64 requests), and 32 steps of 2 ms are short.
Chunks are counted by their tokens since, and the profile times 256 steps; not measured again yet.

## Acceptance length by prompt type, one request in flight

{types}

## What it takes

{timeline}

Most of it is starts of engines, imports and compilation. {states}

## Extraction against the engine alone and against speculators

Tokens a second, median of the rounds (one engine):

{extraction}

## Two GPUs of one host

{two_gpus}

At the same batch of 8,011 tokens a step, training this small head on two GPUs is slower: 73 ms a
step instead of 65. It was not traced; launching a step's kernels takes as long for half the tokens.
Not run on two: going on with a training that one process began, and extraction by two engines;
their machine's time was over.

The same 8B Llama over both, NVLink multicast off. All-reduces are counted without the wait for the
other GPU, the shorter time of both:

{reduces}

They take 5 to 11% of a step here, 51.5% where PCIe joins eight GPUs, and more with K, not less:
each draft step brings three more. The term of prediction (`specmill/roofline.py`) with the latency
of NCCL launched one by one, 25.6 us, foresees three to six times too much: the engine reduces
by kernels of its own, inside CUDA graphs. With the latency of its first row, {own_latency:.1f} us,
it foresees the rows of K = 0 within 2%, and with drafts up to a fifth too little: it is the
verification's, and drafting is counted by `--draft-ms`.
"""


def _rows(folder: Path) -> Rows:
    return [row for row in read_json(folder / "bench_eagle3.json")["rows"] if row["speedup"]]


def _of(rows: Rows, **place: Any) -> dict[str, Any]:
    """The only row of a place."""
    (row,) = [one for one in rows if place.items() <= one.items()]
    return row


def _overall(rows: Rows) -> Rows:
    return [row for row in rows if row["category"] == ALL]


def _heads(few: Rows, many: Rows) -> list[str]:
    lines = [
        "| answers trained on | tokens of them | epochs | draft vocabulary "
        "| replayed, held out, K=3 | served, K=3, 1 request | at position 0 / 1 / 2 "
        "| change at 1 / 8 / 32 requests |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    for folder, rows in ((_FEW, few), (_MANY, many)):
        head, data = read_json(folder / "train.json"), read_json(folder / "prepare.json")
        every = _overall(rows)
        at = [_of(every, num_speculative_tokens=3, concurrency=load) for load in (1, 8, 32)]
        rates = " / ".join(f"{at[0][f'acceptance_rate_pos_{i}']:.3f}" for i in range(3))
        lines.append(
            f"| {head['num_samples']:,} | {data['train']['num_trained_tokens']:,} "
            f"| {head['num_epochs']} | {read_json(folder / 'vocab.json')['draft_vocab_size']:,} "
            f"| {head['replayed_length_k3']:.2f} | {figure(at[0], _LENGTH, '.2f')} | {rates} "
            f"| {', '.join(change(row) for row in at)} |"
        )
    return lines


def _surface(rows: Rows) -> list[str]:
    lines = [
        "| K | requests | pairs | `none` tok/s | tok/s | change | acceptance length | "
        "identical outputs |",
        "| ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: |",
    ]
    for row in _overall(rows):
        lines.append(
            f"| {row['num_speculative_tokens']} | {row['concurrency']} | {row['num_pairs']} "
            f"| {row['reference_tokens_per_s']:,.0f} | {row['output_tokens_per_s']:,.0f} "
            f"| {change(row)}, {row['verdict']} | {row[_LENGTH]:.2f} "
            f"| {row['identical_outputs']:.0%} |"
        )
    return lines


def _steps(rows: Rows) -> list[str]:
    """Which term it is: what a step costs, in steps of `none`, beside what it brings."""
    lines = [
        "| K | requests | step of `none`, ms | step that drafts, ms | costs, x | brings, tokens "
        "| first token of `none`, ms | first token, ms |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    latency = read_json(_MANY / "bench_eagle3.json")["latency"]
    for row in _overall(rows):
        place = {name: row[name] for name in ("num_speculative_tokens", "concurrency")}
        plain, drafts = (_of(latency, role=role, **place) for role in ("reference", "method"))
        lines.append(
            f"| {row['num_speculative_tokens']} | {row['concurrency']} "
            f"| {plain['step_ms_p50']:.2f} | {drafts['step_ms_p50']:.2f} "
            f"| {drafts['step_ms_p50'] / plain['step_ms_p50']:.2f} | {row['tokens_per_step']:.2f} "
            f"| {plain['ttft_ms_p50']:.0f} | {drafts['ttft_ms_p50']:.0f} |"
        )
    return lines


def _types(rows: Rows) -> list[str]:
    ks = sorted({row["num_speculative_tokens"] for row in rows})
    lines = [
        "| prompt type | " + " | ".join(f"K={k}" for k in ks) + " |",
        "| --- |" + " ---: |" * len(ks),
    ]
    for category in [*sorted({row["category"] for row in rows} - {ALL}), ALL]:
        at = {"category": category, "concurrency": 1}
        found = [_of(rows, num_speculative_tokens=k, **at) for k in ks]
        lengths = " | ".join(f"{row[_LENGTH]:.2f}" for row in found)
        lines.append(f"| {category} | {lengths} |")
    return lines


if __name__ == "__main__":
    main()

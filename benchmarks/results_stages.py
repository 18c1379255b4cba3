"""Tables of docs/results.md on what the stages take on a GPU.

From reports/gpu/demo-h200, demo-h200-decision and the measurements of `benchmarks.extraction`.
"""

from statistics import median

from benchmarks.results_methods import METHODS, SWEEP
from specmill import paths
from specmill.files import read_json

_GPU = paths.ROOT / "reports" / "gpu"


def timeline() -> list[str]:
    """What each stage took on one GPU, from the model to the head."""
    took = read_json(SWEEP / "timeline.json")
    answers, states, training = (took[name] for name in ("answers", "states", "training"))
    tokens = read_json(SWEEP / "prepare.json")["train"]["num_tokens"]
    later = median(training["seconds_an_epoch"][1:])
    stages = ("verifier", "prepare", "vocab", "extract", "train")
    return [
        "| stage | seconds | of them |",
        "| --- | ---: | --- |",
        f"| verifier | {took['verifier']} | from a GGUF file |",
        f"| prepare | {took['prepare']} | {answers['seconds']} with {answers['engines']} "
        f"engines up: {answers['number']:,} conversations, {answers['tokens']:,} tokens, "
        f"{answers['tokens'] / answers['seconds']:,.0f} tok/s |",
        f"| extract | {took['extract']} | {states['seconds']} with {states['engines']} "
        f"engines up: {states['tokens']:,} tokens, "
        f"{states['tokens'] / states['seconds']:,.0f} tok/s, "
        f"{states['gigabytes']:.1f} GB |",
        f"| vocab | {took['vocab']} | |",
        f"| train | {took['train']} | {training['epochs']} epochs of {tokens:,} tokens, the "
        f"first {training['seconds_an_epoch'][0]} s (it compiles), then {later:.0f} s: "
        f"{tokens / later:,.0f} tok/s; waited for data {training['waited_for_data']:.2%} |",
        f"| together | {sum(took[stage] for stage in stages)} | |",
    ]


def states() -> str:
    """Extraction on another day, after requests were polled no more."""
    took = read_json(METHODS / "timeline.json")
    states = took["states"]
    return (
        f"Extraction on another day, by code that does not look at every request's file all the "
        f"time: {states['seconds']} s with {states['engines']} engines up, "
        f"{states['tokens'] / states['seconds']:,.0f} tok/s; {took['extract']} s in all."
    )


def extraction() -> list[str]:
    """Tokens a second of extraction in four ways."""
    lines = [
        "| run | tokens | `speculators generate-offline-data` | through a server "
        "| in the stage's process | the engine's own prefill |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    runs = read_json(_GPU / "extraction.json")["runs"][:1]
    for name, run in (
        ("one round, requests copied one by one", runs[0]),
        ("two rounds, a step's requests at once", read_json(_GPU / "extraction_two_rounds.json")),
    ):
        rates = [
            f"{run['num_tokens'] / median(run['seconds'][variant]):,.0f}"
            if variant in run["seconds"]
            else "not run"
            for variant in ("speculators", "server", "here", "plain")
        ]
        lines.append(f"| {name} | {run['num_tokens']:,} | {' | '.join(rates)} |")
    return lines

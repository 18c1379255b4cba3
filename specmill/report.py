"""The comparison as Markdown and as metrics: pure functions of what the benches wrote."""

from collections import Counter
from itertools import chain
from typing import Any

from specmill.causes import heads_section
from specmill.engine_faults import known_sampling_fault
from specmill.fidelity import fidelity_section, footnotes, marked
from specmill.notes import engine_table, notes
from specmill.params_bench import Bench
from specmill.prediction_section import prediction_section
from specmill.reading import overview, reading
from specmill.rows import Results, headline_rows, load_label, load_name, load_order, load_sentence
from specmill.samples import ALL
from specmill.sampling_section import Sampling, sampling_section
from specmill.tables import (
    Named,
    document,
    latency_table,
    overview_table,
    percent,
    prompt_type_table,
    speed_table,
)


def summary_metrics(results: Results) -> dict[str, Any]:
    """The few numbers worth comparing between experiments, by method and load.

    Over all prompt types, at the headline K; what was not measured is left out.
    """
    shown = ("output_tokens_per_s", "speedup", "speedup_low", "speedup_high", "acceptance_length")
    summary: dict[str, Any] = {}
    for method, result in served(results).items():
        summary[method] = {
            load_name(row): {name: row[name] for name in shown if row.get(name) is not None}
            for row in headline_rows(result)
            if row["category"] == ALL
        }
        if result["num_speculative_tokens"]:
            summary[method]["num_speculative_tokens"] = result["num_speculative_tokens"]
    return summary


def served(results: Results) -> Results:
    """The methods that have figures."""
    return {name: result for name, result in results.items() if "not_served" not in result}


def shown_rows(results: Results) -> Named:
    """All rows, what speaks against a method behind its name."""
    return [(name, row) for name, result in marked(results).items() for row in result["rows"]]


def sampled(results: Results) -> Sampling:
    """What was found out about sampling, by method."""
    return {name: result["sampling"] for name, result in results.items() if "sampling" in result}


def trust_note(verifier: dict[str, Any]) -> list[str]:
    """A sentence where code that came with the verifier was run (its identity.json)."""
    if not verifier.get("trust_remote_code"):
        return []
    return [f"{verifier['name']} runs code of its own repository (`verifier.trust_remote_code`)."]


def setting(hardware: dict[str, Any], verifier: dict[str, Any]) -> str:
    """What was measured and on what, in a line."""
    gpus = Counter(gpu["name"] for gpu in hardware["gpus"])
    machine = ", ".join(f"{n} x {name}" if n > 1 else name for name, n in gpus.items()) or (
        f"{hardware['cpu_model']}, {hardware['num_usable_cores']} cores"
    )
    return f"{verifier['name']} on {machine}, vLLM {hardware['versions']['vllm']}; greedy."


def comparison(
    results: Results,
    check: dict[str, Any],
    hardware: dict[str, Any],
    verifier: dict[str, Any],
    bench: Bench,
    limits: list[str],
) -> str:
    """The comparison as Markdown: the answer on top, a block per load, what stands behind it.

    Args:
        results: reports/bench/NAME.json by name.
        check: reports/check.json.
        hardware: reports/hardware.json.
        verifier: identity.json.
        bench: Section of params.yaml: within which times a request counts as good.
        limits: What the run can decide, list items (specmill.decision_text).
    """
    rows, fault = shown_rows(results), known_sampling_fault(hardware)
    lines = [
        "# Does speculation pay?",
        "",
        setting(hardware, verifier),
        "",
        "What this run can decide:",
        "",
        *limits,
        "",
        *overview(rows),
        "",
        *overview_table(rows),
        "",
        *chain.from_iterable((note, "") for note in footnotes(results, fault)),
        *notes(results),
        "## How to read the tables",
        "",
        *reading(results, bench),
        "",
        *chain.from_iterable(
            [f"## {heading}", "", *chain.from_iterable(tables.values())]
            for heading, tables in tables_by_load(rows, results, bench)
        ),
        *prediction_section(check),
        *fidelity_section(results),
        *sampling_section(sampled(results)),
        *heads_section(results),
        *engine_table(results),
    ]
    return document(lines)


def tables_by_load(
    rows: Named, results: Results, bench: Bench
) -> list[tuple[str, dict[str, list[str]]]]:
    """Of each load its heading, and the Markdown of its tables by what they are about."""
    found = []
    loads = {load_label(row): row for _, row in rows}
    for load, place in sorted(loads.items(), key=lambda item: load_order(item[1])):
        of_load = [(method, row) for method, row in rows if load_label(row) == load]
        tables = {
            "speed": [*speed_table(of_load), *_drift_lines(served(results), load)],
            "times": latency_table(of_load, bench),
            "speed by prompt type": prompt_type_table(of_load),
        }
        found.append((load_sentence(place), tables))
    return found


def _drift_lines(results: Results, load: str) -> list[str]:
    """How far each method's baseline lies from that of `none`, in percent."""
    baselines = {
        name: row["reference_tokens_per_s"]
        for name, result in results.items()
        for row in headline_rows(result)
        if load_label(row) == load and row["category"] == ALL and "source" not in result
        if row["reference_tokens_per_s"] is not None  # the headline K may be refused
    }
    none = baselines.pop("none", None)
    if none is None or not baselines:
        return []
    drifts = [f"{name} {percent(speed / none)}" for name, speed in baselines.items()]
    return [
        f"Drift of the baselines from that of `none`, measured at another time: "
        f"{', '.join(drifts)}. Compare changes between methods, not tokens per second.",
        "",
    ]

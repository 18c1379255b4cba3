"""The comparison as Markdown and as metrics: pure functions of what the benches wrote."""

from typing import Any

from specmill.causes import heads_section
from specmill.fidelity import faults, fidelity_section
from specmill.notes import engine_table, notes
from specmill.rows import Results, Row, headline_rows, load_name, load_sentence
from specmill.samples import ALL
from specmill.sampling_section import sampling_section
from specmill.tables import latency_table, percent, prompt_type_table, speed_table


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


def comparison(results: Results, hardware: dict[str, Any], verifier: dict[str, Any]) -> str:
    """The comparison as Markdown: a block per load and context, then what stands behind it."""
    machine = ", ".join(gpu["name"] for gpu in hardware["gpus"]) or (
        f"{hardware['cpu_model']}, {hardware['num_usable_cores']} cores"
    )
    lines = [
        "# Does speculation pay?",
        "",
        f"{verifier['name']} on {machine}, vLLM {hardware['versions']['vllm']}; greedy. Output "
        "tokens per second of all requests together. The baseline of each row is the same server "
        "without speculation, measured in the same stage on the same prompts. Change is the "
        "median over pairs of cells that both answered, with its 95% bootstrap interval; the row "
        "of `none` compares two equal servers, and its interval is what this bench can tell apart.",
        "",
    ]
    for load in _loads(results):
        rows = [
            (_shown_as(name, result), row)
            for name, result in results.items()
            for row in result["rows"]
            if load_name(row) == load
        ]
        lines += [f"## {load_sentence(rows[0][1]).capitalize()}", "", *speed_table(rows), ""]
        lines += _drift_lines(served(results), load)
        lines += [*latency_table(rows), *prompt_type_table(rows)]
    sampling = {
        name: result["sampling"] for name, result in results.items() if "sampling" in result
    }
    lines += [*fidelity_section(results), *sampling_section(sampling)]
    lines += [*heads_section(results), *engine_table(results)]
    return "\n".join([*lines, *notes(served(results))]).rstrip() + "\n"


def _shown_as(name: str, result: dict[str, Any]) -> str:
    """A method that is not lossless says so wherever it stands."""
    return f"{name} (**not lossless**)" if faults(result) else name


def _loads(results: Results) -> list[str]:
    """Names of all loads: requests in flight rising, then rates, each with its contexts."""
    rows = [row for result in results.values() for row in result["rows"]]
    rows.sort(key=_load_order)
    return list(dict.fromkeys(load_name(row) for row in rows))


def _load_order(row: Row) -> tuple[float, float, int]:
    return (row["concurrency"] or float("inf"), row["rate"] or 0.0, row["context"])


def _drift_lines(results: Results, load: str) -> list[str]:
    """How far each method's reference lies from the `none` measured in its own stage."""
    at = {
        name: row
        for name, result in results.items()
        for row in headline_rows(result)
        if load_name(row) == load and row["category"] == ALL and row.get("reference_tokens_per_s")
    }
    if "none" not in at:
        return []
    none = at["none"]["output_tokens_per_s"]
    drifts = [
        f"{name} {percent(row['reference_tokens_per_s'] / none)}"
        for name, row in at.items()
        if name != "none"
    ]
    return [
        f"`none` in its own stage: {none:.1f} tok/s. Drift of each method's baseline from it: "
        f"{', '.join(drifts) or 'no other method'}.",
        "",
    ]

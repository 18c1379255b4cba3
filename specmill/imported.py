"""A row of the comparison from the file of another benchmark tool.

Each run in the file is a row. What the file does not have is null, never guessed. A reference is
the same tool's file of the same server without speculation: a speed-up is the ratio of the two
throughputs at the same load. It was measured once, not in pairs, so it has neither an interval nor
a verdict.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from specmill import guidellm_results, vllm_results
from specmill.files import file_digest
from specmill.measured import FIGURES, Measured
from specmill.params_imported import Imported
from specmill.samples import ALL

_OTHER_PROMPTS = 0.02
"""Relative difference of mean prompt lengths from which two runs had other prompts."""


def identify_imported(key: str, chosen: Imported) -> dict[str, Any]:
    """What an imported row depends on: its files and their content.

    Args:
        key: Place of `chosen` in params.yaml, for errors.
        chosen: The row.

    Raises:
        ValueError: when a file is not there.
    """
    files = {"source": chosen.source, "reference": chosen.reference}
    return {
        field: {"path": path, "sha256": file_digest(_there(f"{key}.{field}", path))}
        for field, path in files.items()
        if path is not None
    }


def _there(key: str, path: str) -> Path:
    if not Path(path).is_file():
        raise ValueError(
            f"{key}: {path} is not there (looked in {Path.cwd()}). With `dvc exp run --temp` or "
            "--queue a relative path must be in Git or in DVC; otherwise write an absolute one"
        )
    return Path(path)


def import_result(name: str, chosen: Imported) -> dict[str, Any]:
    """Everything that reports/bench/NAME.json holds of an imported row.

    Args:
        name: Entry of params.yaml: imported.
        chosen: Its files and K.

    Raises:
        ValueError: naming file and reason, when a file cannot be read or is none of the tools',
            none of its requests was answered, or the two files do not belong together.
    """
    k = chosen.num_speculative_tokens
    facts, runs = read_results(_there(f"imported.{name}.source", chosen.source))
    _check_k(name, chosen.source, k, runs)
    reference_facts, reference = None, None
    if chosen.reference is not None:
        place = _there(f"imported.{name}.reference", chosen.reference)
        reference_facts, reference = read_results(place)
        _check_reference(name, (facts, runs), (reference_facts, reference))
    return {
        "method": name,
        "served_by": "imported",
        "head": {},
        "num_speculative_tokens": k,
        "rows": rows(k, runs, reference),
        "engine": {},
        "source": facts | {"reference": reference_facts},
    }


def read_results(path: Path) -> tuple[dict[str, Any], list[Measured]]:
    """Facts and runs of a file of `vllm bench serve` or guidellm, whichever it is.

    Returns:
        Facts (`tool`, `tool_version`, `measured_at`, `model`, `endpoint`, `backend`, `dataset`,
        `platform` of the client, `labels`, `file`, `sha256`), None where the file says nothing;
        runs in its order.

    Raises:
        ValueError: naming the file, when it is cut short or no such file, no request of it was
            answered with a token, or two runs have the same load.
    """
    contents = _contents(path)
    try:
        if contents[0].keys() >= guidellm_results.MARKS and len(contents) == 1:
            facts, runs = guidellm_results.guidellm_results(contents[0])
        elif all(content.keys() >= vllm_results.MARKS for content in contents):
            facts, runs = vllm_results.vllm_results(contents)
        else:
            raise ValueError(
                "it is neither of `vllm bench serve --save-result` nor guidellm's benchmarks.json; "
                f"its first keys are {', '.join(list(contents[0])[:5]) or 'none'}"
            )
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ValueError(f"{path}: {'; '.join(wrong[:3])}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if all(run.figures["output_tokens_per_s"] is None for run in runs):
        raise ValueError(f"{path}: no request was answered with a token, so it has no figures")
    if twice := _repeated(runs):
        raise ValueError(f"{path}: several runs at one load ({'; '.join(twice)}); keep one")
    # by name alone: a path of another machine says nothing here
    return facts | {"file": path.name, "sha256": file_digest(path)}, runs


def _repeated(runs: list[Measured]) -> list[str]:
    """Loads that more than one run has, or whose rows would have the same place."""
    loads = Counter(run.load for run in runs)
    places = Counter((run.concurrency, run.rate) for run in runs)
    return sorted({r.load for r in runs if loads[r.load] > 1 or places[r.concurrency, r.rate] > 1})


def _contents(path: Path) -> list[dict[str, Any]]:
    """The objects of a file: one, or of `vllm bench serve --append-result` one per line."""
    try:
        text = path.read_text()
        try:
            contents = [json.loads(text)]
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":
                raise
            contents = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON, or was cut short: {error}") from None
    if not all(isinstance(content, dict) for content in contents):
        raise ValueError(f"{path} holds no JSON object; the tools write one")
    return contents


def _check_k(name: str, path: str, k: int, runs: list[Measured]) -> None:
    for run in runs:
        if run.k is not None and run.k != k:
            raise ValueError(
                f"imported.{name}.num_speculative_tokens is {k}, but {path} has acceptance at "
                f"{run.k} positions ({run.load}); write {run.k}"
            )


def _check_reference(
    name: str,
    method: tuple[dict[str, Any], list[Measured]],
    reference: tuple[dict[str, Any], list[Measured]],
) -> None:
    for fact in ("tool", "model"):
        ours, theirs = method[0][fact], reference[0][fact]
        if ours != theirs:
            raise ValueError(
                f"imported.{name}: source is of {fact} {ours!r}, reference of {theirs!r}; a "
                "reference is the same tool's result of the same model"
            )
    if any(run.k is not None for run in reference[1]):
        raise ValueError(
            f"imported.{name}.reference: the server speculated while {reference[0]['file']} was "
            "measured; a reference is measured without"
        )
    loads, others = ([run.load for run in runs] for _, runs in (method, reference))
    if not set(loads) & set(others):
        raise ValueError(
            f"imported.{name}: source and reference have no load in common: {'; '.join(loads)} "
            f"against {'; '.join(others)}"
        )


def rows(k: int, runs: list[Measured], reference: list[Measured] | None) -> list[dict[str, Any]]:
    """One row per run, closed loops first; all with the same keys.

    Args:
        k: num_speculative_tokens.
        runs: Of the method.
        reference: Without speculation; None when there is none.
    """
    beside = {run.load: run for run in reference or []}
    made = [_row(k, run, beside.get(run.load), reference is not None) for run in runs]
    return sorted(made, key=lambda row: (row["rate"] or 0, row["concurrency"] or 0))


def _row(k: int, run: Measured, beside: Measured | None, has_reference: bool) -> dict[str, Any]:
    positions = [f"acceptance_{kind}_pos_{i}" for i in range(k) for kind in ("rate", "given")]
    figures = {name: run.figures.get(name) for name in (*FIGURES, *positions)}
    remarks = [*run.remarks, *run.faults]
    if beside is not None:
        remarks += [f"reference: {fault}" for fault in beside.faults] + _other_prompts(run, beside)
    elif has_reference:
        remarks.append("the reference has no run at this load")
    row = {
        "num_speculative_tokens": k,
        "concurrency": run.concurrency,
        "rate": run.rate,
        "context": 0,
        "category": ALL,
        **figures,
        **_against(figures["output_tokens_per_s"], beside),
        "fresh_prompts": None,
        "one_execution": None,
        "remarks": "; ".join(remarks) or None,
    }
    return {n: round(v, 4) if isinstance(v, float) and n != "rate" else v for n, v in row.items()}


def _against(throughput: float | None, beside: Measured | None) -> dict[str, Any]:
    """Speed-up as a ratio of throughputs; of one run each, so without interval and verdict."""
    reference = None if beside is None else beside.figures["output_tokens_per_s"]
    return {
        "reference_tokens_per_s": reference,
        "speedup": throughput / reference if throughput and reference else None,
        "speedup_low": None,
        "speedup_high": None,
        "num_pairs": 0,
        "verdict": None,
    }


def _other_prompts(run: Measured, beside: Measured) -> list[str]:
    ours, theirs = run.prompt_tokens, beside.prompt_tokens
    if abs(ours - theirs) <= _OTHER_PROMPTS * theirs:
        return []
    return [
        f"other prompts than the reference's: {ours:.0f} tokens on average against {theirs:.0f}"
    ]

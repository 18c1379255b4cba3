"""Tables and plots from the JSON that the benches wrote; pure functions of it."""

from itertools import chain
from typing import Any

from specmill.causes import headline_rows, heads_section
from specmill.samples import ALL

Results = dict[str, dict[str, Any]]
"""reports/bench/NAME.json by method."""

Row = dict[str, Any]


def summary_metrics(results: Results) -> dict[str, Any]:
    """The few numbers worth comparing between experiments, by method and concurrency.

    Over all prompt types, at the headline K; what was not measured is left out.
    """
    shown = ("output_tokens_per_s", "speedup", "acceptance_length")
    summary: dict[str, Any] = {}
    for method, result in _served(results).items():
        summary[method] = {
            f"c{row['concurrency']}": {
                name: row[name] for name in shown if row.get(name) is not None
            }
            for row in headline_rows(result)
            if row["category"] == ALL
        }
        if _has_reference(result):
            summary[method]["num_speculative_tokens"] = result["num_speculative_tokens"]
    return summary


def _served(results: Results) -> Results:
    """The methods that have figures."""
    return {name: result for name, result in results.items() if "not_served" not in result}


def _has_reference(result: dict[str, Any]) -> bool:
    return "speedup" in result["rows"][0]


def _concurrencies(results: Results) -> list[int]:
    return sorted({row["concurrency"] for result in results.values() for row in result["rows"]})


def comparison(results: Results, hardware: dict[str, Any], verifier: dict[str, Any]) -> str:
    """The comparison table as Markdown: one block per concurrency, one row per prompt type."""
    machine = ", ".join(gpu["name"] for gpu in hardware["gpus"]) or (
        f"{hardware['cpu_model']}, {hardware['num_usable_cores']} cores"
    )
    lines = [
        "# Does speculation pay?",
        "",
        f"{verifier['name']} on {machine}, vLLM {hardware['versions']['vllm']}; greedy. Output "
        "tokens per second of all requests together. The baseline of each row is the same server "
        "without speculation, measured in the same stage on the same prompts.",
        "",
    ]
    for concurrency in _concurrencies(results):
        rows = [
            (name, row)
            for name, result in results.items()
            for row in result["rows"]
            if row["concurrency"] == concurrency
        ]
        requests = f"{concurrency} request{'s' if concurrency > 1 else ''}"
        lines += [f"## {requests} in flight", "", *_overall_table(rows), ""]
        lines += [*_drift_lines(_served(results), concurrency), *_prompt_type_table(rows)]
    lines += [*heads_section(results), *_notes(_served(results))]
    return "\n".join(lines).rstrip() + "\n"


_FURTHER = {"draft_coverage": ".0%", "tokens_per_step": ".2f", "ttft_ms": ".0f", "itl_ms": ".1f"}


def _overall_table(rows: list[tuple[str, Row]]) -> list[str]:
    """All prompt types together: a line per method and K, `none` among them."""
    lines = [
        "| method | K | baseline tok/s | tok/s | change | acceptance length | drafted steps | "
        "tokens/step | TTFT ms | ms/token |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for method, row in rows:
        if row["category"] == ALL:
            further = " | ".join(_figure(row, name, form) for name, form in _FURTHER.items())
            lines.append(f"| {method} | {_cells(row)} | {further} |")
    return lines


def _prompt_type_table(rows: list[tuple[str, Row]]) -> list[str]:
    """A line per speculating method, prompt type and K; what differs in K only lies together."""
    lines = [
        "| prompt type | method | K | baseline tok/s | tok/s | change | acceptance length |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    grouped: dict[tuple[str, str], list[str]] = {}
    for method, row in rows:
        category = row["category"]
        if "speedup" in row and category != ALL:
            line = f"| {category} | {method} | {_cells(row)} |"
            grouped.setdefault((method, category), []).append(line)
    return [*lines, *chain.from_iterable(grouped.values()), ""] if grouped else []


def _cells(row: Row) -> str:
    """K, baseline, throughput, change and acceptance length, as both tables show them."""
    if row.get("output_tokens_per_s") is None:
        change = "not served"
    else:
        change = _percent(row["speedup"] - 1) if "speedup" in row else "-"
    return (
        f"{row['num_speculative_tokens']} | {_figure(row, 'reference_tokens_per_s', '.1f')} | "
        f"{_figure(row, 'output_tokens_per_s', '.1f')} | {change} | "
        f"{_figure(row, 'acceptance_length', '.2f')}"
    )


def _figure(row: Row, name: str, form: str) -> str:
    """A number as text; what was not measured is a dash."""
    value = row.get(name)
    return "-" if value is None else f"{value:{form}}"


def _percent(change: float) -> str:
    """A signed whole percentage; what rounds to nothing is +0%."""
    return f"{round(100 * change):+d}%"


def _drift_lines(results: Results, concurrency: int) -> list[str]:
    """How far each method's reference lies from the `none` measured in its own stage."""
    if "none" not in results:
        return []
    at = {
        name: row
        for name, result in results.items()
        for row in headline_rows(result)
        if row["concurrency"] == concurrency and row["category"] == ALL
    }
    none = at["none"]["output_tokens_per_s"]
    drifts = [
        f"{name} {_percent(row['reference_tokens_per_s'] / none - 1)}"
        for name, row in at.items()
        if "speedup" in row
    ]
    return [
        f"`none` in its own stage: {none:.1f} tok/s. Drift of each method's baseline from it: "
        f"{', '.join(drifts) or 'no other method'}.",
        "",
    ]


def _notes(results: Results) -> list[str]:
    """What a reader must know about the rows: eager engines, reused prompts, method quirks."""
    notes = []
    eager = sorted(
        name
        for name, result in results.items()
        if any(row["enforce_eager"] == "True" for row in result["engine"].values())
    )
    if eager:
        notes.append(f"Served **uncompiled (eager)**, for tests only: {', '.join(eager)}.")
    if any(not row["fresh_prompts"] for result in results.values() for row in result["rows"]):
        notes.append("Some prompts were sent twice to one server: prefixes may have been cached.")
    apart = sorted(
        name
        for name, result in results.items()
        if any(not row["one_execution"] for row in result["rows"])
    )
    if apart:
        notes.append(
            f"{', '.join(apart)}: the stage was interrupted and went on later, so some cells and "
            "their baseline lie apart in time; `dvc repro -f -s bench@NAME` measures them together."
        )
    notes += _impossible(results)
    for name, result in results.items():
        facts = [f for key, f in result["engine"].items() if key.startswith("method")]
        off = [f for f in facts if f["async_scheduling"] is False]
        if off:
            notes.append(f"{name}: vLLM turned asynchronous scheduling off, part of its cost.")
        runners = {row["model_runner"] for row in result["engine"].values()}
        if len(runners) > 1:
            notes.append(
                f"{name}: the method and its baseline ran on different model runners "
                f"({', '.join(sorted(map(str, runners)))}), part of the change."
            )
    partly = sorted(name for name, result in results.items() if _least_coverage(result) < 0.95)
    if partly:
        notes.append(
            f"{', '.join(partly)}: no draft in some steps, which acceptance length leaves out; "
            "tokens/step counts them and is what compares with a draft model's."
        )
    return [f"- {note}" for note in notes]


def _least_coverage(result: dict[str, Any]) -> float:
    """The smallest share of steps with a draft; 1 without speculation."""
    shares = [row.get("draft_coverage") for row in result["rows"]]
    return min((share for share in shares if share is not None), default=1.0)


def _impossible(results: Results) -> list[str]:
    """Rows that are faster than accepted tokens allow: something else slowed their reference.

    A verification step costs at least a step without speculation and emits on average
    acceptance_length tokens: no speed-up is larger, a tenth of noise apart.
    """
    notes = []
    for name, result in results.items():
        rows = [
            row
            for row in result["rows"]
            if row.get("acceptance_length") is not None
            and row.get("speedup", 0) > 1.1 * row["acceptance_length"]
        ]
        if rows:
            places = ", ".join(
                f"{row['category']} at {row['concurrency']} (K={row['num_speculative_tokens']})"
                for row in rows[:4]
            )
            notes.append(
                f"**{name}: {len(rows)} rows are faster than their acceptance length allows** "
                f"({places}{', ...' if len(rows) > 4 else ''}): something else kept the machine "
                f"busy during the baseline. `dvc repro -f -s bench@{name}` measures again."
            )
    return notes


def acceptance_rows(results: Results) -> list[Row]:
    """Acceptance rate by draft position (from 0) at the headline K, over all prompt types.

    A method that drafted nothing at a concurrency has no row there.
    """
    prefix = "acceptance_rate_pos_"
    rows = []
    for method, result in _served(results).items():
        for row in headline_rows(result):
            positions = sorted(int(n.removeprefix(prefix)) for n in row if n.startswith(prefix))
            rates = [(i, row[f"{prefix}{i}"]) for i in positions if row["category"] == ALL]
            rows += [
                _place(method, row) | {"position": position, "acceptance_rate": rate}
                for position, rate in rates
                if rate is not None
            ]
    return rows or [_first_place(results) | {"position": 0, "acceptance_rate": None}]


def speedup_rows(results: Results) -> list[Row]:
    """Speed-up of every speculating method by concurrency and prompt type, at the headline K."""
    rows = [
        _place(method, row) | {"category": row["category"], "speedup": row["speedup"]}
        for method, result in _served(results).items()
        if _has_reference(result)
        for row in headline_rows(result)
    ]
    return rows or [_first_place(results) | {"category": ALL, "speedup": None}]


def _place(method: str, row: Row) -> Row:
    place = {name: row[name] for name in ("num_speculative_tokens", "concurrency")}
    return {"method": method} | place


def _first_place(results: Results) -> Row:
    """Stands where no method speculates: DVC cannot plot an empty list."""
    method, result = next(iter(results.items()))
    return _place(method, result["rows"][0])

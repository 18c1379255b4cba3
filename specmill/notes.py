"""What a reader must know about the rows: fallbacks, reused prompts, busy machines, quirks."""

from typing import Any

from specmill.rows import Results, load_name


def engine_table(results: Results) -> list[str]:
    """Markdown: how every method's engine ran, beside its reference's where they differ."""
    lines = [
        "## Engines",
        "",
        "| method | engine | runner | scheduling | attention | graphs | compiled | cores | "
        "start, s |",
        "| --- | --- | --- | --- | --- | --- | --- | ---: | ---: |",
    ]
    for name, result in results.items():
        for server, facts in (result["engine"] or {}).items():
            scheduling = {True: "async", False: "**sync**", None: "-"}[facts["async_scheduling"]]
            cores = len(facts["bound_cores"] or [])
            lines.append(
                f"| {name} | {server} | {_fallback(facts['model_runner'], 'V1')} | {scheduling} | "
                f"{facts['attention_backend'] or '-'} | "
                f"{_fallback(facts['cudagraph_mode'], 'PIECEWISE')} | "
                f"{'**eager**' if facts['enforce_eager'] == 'True' else facts['compilation_mode']} "
                f"| {cores or '-'} | {facts['startup_s']:.0f} |"
            )
    return [*lines, ""] if len(lines) > 4 else []


def _fallback(value: str | None, fallback: str) -> str:
    """What an engine may fall back to in silence stands out."""
    return "-" if value is None else f"**{value}**" if value == fallback else value


def notes(results: Results) -> list[str]:
    """Markdown list items."""
    found = [*_about_engines(results), *_about_measuring(results), *_impossible(results)]
    return [f"- {note}" for note in found]


def _about_engines(results: Results) -> list[str]:
    found = []
    eager = _those(results, lambda _, facts: facts["enforce_eager"] == "True")
    if eager:
        found.append(f"Served **uncompiled (eager)**, for tests only: {', '.join(eager)}.")
    for name in _those(
        results, lambda server, facts: server.startswith("method") and not facts["async_scheduling"]
    ):
        if name != "none" and results[name]["engine"]:
            found.append(f"{name}: vLLM turned asynchronous scheduling off, part of its cost.")
    for name, result in results.items():
        runners = sorted(
            {str(facts["model_runner"]) for facts in (result["engine"] or {}).values()}
        )
        if len(runners) > 1:
            found.append(
                f"{name}: the method and its baseline ran on different model runners "
                f"({', '.join(runners)}), part of the change."
            )
    return found


def _those(results: Results, condition: Any) -> list[str]:
    return sorted(
        name
        for name, result in results.items()
        if any(condition(server, facts) for server, facts in (result["engine"] or {}).items())
    )


def _about_measuring(results: Results) -> list[str]:
    found = []
    reused = _with_row(results, lambda row: row.get("fresh_prompts") is False)
    if reused:
        found.append(
            f"Some prompts were sent twice to one server ({', '.join(reused)}): the prefix cache "
            "is told apart by a salt, suffix decoding may remember its answers."
        )
    apart = _with_row(results, lambda row: row.get("one_execution") is False)
    if apart:
        found.append(
            f"{', '.join(apart)}: the stage was interrupted and went on later; `dvc repro -f -s "
            "bench@NAME` measures it in one go."
        )
    waited = [
        f"{name} {result['provenance']['waited_s']:.0f} s"
        for name, result in results.items()
        if result.get("provenance", {}).get("waited_s", 0) >= 1
    ]
    if waited:
        found.append(f"Waited for other work on this machine to end: {', '.join(waited)}.")
    partly = _with_row(results, lambda row: (row.get("draft_coverage") or 1.0) < 0.95)
    if partly:
        found.append(
            f"{', '.join(partly)}: no draft in some steps, which acceptance length leaves out; "
            "tokens/step counts them and is what compares with a draft model's."
        )
    return found


def _with_row(results: Results, condition: Any) -> list[str]:
    return sorted(
        name for name, result in results.items() if any(condition(row) for row in result["rows"])
    )


def _impossible(results: Results) -> list[str]:
    """Rows that are faster than accepted tokens allow: something else slowed their reference.

    A verification step costs at least a step without speculation and emits on average
    acceptance_length tokens: no speed-up is larger, a tenth of noise apart.
    """
    found = []
    for name, result in results.items():
        rows = [
            row
            for row in result["rows"]
            if row.get("acceptance_length") is not None
            and (row.get("speedup") or 0) > 1.1 * row["acceptance_length"]
        ]
        if rows:
            places = ", ".join(
                f"{row['category']} at {load_name(row)} (K={row['num_speculative_tokens']})"
                for row in rows[:4]
            )
            found.append(
                f"**{name}: {len(rows)} rows are faster than their acceptance length allows** "
                f"({places}{', ...' if len(rows) > 4 else ''}): something else kept the machine "
                f"busy during the baseline. `dvc repro -f -s bench@{name}` measures again."
            )
    return found

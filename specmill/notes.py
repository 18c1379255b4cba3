"""What a reader must know about the rows: fallbacks, reused prompts, busy machines, quirks."""

from collections.abc import Callable
from typing import Any

from specmill.doubts import doubts
from specmill.rows import Results, Row, load_label


def engine_table(results: Results) -> list[str]:
    """Markdown: how every method's engines ran; those that ran alike share a line."""
    lines = [
        "## Engines",
        "",
        "| method | engine | runner | scheduling | attention | graphs | compiled | cores | "
        "start, s |",
        "| --- | --- | --- | --- | --- | --- | --- | ---: | ---: |",
    ]
    for name, result in results.items():
        alike: dict[str, list[str]] = {}
        for server, facts in result["engine"].items():
            alike.setdefault(_how_it_ran(facts), []).append(server)
        for how, servers in alike.items():
            labels = ", ".join(dict.fromkeys(map(_engine_label, servers)))
            starts = [f"{result['engine'][server]['startup_s']:.0f}" for server in servers]
            span = "-".join(dict.fromkeys([min(starts, key=int), max(starts, key=int)]))
            lines.append(f"| {name} | {labels} | {how} | {span} |")
    return [*lines, ""] if len(lines) > 4 else []


def _how_it_ran(facts: dict[str, Any]) -> str:
    scheduling = {True: "async", False: "**sync**", None: "-"}[facts["async_scheduling"]]
    eager = facts["enforce_eager"] == "True"
    cells = [
        facts["model_runner"],
        scheduling,
        facts["attention_backend"],
        facts["cudagraph_mode"],
        "**eager**" if eager else facts["compilation_mode"],
        len(facts["bound_cores"] or []) or None,
    ]
    return " | ".join("-" if cell is None else str(cell) for cell in cells)


def _engine_label(server: str) -> str:
    """`reference_k0_1` and `method_k3_0` as the tables say it."""
    role, k, _ = server.split("_")
    return "baseline" if role == "reference" else f"K={k.removeprefix('k')}"


def notes(results: Results) -> list[str]:
    """Markdown list items."""
    found = [
        *(
            f"**{name} is not served**: {result['not_served']}"
            for name, result in results.items()
            if "not_served" in result
        ),
        *(
            f"**{name} is not served at K={k}**: {reason}"
            for name, result in results.items()
            for k, reason in result.get("refused", {}).items()
        ),
        *doubts(_measured_here(results)),
        *_about_engines(results),
        *_about_measuring(results),
        *_elsewhere(results),
    ]
    return [f"- {note}" for note in found] + ([""] if found else [])


def _about_engines(results: Results) -> list[str]:
    found = []
    for name, result in results.items():
        ours, theirs = (_ran(result, role, "async_scheduling") for role in ("method", "reference"))
        if False in ours - theirs:
            found.append(f"{name}: vLLM turned asynchronous scheduling off, part of its cost.")
        if len(runners := _ran(result, "", "model_runner")) > 1:
            found.append(
                f"{name}: the method and its baseline ran on different model runners "
                f"({', '.join(sorted(map(str, runners)))}), part of the change."
            )
    return found


def _ran(result: dict[str, Any], role: str, fact: str) -> set[Any]:
    """Values of a fact over the engines of a role; of all with an empty one."""
    return {facts[fact] for name, facts in result["engine"].items() if name.startswith(role)}


def _about_measuring(results: Results) -> list[str]:
    found = []
    reused = _with_row(results, lambda row: row.get("fresh_prompts") is False)
    if reused:
        text = f"Some prompts were sent twice to one server ({', '.join(reused)}): "
        text += "the prefix cache is told apart by a salt"
        if any(results[name].get("served_by") == "suffix" for name in reused):
            text += ", suffix decoding may remember its answers"
        found.append(f"{text}.")
    apart = _with_row(results, lambda row: row.get("one_execution") is False)
    if apart:
        found.append(
            f"{', '.join(apart)}: the stage was interrupted and went on later; `dvc repro -f -s "
            "bench@NAME` measures it in one go."
        )
    waited = [
        f"{name} {result['provenance']['waited_s']:.0f} s"
        for name, result in _measured_here(results).items()
        if result["provenance"]["waited_s"] >= 1
    ]
    if waited:
        found.append(f"Waited for other work on this machine to end: {', '.join(waited)}.")
    partly = _with_row(
        results, lambda row: row.get("draft_coverage") is not None and row["draft_coverage"] < 0.95
    )
    if partly:
        found.append(
            f"{', '.join(partly)}: no draft in some steps, which acceptance length leaves out; "
            "tokens/step counts them and is what compares with a draft model's."
        )
    return found


def _with_row(results: Results, condition: Callable[[Row], bool]) -> list[str]:
    return [name for name, result in results.items() if any(map(condition, result["rows"]))]


def _measured_here(results: Results) -> Results:
    return {name: result for name, result in results.items() if "source" not in result}


def _elsewhere(results: Results) -> list[str]:
    """Rows of other tools: that they are, and what the tool's file says against them."""
    found = []
    for name, result in results.items():
        if "source" in result:
            source = result["source"]
            remarks = [
                f" At {load_label(row)}: {row['remarks']}."
                for row in result["rows"]
                if row["remarks"]
            ]
            beside = "one run against another" if source["reference"] else "without a baseline"
            found.append(
                f"{name} was not measured here: {source['file']} of {source['tool']}, "
                f"{source['measured_at']}, model {source['model']}; {beside}.{''.join(remarks)}"
            )
    return found

"""The page: what to deploy, why, and all that stands behind it, as one file that needs no network.

A pure function of the JSON under reports: equal evidence, equal bytes. Every table is the
comparison's own or made from the rows of a plot. Evidence that is not there has no section.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2

from specmill.blocks import (
    Block,
    Bullets,
    Code,
    Folded,
    Heading,
    Paragraph,
    Section,
    blocks,
    inline,
)
from specmill.causes import heads_section
from specmill.decision_text import decision_text
from specmill.engine_faults import known_sampling_fault
from specmill.fidelity import fidelity_section
from specmill.notes import notes
from specmill.options import ADOPT
from specmill.page_evidence import Evidence
from specmill.page_figures import ACCEPTANCE, SURFACE, figures, training_blocks
from specmill.page_predictions import check_blocks, cost_blocks, prediction_blocks
from specmill.page_provenance import provenance_blocks
from specmill.report import OVERVIEW, READING, sampled, setting, shown_rows, tables_by_load
from specmill.rows import Results
from specmill.sampling_section import sampling_section
from specmill.tables import overview_table


def page(evidence: Evidence) -> str:
    """The page as HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    decision = evidence.further.get("decision")
    return environment.get_template("page.html.j2").render(
        setting=setting(evidence.hardware, evidence.verifier),
        verdict=inline(decision["verdict"]) if decision else None,
        sections=[section for section in _sections(evidence) if section.blocks],
    )


def _sections(evidence: Evidence) -> Iterator[Section]:
    results, further = evidence.results, evidence.further
    plots, pictures = evidence.plots, evidence.pictures
    decision = further.get("decision")
    fault = known_sampling_fault(evidence.hardware)
    yield Section("deploy", "What to deploy", _deployment(decision, evidence.serve_script))
    yield Section("comparison", "Measured change of speed", _comparison(results))
    yield Section("decision", "Every option, and what would reopen it", _decision(decision))
    yield Section("surface", "Where it pays", figures(SURFACE, plots, pictures))
    yield Section("acceptance", "What is accepted", figures(ACCEPTANCE, plots, pictures))
    trained = training_blocks(plots.get("train", []), further.get("train"))
    yield Section("training", "Training", trained)
    predicted = prediction_blocks(
        further.get("predicted"), plots.get("predicted", []), further.get("check")
    )
    yield Section("prediction", "Predicted before serving", predicted)
    yield Section("check", "Predicted against measured", check_blocks(further.get("check")))
    costs = cost_blocks(further.get("curves"), further.get("routing"))
    yield Section("cost", "What a verification step costs", costs)
    yield Section("loads", "Every load", _loads(results))
    yield _of_markdown("greedy", fidelity_section(results))
    yield _of_markdown("sampling", sampling_section(sampled(results), fault))
    yield _of_markdown("heads", heads_section(results))
    yield Section(
        "provenance",
        "Where the figures come from",
        provenance_blocks(results, evidence.hardware, evidence.verifier),
    )
    yield _of_markdown("reading", READING)


def _of_markdown(anchor: str, lines: list[str]) -> Section:
    """A section of the comparison; its tables are called what it is called."""
    title = lines[0].removeprefix("## ") if lines else ""
    return Section(anchor, title, blocks(lines[1:], title))


def _deployment(decision: dict[str, Any] | None, serve_script: str | None) -> list[Block]:
    found: list[Block] = []
    if decision:
        adopted = [option for option in decision["options"] if option["status"] == ADOPT]
        for option in adopted:
            reasons = [inline(sentence) for sentence in option["evidence"]]
            found += [Heading(option["name"]), Bullets(reasons)]
        if not adopted:
            text = "The verifier without speculation: of the options below none is adopted."
            found.append(Paragraph(inline(text)))
    if serve_script:
        found.append(Paragraph(inline("`sh reports/serve.sh` serves it.")))
        found.append(Folded("reports/serve.sh", [Code(serve_script, "reports/serve.sh")]))
    return found


def _comparison(results: Results) -> list[Block]:
    lines = [*OVERVIEW, "", *overview_table(shown_rows(results)), ""]
    found = blocks(lines, "Change of speed by method, K and load, all prompt types")
    remarks = notes(results)
    if remarks:
        found += [Heading("What must be known of it"), *blocks(remarks, "")]
    return found


def _decision(decision: dict[str, Any] | None) -> list[Block]:
    """reports/decision.md without its verdict, which the page begins with."""
    if decision is None:
        return []
    lines = decision_text(decision).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("## "))
    return blocks(lines[first:], "")


def _loads(results: Results) -> list[Block]:
    found: list[Block] = []
    for heading, tables in tables_by_load(shown_rows(results), results):
        found.append(Heading(heading))
        for subject, lines in tables.items():
            shown = blocks(lines, f"{heading}: {subject}")
            is_long = len(lines) > _LONG
            found += [Folded(f"{heading}: {subject}", shown)] if is_long else shown
    return found


_LONG = 12
"""Lines of a table that is shown when asked for."""

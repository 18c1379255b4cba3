"""The page: what to deploy, why, and all that stands behind it, as one file that needs no network.

A pure function of the JSON under reports: equal evidence, equal bytes. Every table is the
comparison's own or made from the rows of a plot. Evidence that is not there has no section.
"""

from collections.abc import Iterator
from dataclasses import replace
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
from specmill.decision_text import (
    RULES,
    change_lines,
    changes_title,
    evidence_lines,
    limit_lines,
    options_table,
)
from specmill.engine_faults import known_sampling_fault
from specmill.fidelity import fidelity_section, footnotes
from specmill.notes import notes
from specmill.options import ADOPT
from specmill.page_evidence import Evidence
from specmill.page_figures import ACCEPTANCE, SURFACE, figures, training_blocks
from specmill.page_predictions import check_blocks, cost_blocks, prediction_blocks
from specmill.page_provenance import provenance_blocks
from specmill.palette import looks
from specmill.reading import overview, reading
from specmill.report import sampled, setting, shown_rows, tables_by_load
from specmill.sampling_section import sampling_section
from specmill.tables import overview_table
from specmill.yardstick import is_test


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
        limits=blocks(limit_lines(decision), "") if decision else [],
        sections=[section for section in _sections(evidence) if section.blocks],
    )


def _sections(evidence: Evidence) -> Iterator[Section]:
    results, further = evidence.results, evidence.further
    plots, pictures = evidence.plots, evidence.pictures
    decision = further.get("decision")
    yield Section("deploy", "What to deploy", _deployment(decision, evidence))
    yield Section("comparison", "Measured change of speed", _comparison(evidence))
    yield Section("decision", "Every option", _decision(decision))
    yield Section("surface", "Where it pays", figures(SURFACE, plots, pictures))
    yield Section("acceptance", "What is accepted", figures(ACCEPTANCE, plots, pictures))
    predicted = prediction_blocks(
        further.get("predicted"), plots.get("predicted", []), further.get("check")
    )
    yield Section("prediction", "Predicted before serving", predicted)
    checked = check_blocks(further.get("check"), looks(results))
    yield Section("check", "Predicted against measured", checked)
    yield from _folded(evidence)


def _folded(evidence: Evidence) -> Iterator[Section]:
    """What stands behind all that, each section shown when asked for."""
    results, further = evidence.results, evidence.further
    predicted = further.get("predicted")
    kinds = dict(predicted["kinds"]) if predicted else {}
    costs = cost_blocks(further.get("curves"), kinds, further.get("routing"))
    trained = training_blocks(evidence.plots.get("train", []), further.get("train"))
    machine = provenance_blocks(results, evidence.hardware, evidence.verifier)
    words = blocks(reading(results, evidence.bench), "")
    for section in (
        Section("cost", "What a step costs", costs),
        Section("loads", "Every load in figures", _loads(evidence)),
        _of_markdown("greedy", fidelity_section(results)),
        _of_markdown("sampling", sampling_section(sampled(results))),
        Section("training", "Training", trained),
        _of_markdown("heads", heads_section(results)),
        Section("provenance", "Where the figures come from", machine),
        Section("reading", "How to read the tables", words),
    ):
        yield replace(section, is_folded=True)


def _of_markdown(anchor: str, lines: list[str]) -> Section:
    """A section of the comparison; its tables are called what it is called."""
    title = lines[0].removeprefix("## ") if lines else ""
    return Section(anchor, title, blocks(lines[1:], title))


def _deployment(decision: dict[str, Any] | None, evidence: Evidence) -> list[Block]:
    found: list[Block] = []
    if is_test(evidence.results) and evidence.serve_script:
        text = "**Nothing before compiled engines were measured: this was a test configuration.**"
        found.append(Paragraph(inline(text)))
    if decision:
        adopted = [option for option in decision["options"] if option["status"] == ADOPT]
        for option in adopted:
            reasons = [inline(sentence) for sentence in option["evidence"]]
            found += [Heading(option["name"]), Bullets(reasons)]
        if not adopted:
            text = "The verifier without speculation: of the options below none is adopted."
            found.append(Paragraph(inline(text)))
    if evidence.serve_script:
        found.append(Paragraph(inline("`sh reports/serve.sh` serves it.")))
        code = Code(evidence.serve_script, "reports/serve.sh")
        found.append(Folded("reports/serve.sh", [code]))
    return found


def _comparison(evidence: Evidence) -> list[Block]:
    rows, fault = shown_rows(evidence.results), known_sampling_fault(evidence.hardware)
    lines = [*overview(rows), "", *overview_table(rows), ""]
    found = blocks(lines, "Change of speed by method, K and load, all prompt types")
    found += [Paragraph(inline(note)) for note in footnotes(evidence.results, fault)]
    remarks = notes(evidence.results)
    if remarks:
        found += [Heading("What must be known of it"), *blocks(remarks, "")]
    return found


def _decision(decision: dict[str, Any] | None) -> list[Block]:
    """reports/decision.md without what the page begins with."""
    if decision is None:
        return []
    found: list[Block] = []
    if decision["options"]:
        found += blocks(options_table(decision), "Every option")
        found.append(Folded("Evidence for every option", blocks(evidence_lines(decision), "")))
    title = changes_title(decision)
    found.append(Folded(title, blocks(change_lines(decision), "")))
    return [*found, Folded("Rules", blocks(RULES, ""))]


def _loads(evidence: Evidence) -> list[Block]:
    found: list[Block] = []
    results = evidence.results
    for heading, tables in tables_by_load(shown_rows(results), results, evidence.bench):
        found.append(Heading(heading))
        for subject, lines in tables.items():
            shown = blocks(lines, f"{heading}: {subject}")
            is_long = len(lines) > _LONG
            found += [Folded(f"{heading}: {subject}", shown)] if is_long else shown
    return found


_LONG = 12
"""Lines of a table that is shown when asked for."""

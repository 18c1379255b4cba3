"""What comes from elsewhere into Markdown and terminals: prompt types, engines, heads, models."""

import re
from itertools import pairwise
from typing import Any

import pytest
from markdown_it import MarkdownIt

from specmill.decision_text import decision_text
from specmill.report import comparison
from specmill.tables import document, visible
from tests.benches import BENCH, comparable
from tests.pages import DECISION
from tests.test_report import HARDWARE, NOTHING_PREDICTED

HOSTILE = (
    'a | b\r\n\n# Hacked\n\n<script>alert("x")</script> <img src=x> <!-- '
    "[here](javascript:alert(1)) ![](https://127.0.0.1/seen.png) <https://127.0.0.1/> ` \x85 |"
)


def results() -> dict[str, Any]:
    found = comparable()
    for row in found["eagle3"]["rows"]:
        row["category"] = HOSTILE if row["category"] == "maths" else row["category"]
    found["eagle3"]["head"] = {"trained_for": HOSTILE, "run_on": HOSTILE}
    found["ngram"]["refused"] = {"9": HOSTILE}
    found["narrow"] = {
        "method": "narrow", "head": {}, "num_speculative_tokens": 3, "not_served": HOSTILE,
        "engine": {}, "provenance": {"waited_s": 0.0, "busy_cores_before": 0.0}, "rows": [],
    }  # fmt: skip
    found["else"] = found["narrow"] | {
        "rows": [found["ngram"]["rows"][0] | {"remarks": HOSTILE}],
        "source": {"file": HOSTILE, "tool": "guidellm", "measured_at": HOSTILE, "model": HOSTILE,
                   "reference": None},
    }  # fmt: skip
    del found["else"]["not_served"]
    return found


def decision() -> dict[str, Any]:
    texts = {"name": HOSTILE, "evidence": [HOSTILE], "gate": HOSTILE, "by": HOSTILE}
    option = texts | {"status": "adopt", "against": [HOSTILE], "speeds": {HOSTILE: HOSTILE}}
    more = {"verdict": HOSTILE, "changes": [HOSTILE], "limits": [HOSTILE], "footnotes": [HOSTILE]}
    return DECISION | more | {"options": [option]}


COMPARISON = comparison(
    results(), NOTHING_PREDICTED, HARDWARE, {"name": HOSTILE}, BENCH, [f"- {HOSTILE}"]
)
RECORD = decision_text(decision())


@pytest.mark.parametrize("text", [COMPARISON, RECORD], ids=["comparison", "decision"])
def test_no_tag_link_picture_or_heading_of_somebody_else_is_in_a_report(text: str) -> None:
    assert text.count("Hacked") > 4
    parsed = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    tokens = [one for token in parsed for one in (token, *(token.children or []))]
    kinds = {token.type for token in tokens}
    assert "table_open" in kinds
    assert not kinds & {"html_block", "html_inline", "link_open", "image"}
    headings = [
        after.content for token, after in pairwise(tokens)
        if token.type == "heading_open"
    ]  # fmt: skip
    assert headings
    assert not [heading for heading in headings if "Hacked" in heading]


@pytest.mark.parametrize("text", [COMPARISON, RECORD], ids=["comparison", "decision"])
def test_every_row_of_a_table_has_as_many_cells_as_its_heading(text: str) -> None:
    tables = re.findall(r"(?:^\|.*\n)+", text, re.M)
    assert tables
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table


def test_what_we_write_ourselves_is_left_as_it_is() -> None:
    lines = ["| p | < 1e-300 |", "a < b, 3 <4, `x[0]` and **bold**", "  - deeper", ""]
    assert document(lines) == "| p | < 1e-300 |\na < b, 3 <4, `x[0]` and **bold**\n  - deeper\n"


def test_a_model_that_writes_control_characters_does_not_command_the_terminal() -> None:
    assert visible("\x1b]0;hacked\x07 \x9b2J a\tb\nc \x00") == "�]0;hacked� �2J a\tb\nc �"
    assert "\x1b" not in document(["- \x1b[2J"])

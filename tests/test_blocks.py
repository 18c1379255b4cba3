from typing import Any

import pytest

from specmill.blocks import Bullets, Heading, Paragraph, Table, blocks, inline, number, of, table


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("**faster** by `a*b` and *more*", "<strong>faster</strong> by <code>a*b</code> and "
         "<em>more</em>"),
        ("**`none` is itself**", "<strong><code>none</code> is itself</strong>"),
        ("`**x**`", "<code>**x**</code>"),
        ("2 * 3 * 4, 5*6*7, a ** b", "2 * 3 * 4, 5*6*7, a ** b"),
        ("<b>&</b>", "&lt;b&gt;&amp;&lt;/b&gt;"),
        ("**<i>** `<i>`", "<strong>&lt;i&gt;</strong> <code>&lt;i&gt;</code>"),
        ("", ""),
    ],
)  # fmt: skip
def test_marks_become_elements_and_everything_else_stays_text(text: str, html: str) -> None:
    assert inline(text) == html


def test_markdown_becomes_headings_paragraphs_lists_and_tables() -> None:
    lines = [
        "## Speed",
        "",
        "One line",
        "and its end.",
        "",
        "- first",
        "  goes on",
        "- second",
        "",
        "| method | K |",
        "| --- | ---: |",
        "| **a** | 3 |",
        "",
    ]
    assert blocks(lines, "What it shows") == [
        Heading("Speed"),
        Paragraph(inline("One line and its end.")),
        Bullets([inline("first goes on"), inline("second")]),
        Table(
            "What it shows",
            [inline("method"), inline("K")],
            [False, True],
            [[inline("**a**"), inline("3")]],
        ),
    ]


def test_a_text_that_follows_a_list_without_an_empty_line_is_no_item() -> None:
    assert blocks(["- one", "text"], "") == [Bullets([inline("one")]), Paragraph(inline("text"))]


def test_an_escaped_bar_is_part_of_its_cell() -> None:
    (found,) = blocks(["| row | of |", "| --- | --- |", r"| a | b \| c |"], "")
    assert isinstance(found, Table)
    assert found.rows == [[inline("a"), inline("b | c")]]


def test_what_a_row_lacks_is_a_dash_and_columns_of_numbers_are_known() -> None:
    rows: list[dict[str, Any]] = [
        {"name": "a", "share": 0.5, "change": "+9% (+5% to +12%)", "commit": "3e1"},
        {"name": "<b>", "share": None, "change": "(-2%)", "commit": "afe"},
    ]
    found = table(
        rows,
        "Shares",
        [
            ("name", of("name")),
            ("share", number("share", ".1%")),
            ("change", of("change")),
            ("commit", of("commit")),
        ],
    )
    assert found.is_number == [False, True, True, False]
    assert [row[:2] for row in found.rows] == [["a", "50.0%"], ["&lt;b&gt;", "-"]]


def test_a_table_without_rows_keeps_its_headings() -> None:
    found = table([], "Nothing", [("name", of("name")), ("K", of("k"))])
    assert (len(found.headings), len(found.is_number), found.rows) == (2, 2, [])

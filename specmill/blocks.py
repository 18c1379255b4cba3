"""What a page is made of: text, lists, tables, figures; and the report's Markdown as such blocks.

The Markdown is the subset that the report writes: headings, paragraphs, lists, tables, `code`,
*stress* and **strong**. All else in a text is text: whatever a name, an engine's message or a
model's output holds, it is escaped.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, ClassVar

from markupsafe import Markup, escape

from specmill.rows import Row
from specmill.tables import figure

Column = tuple[str, Callable[[Row], Any]]
"""A column's heading, and what a row has in it; a number is written right-aligned."""


@dataclass(frozen=True)
class Paragraph:
    """A line of running text."""

    text: Markup
    kind: ClassVar[str] = "paragraph"


@dataclass(frozen=True)
class Bullets:
    """A list."""

    items: list[Markup]
    kind: ClassVar[str] = "bullets"


@dataclass(frozen=True)
class Heading:
    """A heading below that of its section."""

    text: str
    kind: ClassVar[str] = "heading"


@dataclass(frozen=True)
class Code:
    """Lines to be copied as they are."""

    text: str
    name: str
    """What they are, for who cannot see them."""
    kind: ClassVar[str] = "code"


@dataclass(frozen=True)
class Table:
    """A table; the first cell of a row is what the row is about."""

    caption: str
    headings: list[Markup]
    is_number: list[bool]
    """By column."""
    rows: list[list[Markup]]
    kind: ClassVar[str] = "table"

    @property
    def is_wordy(self) -> bool:
        """Whether several columns have sentences: a phone shows a row of it as lines."""
        long = [any(len(row[i]) > _LONG for row in self.rows) for i in range(len(self.headings))]
        return sum(long) > 1


@dataclass(frozen=True)
class Figure:
    """A picture with the same figures as a table."""

    svg: Markup
    caption: Markup
    table: Table
    kind: ClassVar[str] = "figure"


@dataclass(frozen=True)
class Folded:
    """Blocks that are shown when asked for."""

    summary: str
    blocks: list["Block"]
    kind: ClassVar[str] = "folded"


Block = Paragraph | Bullets | Heading | Code | Table | Figure | Folded


@dataclass(frozen=True)
class Section:
    """Blocks under a heading that can be linked to."""

    anchor: str
    title: str
    blocks: list[Block] = field(default_factory=list)
    is_folded: bool = False
    """Whether it is shown when asked for."""

    @property
    def target(self) -> str:
        """What a link to it names: a browser opens what is folded when the target is inside."""
        return f"{self.anchor}-inside" if self.is_folded else self.anchor


_LONG = 60
"""Characters of a cell that is a sentence."""

_MARK = re.compile(
    r"\*\*(?P<strong>.+?)\*\*|`(?P<code>[^`]+)`|(?<!\w)\*(?P<em>[^\s*][^*]*)\*(?!\w)"
)


def inline(text: str) -> Markup:
    """Text with its `code`, *stress* and **strong** as HTML, everything else escaped."""
    found, end = Markup(), 0
    for match in _MARK.finditer(text):
        found += escape(text[end : match.start()])
        tag, inner = next((tag, part) for tag, part in match.groupdict().items() if part)
        content = escape(inner) if tag == "code" else inline(inner)
        found += Markup("<{0}>{1}</{0}>").format(tag, content)
        end = match.end()
    return found + escape(text[end:])


def blocks(lines: list[str], caption: str) -> list[Block]:
    """The blocks of Markdown lines; every table among them is called `caption`."""
    found: list[Block] = []
    for (kind, _), run in groupby(_kinds(lines), key=lambda one: one[0]):
        texts = [text for _, text in run]
        if kind == "heading":
            found += [Heading(text.removeprefix("## ")) for text in texts]
        elif kind == "table":
            found.append(_table(texts, caption))
        elif kind == "list":
            found.append(Bullets([inline(text) for text in _items(texts)]))
        elif kind == "text":
            found.append(Paragraph(inline(" ".join(texts))))
    return found


def of(name: str) -> Callable[[Row], Any]:
    """A field of a row, for a column."""
    return lambda row: row[name]


def number(name: str, form: str) -> Callable[[Row], str]:
    """A number of a row as text, for a column; a dash where there is none."""
    return lambda row: figure(row, name, form)


def table(rows: list[Row], caption: str, columns: list[Column]) -> Table:
    """Rows as a table; what a row lacks (None) is a dash."""
    cells = [[value(row) for _, value in columns] for row in rows]
    is_number = [
        all(line[i] is None or _is_number(line[i]) for line in cells) for i in range(len(columns))
    ]
    shown = [[inline("-" if cell is None else str(cell)) for cell in line] for line in cells]
    return Table(caption, [inline(heading) for heading, _ in columns], is_number, shown)


def _is_number(cell: Any) -> bool:
    """`-`, `3`, `1.45`, `1e-09`, `+9%`, `(+2%)`, `+9% (+5% to +12%)`, `40 / 60 / 100`."""
    return bool(re.fullmatch(r"-|\(?[+-]?\d[\d.,e-]*%?\)?( [(/].*)?", str(cell)))


def _kinds(lines: list[str]) -> Iterator[tuple[tuple[str, int], str]]:
    """What each line is part of: runs of one kind, broken by empty lines, are one block."""
    kind, number = "", 0
    for line in lines:
        if not line:
            kind, number = "", number + 1
        elif line.startswith("## "):
            kind = "heading"
        elif line.startswith("| "):
            kind = "table"
        elif line.startswith("- "):
            kind = "list"
        elif not (kind == "list" and line.startswith("  ")):
            kind = "text"
        if kind:
            yield (kind, number), line


def _items(lines: list[str]) -> list[str]:
    """Items of a list; a line that does not begin one goes on with the one before."""
    items: list[str] = []
    for line in lines:
        if line.startswith("- "):
            items.append(line[2:])
        else:
            items[-1] += f" {line.strip()}"
    return items


def _table(lines: list[str], caption: str) -> Table:
    headings, rule, *rows = (_cells(line) for line in lines)
    assert all(len(row) == len(headings) for row in rows), lines
    shown = [[inline(cell) for cell in row] for row in rows]
    return Table(
        caption, [inline(cell) for cell in headings], [cell.endswith(":") for cell in rule], shown
    )


def _cells(line: str) -> list[str]:
    cells = re.split(r"(?<!\\)\|", line)[1:-1]
    return [cell.replace(r"\|", "|").strip() for cell in cells]

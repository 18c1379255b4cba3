import re
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest

from specmill.canvas import Target
from specmill.inline_svg import drawn, inline_svg
from specmill.palette import looks
from specmill.pictures import PICTURES
from specmill.rows import Row
from tests.test_pictures import MIXED, speedups

LOOKS = looks(["none", "ngram", "eagle3"])

XLINK = 'xmlns:xlink="http://www.w3.org/1999/xlink"'
FILE = f"""<?xml version="1.0" encoding="utf-8" standalone="no"?>
<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN"
  "http://www.w3.org/Graphics/SVG/1.1/DTD/svg11.dtd">
<svg {XLINK} width="72pt" height="36pt" viewBox="0 0 72 36" xmlns="http://www.w3.org/2000/svg">
 <metadata><creator>Matplotlib</creator></metadata>
 <defs><style type="text/css">*{{stroke-linejoin: round}}</style></defs>
 <g id="axes_1"><path d="M 0 0" clip-path="url(#p1)" style="fill: #ffffff; stroke: #0072b2"/>
 <use xlink:href="#m1" x="1" y="2" style="stroke: #000000"/>
 <text style="font: 9px; font-family: 'DejaVu Sans', sans-serif; text-anchor: end">#000000 &lt;</text>
 <text style="fill: #010101">+9</text></g>
 <defs><clipPath id="p1"><rect x="0"/></clipPath><path id="m1" d="M 0 0"/></defs>
</svg>"""  # noqa: E501


def flat(text: str) -> str:
    return re.sub(r">\s+<", "><", text)


def test_a_picture_gets_a_name_its_own_ids_and_the_colours_of_the_page() -> None:
    assert flat(inline_svg(FILE, "speed", 'Speed <& "load"')) == (
        # 72 points are 96 pixels
        '<svg viewBox="0 0 72 36" role="img" aria-labelledby="speed-title" style="--width: 96px">'
        '<title id="speed-title">Speed &lt;&amp; "load"</title>'
        "<defs></defs>"
        '<g><path d="M 0 0" clip-path="url(#speed-p1)" '
        'style="fill: var(--paper); stroke: #0072b2" />'
        '<use href="#speed-m1" x="1" y="2" style="stroke: currentColor" />'
        '<text style="font: 9px; text-anchor: end">#000000 &lt;</text>'
        '<text style="fill: #010101">+9</text></g>'
        '<defs><clipPath id="speed-p1"><rect x="0" /></clipPath>'
        '<path id="speed-m1" d="M 0 0" /></defs></svg>'
    ).replace("<defs></defs>", "<defs />")


def in_our_looks(name: str) -> Callable[[list[Row], Target], None]:
    return lambda rows, target: PICTURES[name](rows, target, LOOKS)


@pytest.mark.parametrize("name", list(PICTURES))
def test_of_our_pictures_nothing_points_outside_and_every_reference_is_met(name: str) -> None:
    rows: list[dict[str, Any]] = [
        row
        | {
            "category": "maths",
            "panel": "requests in flight",
            "requests": row["concurrency"],
            "position": 0,
            "acceptance_rate": 0.5,
            "num_drafts": 40,
        }
        for row in speedups(*MIXED)
    ]
    svg = drawn(in_our_looks(name), rows, "it", "It")
    assert "://" not in svg
    assert "#000000" not in svg
    ids = re.findall(r' id="([^"]*)"', svg)
    assert len(ids) == len(set(ids))
    references = re.findall(r'url\(#([^)]*)\)| href="#([^"]*)"', svg)
    assert {first or second for first, second in references} <= set(ids)


def test_a_cell_without_a_colour_follows_the_page_and_so_does_its_text() -> None:
    svg = drawn(in_our_looks("speedup_by_k"), speedups(*MIXED), "it", "It")
    (pattern,) = re.findall(r"<pattern .*?</pattern>", svg, re.DOTALL)
    assert 'fill="var(--paper)"' in pattern
    (style,) = re.findall(r'<text style="([^"]*)"[^>]*>\(\+0\)</text>', svg)
    assert "#" not in style  # the page's ink


def test_text_on_cells_keeps_its_colour_since_the_cells_do() -> None:
    svg = drawn(in_our_looks("speedup_by_k"), speedups(*MIXED), "it", "It")
    for figure in ("+50", "-75"):
        (style,) = re.findall(rf'<text style="([^"]*)"[^>]*>{re.escape(figure)}</text>', svg)
        assert re.search(r"fill: #(010101|fefefe)", style), figure


def test_names_with_dollars_and_brackets_are_drawn_as_they_are() -> None:
    target = StringIO()
    rows = [row | {"category": "from $5 to $x^{"} for row in speedups(*MIXED)]
    PICTURES["speedup"](rows, target, LOOKS)
    assert "from $5 to $x^{</text>" in target.getvalue()

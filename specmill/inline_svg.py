"""matplotlib's SVG as a part of a page: named for who cannot see it, in the page's colours.

Black becomes the page's ink, white its paper and light greys its lines, so that a picture follows
the page into the dark; all other colours stay. Ids are made the picture's own, since a page has
several. Nothing points outside, name spaces and metadata included: HTML knows SVG without them.
"""

import re
from collections.abc import Callable
from io import StringIO
from xml.etree import ElementTree

from markupsafe import Markup

from specmill.canvas import Target
from specmill.rows import Row

_THEME = {
    "#000000": "currentColor",
    "#ffffff": "var(--paper)",
    "#eeeeee": "var(--band)",
    "#dddddd": "var(--line)",
}
_PIXELS = 96 / 72  # CSS pixels in a point
_LEFT_OUT = ("metadata", "style")


def drawn(
    draw: Callable[[list[Row], Target], None], rows: list[Row], name: str, title: str
) -> Markup:
    """Rows as a picture that only a page has; the rest as for `inline_svg`."""
    target = StringIO()
    draw(rows, target)
    return inline_svg(target.getvalue(), name, title)


def inline_svg(svg: str, name: str, title: str) -> Markup:
    """The `<svg>` element of a file of matplotlib, for use inside HTML.

    Args:
        svg: Content of the file.
        name: Told apart from the other pictures of the page; letters, digits, `_` and `-`.
        title: What a screen reader says of it.

    Raises:
        xml.etree.ElementTree.ParseError: when it is no SVG.
    """
    root = ElementTree.fromstring(svg)
    view = root.attrib["viewBox"]
    for element in root.iter():
        element.tag = _bare(element.tag)
        for child in [one for one in element if _bare(one.tag) in _LEFT_OUT]:
            element.remove(child)
        attributes = {_bare(key): value for key, value in element.attrib.items()}
        element.attrib.clear()
        element.attrib.update(_own(element.tag, attributes, name))
    root.attrib.clear()
    root.attrib.update(
        {
            "viewBox": view,
            "role": "img",
            "aria-labelledby": f"{name}-title",
            "style": f"--width: {float(view.split()[2]) * _PIXELS:.0f}px",
        }
    )
    heading = ElementTree.Element("title", {"id": f"{name}-title"})
    heading.text = title
    root.insert(0, heading)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _bare(name: str) -> str:
    """Without its name space."""
    return name.rpartition("}")[2]


def _own(tag: str, attributes: dict[str, str], name: str) -> dict[str, str]:
    """Attributes with the picture's own ids and the page's colours and type."""
    if tag == "g":
        attributes.pop("id", None)  # nothing refers to a group
    if "id" in attributes:
        attributes["id"] = f"{name}-{attributes['id']}"
    for key, value in attributes.items():
        if key == "style":
            value = re.sub(r"font-family: [^;]*;? ?", "", value)
        if key in ("style", "fill"):  # a hatched patch has its ground as an attribute
            value = re.sub(r"#[0-9a-f]{6}\b", lambda found: _THEME.get(found[0], found[0]), value)
        if key == "href":
            value = re.sub(r"^#", f"#{name}-", value)
        attributes[key] = value.replace("url(#", f"url(#{name}-")
    return attributes

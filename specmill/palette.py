"""How lines look: a method has one colour and marker in all pictures of a report.

Told apart by colour-blind readers, and never by colour alone. Only methods have these colours;
lines that are something else (a K, a number of requests) are shades of violet.
"""

from collections.abc import Iterable
from typing import Any

from specmill.fidelity import MARKS

Look = dict[str, Any]
"""Arguments of matplotlib's `plot`."""

NONE = "none"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, without the yellow, which is faint on white."""

_GREY = "#888888"  # of `none`, which everything is compared with
_MARKERS = "sD^vPX*"
_DASHES = ("-", "--", ":")
_SHADES = ((95, 75, 182), (169, 151, 224))  # RGB of the first and the last; seen on white and black


def looks(methods: Iterable[str]) -> dict[str, Look]:
    """Colour, marker and line by method, in the order of the report.

    Args:
        methods: All of it, with the marks of what is not lossless or without.
    """
    found: dict[str, Look] = {NONE: {"color": _GREY, "marker": "o", "linestyle": "-"}}
    for index, method in enumerate(name for name in map(plain, methods) if name != NONE):
        cycle, step = divmod(index, len(COLOURS))
        look = {
            "color": COLOURS[step],
            "marker": _MARKERS[step],
            "linestyle": _DASHES[cycle % len(_DASHES)],
        }
        found[method] = look | ({"mfc": "white"} if cycle % 2 else {})
    return found


def plain(method: str) -> str:
    """A method's name without its mark."""
    return method.rstrip("".join(MARKS.values()))


def shades(num_lines: int) -> list[Look]:
    """Looks of lines that are no methods: from dark to light, with markers."""
    first, last = _SHADES
    found = []
    for line in range(num_lines):
        share = line / max(1, num_lines - 1)
        parts = [round(a + share * (b - a)) for a, b in zip(first, last, strict=True)]
        colour = "#" + "".join(f"{part:02x}" for part in parts)
        found.append({"color": colour, "marker": _MARKERS[line % len(_MARKERS)]})
    return found

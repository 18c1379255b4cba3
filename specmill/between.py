"""Straight lines between measured points, and nothing beyond them.

A step can get dear at once (another kernel, a full machine), and a line that goes on past the last
point would not know.
"""


class NotMeasured(ValueError):
    """A figure lies outside what was measured; says which and how far that goes."""


def neighbours(measured: list[int], wanted: int, what: str) -> dict[int, float]:
    """How much each measured neighbour of `wanted` counts, summing to 1.

    Args:
        measured: Where there are points, rising, at least one.
        wanted: Where a figure is asked for.
        what: What the numbers are, for the message.

    Raises:
        NotMeasured: when there is no neighbour on one side.
    """
    if wanted in measured:
        return {wanted: 1.0}
    below = [value for value in measured if value < wanted]
    above = [value for value in measured if value > wanted]
    if not below or not above:
        span = "-".join(str(value) for value in dict.fromkeys((measured[0], measured[-1])))
        raise NotMeasured(f"{what}: {wanted} is outside what was measured ({span})")
    near, far = below[-1], above[0]
    share = (wanted - near) / (far - near)
    return {near: 1 - share, far: share}

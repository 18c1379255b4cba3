"""Section of params.yaml for rows whose K goes by the number of requests in flight."""

from collections.abc import Collection, Mapping
from typing import Literal

from specmill.section import Section


class Scheduled(Section):
    """The row NAME of `methods` once more, with K by the number of requests in flight as
    reports/schedule.json has it; in the tables it is NAME_scheduled."""

    method: Literal["eagle3", "draft_model", "ngram"]
    """`methods.NAME.method`; others draft one K whatever is in flight."""
    head: str
    """`methods.NAME.head`."""


def scheduled_name(row: str) -> str:
    """What a row is called in the tables when its K goes by the number of requests."""
    return f"{row}{_SUFFIX}"


def unscheduled_name(row: str) -> str:
    """The row of `methods` that such a row is made from."""
    return row.removesuffix(_SUFFIX)


_SUFFIX = "_scheduled"


def check_scheduled(
    scheduled: Mapping[str, Scheduled],
    served: Mapping[str, tuple[str, str]],
    taken: Collection[str],
) -> None:
    """Refuse entries that are no row's, or that a row's own entry contradicts.

    Args:
        scheduled: The section.
        served: Method and head by entry of `methods`.
        taken: Names that other rows have.

    Raises:
        ValueError: naming the entry.
    """
    for name, entry in scheduled.items():
        if name not in served:
            raise ValueError(
                f"scheduled.{name} is no entry of methods; it has {', '.join(served) or 'none'}"
            )
        if served[name] != (entry.method, entry.head):
            method, head = served[name]
            raise ValueError(
                f"scheduled.{name} has method {entry.method} and head {entry.head}, "
                f"methods.{name} has {method} and {head}: write the same"
            )
        if scheduled_name(name) in taken:
            raise ValueError(
                f"scheduled.{name} would write the row {scheduled_name(name)}, which is an entry "
                "of methods or imported too: rename that"
            )

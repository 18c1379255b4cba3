"""Section of params.yaml for results that another benchmark tool measured."""

from collections.abc import Mapping

from pydantic import Field

from specmill.section import Section, Size


class Imported(Section):
    """A row measured elsewhere, by `vllm bench serve` or guidellm; NAME is its name in the tables,
    which no entry of `methods` may have."""

    source: str = Field(min_length=1)
    """Path of the tool's JSON file; what it is is seen from its content."""
    reference: str | None = Field(min_length=1)
    """The same tool's file without speculation; null leaves the speed-up open."""
    num_speculative_tokens: Size
    """K that the server ran with, which not every file says; 0 without speculation."""


def check_names(imported: Mapping[str, Imported], methods: Mapping[str, object]) -> None:
    """Refuse a name that both sections have: both would write reports/bench/NAME.json.

    Raises:
        ValueError: naming the entries.
    """
    both = sorted(imported.keys() & methods.keys())
    if both:
        raise ValueError(
            f"methods and imported both have {', '.join(both)}: rename the entry of imported"
        )

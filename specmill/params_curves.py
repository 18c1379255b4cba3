"""The section `curves` of params.yaml: where step time is measured before anything is trained."""

from typing import Annotated

from pydantic import Field, field_validator

from specmill.section import Count, Section


class Curves(Section):
    """Step time of every kind of draft, T(K, batch), measured before any training."""

    tokens: Annotated[list[Count], Field(min_length=1)]
    """num_speculative_tokens (K) to measure; predictions interpolate between them."""
    batch: Annotated[list[Count], Field(min_length=1)]
    """Requests in flight to measure; predictions interpolate between them."""
    steps: Count
    """Engine steps timed of each wave of requests."""
    repeats: Count
    """Waves at each K and batch; the figure is the median of theirs."""

    @field_validator("tokens", "batch")
    @classmethod
    def _is_a_set(cls, given: list[int]) -> list[int]:
        if len(set(given)) != len(given):
            raise ValueError(f"lists a value twice: {given}")
        return given

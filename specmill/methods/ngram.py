"""Prompt lookup: propose what followed the last tokens when they occurred before.

No draft model. vLLM looks up the longest window of `prompt_lookup_max` down to `prompt_lookup_min`
tokens in prompt and answer (vllm v1/spec_decode/ngram_proposer.py); a step without a match drafts
nothing and is not counted by its acceptance length, so `draft_coverage` and `tokens_per_step` are
what compares with a draft model. Turns asynchronous scheduling off.
"""

from pathlib import Path
from typing import Any

from pydantic import model_validator

from specmill.section import Count, Section


class Settings(Section):
    """The window of tokens matched against what came before."""

    prompt_lookup_min: Count
    """Shortest window."""
    prompt_lookup_max: Count
    """Longest window, tried first."""

    @model_validator(mode="after")
    def _window_is_ordered(self) -> "Settings":
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min {self.prompt_lookup_min} is above "
                f"prompt_lookup_max {self.prompt_lookup_max}"
            )
        return self


def speculative_config(
    k: int, settings: Settings, _head: Path, _verifier: dict[str, Any]
) -> dict[str, Any]:
    """vLLM's `ngram` with K draft tokens."""
    return {
        "method": "ngram",
        "num_speculative_tokens": k,
        "prompt_lookup_min": settings.prompt_lookup_min,
        "prompt_lookup_max": settings.prompt_lookup_max,
    }

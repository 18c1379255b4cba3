"""Suffix decoding: propose what followed the last tokens in this prompt or in any earlier answer.

No draft model (arXiv 2411.04975; vllm v1/spec_decode/suffix_decoding.py calls arctic_inference).
Two suffix trees are searched for the last tokens: one of this request's prompt and answer, one of
the answers the server gave before. Of all matches, the one whose continuation is likeliest by count
is the draft: at most K tokens, at most `suffix_decoding_max_spec_factor` times as many as matched.
A step without a match drafts nothing and is not counted by acceptance length, so `draft_coverage`
and `tokens_per_step` are what compares with a draft model; rates at later positions are also low
because few drafts are that long. The proposer asserts a fixed K: no schedule of K by batch size
works. Turns asynchronous scheduling off.

The second tree makes the figures depend on what the server answered before: a prompt that is sent
again is replayed from memory. The bench gives each cell prompts of its own, so that this row shows
what prompts and related earlier answers are worth, later cells having more of those to search;
traffic that repeats itself gains more. `suffix_decoding_max_cached_requests: 0` takes the second
tree away: a row of its own then says what the prompt alone is worth.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from specmill.section import Count, DoesNotFit, Section


class Settings(Section):
    """What bounds a draft; each is null for vLLM's own default (vllm config/speculative.py)."""

    suffix_decoding_max_tree_depth: Count | None = None
    """Depth of both trees: matched and drafted tokens together are fewer. vLLM: 24."""
    suffix_decoding_max_cached_requests: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Earlier answers kept, the oldest dropped first; 0 keeps none. vLLM: 10000."""
    suffix_decoding_max_spec_factor: Annotated[float, Field(gt=0)] | None = None
    """Most tokens drafted per token matched. vLLM: 1.0."""
    suffix_decoding_min_token_prob: Annotated[float, Field(ge=0, le=1)] | None = None
    """A draft ends before its estimated probability, from counts, is lower. vLLM: 0.1."""


def speculative_config(
    k: int, settings: Settings, _head: Path, _verifier: dict[str, Any]
) -> dict[str, Any]:
    """vLLM's `suffix` with at most K draft tokens.

    Raises:
        DoesNotFit: when arctic_inference is not installed.
    """
    if find_spec("arctic_inference") is None:
        raise DoesNotFit(
            "suffix decoding needs arctic_inference, which is not installed; `make venv` installs "
            "it on a CPU, elsewhere build the version in requirements/cpu.txt as the Makefile does"
        )
    return {
        "method": "suffix",
        "num_speculative_tokens": k,
        **settings.model_dump(exclude_none=True),
    }

"""Prompt lookup: propose what followed the last tokens when they occurred before.

No draft model. vLLM looks up the longest window of `prompt_lookup_max` down to `prompt_lookup_min`
tokens in prompt and answer (vllm v1/spec_decode/ngram_proposer.py); a step without a match drafts
nothing, so its acceptance length, counted over drafts alone, is not comparable with EAGLE-3's.
Turns asynchronous scheduling off.
"""

from pathlib import Path
from typing import Any

from specmill.params import Spec


def speculative_config(
    k: int, spec: Spec, _head: Path, _verifier: dict[str, Any]
) -> dict[str, Any]:
    """vLLM's `ngram` with K draft tokens."""
    return {
        "method": "ngram",
        "num_speculative_tokens": k,
        "prompt_lookup_min": spec.ngram.prompt_lookup_min,
        "prompt_lookup_max": spec.ngram.prompt_lookup_max,
    }

"""Longer contexts for a prompt: earlier conversations of the same verifier before it."""

from specmill.files import digest
from specmill.samples import Sample


def with_context(prompt: Sample, others: list[Sample], length: int) -> list[int]:
    """Token ids of a prompt behind exactly `length` tokens of other conversations.

        | ... conversation i+1 | conversation i+2 | prompt |
          the last `length` tokens of these

    They are prompts with the verifier's own recorded answers, so that the context reads as a chat
    does; which ones come last differs from prompt to prompt.

    Args:
        prompt: What is answered.
        others: Conversations to take context from; the prompt's own is left out.
        length: Tokens before the prompt; 0 adds none.

    Raises:
        ValueError: when all of them together are shorter.
    """
    if length == 0:
        return prompt.prompt_token_ids
    start = int(digest(prompt.sample_key)[:8], 16) % len(others)
    turned = others[start:] + others[:start]
    pieces: list[list[int]] = []
    missing = length
    for other in turned:
        if other.sample_key == prompt.sample_key:
            continue
        pieces.insert(0, [int(token) for token in other.input_ids[-missing:]])
        missing -= len(pieces[0])
        if missing == 0:
            return [token for piece in pieces for token in piece] + prompt.prompt_token_ids
    raise ValueError(
        f"bench.context asks for {length} tokens before a prompt, but all other bench prompts and "
        f"their answers have {length - missing}; lower it or raise prepare.bench_per_category"
    )

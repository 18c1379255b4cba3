"""Longer contexts for a prompt: earlier conversations of the same verifier before it."""

from specmill.samples import Sample


def with_context(prompt: Sample, samples: list[Sample], length: int) -> list[int]:
    """Token ids of a prompt behind exactly `length` tokens of other conversations.

        | ... conversation i+2 | conversation i+1 | prompt i |
          the last `length` tokens of these

    They are prompts with the verifier's own recorded answers, so that the context reads as a chat
    does. Their order is that of their keys, which mixes prompt types; no two prompts have the same
    context.

    Args:
        prompt: What is answered, one of the samples.
        samples: Conversations to take context from.
        length: Tokens before the prompt; 0 adds none.

    Raises:
        ValueError: when all others together are shorter.
    """
    if length == 0:
        return prompt.prompt_token_ids
    ordered = sorted(samples, key=lambda sample: sample.sample_key)
    own = [sample.sample_key for sample in ordered].index(prompt.sample_key)
    context: list[int] = []
    for other in ordered[own + 1 :] + ordered[:own]:
        missing = length - len(context)
        context = [int(token) for token in other.input_ids[-missing:]] + context
        if len(context) == length:
            return context + prompt.prompt_token_ids
    raise ValueError(
        f"bench.context asks for {length} tokens before a prompt, but all other bench prompts and "
        f"their answers have {len(context)}; lower it or raise prepare.bench_per_category"
    )

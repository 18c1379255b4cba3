import pytest

from specmill.context import with_context
from tests.fakes import sample

SAMPLES = [
    sample([10 * i, 10 * i + 1], [10 * i + 2], category=f"type {i % 2}") for i in range(1, 7)
]
"""Six conversations of three tokens: [10, 11, 12] ... [60, 61, 62]."""
RING = sorted(SAMPLES, key=lambda one: one.sample_key)


def whole(index: int) -> list[int]:
    return [int(token) for token in RING[index % len(RING)].input_ids]


def test_a_context_of_no_tokens_leaves_the_prompt_as_it_is() -> None:
    assert with_context(SAMPLES[0], SAMPLES, 0) == [10, 11]
    assert with_context(SAMPLES[0], SAMPLES[:1], 0) == [10, 11]


def test_a_context_is_the_end_of_the_conversations_that_come_next_in_order_of_their_keys() -> None:
    own = RING[2].prompt_token_ids
    assert with_context(RING[2], SAMPLES, 3) == whole(3) + own
    assert with_context(RING[2], SAMPLES, 5) == whole(4)[1:] + whole(3) + own
    assert with_context(RING[5], SAMPLES, 4) == whole(1)[2:] + whole(0) + RING[5].prompt_token_ids


@pytest.mark.parametrize("length", range(1, 16))
def test_a_context_has_exactly_the_tokens_asked_for_and_never_the_prompts_own_answer(
    length: int,
) -> None:
    for prompt in SAMPLES:
        ids = with_context(prompt, SAMPLES, length)
        assert len(ids) == length + 2
        assert ids[length:] == prompt.prompt_token_ids
        assert int(prompt.input_ids[-1]) not in ids


def test_no_two_prompts_have_the_same_context() -> None:
    contexts = {tuple(with_context(prompt, SAMPLES, 7)[:7]) for prompt in SAMPLES}
    assert len(contexts) == len(SAMPLES)


def test_a_context_longer_than_all_other_conversations_is_refused() -> None:
    assert len(with_context(SAMPLES[0], SAMPLES, 15)) == 17
    with pytest.raises(
        ValueError,
        match=r"bench\.context asks for 16 tokens .* have 15; .* prepare\.bench_per_category",
    ):
        with_context(SAMPLES[0], SAMPLES, 16)

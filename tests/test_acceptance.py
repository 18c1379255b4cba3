import random
from typing import Any

import pytest

from specmill.acceptance import acceptance, add, conditional, draft_coverage, subtract

COUNTS = {
    "num_drafts": 8,
    "num_draft_tokens": 24,
    "num_accepted_tokens": 9,
    "accepted_at_0": 6,
    "accepted_at_1": 2,
    "accepted_at_2": 1,
}


def test_acceptance_of_a_hand_made_cell() -> None:
    assert acceptance(COUNTS, 3) == {
        "num_drafts": 8,
        "num_draft_tokens": 24,
        "acceptance_length": 2.125,  # 1 + 9 / 8
        "acceptance_rate": 0.375,  # 9 / 24
        "acceptance_rate_pos": [0.75, 0.25, 0.125],  # 6 / 8, 2 / 8, 1 / 8
    }


@pytest.mark.parametrize("seed", range(20))
def test_acceptance_length_is_one_plus_the_sum_of_the_rates(seed: int) -> None:
    generator = random.Random(seed)
    num_drafts, k = generator.randint(1, 1000), generator.randint(1, 8)
    at = sorted((generator.randint(0, num_drafts) for _ in range(k)), reverse=True)
    counts = {
        "num_drafts": num_drafts,
        "num_draft_tokens": num_drafts * k,
        "num_accepted_tokens": sum(at),
        **{f"accepted_at_{position}": accepted for position, accepted in enumerate(at)},
    }
    figures = acceptance(counts, k)
    rates = figures["acceptance_rate_pos"]
    assert figures["acceptance_length"] == pytest.approx(1 + sum(rates))
    assert 1 <= figures["acceptance_length"] <= 1 + k
    assert rates == sorted(rates, reverse=True)
    assert figures["acceptance_rate"] == pytest.approx(sum(rates) / k)


@pytest.mark.parametrize("seed", range(20))
def test_conditional_rates_multiply_to_the_unconditional_ones(seed: int) -> None:
    generator = random.Random(seed)
    drafts, k = generator.randint(1, 1000), generator.randint(1, 8)
    at = sorted((generator.randint(0, drafts) for _ in range(k)), reverse=True)
    rates = [accepted / drafts for accepted in at]
    given = conditional(rates)
    assert len(given) == k
    product = 1.0
    for rate, factor in zip(rates, given, strict=True):
        product *= factor or 0.0
        assert product == pytest.approx(rate)
        assert factor is None or 0 <= factor <= 1


def test_conditional_rates_of_a_hand_made_cell() -> None:
    assert conditional([0.75, 0.25, 0.125]) == [0.75, pytest.approx(1 / 3), 0.5]
    assert conditional([]) == []


def test_where_no_draft_came_that_far_there_is_no_conditional_rate() -> None:
    assert conditional([0.5, 0.0, 0.0]) == [0.5, 0.0, None]


def test_a_position_that_was_never_accepted_has_rate_zero() -> None:
    counts = COUNTS | {"num_draft_tokens": 32}
    assert acceptance(counts, 4)["acceptance_rate_pos"] == [0.75, 0.25, 0.125, 0.0]


def test_without_a_draft_there_is_no_acceptance_length() -> None:
    zeros = dict.fromkeys(COUNTS, 0)
    assert acceptance(zeros, 3) == {"num_drafts": 0}


@pytest.mark.parametrize(
    "changed",
    [
        {"num_accepted_tokens": 10},
        {"accepted_at_0": 2, "accepted_at_1": 6},  # accepted later more often than before
        {"accepted_at_3": 1, "num_accepted_tokens": 10},  # a position that was never drafted
        {"accepted_at_0": 9, "num_accepted_tokens": 12},  # more often than there were drafts
        {"num_drafts": 0},
    ],
)
def test_counters_that_contradict_each_other_are_refused(changed: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="acceptance counters contradict each other"):
        acceptance(COUNTS | changed, 3)


def test_an_engine_without_speculation_counters_is_refused() -> None:
    with pytest.raises(ValueError, match="it is not speculating"):
        acceptance({"engine_steps": 10}, 3)


def test_subtracting_gives_what_each_counter_gained() -> None:
    before: dict[str, Any] = {"num_drafts": 10.0, "engine_steps": 7.0}
    after: dict[str, Any] = {"num_drafts": 18.0, "engine_steps": 7.0, "accepted_at_0": 3.0}
    gained = subtract(after, before)
    assert gained == {"num_drafts": 8, "engine_steps": 0, "accepted_at_0": 3}
    assert {type(value) for value in gained.values()} == {int}
    assert subtract({}, {}) == {}


def test_a_counter_that_fell_is_refused() -> None:
    with pytest.raises(ValueError, match="counters fell"):
        subtract({"num_drafts": 5.0, "engine_steps": 9.0}, {"num_drafts": 6.0})


def test_adding_sums_name_by_name_and_misses_none() -> None:
    rows = [{"num_drafts": 1, "accepted_at_0": 1}, {"num_drafts": 5, "engine_steps": 2}, {}]
    assert add(rows) == {"num_drafts": 6, "accepted_at_0": 1, "engine_steps": 2}
    assert add([]) == {}


def test_coverage_counts_the_steps_without_a_draft() -> None:
    # two requests, 22 tokens: 2 come from prefills, 20 from decode steps; 4 drafts had 6 tokens
    # accepted, so 4 steps gave 4 + 6 and 10 steps gave one each
    counts = {"num_drafts": 4, "num_draft_tokens": 12, "num_accepted_tokens": 6}
    found = draft_coverage(counts, output_tokens=22, num_requests=2)
    assert found == {"draft_coverage": 4 / 14, "tokens_per_step": 20 / 14}


def test_with_a_draft_at_every_step_tokens_per_step_is_acceptance_length() -> None:
    counts = {"num_drafts": 10, "num_accepted_tokens": 5}
    found = draft_coverage(counts, output_tokens=16, num_requests=1)
    assert found == {"draft_coverage": 1.0, "tokens_per_step": 1.5}


def test_tokens_accepted_beyond_the_end_of_an_answer_make_no_coverage_above_one() -> None:
    # the last of 10 steps accepted 3 tokens of which the answer had room for 1
    counts = {"num_drafts": 10, "num_accepted_tokens": 7}
    found = draft_coverage(counts, output_tokens=16, num_requests=1)
    assert found == {"draft_coverage": 1.0, "tokens_per_step": 1.5}


def test_answers_of_one_token_have_no_coverage() -> None:
    counts = {"num_drafts": 0, "num_accepted_tokens": 0}
    found = draft_coverage(counts, output_tokens=3, num_requests=3)
    assert found == {"draft_coverage": None, "tokens_per_step": None}

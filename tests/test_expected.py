from dataclasses import replace
from math import sqrt

import pytest

from specmill.between import NotMeasured
from specmill.expected import (
    Cell,
    Estimate,
    best_k,
    lengths_to_try,
    required_tokens,
    speedup,
    tokens_per_step,
    with_coverage,
)

EXACT = Cell(none_ms=10.0, none_ttft_ms=40.0, ttft_ms=60.0, ratio=Estimate.exact(1.5))
"""Ten steps of 10 ms without speculation, or five of 15 ms at two tokens a step."""
DECODING = Cell(none_ms=10.0, none_ttft_ms=0.0, ttft_ms=0.0, ratio=Estimate(1.5, 1.2, 1.875))


def test_tokens_per_step_are_the_bonus_token_and_the_rates() -> None:
    assert tokens_per_step([0.5, 0.25]) == 1.75
    assert tokens_per_step([]) == 1


def test_a_step_without_drafts_gives_one_token() -> None:
    assert tokens_per_step([0.5, 0.25], coverage=0.2) == pytest.approx(1.15)  # 0.2 * 1.75 + 0.8


@pytest.mark.parametrize("rates", [[0.2, 0.5], [1.5], [0.5, -0.1]])
def test_rates_that_are_not_unconditional_are_refused(rates: list[float]) -> None:
    with pytest.raises(ValueError, match="are not unconditional"):
        tokens_per_step(rates)


def test_coverage_is_a_share() -> None:
    with pytest.raises(ValueError, match=r"coverage is 1\.2"):
        tokens_per_step([0.5], coverage=1.2)


def test_speedup_is_the_ratio_of_two_requests_times_prefill_included() -> None:
    # 40 + 10 * 10 = 140 ms against 60 + 5 * 15 = 135 ms for eleven tokens
    assert speedup(EXACT, Estimate.exact(2.0), 11).value == pytest.approx(140 / 135)


def test_of_decoding_alone_it_is_tokens_over_the_step_ratio_whatever_the_length() -> None:
    for num_tokens in (2, 64, 1000):
        gain = speedup(DECODING, Estimate.exact(2.0), num_tokens)
        assert gain.value == pytest.approx(2 / 1.5)


def test_prefill_pulls_a_gain_towards_one_the_more_the_shorter_the_answer() -> None:
    same = Cell(none_ms=10.0, none_ttft_ms=50.0, ttft_ms=50.0, ratio=Estimate.exact(1.5))
    gains = [speedup(same, Estimate.exact(3.0), n).value for n in (2, 11, 101, 100_001)]
    assert gains == sorted(gains)
    assert gains[0] == pytest.approx(60 / 55)
    assert gains[-1] == pytest.approx(2.0, abs=1e-3)


def test_break_even_is_where_the_speedup_is_one() -> None:
    needed = required_tokens(EXACT, 1.0, 11)
    assert needed == pytest.approx(1.875)  # 150 / (140 - 60)
    assert needed is not None
    assert speedup(EXACT, Estimate.exact(needed), 11).value == pytest.approx(1.0)


def test_a_target_needs_what_gives_it() -> None:
    needed = required_tokens(EXACT, 1.25, 11)
    assert needed == pytest.approx(150 / 52)  # 140 / 1.25 = 112 ms, 60 of them for the first token
    assert needed is not None
    assert speedup(EXACT, Estimate.exact(needed), 11).value == pytest.approx(1.25)


def test_no_acceptance_makes_up_for_a_first_token_that_takes_longer_than_all() -> None:
    assert required_tokens(EXACT, 3.0, 11) is None  # 46.7 ms in all, 60 for the first token


def test_intervals_of_acceptance_and_step_time_add_as_roots_of_squares() -> None:
    # both are known to a factor of 1.25, so that their quotient is to 1.25 ** sqrt(2)
    gain = speedup(DECODING, Estimate(2.0, 1.6, 2.5), 64)
    assert gain.low == pytest.approx(2 / 1.5 / 1.25 ** sqrt(2))
    assert gain.high == pytest.approx(2 / 1.5 * 1.25 ** sqrt(2))


def test_a_part_without_an_interval_leaves_that_of_the_other() -> None:
    gain = speedup(DECODING, Estimate.exact(2.0), 64)
    assert (gain.low, gain.high) == (pytest.approx(2 / 1.875), pytest.approx(2 / 1.2))


def test_prefill_is_no_part_of_the_uncertainty() -> None:
    cell = Cell(none_ms=10.0, none_ttft_ms=40.0, ttft_ms=60.0, ratio=Estimate(1.5, 1.2, 1.875))
    gain = speedup(cell, Estimate.exact(2.0), 11)
    assert gain.low == pytest.approx(140 / (60 + 100 * 1.875 / 2))


def test_an_answer_of_one_token_has_nothing_to_speed_up() -> None:
    with pytest.raises(ValueError, match="give 2 or more"):
        speedup(EXACT, Estimate.exact(2.0), 1)


def test_the_best_k_is_named_with_the_next_one_and_no_speculation_is_one_of_them() -> None:
    best = best_k({1: Estimate.exact(1.2), 2: Estimate(1.25, 1.1, 1.4)})
    assert (best.k, best.next_k, best.speedup.low) == (2, 1, 1.1)
    assert best.margin == pytest.approx(1.25 / 1.2)
    worse = best_k({1: Estimate.exact(0.9), 2: Estimate.exact(0.8)})
    assert (worse.k, worse.next_k, worse.speedup.value) == (0, 1, 1.0)
    assert worse.margin == pytest.approx(1 / 0.9)


def test_lengths_to_try_end_at_all_drafts_accepted() -> None:
    assert lengths_to_try(1) == [1.4, 1.7, 2.0]
    assert lengths_to_try(3) == [1.4, 1.7, 2.0, 2.5, 3.0, 3.5, 4.0]


LIKE_NONE = replace(DECODING, empty=Estimate.exact(1.0))
"""A step that drafts nothing costs what one without speculation does, as on a CPU."""
OUTSIDE = replace(DECODING, empty=Estimate(2.0, 1.8, 2.2))
"""It costs more than one in which all draft, as outside the CUDA graph of a whole step."""


def test_where_empty_steps_are_those_of_none_any_draft_costs_the_step_of_all() -> None:
    # half of the steps of two requests each: in three of four steps one of them drafts
    ratio = with_coverage(LIKE_NONE, 0.5, 2).ratio
    assert ratio.value == pytest.approx(1 + 0.75 * 0.5)
    assert ratio.high == pytest.approx(1 + 0.75 * 0.875)
    assert ratio.low == pytest.approx(1 + 0.5 * 0.2)  # in proportion to the drafts


def test_where_empty_steps_are_the_dearest_only_drafts_of_all_requests_are_cheaper() -> None:
    # of two requests: both draft in a quarter of the steps
    ratio = with_coverage(OUTSIDE, 0.5, 2).ratio
    assert ratio.value == pytest.approx(0.75 * 2.0 + 0.25 * 1.5)
    assert ratio.low == pytest.approx(1.8 + 0.5 * (1.2 - 1.8))  # in proportion
    assert ratio.high == pytest.approx(0.75 * 2.2 + 0.25 * 1.875)


def test_coverage_of_one_changes_nothing_and_of_one_request_is_the_share() -> None:
    assert with_coverage(DECODING, 1.0, 8) == DECODING
    assert with_coverage(LIKE_NONE, 0.2, 1).ratio.value == pytest.approx(1.1)
    assert with_coverage(OUTSIDE, 0.2, 1).ratio.value == pytest.approx(0.8 * 2.0 + 0.2 * 1.5)
    assert with_coverage(OUTSIDE, 0.0, 8).ratio == OUTSIDE.empty


def test_without_a_measured_empty_step_coverage_is_refused() -> None:
    with pytest.raises(NotMeasured, match="steps in which nothing is drafted were not measured"):
        with_coverage(DECODING, 0.5, 2)

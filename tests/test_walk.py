import numpy as np
import pytest

from specmill.walk import Runs, figures, walk


def runs_of(right: list[int], most_k: int = 3, drafted: list[int] | None = None) -> Runs:
    """Runs of a method with so many right drafts at each start."""
    table = np.array([[position < run for position in range(most_k)] for run in right])
    return Runs.of_chain(table, None if drafted is None else np.array(drafted))


def test_the_answer_of_the_docstring_takes_two_steps() -> None:
    found = walk(runs_of([2, 0, 1, 3, 0, 1]), 3)
    assert (found.num_steps, found.num_tokens, found.num_drafts) == (2, 6, 2)
    assert found.accepted_at == (2, 2, 1)
    assert found.num_draft_tokens == 6


def test_a_smaller_k_accepts_less_and_takes_more_steps() -> None:
    # start 0: 1 + bonus; 2: 1 + bonus; 4: 0 + bonus; 5: 1, the end
    found = walk(runs_of([2, 0, 1, 3, 0, 1]), 1)
    assert (found.num_steps, found.accepted_at) == (4, (3,))
    assert figures([found])["tokens_per_step"] == 6 / 4


def test_nothing_right_is_one_token_a_step() -> None:
    found = walk(runs_of([0, 0, 0]), 2)
    assert (found.num_steps, found.num_tokens, found.accepted_at) == (3, 3, (0, 0))


def test_a_wrong_draft_hides_right_ones_after_it() -> None:
    table = np.array([[False, True, True], [True, False, True]])
    assert Runs.of_chain(table).accepted.tolist() == [[0, 0, 0], [1, 1, 1]]


def test_a_shorter_answer_ends_the_walk_within_a_run() -> None:
    found = walk(runs_of([2, 0, 1, 3, 0, 1]), 3, num_tokens=2)
    assert (found.num_steps, found.num_tokens, found.accepted_at) == (1, 1, (1, 0, 0))


def test_a_step_without_a_draft_is_a_step_and_no_draft() -> None:
    found = walk(runs_of([0, 1, 0], drafted=[0, 2, 3]), 2)
    assert (found.num_steps, found.num_drafts, found.num_draft_tokens) == (2, 1, 2)
    assert figures([found]) == {
        "num_sequences": 1,
        "num_tokens": 3,
        "num_steps": 2,
        "num_drafts": 1,
        "tokens_per_step": 1.5,
        "tokens_per_step_low": None,
        "tokens_per_step_high": None,
        "draft_coverage": 0.5,
        "acceptance_length": 2.0,
        "acceptance_rate_pos_0": 1.0,
        "acceptance_rate_pos_1": 0.0,
    }


def test_acceptance_length_is_one_plus_the_rates_which_never_rise() -> None:
    chance = np.random.default_rng(5)
    table = chance.random((40, 60, 4)) < 0.6
    found = figures([walk(Runs.of_chain(one), 4) for one in table])
    rates = [found[f"acceptance_rate_pos_{position}"] for position in range(4)]
    assert found["acceptance_length"] == pytest.approx(1 + sum(rates))
    assert rates == sorted(rates, reverse=True)
    assert found["tokens_per_step_low"] < found["tokens_per_step"] < found["tokens_per_step_high"]


def test_equal_answers_leave_no_doubt() -> None:
    found = figures([walk(runs_of([1, 0, 1, 0]), 2)] * 5)
    assert found["tokens_per_step_low"] == found["tokens_per_step_high"] == 2.0


def test_an_answer_of_one_token_has_no_step() -> None:
    found = figures([walk(Runs.of_chain(np.zeros((0, 2), bool)), 2)])
    assert (found["num_steps"], found["tokens_per_step"]) == (0, None)


@pytest.mark.parametrize("k", [0, 4])
def test_a_k_that_is_not_covered_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"K is {k}, and drafts are known for 1 to 3"):
        walk(runs_of([1]), k)


def test_more_tokens_than_the_answer_has_are_refused() -> None:
    with pytest.raises(ValueError, match="4 tokens of an answer of 2"):
        walk(runs_of([1]), 1, num_tokens=4)

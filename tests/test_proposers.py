import importlib.util
import random

import numpy as np
import pytest

from specmill.proposers import ngram_runs, suffix_defaults, suffix_runs
from specmill.walk import walk

needs_arctic = pytest.mark.skipif(
    importlib.util.find_spec("arctic_inference") is None,
    reason="arctic_inference is not in this lock file",
)


def looked_up(known: list[int], least: int, most: int, k: int) -> list[int]:
    """What followed the earliest of the longest matches, found by trying all of them."""
    for size in range(min(most, len(known) - 1), least - 1, -1):
        for start in range(len(known) - size):
            if known[start : start + size] == known[-size:]:
                return known[start + size : start + size + k]
    return []


@pytest.mark.parametrize("window", [(1, 1), (1, 3), (2, 4), (3, 5)])
def test_every_draft_is_what_trying_all_matches_finds(window: tuple[int, int]) -> None:
    chance = random.Random(7)
    for _ in range(20):
        ids = [chance.randrange(4) for _ in range(50)]
        runs = ngram_runs(np.array(ids, np.int32), 10, window, 5, 1000)
        assert len(runs.accepted) == 39
        for start, known in enumerate(range(11, 50)):
            draft = looked_up(ids[:known], *window, 5)
            right = 0
            while right < min(len(draft), 50 - known) and draft[right] == ids[known + right]:
                right += 1
            assert runs.drafted[start, 4] == len(draft)
            assert runs.accepted[start].tolist() == [min(right, k) for k in range(1, 6)]


def test_an_answer_that_repeats_its_prompt_is_drafted_whole() -> None:
    ids = np.array([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8], np.int32)
    found = walk(ngram_runs(ids, 8, (1, 3), 4, 1000), 4)
    # a0 = 1 is known: 2 3 4 5 and 6 as bonus, then 7 8
    assert (found.num_steps, found.accepted_at) == (2, (2, 2, 1, 1))


def test_nothing_is_drafted_beyond_the_longest_context() -> None:
    ids = np.array([1, 2, 3, 1, 2, 3, 1, 2, 3], np.int32)
    runs = ngram_runs(ids, 4, (1, 2), 3, 7)
    assert runs.drafted[:, 2].tolist() == [2, 1, 0, 0]


@needs_arctic
def test_a_repeated_request_is_drafted_from_the_first_answer() -> None:
    chance = random.Random(1)
    ids = np.array(chance.sample(range(1000), 40), np.int32)
    first, again = suffix_runs([(ids, 20), (ids, 20)], suffix_defaults(), 4, 1000)
    assert first.accepted.sum() == 0
    assert again.accepted[1:-4, 3].min() >= 1
    assert walk(again, 4).num_steps < walk(first, 4).num_steps == 19


@needs_arctic
def test_without_earlier_requests_only_the_own_text_is_drafted_from() -> None:
    chance = random.Random(1)
    ids = np.array(chance.sample(range(1000), 40), np.int32)
    settings = suffix_defaults() | {"suffix_decoding_max_cached_requests": 0}
    _, again = suffix_runs([(ids, 20), (ids, 20)], settings, 4, 1000)
    assert again.accepted.sum() == 0


@needs_arctic
def test_no_more_is_drafted_than_k() -> None:
    ids = np.array([*range(20), *range(20)], np.int32)
    (runs,) = suffix_runs([(ids, 20)], suffix_defaults(), 5, 1000)
    assert (runs.drafted <= np.arange(1, 6)).all()
    assert (runs.accepted <= runs.drafted).all()
    assert walk(runs, 5).num_steps < 19

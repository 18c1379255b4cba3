"""The test of losslessness: its formula by hand, what it finds, and how often it is wrong."""

from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import chi2

from specmill.sampling import NUM_POSITIONS, NUM_SAMPLES, K
from specmill.sampling_check import SIGNIFICANCE, Verdict, check_samples, chi_square, p_value
from specmill.sampling_twin import DRAFT_VOCAB_SIZE, VOCAB_SIZE

NUM_PROMPTS = 8
ROWS = np.arange(NUM_SAMPLES)


def test_draws_from_one_distribution_are_tested_as_pearson_did() -> None:
    """50 + 30 + 20 expected, 60 + 25 + 15 drawn: 100/50 + 25/30 + 25/20 = 4.0833."""
    tokens = np.repeat([0, 1, 2], [60, 25, 15])
    statistic, freedom = chi_square(tokens, np.tile([0.5, 0.3, 0.2], (100, 1)))
    assert statistic == pytest.approx(49 / 12)
    assert freedom == 2


def test_draws_from_two_distributions_vary_as_their_sum_does() -> None:
    """Token 0 is expected 50 + 20 times with variance 25 + 16 and drawn 83: 13 * 13 / 41."""
    probabilities = np.repeat([[0.5, 0.5], [0.2, 0.8]], 100, axis=0)
    statistic, freedom = chi_square(np.repeat([0, 1], [83, 117]), probabilities)
    assert statistic == pytest.approx(169 / 41)
    assert freedom == 1


def test_tokens_too_rare_to_count_are_one_cell_with_the_rarest_that_is_not() -> None:
    """Expected 60, 28, 7 and 5: the last two together are 12; their draws are 20."""
    tokens = np.repeat([0, 1, 2, 3], [55, 25, 18, 2])
    statistic, freedom = chi_square(tokens, np.tile([0.6, 0.28, 0.07, 0.05], (100, 1)))
    assert statistic == pytest.approx(25 / 60 + 9 / 28 + 64 / 12)
    assert freedom == 2


def test_independent_statistics_and_their_degrees_of_freedom_add_up() -> None:
    """With two degrees of freedom, the chance of more than x is exp(-x / 2)."""
    assert p_value([(3.0, 1), (0.0, 0), (4.0, 1)]) == pytest.approx(np.exp(-3.5))


def test_the_smallest_p_value_is_multiplied_by_the_number_of_tests() -> None:
    """One position, one prompt: both tests are Pearson's, 10 * 10 / 50 + 10 * 10 / 50 = 4."""
    tokens = np.repeat([0, 1], [60, 40])[:, None]
    verdict = check_samples(np.zeros(100, int), tokens, np.full((100, 1, 2), 0.5))
    assert verdict.num_tests == 2
    assert verdict.p_value == pytest.approx(2 * 0.04550, rel=1e-3)


def test_too_few_samples_for_any_test_are_refused() -> None:
    with pytest.raises(ValueError, match="take more samples"):
        check_samples(np.zeros(9, int), np.zeros((9, 1), int), np.full((9, 1, 2), 0.5))


def test_the_statistic_follows_chi_square_far_into_its_tail() -> None:
    """Of 10,000 sets of right draws one in a thousand is below 0.001: 10, give or take 9."""
    draw = np.random.default_rng(11)
    table = softmax(1.5 * draw.normal(size=(5, 20)))
    probabilities = np.repeat(table, 60, axis=0)
    parts = [chi_square(draw_tokens(probabilities, draw), probabilities) for _ in range(10_000)]
    p_values = chi2.sf(*np.array(parts).T)
    assert abs((p_values < 0.05).mean() - 0.05) < 0.007
    assert 1 <= (p_values < 0.001).sum() <= 19


# A speculative sampler in numpy, over tokens that depend on the one before.


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits)
    return weights / weights.sum(axis=-1, keepdims=True)


def draw_tokens(weights: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """One token per row of `weights`, in proportion to them."""
    edges = weights.cumsum(axis=1)
    return (edges < draw.random((len(edges), 1)) * edges[:, -1:]).sum(axis=1)


BIASES = np.random.default_rng(0).normal(size=VOCAB_SIZE)
TABLE = softmax(BIASES + 2.0 * np.random.default_rng(1).normal(size=(VOCAB_SIZE, VOCAB_SIZE)))
"""[token before, token], shaped like the twin's distributions."""
LIKELIEST = np.argsort(-BIASES)[:DRAFT_VOCAB_SIZE]
RANDOM_DRAFTS = np.random.default_rng(2).choice(LIKELIEST, VOCAB_SIZE)
"""What is drafted after each token: as poor as a random head's."""


class RightSampler:
    """Accept a draft with its probability; else draw from the distribution without it."""

    def accepts(self, probability: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        return draw.random(len(probability)) < probability

    def residual(self, exact: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        left = exact.copy()
        left[ROWS, drafts] = 0.0
        return left

    def bonus(self, exact: np.ndarray, _exact_before: np.ndarray) -> np.ndarray:
        return exact


class AcceptsEveryDraft(RightSampler):
    def accepts(self, probability: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        return np.ones(len(probability), bool)


class AcceptsTypicalDrafts(RightSampler):
    """Medusa's typical acceptance (arXiv 2401.10774, section 2.3.1), with a fixed threshold."""

    def accepts(self, probability: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        return probability > 0.09


class AcceptsHalfAsOftenAgain(RightSampler):
    def accepts(self, probability: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        return draw.random(len(probability)) < 1.5 * probability


class ForgetsTheResidual(RightSampler):
    """A rejected draft can be drawn again."""

    def residual(self, exact: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        return exact


class DrawsTheBonusTokenOnePositionBefore(RightSampler):
    def bonus(self, exact: np.ndarray, exact_before: np.ndarray) -> np.ndarray:
        return exact_before


def speculate(
    sampler: RightSampler, drafts: np.ndarray, draw: np.random.Generator
) -> tuple[Verdict, float]:
    """Samples of a sampler, tested; and its acceptance length."""
    before = np.repeat(np.arange(NUM_PROMPTS), NUM_SAMPLES // NUM_PROMPTS)
    exact = TABLE[before]
    tokens, probabilities = [draw_tokens(exact, draw)], [exact]  # the prompt's own step
    place = np.zeros(NUM_SAMPLES, int)  # in a draft of K; K is the bonus token's
    num_drafts = num_accepted = 0
    for _ in range(1, NUM_POSITIONS):
        exact_before, exact = exact, TABLE[tokens[-1]]
        draft, is_drafted = drafts[tokens[-1]], place < K
        is_accepted = is_drafted & sampler.accepts(exact[ROWS, draft], draw)
        undrafted = sampler.bonus(exact, exact_before)
        weights = np.where(is_drafted[:, None], sampler.residual(exact, draft), undrafted)
        tokens.append(np.where(is_accepted, draft, draw_tokens(weights, draw)))
        probabilities.append(exact)
        num_drafts += int((place == 0).sum())
        num_accepted += int(is_accepted.sum())
        place = np.where(is_accepted, place + 1, 0)
    verdict = check_samples(before, np.stack(tokens, axis=1), np.stack(probabilities, axis=1))
    return verdict, 1 + num_accepted / num_drafts


@pytest.mark.parametrize(
    ("sampler", "drafts"),
    [
        (AcceptsEveryDraft, RANDOM_DRAFTS),
        (AcceptsTypicalDrafts, RANDOM_DRAFTS),
        (AcceptsHalfAsOftenAgain, TABLE.argmax(axis=1)),
        (ForgetsTheResidual, RANDOM_DRAFTS),
        (DrawsTheBonusTokenOnePositionBefore, TABLE.argmax(axis=1)),
    ],
)
def test_a_wrong_sampler_is_found(sampler: Callable[[], RightSampler], drafts: np.ndarray) -> None:
    for seed in range(3):
        verdict, _ = speculate(sampler(), drafts, np.random.default_rng(seed))
        # so far below that a run that misses it is one in very many
        assert verdict.p_value < 1e-6 * SIGNIFICANCE


@pytest.mark.parametrize("drafts", [RANDOM_DRAFTS, TABLE.argmax(axis=1)])
def test_a_right_sampler_passes_and_its_p_values_are_those_of_chance(drafts: np.ndarray) -> None:
    p_values = []
    for seed in range(10):
        verdict, length = speculate(RightSampler(), drafts, np.random.default_rng(seed))
        assert 1.02 < length < 1.6  # there were drafts of either fate
        assert verdict.lossless
        p_values.append(verdict.p_value)
    # six tests: the smallest times six is below a half in 1 - (11/12)^6 = 41% of runs
    assert 1 <= sum(value < 0.5 for value in p_values) <= 8

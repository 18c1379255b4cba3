"""Were these tokens drawn from the distribution they should be? Statistics without an engine.

Every sampled token is held against the verifier's exact distribution given what came before it in
its own answer. By the chain rule, answers have the right distribution exactly when all these do, so
no sampler that changes it can hide behind an answer's length. Sample s at position i has
probabilities p_si over the vocabulary. For a set of samples S and tokens v, of a right sampler

    O_v = how many of S have token v        E_v = sum over S of p_si(v)
    C   = sum over S of diag(p_si) - p_si p_si'
    (O - E)' inverse(C) (O - E)             chi-square, one degree of freedom per token

which is Pearson's test when all p_si of S are the same. Tokens with a small E_v are left to a last
cell that the others determine; it is kept large enough too, and takes no degree of freedom.

One test per position, and one over all positions that looks at the draws after each token apart
and adds their statistics and degrees of freedom: what is drafted depends on the token before, and
so does what a wrong sampler gets wrong. p-values are multiplied by the number of tests (Bonferroni;
the smallest is Holm's smallest too).
"""

from dataclasses import dataclass

import numpy as np
from scipy.stats import chi2

SIGNIFICANCE = 1e-3
"""Chance that a right sampler is called wrong, over all tests together."""
_LEAST_EXPECTED = 10
"""Of a cell; with fewer, chi-square is no longer what the statistic follows far in its tail."""


@dataclass(frozen=True)
class Verdict:
    """What the tests found."""

    p_value: float
    """The smallest of all tests, corrected for their number."""
    num_tests: int

    @property
    def lossless(self) -> bool:
        """No difference from the exact distribution was found."""
        return self.p_value >= SIGNIFICANCE


def check_samples(before: np.ndarray, tokens: np.ndarray, probabilities: np.ndarray) -> Verdict:
    """Test samples against their exact distributions.

    Args:
        before: int [num_samples], the last token of each sample's prompt.
        tokens: int [num_samples, num_positions].
        probabilities: float [num_samples, num_positions, vocab_size], what each token was to be
            drawn from given all before it.

    Raises:
        ValueError: when there are too few samples for any test.
    """
    p_values = [
        p_value([chi_square(tokens[:, position], probabilities[:, position])])
        for position in range(tokens.shape[1])
    ]
    previous = np.column_stack([before, tokens[:, :-1]])
    after_each = (previous == token for token in np.unique(previous))
    p_values.append(p_value([chi_square(tokens[at], probabilities[at]) for at in after_each]))
    return Verdict(min(1.0, len(p_values) * min(p_values)), len(p_values))


def p_value(parts: list[tuple[float, int]]) -> float:
    """Of independent chi-square statistics and their degrees of freedom taken together.

    Raises:
        ValueError: when there is no degree of freedom.
    """
    statistic, freedom = (sum(column) for column in zip(*parts, strict=True))
    if freedom == 0:
        raise ValueError("no token is expected often enough to be tested; take more samples")
    return float(chi2.sf(statistic, freedom))


def chi_square(tokens: np.ndarray, probabilities: np.ndarray) -> tuple[float, int]:
    """Statistic and degrees of freedom of draws from distributions that may differ.

    Args:
        tokens: int [num_samples].
        probabilities: float [num_samples, vocab_size].
    """
    expected = probabilities.sum(axis=0)  # [vocab_size]
    by_size = np.argsort(-expected, kind="stable")
    kept = by_size[: int((expected >= _LEAST_EXPECTED).sum())]
    while len(kept) and expected.sum() - expected[kept].sum() < _LEAST_EXPECTED:
        kept = kept[:-1]
    if not len(kept):
        return 0.0, 0
    cells = probabilities[:, kept]  # [num_samples, num_cells]
    observed = np.bincount(tokens, minlength=len(expected))[kept]
    covariance = np.diag(expected[kept]) - cells.T @ cells
    difference = observed - expected[kept]
    return float(difference @ np.linalg.solve(covariance, difference)), len(kept)

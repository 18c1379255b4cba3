"""The figures of docs/concepts.md are what the library computes and the raw results hold."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.results import text
from benchmarks.results_gpus import drafting_steps
from specmill.acceptance import acceptance
from specmill.vocab import build_tables, check_tables

DOC = (Path(__file__).parents[1] / "docs" / "concepts.md").read_text()


def test_the_four_steps_have_the_acceptance_that_the_page_says() -> None:
    """Accepted 3, 0, 1 and 2 of three drafts each."""
    counts = {"num_drafts": 4, "num_draft_tokens": 12, "num_accepted_tokens": 6}
    found = acceptance(counts | {"accepted_at_0": 3, "accepted_at_1": 2, "accepted_at_2": 1}, 3)
    assert found["acceptance_length"] == 2.5
    assert found["acceptance_rate_pos"] == [0.75, 0.5, 0.25]
    assert "1 + 6/4 = 2.50 = 1 + 0.75 + 0.50 + 0.25" in DOC
    assert 1 + 0.2 * sum(found["acceptance_rate_pos"]) == pytest.approx(1.30)


def test_the_small_vocabulary_has_the_tables_of_the_page() -> None:
    d2t, t2d = build_tables(Counter({0: 9, 3: 8, 5: 7, 8: 6, 9: 1}), 4, 10)
    check_tables(d2t, t2d, 4, 10)
    assert d2t.tolist() == [0, 2, 3, 5]
    assert np.flatnonzero(t2d).tolist() == [0, 3, 5, 8]
    assert "d2t                    0           2       3           5 " in DOC
    assert "t2d                    1   0   0   1   0   1   0   0   1   0 " in DOC


def test_the_steps_of_the_page_are_those_of_the_results() -> None:
    """6.13 / 1.94 = 3.16, and 2.53 / 3.16 = 0.80; 6.73 ms over 5.34 ms are 1.26."""
    assert "| 3 | 8 | 1.94 | 6.13 | 3.16 | 2.53 |" in text()
    assert any(line.startswith("| 8 | 3 | 6.73 | 1.26 |") for line in drafting_steps())
    assert "2.53 / 3.16 = 0.80" in DOC

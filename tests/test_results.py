"""docs/results.md is what the raw results say."""

from pathlib import Path

import pytest

from benchmarks.results import text, with_tables
from benchmarks.results_gpus import PICTURE, draw, own_link

ROOT = Path(__file__).parents[1]


def test_the_page_of_results_is_generated_from_the_raw_ones() -> None:
    assert (ROOT / "docs" / "results.md").read_text() == text()


def test_the_readme_s_tables_are_generated_from_the_raw_results() -> None:
    readme = (ROOT / "README.md").read_text()
    assert readme == with_tables(readme)
    stale = readme.replace("<!-- results -->\n", "<!-- results -->\n| stale |\n")
    assert with_tables(stale) == readme != stale


def test_figures_of_the_page_are_those_of_the_raw_results() -> None:
    """4,356,348 answer tokens in 61 s; 7,163,329 in the median of 57, 60, 62 and 65 s."""
    page = text()
    assert "71,416 tok/s" in page
    assert "117,432 tok/s" in page
    row = "| 3 | 1 | 70 | 494 | 514 | +5% (-4% to +15%), no difference shown | 2.45 | 100% |"
    assert row in page


def test_goals_have_their_figure_beside_them() -> None:
    """2.45 is below 3.1; 42 + 164 + 27 + 161 + 594 s are 988; EAGLE-3's row is the README's."""
    page = text()
    assert "| acceptance length at K=3, all prompt types, from 3.1 on | 2.45 | no |" in page
    assert "| from the model to the head in 12 minutes | 16.5 | no |" in page
    assert "| greedy outputs at 1 request those of `none` | 100% of the answers" in page
    assert (
        "| 32 | eagle3 | 3 | 11,422 | 7,511 | -32% (-40% to -22%) | slower | 2.54 | 2.51 |" in page
    )


def test_what_was_foreseen_stands_beside_what_came() -> None:
    """3,702 steps replayed and 3,705 served; 7,269,237 tokens in 39 s."""
    page = text()
    assert "| eagle3 | 3 | 81 | 8,801 | 3,702 | 3,705 | 0.08% |" in page
    assert "| ngram | 3 | 84 | 11,445 | 7,683 | 7,683 | 0.00% |" in page
    assert "186,391 tok/s" in page


def test_the_picture_of_a_step_is_drawn_from_the_raw_results(tmp_path: Path) -> None:
    draw(tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_text() == PICTURE.read_text()


def test_the_engine_s_own_link_is_what_its_least_all_reduce_took() -> None:
    """258.623 us of 65 are 3.9788 us each; 8,192 bytes at 297.424 GB/s take 0.0275 of them."""
    assert own_link().latency_us == pytest.approx(3.9788 - 0.0275, abs=1e-4)


def test_figures_of_two_gpus_are_those_of_the_raw_results() -> None:
    """110,372 / 123,834 is 0.89; 0.737 ms of a step of 6.998 are 11%."""
    page = text()
    assert "| training, tokens/s | 1.8 times | 123,834 | 110,372 | 0.89 |" in page
    assert "| 32 | 5 | 9.86 | 7.00 | 1.41 | 80 | 0.74 | 11% | 1.98 | 0.59 |" in page

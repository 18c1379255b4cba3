"""Greedy outputs: what is said of a method whose outputs are not the verifier's."""

from typing import Any

import pytest

from specmill.fidelity import fidelity_section, flaw, footnotes, marked, num_wrong
from tests.benches import comparable
from tests.surfaces import place

Results = dict[str, dict[str, Any]]


@pytest.fixture
def results() -> Results:
    return comparable()


def differ(results: Results, name: str, index: int, **figures: Any) -> None:
    """Change figures of the method's row with this index."""
    results[name]["rows"][index] |= figures


def lines(results: Results) -> list[str]:
    """The table's lines without its head, then the sentences."""
    section = fidelity_section(results)
    return [line for line in section[section.index("") + 3 :] if line][2:]


def test_a_method_and_k_has_one_line_over_all_loads(results: Results) -> None:
    differ(results, "eagle3", 4, identical_outputs=0.75, first_divergence=31, largest_gap=0.0625)
    differ(results, "eagle3", 6, identical_outputs=0.5, first_divergence=7, largest_gap=0.25)
    assert lines(results) == [
        "| none | 0 | 100% | 100% | - | - | 0 |",
        "| ngram | 3 | 100% | 100% | - | - | 0 |",
        "| eagle3 | 1 | 100% | 100% | - | - | 0 |",
        "| eagle3 | 2 | 75% | 50% | 7 | 0.25 | 0 |",
    ]
    assert fidelity_section(results)[4] == (
        "| method | K | 1 in flight | 8 in flight | first divergence | largest gap | not rounding |"
    )


def test_what_is_within_rounding_is_lossless(results: Results) -> None:
    differ(results, "eagle3", 4, identical_outputs=0.1, first_divergence=3, largest_gap=0.5)
    assert flaw("eagle3", results) is None


def test_a_difference_beyond_rounding_at_any_k_and_load_is_said(results: Results) -> None:
    differ(results, "eagle3", 0, identical_outputs=0.5, num_not_rounding=2, first_divergence=0)
    differ(results, "eagle3", 6, identical_outputs=0.5, num_not_rounding=1)
    # of one prompt type: counted among all of them already
    differ(results, "eagle3", 7, identical_outputs=0.5, num_not_rounding=1)
    assert num_wrong("eagle3", results) == 3
    assert flaw("eagle3", results) == "not lossless"
    assert flaw("ngram", results) is None
    assert "| eagle3 | 1 | 50% | 100% | 0 | - | 2 |" in lines(results)
    assert lines(results)[4:] == [
        "- **eagle3 is not lossless**: in 3 of its greedy answers the first other token is not "
        "nearly as likely to the baseline as the baseline's own."
    ]


def test_where_even_none_leaves_itself_a_method_is_blamed_for_clearly_more(
    results: Results,
) -> None:
    differ(results, "none", 2, identical_outputs=0.9, num_not_rounding=1)
    # of 24 + 24 answers; one-sided by hand: (C(24,8) 24 + C(24,9)) / C(48,9) = 0.0113
    differ(results, "eagle3", 6, identical_outputs=0.5, num_not_rounding=8)
    assert flaw("eagle3", results) is None
    assert flaw("none", results) is None
    assert lines(results)[4:] == [
        "- `none` left itself by more than rounding in 1 of 24 answers at 8 in flight."
    ]
    # (C(24,9) 24 + C(24,10)) / C(48,10) = 0.0051
    differ(results, "eagle3", 6, identical_outputs=0.5, num_not_rounding=9)
    assert num_wrong("eagle3", results) == 9
    # at one request in flight `none` is always itself
    differ(results, "ngram", 0, identical_outputs=0.5, num_not_rounding=1)
    assert num_wrong("ngram", results) == 1


@pytest.mark.parametrize(
    ("lossless", "expected"), [(True, None), (None, None), (False, "not lossless when sampled")]
)
def test_samples_that_failed_make_a_method_not_lossless_too(
    results: Results, lossless: bool | None, expected: str | None
) -> None:
    results["ngram"]["sampling"] = {"lossless": lossless}
    assert flaw("ngram", results) == expected
    assert flaw("eagle3", results) is None


def test_what_is_not_lossless_is_shown_with_a_mark(results: Results) -> None:
    assert marked(results) == results
    results["ngram"]["sampling"] = {"lossless": False}
    assert footnotes(results, None) == [
        "† Not lossless when sampled: ngram. At temperature 1 the samples have another "
        "distribution than the verifier's, and no cause is known."
    ]
    differ(results, "eagle3", 4, num_not_rounding=3)
    assert list(marked(results)) == ["none", "ngram †", "eagle3 ‡"]
    assert marked(results)["ngram †"] is results["ngram"]


def test_a_footnote_has_the_known_cause_and_that_the_plain_server_passes(results: Results) -> None:
    assert footnotes(results, "vllm#1 swaps tokens") == []
    results["ngram"]["sampling"] = {"lossless": False}
    results["none"]["sampling"] = {"lossless": True}
    differ(results, "eagle3", 4, num_not_rounding=3)
    assert footnotes(results, "vllm#1 swaps tokens") == [
        "‡ Not lossless: greedy answers that leave the verifier's by more than rounding explains, "
        "3 of eagle3.",
        "† Not lossless when sampled: ngram. At temperature 1 the samples have another "
        "distribution than the verifier's: vllm#1 swaps tokens. A server without speculation is "
        "not affected: `none` passes the same test.",
    ]


def test_without_none_methods_are_still_judged(results: Results) -> None:
    del results["none"]
    differ(results, "ngram", 0, num_not_rounding=1)
    assert [flaw(name, results) for name in ("ngram", "eagle3")] == ["not lossless", None]


def test_what_was_not_compared_is_left_out(results: Results) -> None:
    differ(results, "eagle3", 4, identical_outputs=None)
    refused = {"rows": [place(3, 1, 0)], "not_served": "too wide"}
    assert lines(results | {"refused": refused}) == [
        "| none | 0 | 100% | 100% | - | - | 0 |",
        "| ngram | 3 | 100% | 100% | - | - | 0 |",
        "| eagle3 | 1 | 100% | 100% | - | - | 0 |",
        "| eagle3 | 2 | - | 100% | - | - | 0 |",
    ]
    assert fidelity_section({"refused": refused}) == []
    assert flaw("refused", {"refused": refused}) is None

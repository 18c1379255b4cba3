"""What the report says about the heads that rows serve."""

from typing import Any

from specmill.causes import causes, heads_section, served_at_0


def bench(
    head: dict[str, Any], *rates: tuple[int, str, float | None], k: int = 3
) -> dict[str, Any]:
    """A bench's JSON with the acceptance rate at position 0 by concurrency and category."""
    return {
        "num_speculative_tokens": k,
        "head": head,
        "rows": [
            {
                "num_speculative_tokens": k,
                "concurrency": concurrency,
                "rate": None,
                "context": 0,
                "category": category,
                "output_tokens_per_s": 5.0,
                "acceptance_rate_pos_0": rate,
            }
            for concurrency, category, rate in rates
        ],
    }


OWN = {"trained_for": "tiny", "run_on": "tiny"}


def test_of_a_row_that_is_not_served_nothing_is_concluded_about_its_head() -> None:
    found = OWN | {"findings": {"width": "its hidden size is 4, not 8"}}
    narrow = bench(found, (1, "all", None)) | {"not_served": "its hidden size is 4, not 8"}
    assert causes("narrow", narrow) == []


def test_what_was_found_before_serving_is_the_cause() -> None:
    head = OWN | {"findings": {"d2t": "d2t is not t2d"}, "offline_acceptance_pos_0": 0.5}
    assert causes("mixed", bench(head, (1, "all", 0.0))) == ["**mixed**: d2t is not t2d"]


def test_a_head_that_is_worse_served_than_offline_is_fed_something_else() -> None:
    head = OWN | {"offline_acceptance_pos_0": 0.4}
    (line,) = causes("fed", bench(head, (8, "all", 0.39), (1, "all", 0.2), (1, "coding", 0.4)))
    assert "accepted at position 0 0.20, but 0.40 on stored hidden states" in line
    assert causes("fine", bench(head, (8, "all", 0.1), (1, "all", 0.29), (1, "coding", 0.1))) == []


def test_acceptance_is_compared_at_the_lowest_load_without_context() -> None:
    result = bench({}, (8, "all", 0.4), (1, "all", 0.3), (1, "all", 0.5), k=3)
    result["rows"][1]["context"] = 512
    assert served_at_0(result) == 0.5
    for row, rate in zip(result["rows"], (8.0, 0.5, 2.5), strict=True):
        row |= {"concurrency": None, "rate": rate, "context": 0}
    assert served_at_0(result) == 0.3


def test_without_figures_to_compare_nothing_is_claimed() -> None:
    assert causes("none", bench({}, (1, "all", None))) == []
    assert causes("new", bench(OWN, (1, "all", 0.01))) == []
    assert (
        causes("undrafted", bench(OWN | {"offline_acceptance_pos_0": 0.4}, (1, "all", None))) == []
    )


def test_the_section_says_for_whom_a_head_was_trained_and_on_what_it_ran() -> None:
    results = {
        "none": bench({}, (1, "all", None), k=0),
        "old": bench(
            {"trained_for": "tiny 1", "run_on": "tiny 2", "offline_acceptance_pos_0": 0.256},
            (1, "all", 0.243),
        ),
        "unknown": bench({"trained_for": None, "run_on": "tiny 2"}, (1, "all", 0.1)),
    }
    text = "\n".join(heads_section(results))
    assert "| old | tiny 1 | tiny 2 | 0.26 | 0.24 |" in text
    assert "| unknown | not said | tiny 2 | - | 0.10 |" in text
    assert "| none |" not in text
    assert heads_section({"none": results["none"]}) == []

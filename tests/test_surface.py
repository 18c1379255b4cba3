import math
from typing import Any

import pytest

from specmill.intervals import FASTER, SLOWER, UNDECIDED
from specmill.rows import load_label
from specmill.surface import (
    acceptance_by_category_rows,
    acceptance_rows,
    plot_rows,
    speedup_by_k_rows,
    speedup_by_load_rows,
    speedup_rows,
)
from tests.surfaces import place, sixteen_methods

Results = dict[str, dict[str, Any]]


def figures(
    speedup: float | None, *rates: float | None, verdict: str | None = FASTER
) -> dict[str, Any]:
    ends = {"speedup_low": speedup - 0.1, "speedup_high": speedup + 0.1} if speedup else {}
    return {
        "speedup": speedup,
        **(ends if verdict else {"speedup_low": None, "speedup_high": None}),
        "verdict": verdict,
    } | {f"acceptance_rate_pos_{position}": rate for position, rate in enumerate(rates)}


def bench(k: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"num_speculative_tokens": k, "rows": rows}


@pytest.fixture
def results() -> Results:
    """Rows in the order of a bench: by K, then load; a rate before a longer context."""
    return {
        "none": bench(0, [place(0, 1, 0), place(0, 8, 0)]),
        "ngram": bench(
            3,
            [
                place(3, 1, 0) | figures(1.25, None, None, None),
                place(3, 8, 0) | figures(0.75, 0.5, 0.25, 0.125, verdict=SLOWER),
                place(3, 0.5, 0) | figures(1.5, 0.5, 0.25, 0.125, verdict=None),
                place(3, 8, 1024) | figures(1.0, 0.4, 0.2, 0.1, verdict=UNDECIDED),
            ],
        ),
        "eagle3": bench(
            2,
            [
                place(1, 1, 0) | figures(1.75, 0.5, None),
                place(2, 1, 0) | figures(2.0, 0.5, 0.25),
                place(2, 1, 0, "maths") | figures(2.5, 0.75, 0.0),
                place(2, 8, 0) | figures(None, 0.5, 0.25),
            ],
        ),
        "narrow": bench(3, [place(3, 1, 0)]) | {"not_served": "its heads are 4 wide, not 8"},
    }


def picked(rows: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in rows]


def test_a_load_is_named_by_its_requests_and_its_context() -> None:
    assert load_label(place(3, 8, 0)) == "8 in flight"
    assert load_label(place(3, 8, 1024)) == "8 in flight +1024"
    assert load_label(place(3, 2.0, 0)) == "2/s"
    assert load_label(place(3, 0.25, 64)) == "0.25/s +64"


def test_acceptance_is_of_the_headline_k_by_load_without_what_drafted_nothing(
    results: Results,
) -> None:
    rows = acceptance_rows(results)
    assert picked(rows, "method", "load", "position", "acceptance_rate") == [
        ("eagle3", "1 in flight", 0, 0.5),
        ("eagle3", "1 in flight", 1, 0.25),
        ("ngram", "8 in flight", 0, 0.5),
        ("ngram", "8 in flight", 1, 0.25),
        ("ngram", "8 in flight", 2, 0.125),
        ("eagle3", "8 in flight", 0, 0.5),
        ("eagle3", "8 in flight", 1, 0.25),
        ("ngram", "8 in flight +1024", 0, 0.4),
        ("ngram", "8 in flight +1024", 1, 0.2),
        ("ngram", "8 in flight +1024", 2, 0.1),
        ("ngram", "0.5/s", 0, 0.5),
        ("ngram", "0.5/s", 1, 0.25),
        ("ngram", "0.5/s", 2, 0.125),
    ]


def test_acceptance_is_in_the_order_of_positions_beyond_nine() -> None:
    rates = [(12 - position) / 100 for position in range(12)]
    row = dict(sorted((place(12, 1, 0) | figures(1.5, *rates)).items()))
    found = acceptance_rows({"eagle3": bench(12, [row])})
    assert picked(found, "position", "acceptance_rate") == list(enumerate(rates))


def test_acceptance_by_prompt_type_is_at_the_lowest_load_and_a_measured_zero_stays(
    results: Results,
) -> None:
    # ngram drafted nothing at its lowest load: no other load stands in for it
    rows = acceptance_by_category_rows(results)
    assert picked(rows, "method", "load", "category", "position", "acceptance_rate") == [
        ("eagle3", "1 in flight", "all", 0, 0.5),
        ("eagle3", "1 in flight", "all", 1, 0.25),
        ("eagle3", "1 in flight", "maths", 0, 0.75),
        ("eagle3", "1 in flight", "maths", 1, 0.0),
    ]


def test_the_lowest_load_of_a_method_that_ran_in_open_loop_only_is_its_lowest_rate() -> None:
    rows = [place(1, rate, 0) | figures(1.5, rate / 10) for rate in (4.0, 0.5, 2.0)]
    found = acceptance_by_category_rows({"ngram": bench(1, rows)})
    assert picked(found, "load", "acceptance_rate") == [("0.5/s", 0.05)]


def test_speedup_by_prompt_type_has_the_interval_or_none_and_leaves_out_what_is_null(
    results: Results,
) -> None:
    names = ("method", "load", "category", "speedup", "speedup_low", "speedup_high", "verdict")
    assert picked(speedup_rows(results), *names) == [
        ("ngram", "1 in flight", "all", 1.25, 1.15, 1.35, FASTER),
        ("eagle3", "1 in flight", "all", 2.0, 1.9, 2.1, FASTER),
        ("eagle3", "1 in flight", "maths", 2.5, 2.4, 2.6, FASTER),
        ("ngram", "8 in flight", "all", 0.75, 0.65, 0.85, SLOWER),
        ("ngram", "8 in flight +1024", "all", 1.0, 0.9, 1.1, UNDECIDED),
        ("ngram", "0.5/s", "all", 1.5, None, None, None),
    ]


def test_a_rate_and_another_context_have_panels_of_their_own(results: Results) -> None:
    names = ("panel", "method", "requests", "speedup")
    assert picked(speedup_by_load_rows(results), *names) == [
        ("requests in flight", "ngram", 1, 1.25),
        ("requests in flight", "eagle3", 1, 2.0),
        ("requests in flight", "ngram", 8, 0.75),
        ("requests in flight +1024", "ngram", 8, 1.0),
        ("requests per second", "ngram", 0.5, 1.5),
    ]


def test_speedup_by_k_has_every_k_over_all_prompt_types(results: Results) -> None:
    names = ("method", "num_speculative_tokens", "load", "speedup", "verdict")
    assert picked(speedup_by_k_rows(results), *names) == [
        ("ngram", 3, "1 in flight", 1.25, FASTER),
        ("eagle3", 1, "1 in flight", 1.75, FASTER),
        ("eagle3", 2, "1 in flight", 2.0, FASTER),
        ("ngram", 3, "8 in flight", 0.75, SLOWER),
        ("ngram", 3, "8 in flight +1024", 1.0, UNDECIDED),
        ("ngram", 3, "0.5/s", 1.5, None),
    ]


def test_none_beside_itself_is_in_the_speedups_and_not_in_the_map_of_k(results: Results) -> None:
    results["none"]["rows"][0] |= figures(1.0, verdict=UNDECIDED)
    assert ("none", 1.0) in picked(speedup_rows(results), "method", "speedup")
    assert ("none", 1.0) in picked(speedup_by_load_rows(results), "method", "speedup")
    assert "none" not in {row["method"] for row in speedup_by_k_rows(results)}


def test_a_method_that_is_not_served_changes_no_plot(results: Results) -> None:
    served = {name: result for name, result in results.items() if name != "narrow"}
    assert plot_rows(results) == plot_rows(served)


def test_without_a_speculating_method_every_plot_has_one_row_without_a_value(
    results: Results,
) -> None:
    for name, rows in plot_rows({"none": results["none"]}).items():
        assert len(rows) == 1, name
        value = "acceptance_rate" if name.startswith("acceptance") else "speedup"
        assert (rows[0]["method"], rows[0][value]) == ("none", None), name


def test_the_row_that_stands_in_has_the_keys_of_a_measured_one(results: Results) -> None:
    nothing = plot_rows({"none": results["none"]})
    for name, rows in plot_rows(results).items():
        assert {frozenset(row) for row in rows} == {frozenset(nothing[name][0])}, name


def test_sixteen_methods_give_a_row_for_every_measured_cell() -> None:
    rows = plot_rows(sixteen_methods())
    # 14 of them have figures, at 3 concurrencies x 2 contexts; K is 3 of 1, 2, 3, 5
    assert {name: len(of_plot) for name, of_plot in rows.items()} == {
        "acceptance": 14 * 6 * 3,
        "acceptance_by_category": 14 * 7 * 3,
        "speedup": 14 * 6 * 7,
        "speedup_by_load": 14 * 6,
        "speedup_by_k": 14 * 6 * 4,
    }
    values = [row["speedup"] for row in rows["speedup_by_k"]]
    assert all(math.isfinite(value) and value > 0 for value in values)

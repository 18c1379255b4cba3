from typing import Any

import pytest

from specmill.tables import latency_table, overview_table, percent, prompt_type_table, speed_table
from tests.benches import BENCH, alone, beside, comparable, row
from tests.surfaces import place

Named = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def rows() -> Named:
    """All rows, of both loads."""
    return [(name, one) for name, result in comparable().items() for one in result["rows"]]


def of_one(rows: Named) -> Named:
    """Rows of one request in flight."""
    return [(name, one) for name, one in rows if one["concurrency"] == 1]


def test_the_overview_has_a_line_per_method_and_k_and_a_column_per_load(rows: Named) -> None:
    assert overview_table(rows) == [
        "| method | K | 1 in flight | 8 in flight |",
        "| --- | ---: | ---: | ---: |",
        "| none | 0 | +0.2% (-2% to +3%) | -0.4% (-3% to +2%) |",
        "| ngram | 3 | **+9% (+5% to +12%)** | **-8% (-12% to -5%)** |",
        "| eagle3 | 1 | **+20% (+15% to +25%)** | +1% (-3% to +5%) |",
        "| eagle3 | 2 | **+25% (+20% to +30%)** | **-25% (-30% to -20%)** |",
    ]


def test_loads_of_the_overview_are_in_the_order_of_the_plots() -> None:
    loads = [(2.5, 0), (8, 512), (8, 0), (0.5, 0), (16, 0)]
    figures = beside(40.0, 50.0, 1.25)
    rows = [("ngram", place(3, load, context) | figures) for load, context in loads]
    assert overview_table(rows)[0] == (
        "| method | K | 8 in flight | 16 in flight | 8 in flight +512 | 0.5/s | 2.5/s |"
    )


def test_what_was_not_compared_is_a_dash_and_what_has_no_interval_is_plain() -> None:
    rows = [
        ("few", row(3, 1, "all", beside(40.0, 50.0, 1.25))),
        ("few", row(9, 1, "all", dict.fromkeys(beside(1.0, 1.0, 1.0)))),
        ("refused", place(3, 1, 0)),
        ("refused", place(3, 8, 0)),
        ("uncompared", row(3, 2, "all", alone(50.0))),
    ]
    assert overview_table(rows) == [
        "| method | K | 1 in flight | 8 in flight |",
        "| --- | ---: | ---: | ---: |",
        "| few | 3 | +25% | - |",
        "| few | 9 | not served | - |",
        "| refused | 3 | not served | not served |",
    ]


def test_the_table_of_speeds_has_every_k_beside_its_own_baseline(rows: Named) -> None:
    assert speed_table(of_one(rows)) == [
        "| method | K | baseline tok/s | tok/s | change of a pair, median (95% interval) | pairs | "
        "verdict | acceptance length | drafted steps | tokens/step |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: |",
        "| none | 0 | 40.0 | 40.1 | +0.2% (-2% to +3%) | 8 | no difference shown | - | - | - |",
        "| ngram | 3 | 40.4 | 44.0 | +9% (+5% to +12%) | 8 | faster | - | - | - |",
        "| eagle3 | 1 | 40.0 | 48.0 | +20% (+15% to +25%) | 8 | faster | 1.40 | 100% | 1.38 |",
        "| eagle3 | 2 | 40.0 | 50.0 | +25% (+20% to +30%) | 8 | faster | 1.50 | 100% | 1.38 |",
        "",
    ]


def test_totals_that_changed_the_other_way_than_the_median_pair_are_said_below_the_table() -> None:
    odd = row(3, 1, "all", beside(40.0, 38.0, 1.02, (0.9, 1.1)))
    typed = row(3, 1, "maths", beside(40.0, 38.0, 1.02, (0.9, 1.1)))
    rated = row(3, 2.5, "all", beside(40.0, 38.0, 1.02, (0.9, 1.1)))
    plain = row(2, 1, "all", beside(40.0, 41.0, 1.02, (0.9, 1.1)))
    named = [("ngram", one) for one in (odd, typed, rated, plain)]
    # 38 / 40
    assert speed_table(named)[-2] == (
        "Median pair and total tok/s disagree in sign: ngram, K=3: +2% and -5%. Long answers weigh "
        "more in a total; the median counts every pair once."
    )


@pytest.mark.parametrize(
    ("figures", "line"),
    [
        (beside(40.0, 50.0, 1.25), "40.0 | 50.0 | +25% | 4 | too few pairs"),
        (
            alone(50.0) | {"reference_tokens_per_s": 40.0, "speedup": 1.25},
            "40.0 | 50.0 | +25% | - | single run",
        ),
        (alone(50.0), "- | 50.0 | - | - | -"),
        (alone(50.0) | {"output_tokens_per_s": None}, "- | - | - | - | -"),
        ({"output_tokens_per_s": None}, "- | - | - | - | not served"),
        # of a K that was refused: a row has every field that others of its method have
        (dict.fromkeys(beside(1.0, 1.0, 1.0)), "- | - | - | - | not served"),
    ],
)
def test_a_row_without_an_interval_says_why(figures: dict[str, Any], line: str) -> None:
    rows = [("method", row(3, 1, "all", figures))]
    assert speed_table(rows)[2] == f"| method | 3 | {line} | - | - | - |"


def test_times_are_three_percentiles_each(rows: Named) -> None:
    figures = alone(40.0) | {"itl_ms_p90": 75.25, "chunk_ms_p50": None, "num_requests": 7}
    figures |= {"chunk_ms_p90": None, "chunk_ms_p99": None, "e2e_ms_p99": None, "goodput": None}
    named = [("some", row(0, 1, "all", figures)), ("typed", row(0, 1, "maths", figures))]
    assert latency_table(named, BENCH) == [
        "| method | K | requests | first token, ms | per token, ms | between chunks, ms | "
        "whole answer, ms | good requests/s (first token in 1000 ms, others in 50 each) |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| some | 0 | 7 | 100 / 140 / 149 | 75.0 / 75.2 / 124.0 | - | 1050 / 1090 / - | - |",
        "",
    ]
    assert (
        "| none | 0 | 24 | 100 / 140 / 149 | 75.0 / 115.0 / 124.0 | 80.0 / 120.0 / 129.0 | "
        in (latency_table(of_one(rows), BENCH)[2])
    )


def test_without_any_time_there_is_no_table_of_times() -> None:
    assert latency_table([("refused", place(3, 1, 0))], BENCH) == []


def test_prompt_types_are_in_a_table_of_their_own(rows: Named) -> None:
    assert prompt_type_table(of_one(rows)) == [
        "| prompt type | method | K | baseline tok/s | tok/s | change of a pair, median (95% "
        "interval) | verdict | acceptance length |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- | ---: |",
        "| maths | ngram | 3 | 40.0 | 30.0 | -25% (-30% to -20%) | slower | - |",
        "| maths | eagle3 | 1 | 40.0 | 48.0 | +20% (+10% to +30%) | faster | 1.40 |",
        "| maths | eagle3 | 2 | 40.0 | 60.0 | +50% (+40% to +60%) | faster | 1.75 |",
        "",
    ]


def test_with_several_k_one_prompt_type_lies_together(rows: Named) -> None:
    eagle3 = [(name, one) for name, one in of_one(rows) if name == "eagle3"]
    writing = [(name, one | {"category": "writing"}) for name, one in eagle3[1::2]]
    lines = [line.split(" | ") for line in prompt_type_table(eagle3 + writing)[2:-1]]
    assert [(line[0], line[2]) for line in lines] == [
        ("| maths", "1"),
        ("| maths", "2"),
        ("| writing", "1"),
        ("| writing", "2"),
    ]


def test_without_a_speculating_method_there_are_no_prompt_types(rows: Named) -> None:
    assert prompt_type_table([(name, one) for name, one in rows if name == "none"]) == []


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (1.25, "+25%"),
        (0.744, "-26%"),
        (1.006, "+1%"),
        (1.003, "+0.3%"),
        (0.996, "-0.4%"),
        (1.0, "+0.0%"),
        (0.9999, "+0.0%"),
        (2.5, "+150%"),
    ],
)
def test_a_change_is_whole_per_cent_unless_that_would_be_nothing(ratio: float, text: str) -> None:
    assert percent(ratio) == text

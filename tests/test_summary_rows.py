"""Which rows a summary has, and which fields."""

from typing import Any

from specmill.compat import engine_facts
from specmill.recording import Recording
from specmill.rows import PLACE
from specmill.summary import by_name, same_fields, summarise, without_empty_lists
from tests.benched import bench_section, both, drafted

Rows = list[dict[str, Any]]


def rows_of(cells: list[dict[str, Any]]) -> Rows:
    return summarise(Recording(cells), bench_section())


def test_rows_are_all_and_then_the_categories_in_their_order() -> None:
    rows = rows_of(both(1.0, 1.0) + both(1.0, 1.0, category="maths", number=1))
    assert [row["category"] for row in rows] == ["all", "coding", "maths"]
    assert [row["num_requests"] for row in rows] == [2, 1, 1]
    assert list(rows[0])[: len(PLACE)] == list(PLACE)


PLACES: list[dict[str, Any]] = [
    {"k": 1},
    {"k": 1, "concurrency": 8},
    {"k": 1, "concurrency": None, "rate": 2.0},
    {"k": 1, "context": 64},
    {"k": 2, "phase": 1},
]


def test_loads_contexts_and_values_of_k_are_kept_apart_and_ordered_by_k() -> None:
    cells = [one for n, place in enumerate(PLACES) for one in both(1.0, 1.0 / (n + 1), **place)]
    rows = rows_of(cells[-2:] + cells[:-2])
    found = [tuple(row[n] for n in (*PLACE, "output_tokens_per_s")) for row in rows]
    assert found[::2] == [
        (1, 1, None, 0, "all", 4.0),
        (1, 8, None, 0, "all", 8.0),
        (1, None, 2.0, 0, "all", 12.0),
        (1, 1, None, 64, "all", 16.0),
        (2, 1, None, 0, "all", 20.0),
    ]
    assert [row["category"] for row in rows[1::2]] == ["coding"] * 5


def test_every_row_has_the_same_fields_and_none_where_nothing_was_measured() -> None:
    silent = both(1.0, 1.0, k=1)
    drafting = both(1.0, 1.0, k=2, phase=1, counters=drafted(1, 1, 1))
    rows = rows_of([*silent, *drafting])
    assert {tuple(row) for row in rows} == {tuple(rows[0])}
    assert [row["acceptance_length"] for row in rows] == [None, None, 3.0, 3.0]
    assert [row["acceptance_rate_pos_1"] for row in rows] == [None, None, 1.0, 1.0]
    assert [row["acceptance_given_pos_1"] for row in rows] == [None, None, 1.0, 1.0]


def test_rows_get_the_fields_of_each_other() -> None:
    assert same_fields([{"a": 1}, {"b": 2, "a": 3}]) == [{"a": 1, "b": None}, {"a": 3, "b": 2}]
    assert same_fields([]) == []


def test_how_the_methods_engine_ran_is_text_and_none_where_it_did_not_say() -> None:
    facts = engine_facts("Using FLASH attention backend\nenforce_eager=False")
    servers = {
        "reference_k0_0": engine_facts("Using OTHER attention backend"),
        "method_k2_0": facts,
        "method_k2_1": facts | {"enforce_eager": "True", "moe_backend": None},
    }
    cells = both(1.0, 1.0) + both(1.0, 1.0, number=1)
    cells[3]["server"] = "method_k2_1"
    (row, _) = summarise(Recording(cells, servers), bench_section())
    assert row["attention_backend"] == "FLASH"
    assert row["enforce_eager"] == "False | True"
    assert row["moe_backend"] is None
    assert rows_of(cells)[0]["attention_backend"] is None


def test_by_name_holds_the_figures_of_one_k_by_load_and_category() -> None:
    cells = [one for place in PLACES for one in both(1.0, 1.0, **place)]
    named = by_name(rows_of(cells), 1)
    assert list(named) == ["c1", "c8", "r2", "c1_ctx64"]
    assert all(list(figures) == ["all", "coding"] for figures in named.values())
    assert named["c1"]["all"]["speedup"] == 1.0
    assert not set(PLACE) & set(named["c1"]["all"])
    assert list(by_name(rows_of(cells), 2)) == ["c1"]


def test_an_empty_list_becomes_none_at_any_depth() -> None:
    tree = {"a": {"warnings": [], "cores": [0, 1]}, "b": [], "c": False}
    assert without_empty_lists(tree) == {
        "a": {"warnings": None, "cores": [0, 1]},
        "b": None,
        "c": False,
    }

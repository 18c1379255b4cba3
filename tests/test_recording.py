import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specmill.files import read_json
from specmill.plan import Cell, Run, plan_cells
from specmill.recording import CellCache, Recording
from specmill.records import read_requests
from specmill.summary import headline_k, summarise
from tests.benched import answer, bench_section, cell, drafted, prompts, request
from tests.lab import Lab

INPUTS: dict[str, Any] = {
    "method": "ngram",
    "head": "h",
    "verifier": {"fingerprint": "f"},
    "bench": {"max_tokens": 8},
    "hardware": {"machine": "m"},
}
REFERENCE, METHOD = Run("reference", None, 0, None), Run("method", 3, 0, {"k": 3})


@pytest.fixture
def recording() -> Recording:
    """Two loads, two contexts, two rounds and both kinds of loop, with several requests a cell."""
    answers = [
        request([1, 2, 3], 0.0, (0.1, 2), (0.25, 1), key="a"),
        request([4, 5], 0.125, (0.5, 2), key="b"),
    ]
    places: list[dict[str, Any]] = [
        {},
        {"number": 1, "category": "maths", "fresh_prompts": False},
        {"number": 2, "concurrency": 8},
        {"number": 3, "concurrency": None, "rate": 2.5, "context": 64},
    ]
    cells = []
    for number in range(2):
        for place in places:
            where = place | {"round": number, "execution": f"execution {number}"}
            cells.append(cell("reference", 1.5, *answers, **where))
            cells.append(cell("method", 0.7 + number, *answers, counters=drafted(3, 2, 1), **where))
    facts = {"dtype": "bfloat16", "warnings": [], "bound_cores": [0, 1], "startup_s": 1.5}
    divergence = {"k": 2, "concurrency": 8, "rate": None, "context": 0, "category": "coding",
                  "sample_key": "a", "position": 1, "reference_id": 2, "method_id": None,
                  "gap": None}  # fmt: skip
    return Recording(cells, {"reference_k0_0": facts, "method_k2_0": facts}, [divergence])


def test_a_recording_is_read_as_it_was_written(tmp_path: Path, recording: Recording) -> None:
    before = copy.deepcopy(recording)
    recording.write(tmp_path / "deep/ngram", "ngram")
    assert recording == before
    assert Recording.read(tmp_path / "deep/ngram") == recording


def test_the_tables_are_a_function_of_the_files(tmp_path: Path, recording: Recording) -> None:
    recording.write(tmp_path / "ngram", "ngram")
    read = Recording.read(tmp_path / "ngram")
    bench = bench_section()
    assert summarise(read, bench) == summarise(recording, bench)
    assert headline_k(read) == headline_k(recording) == 2


@pytest.mark.parametrize("reference", ["beside", "bracket"])
def test_what_a_bench_measured_survives_its_files(tmp_path: Path, reference: str) -> None:
    bench = bench_section(reference=reference, requests=1, rates=[200.0], context=[0, 2], rounds=2)
    rounds = plan_cells(prompts("coding", 20) + prompts("maths", 20, 50), bench)
    configs: dict[int, dict[str, Any] | None] = {3: {"k": 3}, 1: {"k": 1}}
    measured = Lab(tmp_path, wrong={"method_k1"}).measure(configs, rounds, bench)
    measured.write(tmp_path / "raw", "ngram")
    read = Recording.read(tmp_path / "raw")
    assert read == measured
    rows = summarise(read, bench)
    assert rows == summarise(measured, bench)
    # K, two loads, two contexts; all and two categories
    assert len(rows) == 2 * 2 * 2 * 3
    assert {row["num_not_rounding"] for row in rows if row["category"] == "maths"} >= {0, 2}


def test_there_is_a_row_per_request_with_its_place(tmp_path: Path, recording: Recording) -> None:
    recording.write(tmp_path, "ngram")
    rows = read_requests(tmp_path / "requests.parquet")
    names = ("method", "role", "k", "round", "number", "index", "concurrency", "rate", "category")
    assert len(rows) == 2 * 2 * 4 * 2
    assert [tuple(row[name] for name in names) for row in rows[:5]] == [
        ("ngram", "reference", None, 0, 0, 0, 1, None, "coding"),
        ("ngram", "reference", None, 0, 0, 1, 1, None, "coding"),
        ("ngram", "method", 2, 0, 0, 0, 1, None, "coding"),
        ("ngram", "method", 2, 0, 0, 1, 1, None, "coding"),
        ("ngram", "reference", None, 0, 1, 0, 1, None, "maths"),
    ]
    assert [row["output_ids"] for row in rows[:2]] == [[1, 2, 3], [4, 5]]
    assert "requests" not in read_json(tmp_path / "cells.json")["cells"][0]


def test_an_earlier_recording_is_replaced_with_all_its_files(
    tmp_path: Path, recording: Recording
) -> None:
    recording.write(tmp_path / "raw", "ngram")
    (tmp_path / "raw/left.txt").touch()
    Recording().write(tmp_path / "raw", "ngram")
    assert Recording.read(tmp_path / "raw") == Recording()
    assert {path.name for path in (tmp_path / "raw").iterdir()} == {
        "requests.parquet",
        "cells.json",
    }


@pytest.fixture
def unit() -> list[tuple[Run, Cell]]:
    ((first, _),) = plan_cells(prompts("coding", 2), bench_section())
    return [(REFERENCE, first), (METHOD, first)]


RECORDS = [cell("reference", 1.5), cell("method", 0.1 + 0.2, answer([1, 2], 0.1))]


def test_a_finished_unit_is_found_again_by_a_later_execution(
    tmp_path: Path, unit: list[tuple[Run, Cell]]
) -> None:
    cache = CellCache(tmp_path, INPUTS)
    assert cache.get(unit) is None
    cache.put(unit, RECORDS)
    assert CellCache(tmp_path, copy.deepcopy(INPUTS)).get(unit) == RECORDS


@pytest.mark.parametrize("name", list(INPUTS))
def test_a_unit_is_not_found_where_any_input_of_its_stage_differs(
    tmp_path: Path, unit: list[tuple[Run, Cell]], name: str
) -> None:
    CellCache(tmp_path, INPUTS).put(unit, RECORDS)
    assert CellCache(tmp_path, INPUTS | {name: "other"}).get(unit) is None


def test_a_unit_is_not_found_under_other_runs_cells_or_in_another_order(
    tmp_path: Path, unit: list[tuple[Run, Cell]]
) -> None:
    cache = CellCache(tmp_path, INPUTS)
    cache.put(unit, RECORDS)
    (_, one), _ = unit
    others = [
        unit[::-1],
        unit[:1],
        unit[1:],
        [(REFERENCE, replace(one, round=1)), (METHOD, replace(one, round=1))],
        [(REFERENCE, replace(one, ids=([5, 99],))), (METHOD, replace(one, ids=([5, 99],)))],
        *(
            [(REFERENCE, one), (replace(METHOD, **changes), one)]
            for changes in (
                {"k": 2},
                {"phase": 1},
                {"role": "reference"},
                {"speculative_config": {"k": 3, "window": 2}},
            )
        ),
    ]
    assert [cache.get(other) for other in others] == [None] * len(others)


def test_facts_of_servers_are_kept_with_the_units(tmp_path: Path) -> None:
    cache = CellCache(tmp_path, INPUTS)
    assert cache.servers() == {}
    cache.put_servers({"reference_k0_0": {"dtype": None}})
    assert CellCache(tmp_path, INPUTS).servers() == {"reference_k0_0": {"dtype": None}}
    assert CellCache(tmp_path, INPUTS | {"head": "other"}).servers() == {}


def test_clearing_forgets_this_stage_and_leaves_the_others(
    tmp_path: Path, unit: list[tuple[Run, Cell]]
) -> None:
    mine, other = CellCache(tmp_path, INPUTS), CellCache(tmp_path, INPUTS | {"method": "eagle3"})
    for cache in (mine, other):
        cache.put(unit, RECORDS)
        cache.put_servers({"reference_k0_0": {}})
    mine.clear()
    assert mine.get(unit) is None
    assert mine.servers() == {}
    assert other.get(unit) == RECORDS
    mine.clear()  # nothing left: no error

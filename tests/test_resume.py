"""An interrupted bench goes on where it was."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specmill import cells
from specmill.plan import Cell, plan_cells
from specmill.recording import CellCache, Recording
from specmill.summary import summarise
from tests.benched import bench_section, prompts
from tests.lab import INPUTS, Lab, places, written

CONFIGS: dict[int, dict[str, Any] | None] = {3: {"k": 3}, 1: {"k": 1}}


class Killed(BaseException):
    """As a signal ends a stage."""


class Dying(CellCache):
    """Ends the stage once so many units were kept."""

    def __init__(self, folder: Path, units: int):
        super().__init__(folder / "cells", INPUTS)
        self._left = units

    def put(self, unit: Any, records: list[dict[str, Any]]) -> None:
        super().put(unit, records)
        self._left -= 1
        if self._left == 0:
            raise Killed


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def plan(reference: str) -> tuple[list[list[Cell]], Any]:
    bench = bench_section(reference=reference, requests=1, rounds=2, precision=1e-9)
    return plan_cells(prompts("coding", 4, 10) + prompts("maths", 4, 30), bench), bench


def sent(lab: Lab) -> Counter[tuple[str, tuple[int, ...]]]:
    """How often each label was sent each prompt, warm-ups aside."""
    return Counter((name.rpartition("_")[0], prompt) for name, prompt in lab.asked())


# beside has a unit per cell and phase, bracket one per cell and server: 8 and 12 in two rounds
@pytest.mark.parametrize(
    ("reference", "units"),
    [*(("beside", n) for n in range(1, 9)), *(("bracket", n) for n in range(1, 13))],
)
def test_killed_after_any_unit_it_goes_on_and_measures_nothing_twice(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, reference: str, units: int
) -> None:
    rounds, bench = plan(reference)
    with pytest.raises(Killed):
        lab.measure(CONFIGS, rounds, bench, Dying(lab.folder, units))
    kept = len(lab.asked())
    assert kept == units * (2 if reference == "beside" else 1)
    before = dict(lab.cache.servers())

    monkeypatch.setattr(cells, "EXECUTION", "later")
    recording = lab.measure(CONFIGS, rounds, bench)
    times = sent(lab)
    # beside, the reference answers every prompt once for each K
    expected = {label: 2 if label == "reference_k0" and reference == "beside" else 1
                for label, _ in times}  # fmt: skip
    assert set(expected) == {"reference_k0", "method_k3", "method_k1"}
    assert all(count == expected[label] for (label, _), count in times.items())
    assert len(times) == 3 * 4

    by_execution = Counter(cell["execution"] == "later" for cell in recording.cells)
    assert by_execution[False] == kept
    assert {cell["server"] for cell in recording.cells} <= set(recording.servers)
    assert before.items() <= recording.servers.items()


@pytest.mark.parametrize("reference", ["beside", "bracket"])
def test_what_was_interrupted_is_in_the_order_of_what_was_not(
    tmp_path: Path, reference: str
) -> None:
    rounds, bench = plan(reference)
    whole = Lab(tmp_path / "whole")
    cut = Lab(tmp_path / "cut")
    for lab in (whole, cut):
        lab.folder.mkdir()
    with pytest.raises(Killed):
        cut.measure(CONFIGS, rounds, bench, Dying(cut.folder, 5))
    expected = places(whole.measure(CONFIGS, rounds, bench))
    assert places(cut.measure(CONFIGS, rounds, bench)) == expected


def test_rows_say_which_figures_come_of_more_than_one_execution(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, bench = plan("beside")
    with pytest.raises(Killed):
        lab.measure(CONFIGS, rounds, bench, Dying(lab.folder, 5))  # K=3, and a cell of K=1
    monkeypatch.setattr(cells, "EXECUTION", "later")
    rows = summarise(lab.measure(CONFIGS, rounds, bench), bench)
    found = {(row["num_speculative_tokens"], row["category"]): row["one_execution"] for row in rows}
    assert found == {
        (3, "all"): True,
        (3, "coding"): True,
        (3, "maths"): True,
        (1, "all"): False,
        (1, "coding"): False,
        (1, "maths"): True,
    }


def test_a_pair_of_which_one_server_failed_is_measured_again_on_both(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, bench = plan("beside")
    calls = iter(range(100))

    async def fails_at_the_fourth(*arguments: Any) -> dict[str, Any]:
        if next(calls) == 3:
            raise RuntimeError("the engine is gone")
        return await cells.measure_cell(*arguments)

    monkeypatch.setattr("specmill.bench.measure_cell", fails_at_the_fourth)
    with pytest.raises(RuntimeError, match="the engine is gone"):
        lab.measure(CONFIGS, rounds, bench)
    monkeypatch.setattr(cells, "EXECUTION", "later")
    recording = lab.measure(CONFIGS, rounds, bench)
    # the first two cells came of the pair before, the third was lost with the fourth
    assert [cell["execution"] == "later" for cell in recording.cells] == [False] * 2 + [True] * 14


def test_a_bench_that_ended_is_found_whole_until_its_cells_are_cleared(lab: Lab) -> None:
    rounds, bench = plan("bracket")
    first = lab.measure(CONFIGS, rounds, bench)
    starts = len(lab.starts)
    assert written(lab.measure(CONFIGS, rounds, bench)) == written(first)
    assert len(lab.starts) == starts
    lab.cache.clear()
    again: Recording = lab.measure(CONFIGS, rounds, bench)
    assert len(lab.starts) == 2 * starts
    assert written(again) != written(first)


@pytest.mark.parametrize("left", [0, 1, 40])
def test_a_unit_that_was_cut_is_measured_again_and_no_other(lab: Lab, left: int) -> None:
    rounds, bench = plan("beside")
    first = places(lab.measure(CONFIGS, rounds, bench))
    asked = len(lab.asked())
    units = sorted(path for path in lab.folder.glob("cells/*/*.json") if path.stem != "servers")
    os.truncate(units[3], left)
    assert places(lab.measure(CONFIGS, rounds, bench)) == first
    assert len(lab.asked()) == asked + 2  # the method and its reference


def test_cells_whose_servers_facts_were_cut_are_measured_again(lab: Lab) -> None:
    rounds, bench = plan("beside")
    lab.measure(CONFIGS, rounds, bench)
    asked = len(lab.asked())
    (facts,) = lab.folder.glob("cells/*/servers.json")
    os.truncate(facts, 30)
    recording = lab.measure(CONFIGS, rounds, bench)
    assert len(lab.asked()) == 2 * asked
    assert {cell["server"] for cell in recording.cells} <= set(recording.servers)


def test_facts_of_the_servers_are_kept_before_what_they_measured(lab: Lab) -> None:
    class Cut(CellCache):
        def put(self, unit: Any, records: list[dict[str, Any]]) -> None:
            raise Killed

    rounds, bench = plan("beside")
    with pytest.raises(Killed):
        lab.measure(CONFIGS, rounds, bench, Cut(lab.folder / "cells", INPUTS))
    assert list(lab.cache.servers()) == ["method_k3_0", "reference_k0_0"]

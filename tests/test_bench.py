from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specmill.bench import not_served, precise_enough
from specmill.params_bench import Bench
from specmill.plan import Cell, plan_cells
from specmill.section import DoesNotFit
from specmill.summary import summarise
from tests.benched import bench_section, both, prompts
from tests.lab import Lab, places

ONE: dict[int, dict[str, Any] | None] = {3: {"k": 3}}
SWEEP: dict[int, dict[str, Any] | None] = {3: {"k": 3}, 1: {"k": 1}, 2: {"k": 2}}
NEVER, ALWAYS = 1e-9, 1e9
"""Precision that no interval of a few servers on one machine has, and that every one has."""


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def plan(**changes: Any) -> tuple[list[list[Cell]], Bench]:
    """Rounds of two categories, prompts that end in 10 ... and 30 ..., and their section."""
    bench = bench_section(**({"requests": 1, "precision": NEVER} | changes))
    samples = prompts("coding", 12, 10) + prompts("maths", 12, 30)
    return plan_cells(samples, bench), bench


def test_beside_each_cell_is_answered_by_both_servers_and_each_is_started_once(lab: Lab) -> None:
    rounds, bench = plan(rounds=2)
    recording = lab.measure(ONE, rounds, bench)
    assert places(recording) == [
        "reference_k0 r0 c0", "method_k3 r0 c0", "method_k3 r0 c1", "reference_k0 r0 c1",
        "method_k3 r1 c0", "reference_k0 r1 c0", "reference_k0 r1 c1", "method_k3 r1 c1",
    ]  # fmt: skip
    assert lab.starts == ["reference_k0_0", "method_k3_0"]
    assert all(cell["side_by_side"] for cell in recording.cells)


def test_bracket_has_one_server_up_and_the_last_of_a_round_stays_for_the_next(lab: Lab) -> None:
    rounds, bench = plan(rounds=2, reference="bracket")
    recording = lab.measure(ONE, rounds, bench)
    assert places(recording) == [
        "reference_k0 r0 c0", "reference_k0 r0 c1", "method_k3 r0 c0", "method_k3 r0 c1",
        "method_k3 r1 c0", "method_k3 r1 c1", "reference_k0 r1 c0", "reference_k0 r1 c1",
    ]  # fmt: skip
    assert lab.events == [
        "+ reference_k0_0", "- reference_k0_0", "+ method_k3_0", "- method_k3_0",
        "+ reference_k0_1", "- reference_k0_1",
    ]  # fmt: skip
    assert lab.most_up == 1
    assert not any(cell["side_by_side"] for cell in recording.cells)


def test_a_sweep_beside_keeps_the_reference_up_and_stops_a_finished_k(lab: Lab) -> None:
    rounds, bench = plan(rounds=2)
    lab.measure(SWEEP, rounds, bench)
    assert lab.events[:-2] == [
        "+ reference_k0_0", "+ method_k3_0", "- method_k3_0", "+ method_k1_0", "- method_k1_0",
        "+ method_k2_0",
    ]  # fmt: skip
    assert lab.most_up == 2
    asked = [name for name, _ in lab.asked()]
    assert asked.count("reference_k0_0") == 3 * asked.count("method_k1_0") == 3 * 4


def test_a_sweep_in_bracket_starts_each_k_once_a_round_but_the_last_of_the_round_before(
    lab: Lab,
) -> None:
    rounds, bench = plan(rounds=3, reference="bracket")
    lab.measure(SWEEP, rounds, bench)
    assert [name[:-2] for name in lab.starts] == [
        "reference_k0", "method_k3", "method_k1", "method_k2",
        "method_k1", "method_k3", "reference_k0",
        "method_k3", "method_k1", "method_k2",
    ]  # fmt: skip
    assert lab.most_up == 1


def test_every_record_names_the_server_that_answered_it(lab: Lab) -> None:
    rounds, bench = plan(rounds=2, reference="bracket")
    recording = lab.measure(SWEEP, rounds, bench)
    named = [(cell["server"], tuple(rounds[cell["round"]][cell["number"]].ids[0]))
             for cell in recording.cells]  # fmt: skip
    assert sorted(named) == sorted(lab.asked())
    assert {cell["server"] for cell in recording.cells} == set(recording.servers)


def test_none_is_measured_against_itself(lab: Lab) -> None:
    rounds, bench = plan(rounds=2)
    lab.measure({3: None, 1: None}, rounds, bench)
    assert lab.starts == ["reference_k0_0", "method_k0_0"]


@pytest.mark.parametrize("reference", ["beside", "bracket"])
def test_rounds_end_once_the_interval_is_narrow_enough_but_not_before_the_second(
    lab: Lab, reference: str
) -> None:
    rounds, bench = plan(rounds=4, requests=3, reference=reference, precision=ALWAYS)
    recording = lab.measure(ONE, rounds, bench)
    assert {cell["round"] for cell in recording.cells} == {0, 1}


def test_rounds_go_on_to_the_last_while_the_interval_is_too_wide(lab: Lab) -> None:
    rounds, bench = plan(rounds=3, requests=3)
    recording = lab.measure(ONE, rounds, bench)
    assert {cell["round"] for cell in recording.cells} == {0, 1, 2}


def test_rounds_go_on_while_pairs_are_too_few_for_an_interval(lab: Lab) -> None:
    rounds, bench = plan(rounds=3, precision=ALWAYS)  # two pairs a round, six are needed
    recording = lab.measure(ONE, rounds, bench)
    assert {cell["round"] for cell in recording.cells} == {0, 1, 2}


def pairs_of(*ratios: float, **changes: Any) -> list[dict[str, Any]]:
    return [
        record
        for number, ratio in enumerate(ratios)
        for record in both(1.0, 1 / ratio, **({"number": number} | changes))
    ]


def test_precise_enough_is_an_interval_no_wider_than_asked() -> None:
    # of six pairs the interval spans all of them, and a server's start: 1 / 1.04 to 1.1 * 1.04
    cells = pairs_of(1.0, 1.02, 1.04, 1.06, 1.08, 1.1)
    assert precise_enough(cells, bench_section(precision=0.1826))
    assert not precise_enough(cells, bench_section(precision=0.1823))
    assert not precise_enough(cells[:-2], bench_section(precision=0.1826))  # five pairs


def test_precise_enough_asks_every_load_and_k_but_no_prompt_type() -> None:
    narrow = pairs_of(*[1.0] * 6) + pairs_of(*[1.0] * 6, category="maths")
    wide = pairs_of(0.5, 0.7, 0.9, 1.1, 1.3, 1.5)
    bench = bench_section(precision=0.2)
    assert precise_enough(narrow, bench)
    assert precise_enough(narrow + pairs_of(2.0, category="prose", number=9), bench)
    for changes in ({"concurrency": 8}, {"concurrency": None, "rate": 2.0}, {"context": 64}):
        assert not precise_enough(narrow + [cell | changes for cell in wide], bench)
    assert not precise_enough(narrow + pairs_of(*[0.5, 1.5] * 3, k=3, phase=1), bench)


def test_where_all_outputs_are_the_references_no_server_is_started_to_compare_them(
    lab: Lab,
) -> None:
    rounds, bench = plan(rounds=1, reference="bracket")
    recording = lab.measure(ONE, rounds, bench)
    assert lab.starts == ["reference_k0_0", "method_k3_0"]
    assert recording.divergences == []


@pytest.mark.parametrize("reference", ["beside", "bracket"])
def test_where_outputs_differ_the_reference_is_asked_how_likely_each_token_was(
    lab: Lab, reference: str
) -> None:
    rounds, bench = plan(rounds=1, reference=reference)
    lab.wrong = {"method_k3"}
    recording = lab.measure(ONE, rounds, bench)
    expected = ["reference_k0_0", "method_k3_0"]
    if reference == "bracket":  # it was stopped for the method
        expected.append("reference_k0_1")
    assert lab.starts == list(recording.servers) == expected
    coding, maths = recording.divergences
    assert coding["category"] == "coding"
    # [5, 10] is answered 11, 12 and 13 by the reference and 14 by the method
    found = [coding[name] for name in ("position", "reference_id", "method_id", "gap")]
    assert found == [2, 13, 14, 0.3]
    assert (maths["position"], maths["gap"]) == (0, None)  # 31 is not among the likely ones
    asked = lab.fakes[expected[-1] if reference == "bracket" else "reference_k0_0"][0].requests
    assert [one["prompt"] for one in asked if "logprobs" in one] == [[5, 10, 11, 12], [5, 30]]


@pytest.mark.parametrize("reference", ["beside", "bracket"])
def test_a_method_that_is_refused_at_every_k_does_not_fit(lab: Lab, reference: str) -> None:
    rounds, bench = plan(reference=reference)
    lab.refused = {"method_k3", "method_k1"}
    with pytest.raises(DoesNotFit, match="no such head"):
        lab.measure({3: {"k": 3}, 1: {"k": 1}}, rounds, bench)
    assert lab.starts == ["reference_k0_0"]
    assert lab.events[-1] == "- reference_k0_0"


@pytest.mark.parametrize("refused", [3, 1, 2])
@pytest.mark.parametrize("reference", ["beside", "bracket"])
def test_a_k_that_is_refused_is_left_out_and_the_others_are_measured_once(
    lab: Lab, reference: str, refused: int
) -> None:
    rounds, bench = plan(rounds=2, reference=reference)
    lab.refused = {f"method_k{refused}"}
    recording = lab.measure(SWEEP, rounds, bench)
    assert recording.refused == {
        str(refused): "vLLM does not start with it: ValueError: no such head"
    }
    measured = Counter(place.split()[0] for place in places(recording))
    others = {f"method_k{k}": 4 for k in SWEEP if k != refused}
    assert measured == others | {"reference_k0": 4 * (2 if reference == "beside" else 1)}
    assert len(lab.asked()) == len(recording.cells)
    assert {row["num_speculative_tokens"] for row in summarise(recording, bench)} == {
        k for k in SWEEP if k != refused
    }


def test_the_row_of_a_method_that_is_not_served_has_its_places_and_the_reason() -> None:
    bench = bench_section(concurrency=[1, 8], rates=[2.5], context=[0, 64])
    row = not_served(DoesNotFit("too wide"), 3, bench)
    assert (row["num_speculative_tokens"], row["not_served"]) == (3, "too wide")
    names = ("concurrency", "rate", "context")
    assert [tuple(one[name] for name in names) for one in row["rows"]] == [
        (1, None, 0), (1, None, 64), (8, None, 0), (8, None, 64), (None, 2.5, 0), (None, 2.5, 64),
    ]  # fmt: skip
    assert {one["category"] for one in row["rows"]} == {"all"}

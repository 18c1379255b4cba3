from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from specmill.plan import (
    Cell,
    Load,
    Run,
    check_room,
    plan_cells,
    plan_phases,
    units,
    warmup_prompts,
)
from tests.benched import bench_section, prompts
from tests.fakes import sample

CONFIGS: dict[int, dict[str, Any] | None] = {3: {"k": 3}, 1: {"k": 1}}
REFERENCE = Run("reference", None, 0, None)
METHOD = Run("method", 3, 0, {"k": 3})


def last_ids(cell: Cell) -> list[int]:
    return [one.prompt_token_ids[-1] for one in cell.prompts]


def order(phase: list[Run], cells: list[Cell], beside: bool) -> list[str]:
    """Each unit as `reference_k0 0, method_k3 0`: label and cell number."""
    return [
        ", ".join(f"{run.label} {cell.number}" for run, cell in unit)
        for unit in units(phase, cells, beside)
    ]


def test_beside_every_k_has_a_phase_with_the_reference_and_they_share_its_server() -> None:
    phases = plan_phases(CONFIGS, "beside")
    assert phases == [
        [Run("reference", None, 0, None), Run("method", 3, 0, {"k": 3})],
        [Run("reference", None, 1, None), Run("method", 1, 1, {"k": 1})],
    ]
    assert phases[0][0].label == phases[1][0].label == "reference_k0"


def test_in_bracket_every_k_is_in_one_phase_behind_the_reference() -> None:
    assert plan_phases(CONFIGS, "bracket") == [
        [
            Run("reference", None, 0, None),
            Run("method", 3, 0, {"k": 3}),
            Run("method", 1, 0, {"k": 1}),
        ]
    ]


@pytest.mark.parametrize("reference", ["beside", "bracket"])
def test_none_is_compared_with_itself_once_whatever_k(reference: str) -> None:
    assert plan_phases({3: None, 1: None}, reference) == [
        [Run("reference", None, 0, None), Run("method", None, 0, None)]
    ]


def test_with_one_request_in_flight_a_cell_is_one_request_else_a_full_wave() -> None:
    samples = prompts("maths", 5, 30) + prompts("coding", 5, 10)
    (cells,) = plan_cells(samples, bench_section(concurrency=[1, 3]))
    assert [(cell.load.label, cell.category, last_ids(cell)) for cell in cells] == [
        ("c1", "coding", [10]),
        ("c1", "maths", [30]),
        ("c1", "coding", [11]),
        ("c1", "maths", [31]),
        ("c3", "coding", [12, 13, 14]),
        ("c3", "maths", [32, 33, 34]),
    ]
    assert [cell.number for cell in cells] == [0, 1, 2, 3, 4, 5]
    assert all(cell.fresh for cell in cells)


def test_every_context_has_every_load_closed_loops_first() -> None:
    bench = bench_section(concurrency=[4, 2], rates=[2.0], context=[0, 2], requests=1, seconds=1.0)
    (cells,) = plan_cells(prompts("coding", 40), bench)
    loads = [Load(concurrency=4), Load(concurrency=2), Load(rate=2.0)]
    assert [(cell.context, cell.load) for cell in cells] == [
        (context, load) for context in (0, 2) for load in loads
    ]
    assert [len(ids) for ids in cells[5].ids] == [2 + 2] * 2
    assert cells[5].ids[0][2:] == cells[5].prompts[0].prompt_token_ids


def test_a_cell_of_an_open_loop_is_a_stream_of_all_categories_in_turn() -> None:
    bench = bench_section(concurrency=[], rates=[2.5, 0.1], seconds=2.0)
    samples = prompts("maths", 9, 30) + prompts("coding", 9, 10)
    (cells,) = plan_cells(samples, bench)
    # bench.requests cells of 2.5 a second for 2 s, at least two requests
    assert [(cell.load.label, cell.category, last_ids(cell)) for cell in cells] == [
        ("r2.5", "all", [10, 30, 11, 31, 12]),
        ("r2.5", "all", [13, 32, 14, 33, 15]),
        ("r0.1", "all", [16, 34]),
        ("r0.1", "all", [17, 35]),
    ]
    assert all(cell.fresh for cell in cells)


def test_closed_and_open_loops_draw_from_the_same_prompts() -> None:
    bench = bench_section(concurrency=[2], rates=[3.0], seconds=1.0, requests=1, rounds=2)
    samples = prompts("maths", 5, 30) + prompts("coding", 7, 10)
    rounds = plan_cells(samples, bench)
    assert [[(last_ids(cell), cell.fresh) for cell in cells] for cells in rounds] == [
        [([10, 11], True), ([30, 31], True), ([12, 32, 13], True)],
        # coding has one more than is drawn, maths one less
        [([14, 15], True), ([33, 34], True), ([16, 30, 10], False)],
    ]


def test_without_prompts_there_is_nothing_to_measure() -> None:
    with pytest.raises(ValueError, match=r"there are no bench prompts \(prepare\.bench\)"):
        plan_cells([], bench_section())


def test_every_round_has_the_same_cells_with_other_prompts() -> None:
    rounds = plan_cells(prompts("coding", 10), bench_section(concurrency=[1, 3], rounds=2))
    assert [[last_ids(cell) for cell in cells] for cells in rounds] == [
        [[10], [11], [12, 13, 14]],
        [[15], [16], [17, 18, 19]],
    ]
    first, second = ([cell.kind for cell in cells] for cells in rounds)
    assert first == second
    assert [cell.round for cells in rounds for cell in cells] == [0, 0, 0, 1, 1, 1]
    assert all(cell.fresh for cells in rounds for cell in cells)


def test_a_cell_that_must_reuse_prompts_says_so() -> None:
    samples = prompts("coding", 4, 10) + prompts("maths", 5, 30)
    (cells,) = plan_cells(samples, bench_section(concurrency=[1, 3]))
    assert last_ids(cells[4]) == [12, 13, 10]
    assert [cell.fresh for cell in cells] == [True, True, True, True, False, True]


def test_a_cell_larger_than_its_category_repeats_prompts_and_says_so() -> None:
    ((cell,),) = plan_cells(prompts("coding", 2), bench_section(concurrency=[5]))
    assert last_ids(cell) == [10, 11, 10, 11, 10]
    assert not cell.fresh


def test_beside_both_servers_answer_a_cell_before_the_next_in_alternating_order() -> None:
    (cells,) = plan_cells(prompts("coding", 3), bench_section(requests=3))
    assert order([REFERENCE, METHOD], cells, beside=True) == [
        "reference_k0 0, method_k3 0",
        "method_k3 1, reference_k0 1",
        "reference_k0 2, method_k3 2",
    ]


def test_beside_the_next_round_begins_with_the_other_server() -> None:
    rounds = plan_cells(prompts("coding", 6), bench_section(requests=3, rounds=2))
    assert order([REFERENCE, METHOD], rounds[1], beside=True) == [
        "method_k3 0, reference_k0 0",
        "reference_k0 1, method_k3 1",
        "method_k3 2, reference_k0 2",
    ]


@pytest.mark.parametrize("categories", [1, 2, 3, 4])
@pytest.mark.parametrize(("concurrency", "rounds"), [(1, 1), (1, 3), (4, 2)])
def test_beside_every_category_goes_first_to_either_server_equally_often(
    categories: int, concurrency: int, rounds: int
) -> None:
    samples = [one for i in range(categories) for one in prompts(f"type {i}", 12, 100 * i)]
    bench = bench_section(concurrency=[concurrency], rounds=rounds)
    first: Counter[tuple[str, str]] = Counter()
    for cells in plan_cells(samples, bench):
        for unit in units([REFERENCE, METHOD], cells, beside=True):
            run, cell = unit[0]
            first[cell.category, run.role] += 1
    assert len(first) == 2 * categories
    assert set(first.values()) == {rounds if concurrency == 1 else rounds // 2}


def test_bracket_measures_all_cells_of_a_server_before_the_next_and_mirrors_rounds() -> None:
    bench = bench_section(requests=2, rounds=3)
    (phase,) = plan_phases(CONFIGS, "bracket")
    found = [order(phase, cells, beside=False) for cells in plan_cells(prompts("a", 6), bench)]
    there = ["reference_k0 0", "reference_k0 1", "method_k3 0", "method_k3 1", "method_k1 0",
             "method_k1 1"]  # fmt: skip
    back = ["method_k1 0", "method_k1 1", "method_k3 0", "method_k3 1", "reference_k0 0",
            "reference_k0 1"]  # fmt: skip
    assert found == [there, back, there]


def test_the_warmup_sends_whole_answers_behind_the_longest_context() -> None:
    samples = [sample([1, 2], [3]), sample([4], [5, 6])]
    assert warmup_prompts(samples, 0, room=8) == [[3], [5, 6]]
    assert warmup_prompts(samples, 2, room=8) == [[5, 6, 3], [2, 3, 5, 6]]


def test_a_prompt_of_the_warmup_leaves_room_for_its_answer() -> None:
    samples = [sample([1], [2, 3, 4, 5]), sample([6], [7, 8])]
    assert warmup_prompts(samples, 0, room=3) == [[3, 4, 5], [7, 8]]
    assert warmup_prompts(samples, 2, room=3) == [[3, 4, 5], [5, 7, 8]]


def test_a_sample_without_an_answer_warms_nothing_up() -> None:
    assert warmup_prompts([sample([1], []), sample([2], [3])], 0, room=8) == [[3]]


def test_answers_that_do_not_fit_behind_prompt_and_context_are_refused() -> None:
    samples = [sample([1] * 3, [2], category="a"), sample([1] * 7, [2, 2], category="b")]
    rounds = plan_cells(samples, bench_section(requests=1))
    check_room(rounds, max_tokens=8, max_model_len=15)  # 7 + 8
    with pytest.raises(
        ValueError, match=r"bench\.max_tokens is 8 .* has 7 tokens, .*max_model_len \(14\)"
    ):
        check_room(rounds, max_tokens=8, max_model_len=14)
    rounds = plan_cells(samples, bench_section(requests=1, context=[0, 4]))
    check_room(rounds, max_tokens=8, max_model_len=19)  # 4 + 7 + 8
    with pytest.raises(ValueError, match="has 11 tokens"):
        check_room(rounds, max_tokens=8, max_model_len=18)


def test_the_key_of_a_cell_changes_with_what_is_sent_and_how() -> None:
    ((cell, other),) = plan_cells(prompts("coding", 2), bench_section())
    assert replace(cell).key == cell.key
    changed = [
        other,
        replace(cell, category="maths"),
        replace(cell, load=Load(concurrency=2)),
        replace(cell, load=Load(rate=1.0)),
        replace(cell, context=1),
        replace(cell, round=1),
        replace(cell, number=7),
        replace(cell, ids=([5, 12],)),
    ]
    assert len({one.key for one in [cell, *changed]}) == 1 + len(changed)

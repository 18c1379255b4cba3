from typing import Any

import numpy as np
import pytest

from specmill.intervals import UNDECIDED, paired_ratio
from specmill.pairs import pair_up, throughput
from tests.benched import answer, both, cell, request


def test_a_methods_cell_is_paired_with_the_reference_of_its_phase_round_and_place() -> None:
    places: list[dict[str, Any]] = [
        {},
        {"phase": 1},
        {"round": 1},
        {"number": 1},
        {"category": "maths"},
        {"context": 64},
        {"concurrency": 8},
        {"concurrency": None, "rate": 2.0},
        {"concurrency": None, "rate": 3.0},
    ]
    records = [one for n, place in enumerate(places) for one in both(n + 1.0, 1.0, **place)]
    for order in (records, records[::-1], records[::2] + records[1::2]):
        pairs = pair_up(order)
        assert len(pairs) == len(places)
        for pair in pairs:
            assert all(pair.reference[name] == pair.method[name] for name in ("phase", "round"))
            place = {name: pair.method[name] for name in ("category", "context", "concurrency")}
            assert place.items() <= pair.reference.items()
        assert sorted(pair.reference["wall_s"] for pair in pairs) == list(range(1, 10))


def test_in_a_bracket_every_k_is_paired_with_the_same_reference() -> None:
    records = [cell("reference", 2.0), cell("method", 1.0, k=3), cell("method", 4.0, k=1)]
    assert [pair.ratio for pair in pair_up(records)] == [2.0, 0.5]


def test_a_method_without_a_reference_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no reference was measured for cell .*'maths'"):
        pair_up([cell("reference", 1.0), cell("method", 1.0, category="maths")])


def test_in_a_closed_loop_tokens_per_wall_second_are_compared() -> None:
    reference = cell("reference", 4.0, answer([1] * 4, 2.0), answer([1] * 4, 4.0))
    method = cell("method", 3.0, answer([1] * 4, 1.0), answer([1] * 8, 3.0))
    (pair,) = pair_up([reference, method])
    assert pair.ratio == 2.0  # 12 / 3 over 8 / 4


def test_in_an_open_loop_tokens_per_second_of_waiting_are_compared() -> None:
    load = {"concurrency": None, "rate": 1.0}
    # both last 10 s, for the last request arrives then
    reference = cell(
        "reference", 11.0, answer([1] * 4, 3.0), request([1] * 4, 10.0, (11.0, 4)), **load
    )
    method = cell("method", 10.5, answer([1] * 4, 1.5), request([1] * 4, 10.0, (10.5, 4)), **load)
    (pair,) = pair_up([reference, method])
    assert pair.ratio == 2.0  # 8 tokens in 1.5 + 0.5 s over 8 in 3 + 1 s


def test_throughput_of_several_cells_is_weighted_by_their_seconds() -> None:
    cells = [cell("method", 1.0, answer([1] * 8)), cell("method", 3.0, answer([1] * 4))]
    assert throughput(cells) == 3.0  # 12 / 4; the mean of 8 and 4 / 3 is 4.7


def test_outputs_are_paired_request_by_request() -> None:
    first, second, other = answer([1, 2]), answer([3, 4]), answer([3, 5])
    (pair,) = pair_up([cell("reference", 1.0, first, second), cell("method", 1.0, first, other)])
    assert list(pair.outputs()) == [(first, first), (second, other)]
    assert not pair.is_identical
    (pair,) = pair_up([cell("reference", 1.0, first, second), cell("method", 2.0, first, second)])
    assert pair.is_identical


def test_requests_of_an_open_loop_are_no_pairs_of_their_own() -> None:
    """What slows a request down slows its neighbours too: 3% noise of a cell, 3% of each of six."""
    generator = np.random.default_rng(17)
    by_cell = by_request = 0
    for _ in range(200):
        records = []
        for number in range(14):
            place = {"concurrency": None, "rate": 1.0, "number": number}
            for role in ("reference", "method"):
                noise = 0.03 * generator.standard_normal() + 0.03 * generator.standard_normal(6)
                answers = [answer([1] * 4, float(seconds)) for seconds in np.exp(noise)]
                records.append(cell(role, 1.0, *answers, **place))
        pairs = pair_up(records)
        single = [theirs["chunk_s"][-1] / ours["chunk_s"][-1]
                  for pair in pairs for theirs, ours in pair.outputs()]  # fmt: skip
        by_cell += paired_ratio([pair.ratio for pair in pairs]).verdict != UNDECIDED
        by_request += paired_ratio(single).verdict != UNDECIDED
    assert by_cell / 200 <= 0.07
    assert by_request / 200 > 0.12

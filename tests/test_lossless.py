import asyncio
from typing import Any

import pytest
import torch

from specmill.lossless import ROUNDING, find_divergences, first_difference, is_rounding
from specmill.pairs import pair_up
from specmill.plan import Cell, Load
from tests.benched import answer, cell, prompts
from tests.fakes import FakeVllm


@pytest.fixture
def fake() -> FakeVllm:
    return FakeVllm()


def diverge(
    fake: FakeVllm, *outputs: tuple[list[int], list[int]], **changes: Any
) -> list[dict[str, Any]]:
    """What is found of answers of the reference and the method to prompts [5, 10], [5, 11] ..."""
    sent = tuple(prompts("coding", len(outputs)))
    ids = tuple(one.prompt_token_ids for one in sent)
    planned = Cell("coding", Load(1), 0, 3, 2, sent, ids, True)
    place = {"round": 3, "number": 2} | changes
    theirs = [answer(output) for output, _ in outputs]
    ours = [answer(output, key=f"key {n}") for n, (_, output) in enumerate(outputs)]
    pairs = pair_up(
        [
            cell("reference", 1.0, *theirs, **(place | {"k": None})),
            cell("method", 1.0, *ours, **place),
        ]
    )
    with fake.serve() as server:
        return asyncio.run(find_divergences(pairs, {(3, 2): planned}, server, 30))


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([], [], None),
        ([1, 2, 3], [9, 2, 3], 0),
        ([1, 2, 3], [1, 2, 9], 2),
        ([1, 9, 3, 9], [1, 2, 3, 4], 1),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], [1, 2, 3], 2),
        ([], [1], 0),
    ],
)
def test_the_first_difference_counts_from_0(
    left: list[int], right: list[int], expected: int | None
) -> None:
    assert first_difference(left, right) == expected


def test_answers_that_are_the_references_ask_nothing(fake: FakeVllm) -> None:
    assert diverge(fake, ([7, 8], [7, 8])) == []
    assert fake.requests == []


def test_the_reference_is_asked_after_the_prompt_and_what_both_answers_share(
    fake: FakeVllm,
) -> None:
    fake.likely = {8: -0.2, 9: -1.7}
    (found,) = diverge(fake, ([6], [6]), ([7, 8, 1], [7, 9, 2]), concurrency=4, context=64)
    assert found == {
        "k": 2,
        "concurrency": 4,
        "rate": None,
        "context": 64,
        "category": "coding",
        "sample_key": "key 1",
        "position": 1,
        "reference_id": 8,
        "method_id": 9,
        "gap": 1.5,
    }
    (asked,) = fake.requests
    assert asked["prompt"] == [5, 11, 7]
    assert (asked["logprobs"], asked["max_tokens"], asked["temperature"]) == (20, 1, 0.0)


def test_the_gap_is_negative_where_the_reference_itself_prefers_the_methods_token(
    fake: FakeVllm,
) -> None:
    fake.likely = {8: -0.9, 9: -0.65}
    (found,) = diverge(fake, ([8], [9]))
    assert found["gap"] == -0.25
    (turned,) = diverge(fake, ([9], [8]))
    assert turned["gap"] == 0.25


@pytest.mark.parametrize("likely", [{8: -0.1}, {9: -0.1}, {7: -0.1}])
def test_a_token_that_is_not_among_the_likeliest_20_has_no_gap_and_is_no_rounding(
    fake: FakeVllm, likely: dict[int, float]
) -> None:
    fake.likely = likely
    (found,) = diverge(fake, ([8], [9]))
    assert (found["reference_id"], found["method_id"], found["gap"]) == (8, 9, None)
    assert not is_rounding(found)


def test_an_answer_that_ended_earlier_has_no_token_and_no_gap_there(fake: FakeVllm) -> None:
    shorter, longer = diverge(fake, ([7, 8], [7]), ([7], [7, 8]))
    names = ("position", "reference_id", "method_id", "gap")
    assert [shorter[name] for name in names] == [1, 8, None, None]
    assert [longer[name] for name in names] == [1, None, 8, None]
    assert not is_rounding(shorter)
    assert fake.requests == []


@pytest.mark.parametrize(
    ("gap", "expected"),
    [(0.0, True), (ROUNDING, True), (-ROUNDING, True), (0.5001, False), (-0.5001, False)],
)
def test_rounding_can_exchange_tokens_that_are_half_a_nat_apart(gap: float, expected: bool) -> None:
    assert is_rounding({"gap": gap}) is expected


def test_the_threshold_is_four_units_in_the_last_place_of_a_bf16_logit_of_16_to_32() -> None:
    logits = torch.arange(16, 32, dtype=torch.bfloat16)
    steps = torch.nextafter(logits, torch.full_like(logits, 64)) - logits
    assert set((4 * steps).tolist()) == {ROUNDING}


def test_none_against_itself_has_k_0(fake: FakeVllm) -> None:
    fake.likely = {8: -0.1, 9: -0.1}
    (found,) = diverge(fake, ([8], [9]), k=None)
    assert (found["k"], found["gap"]) == (0, 0.0)

from typing import Any

import pytest

from specmill.params import Prepare
from specmill.prepare import plan_jobs, split_and_filter
from specmill.prompts import Prompt, split_prompts
from tests.fakes import sample

PROMPTS = [Prompt("coding", (f"What is prompt number {number}?",)) for number in range(200)]
BENCH = [Prompt("maths", ("How much is one and one?",)), Prompt("dialogue", ("Hi.", "Bye."))]


def chosen(**changes: Any) -> Prepare:
    values: dict[str, Any] = {
        "limit": 30,
        "heldout": 5,
        "max_tokens": 16,
        "min_tokens": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 17,
    }
    return Prepare(**(values | changes))


def test_training_answers_are_sampled_and_the_others_greedy() -> None:
    jobs = plan_jobs(PROMPTS, BENCH, chosen())
    assert [split for split, _, _ in jobs] == ["train"] * 30 + ["heldout"] * 5 + ["bench"] * 2
    for split, _, sampling in jobs:
        assert sampling["max_tokens"] == 16
        assert sampling["temperature"] == (0.7 if split == "train" else 0.0)
    assert len({sampling["seed"] for split, _, sampling in jobs if split == "train"}) == 30


def test_the_jobs_are_the_split_prompts_and_then_the_whole_bench_in_order() -> None:
    training, heldout = split_prompts(PROMPTS, 30, 5, seed=17)
    jobs = plan_jobs(PROMPTS, BENCH, chosen())
    assert [prompt for _, prompt, _ in jobs] == [*training, *heldout, *BENCH]


def test_a_bench_prompt_that_the_limit_leaves_out_of_training_is_refused_too() -> None:
    training, heldout = split_prompts(PROMPTS, 30, 5, seed=17)
    unused = next(prompt for prompt in PROMPTS if prompt not in [*training, *heldout])
    with pytest.raises(ValueError, match="1 bench prompts are also training prompts"):
        plan_jobs(PROMPTS, [*BENCH, unused], chosen())


def conversation(split: str, *turns: tuple[list[int], list[int]]) -> list[Any]:
    return [
        sample(prompt, answer, split=split, turn=turn)
        for turn, (prompt, answer) in enumerate(turns)
    ]


def test_every_turn_trains_and_only_the_last_turn_is_benched() -> None:
    conversations = [
        conversation("train", ([1], [2, 3]), ([1, 2, 3, 4], [5, 6])),
        conversation("heldout", ([7], [8, 9])),
        conversation("bench", ([10], [11, 12]), ([10, 11, 12, 13], [14])),
    ]
    splits, counts = split_and_filter(conversations, min_tokens=2, max_model_len=64)
    assert [one.turn for one in splits["train"]] == [0, 1]
    assert [one.turn for one in splits["heldout"]] == [0]
    assert [one.prompt_token_ids for one in splits["bench"]] == [[10, 11, 12, 13]]
    assert counts["train"]["num_kept"] == 2
    assert counts["train"]["num_tokens"] == 9  # 3 + 6
    assert counts["train"]["num_trained_tokens"] == 4
    assert counts["bench"] == {"num_kept": 1, "num_tokens": 5, "num_trained_tokens": 1}


def test_bench_prompts_are_kept_whatever_their_answers() -> None:
    conversations = [
        conversation("train", ([1], [2, 3])),
        conversation("train", ([1], [4])),
        conversation("heldout", ([7], [8, 9])),
        conversation("bench", ([10], [])),
        conversation("bench", ([10], [])),
    ]
    splits, counts = split_and_filter(conversations, min_tokens=2, max_model_len=4)
    assert len(splits["bench"]) == 2
    assert counts["train"]["num_too_short"] == 1


def test_a_sample_that_fills_the_context_leaves_extraction_no_room_and_is_dropped() -> None:
    conversations = [
        conversation("train", ([1], [2, 3])),
        conversation("train", ([1], [2, 3, 4])),
        conversation("heldout", ([7], [8, 9])),
        conversation("bench", ([10], [11])),
    ]
    splits, counts = split_and_filter(conversations, min_tokens=2, max_model_len=4)
    assert [sample.answer_token_ids for sample in splits["train"]] == [[2, 3]]
    assert counts["train"]["num_too_long"] == 1


@pytest.mark.parametrize("split", ["train", "heldout", "bench"])
def test_a_split_without_samples_is_refused_by_name(split: str) -> None:
    conversations = [
        conversation(name, ([1], [2, 3])) for name in ("train", "heldout", "bench") if name != split
    ]
    with pytest.raises(ValueError, match=f"no {split} sample is left"):
        split_and_filter(conversations, min_tokens=2, max_model_len=64)

import json
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specmill.conversations import Conversation, from_row
from specmill.params import Prepare
from specmill.prepare import (
    Picked,
    dataset_samples,
    pick_conversations,
    plan_jobs,
    split_and_filter,
)
from tests.fakes import prepare_section, sample
from tests.test_templates import CHATML, PREFILLS_THINKING, tokenizer


def prompt(*turns: str, category: str = "coding") -> Conversation:
    return from_row({"category": category, "turns": list(turns)}, "none", "tests")


def answered(question: str, answer: str) -> Conversation:
    return from_row({"prompt": question, "completion": answer}, "coding", "file:x.jsonl")


TRAINING = [prompt(f"Training {number}?") for number in range(3)]
HELDOUT = [prompt("Held out?")]
BENCH = [prompt("How much is one and one?", category="maths"), prompt("Hi.", "Bye.")]
PICKED = Picked(TRAINING, HELDOUT, BENCH, {})


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return f"file:{path}"


def chosen(folder: Path, **changes: Any) -> Prepare:
    """200 training prompts, the last of which is also measured; 5 maths and 2 other ones."""
    training = [{"prompt": f"What is prompt number {number}?"} for number in range(199)]
    bench: list[dict[str, Any]]
    bench = [{"prompt": f"maths {number}", "category": "maths"} for number in range(5)]
    bench += [{"turns": ["Hi.", "sort THESE words!"]}, {"prompt": "Ho."}]
    files = {
        "dataset": written(folder / "own.jsonl", [*training, {"prompt": "Sort these words"}]),
        "bench": written(folder / "measured.jsonl", bench),
    }
    return prepare_section(**(files | changes))


def test_conversations_are_picked_in_the_numbers_asked_for(tmp_path: Path) -> None:
    picked = pick_conversations(chosen(tmp_path, bench_per_category=3))
    assert (len(picked.training), len(picked.heldout)) == (30, 5)
    assert Counter(one.category for one in picked.bench) == {"maths": 3, "measured": 2}
    assert {one.category for one in [*picked.training, *picked.heldout]} == {"own"}


def test_what_is_measured_is_taken_out_of_training_and_counted(tmp_path: Path) -> None:
    picked = pick_conversations(chosen(tmp_path, limit=None))
    assert not any("Sort these words" in one.said for one in [*picked.training, *picked.heldout])
    assert picked.sources == {
        "dataset": [
            {
                "source": f"file:{tmp_path / 'own.jsonl'}",
                "num_rows": 200,
                "num_unusable": 0,
                "num_repeated": 0,
                "num_also_in_bench": 1,
            }
        ],
        "bench": [
            {
                "source": f"file:{tmp_path / 'measured.jsonl'}",
                "num_rows": 7,
                "num_unusable": 0,
                "num_repeated": 0,
            }
        ],
    }


def test_a_bench_prompt_that_is_not_picked_is_taken_out_of_training_too(tmp_path: Path) -> None:
    rows = [{"prompt": f"What is prompt number {number}?"} for number in range(20)]
    source = written(tmp_path / "first.jsonl", rows)
    picked = pick_conversations(chosen(tmp_path, bench=source, bench_per_category=1, limit=None))
    assert len(picked.bench) == 1
    assert picked.sources["dataset"][0]["num_also_in_bench"] == 20


def test_the_bench_set_alone_leaves_nothing_to_train_on(tmp_path: Path) -> None:
    values = chosen(tmp_path)
    with pytest.raises(ValueError, match=r"prepare.heldout asks for 5 conversations of .* gave 0"):
        pick_conversations(values.model_copy(update={"dataset": values.bench}))


def test_max_rows_are_read_of_every_dataset(tmp_path: Path) -> None:
    values = chosen(tmp_path, max_rows=150, limit=None)
    assert pick_conversations(values).sources["dataset"][0]["num_rows"] == 150


def test_two_datasets_are_mixed_by_weight(tmp_path: Path) -> None:
    values = chosen(tmp_path)
    other = written(
        tmp_path / "other.jsonl", [{"prompt": f"other {number}"} for number in range(150)]
    )
    mixed = [
        {"source": values.dataset[0].source, "weight": 2.0},
        {"source": other, "category": "b"},
    ]
    picked = pick_conversations(prepare_section(dataset=mixed, bench=values.bench[0].source))
    assert Counter(one.category for one in picked.training) == {"own": 20, "b": 10}
    # 5 held out: 3.33 and 1.67
    assert Counter(one.category for one in picked.heldout) == {"own": 3, "b": 2}


def test_training_answers_are_sampled_and_the_others_greedy() -> None:
    jobs = plan_jobs(PICKED, prepare_section())
    assert [split for split, _, _ in jobs] == ["train"] * 3 + ["heldout"] + ["bench"] * 2
    assert [one for _, one, _ in jobs] == [*TRAINING, *HELDOUT, *BENCH]
    for split, _, sampling in jobs:
        assert sampling["max_tokens"] == 16
        assert sampling["temperature"] == (0.7 if split == "train" else 0.0)
    assert len({sampling["seed"] for split, _, sampling in jobs if split == "train"}) == 3


def test_the_verifier_is_not_asked_what_the_dataset_answers() -> None:
    jobs = plan_jobs(PICKED, prepare_section(responses="dataset"))
    assert [(split, one, sampling["temperature"]) for split, one, sampling in jobs] == [
        ("heldout", HELDOUT[0], 0.0),
        ("bench", BENCH[0], 0.0),
        ("bench", BENCH[1], 0.0),
    ]


def test_answers_of_the_dataset_are_samples_to_train_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    read = tokenizer(CHATML)
    conversations = [answered("a", "A"), prompt("unanswered"), answered("b", "B")]
    kept, refused = dataset_samples(conversations, read, {})
    assert [[read.decode(one.answer_token_ids) for one in samples] for samples in kept] == [
        ["A<|im_end|>"],
        ["B<|im_end|>"],
    ]
    assert {one.split for samples in kept for one in samples} == {"train"}
    assert refused == {"num_template_refused": 0, "num_without_answer": 1}
    assert "1 of 3 training conversations have no answer" in caplog.text


def test_refused_answers_are_counted_and_the_first_fault_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    thinking = from_row(
        {
            "messages": [
                {"role": "user", "content": "1+1?"},
                {"role": "assistant", "content": "2", "reasoning": "hm"},
            ]
        },
        "maths",
        "file:x.jsonl",
    )
    with caplog.at_level(logging.WARNING):
        kept, refused = dataset_samples([thinking, answered("a", "A")], tokenizer(CHATML), {})
    assert len(kept) == 1
    assert refused == {"num_template_refused": 1, "num_without_answer": 0}
    assert "1 turns are left out; the first: the chat template leaves the answer's" in caplog.text


def test_when_every_answer_is_refused_the_fault_is_named() -> None:
    conversations = [answered("a", "A"), answered("b", "B")]
    fault = r"asks for an answer with .*<think>.*\(turn 1 of 'a'\); set prepare.responses: verifier"
    with pytest.raises(ValueError, match=fault):
        dataset_samples(conversations, tokenizer(PREFILLS_THINKING), {})


def test_a_dataset_of_questions_has_no_answers_to_train_on() -> None:
    with pytest.raises(ValueError, match="no answer of it can be used: it has questions only"):
        dataset_samples([prompt("a")], tokenizer(CHATML), {})


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
    with pytest.raises(ValueError, match=f"no {split} sample is left .there was none"):
        split_and_filter(conversations, min_tokens=2, max_model_len=64)


def test_when_everything_is_filtered_out_the_reasons_and_their_keys_are_named() -> None:
    conversations = [
        conversation("train", ([1], [2])),
        conversation("train", ([1], [3])),
        conversation("train", ([1, 2, 3], [4, 5])),
        conversation("heldout", ([7], [8, 9])),
        conversation("bench", ([10], [11])),
    ]
    message = (
        "no train sample is left (too_short 2, too_long 1): too short is less than "
        "prepare.min_tokens (2), too long more than verifier.max_model_len (5); "
        "answers end at prepare.max_tokens"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        split_and_filter(conversations, min_tokens=2, max_model_len=5)

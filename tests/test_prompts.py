import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specmill.conversations import Conversation, from_row
from specmill.params_data import Dataset
from specmill.prompts import (
    drop_bench_prompts,
    normalise,
    pick_bench,
    pick_training,
    place,
    shares,
)
from specmill.sources import Reading, read_conversations

PROMPTS = Path(__file__).parents[1] / "data" / "prompts"
CATEGORIES = {
    "coding",
    "dialogue",
    "explanation",
    "maths",
    "reasoning",
    "structured",
    "writing",
}


def conversation(*turns: str, category: str = "coding") -> Conversation:
    return from_row({"category": category, "turns": list(turns)}, "none", "tests")


def numbered(*numbers: int) -> list[Conversation]:
    return [conversation(f"What is prompt number {number}?") for number in numbers]


def reading(
    conversations: list[Conversation], weight: float = 1.0, source: str = "file:a.jsonl"
) -> Reading:
    return Reading(Dataset(source=source, weight=weight), list(conversations))


def pick(
    conversations: list[Conversation], limit: int | None, heldout: int, seed: int
) -> tuple[list[Conversation], list[Conversation]]:
    return pick_training([reading(conversations)], limit, heldout, seed)


def keys(conversations: list[Conversation]) -> set[str]:
    return {one.key for one in conversations}


def own_prompts(name: str) -> Reading:
    return read_conversations(Dataset(source=f"file:{PROMPTS / name}.jsonl"), None)


@pytest.fixture(scope="module")
def train() -> list[Conversation]:
    return own_prompts("train").conversations


@pytest.fixture(scope="module")
def bench() -> list[Conversation]:
    return own_prompts("bench").conversations


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  Write\n a   HAIKU. ", "write a haiku"),
        ("x = f(1, y_2)", "x = f 1 y_2"),
        ("!!!", "!!!"),
        ("Größe in ÅNGSTRÖM?", "größe in ångström"),
        ("it's", "it s"),
    ],
)
def test_normalised_text_is_lower_case_words_between_single_spaces(
    text: str, expected: str
) -> None:
    assert normalise(text) == expected


@pytest.mark.parametrize(
    ("total", "weights", "expected"),
    [
        (400, [3.0, 1.0], [300, 100]),
        (10, [1.0, 1.0, 1.0], [4, 3, 3]),  # remainders are equal: the first gets it
        (10, [1.0, 2.0, 3.0], [2, 3, 5]),  # 1.67, 3.33, 5
        (7, [0.5, 0.3, 0.2], [4, 2, 1]),  # 3.5, 2.1, 1.4: one left, .5 is the largest
        (8, [0.45, 0.35, 0.2], [4, 3, 1]),  # 3.6, 2.8, 1.6: two left, .8 and then .6
        (1, [1.0, 5.0], [0, 1]),
        (5, [2.0], [5]),
    ],
)
def test_shares_are_whole_and_the_largest_remainders_get_what_is_left(
    total: int, weights: list[float], expected: list[int]
) -> None:
    assert shares(total, weights) == expected


def test_shares_always_add_up_to_the_total() -> None:
    drawn = random.Random(3)
    for _ in range(500):
        weights = [drawn.uniform(0.01, 9) for _ in range(drawn.randint(1, 6))]
        total = drawn.randint(1, 5000)
        given = shares(total, weights)
        assert sum(given) == total
        for number, weight in zip(given, weights, strict=True):
            assert abs(number - total * weight / sum(weights)) < 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("limit", [40, None])
def test_one_more_prompt_takes_at_most_one_place_and_moves_none_across(
    seed: int, limit: int | None
) -> None:
    prompts = numbered(*range(200))
    before = [keys(part) for part in pick(prompts, limit, 5, seed)]
    num_changed = 0
    for number in range(1000, 1060):
        after = [keys(part) for part in pick(prompts + numbered(number), limit, 5, seed)]
        gone = [old - new for old, new in zip(before, after, strict=True)]
        come = [new - old for old, new in zip(before, after, strict=True)]
        assert len(gone[0]) + len(gone[1]) <= 1
        assert len(come[0]) + len(come[1]) <= 1
        assert come[0] | come[1] <= keys(numbered(number))
        assert not before[0] & after[1]
        assert not before[1] & after[0]
        num_changed += before != after
    assert num_changed > 0


def test_the_split_depends_on_the_seed_and_not_on_the_order_of_the_file() -> None:
    prompts = numbered(*range(200))
    shuffled = random.Random(1).sample(prompts, len(prompts))
    training, heldout = pick(prompts, 50, 5, seed=17)
    assert pick(shuffled, 50, 5, seed=17) == (training, heldout)
    assert keys(pick(prompts, 50, 5, seed=18)[0]) != keys(training)


def test_the_two_parts_have_the_sizes_asked_for_and_share_no_prompt() -> None:
    training, heldout = pick(numbered(*range(200)), 50, 5, seed=17)
    assert (len(keys(training)), len(keys(heldout))) == (50, 5)
    assert not keys(training) & keys(heldout)


def test_a_smaller_limit_takes_a_part_of_what_a_larger_one_takes() -> None:
    prompts = numbered(*range(200))
    small, large = pick(prompts, 20, 5, 17)[0], pick(prompts, 60, 5, 17)[0]
    assert small == large[:20]


def test_no_limit_and_no_heldout_number_moves_a_prompt_to_the_other_side() -> None:
    prompts = numbered(*range(300))
    ever_trained, ever_held_out = set[str](), set[str]()
    for limit in (5, 50, None):
        for heldout in (1, 5, 15):
            training, kept_out = pick(prompts, limit, heldout, seed=17)
            ever_trained |= keys(training)
            ever_held_out |= keys(kept_out)
    assert not ever_trained & ever_held_out


def test_about_a_tenth_of_all_prompts_can_be_held_out() -> None:
    prompts = numbered(*range(2000))
    training, heldout = pick(prompts, None, 150, seed=17)
    assert len(heldout) == 150
    # binomial(2000, 0.1): mean 200, standard deviation 13.4
    assert 2000 - len(training) == pytest.approx(200, abs=5 * 13.4)


def test_each_dataset_gives_its_share_of_the_limit_and_of_what_is_held_out() -> None:
    first, second = numbered(*range(900)), numbered(*range(1000, 1900))
    training, heldout = pick_training([reading(first, 3.0), reading(second, 1.0)], 400, 8, 17)
    assert len(keys(training) & keys(first)) == 300
    assert len(keys(training) & keys(second)) == 100
    assert len(keys(heldout) & keys(first)) == 6
    assert len(keys(heldout) & keys(second)) == 2


def test_a_conversation_of_two_datasets_is_used_once_and_both_give_their_share() -> None:
    shared, rest = numbered(*range(100)), numbered(*range(100, 400))
    training, heldout = pick_training([reading(shared), reading(shared + rest)], 100, 6, 17)
    assert len(keys(training)) == len(training) == 100
    assert len(keys(heldout)) == len(heldout) == 6


def test_two_equal_datasets_are_as_good_as_one() -> None:
    prompts = numbered(*range(200))
    for limit in (20, None):
        alone = pick(prompts, limit, 6, 17)
        assert pick_training([reading(prompts), reading(prompts)], limit, 6, 17) == alone


def test_too_few_prompts_for_the_limit_or_the_heldout_part_name_dataset_and_numbers() -> None:
    prompts = numbered(*range(200))
    num_training = len(pick(prompts, None, 5, seed=17)[0])
    with pytest.raises(
        ValueError,
        match=rf"prepare\.limit asks for {num_training + 1} of file:a\.jsonl, which gave 200 "
        f"conversations; the {num_training} that come after the held-out ones",
    ):
        pick(prompts, num_training + 1, 5, seed=17)
    with pytest.raises(
        ValueError,
        match=r"prepare\.heldout asks for 201 conversations of file:a\.jsonl, which gave 200",
    ):
        pick(prompts, None, 201, seed=17)
    with pytest.raises(ValueError, match="no conversation is left for training"):
        pick(prompts, None, 200, seed=17)


def test_a_small_dataset_holds_out_beyond_its_first_tenth_and_never_trains_on_that() -> None:
    prompts = numbered(*range(12))
    training, heldout = pick(prompts, None, 4, seed=17)
    assert len(heldout) == 4
    assert not keys(training) & keys(heldout)
    assert max(place(one, 17) for one in heldout) < min(place(one, 17) for one in training)


def test_conversations_that_begin_alike_are_on_one_side() -> None:
    pairs = [
        conversation(*turns)
        for number in range(200)
        for turns in ((f"What is {number}?",), (f"what is {number}", "And more?"))
    ]
    training, heldout = pick(pairs, None, 20, seed=17)
    held = {normalise(one.questions[0]) for one in heldout}
    assert not held & {normalise(one.questions[0]) for one in training}


def test_a_weight_that_gives_no_prompt_is_refused() -> None:
    large, small = reading(numbered(*range(500))), reading(numbered(*range(500, 600)), 1e-6)
    with pytest.raises(ValueError, match="weight 1e-06, too little for one of 10 prompts"):
        pick_training([large, small], 10, 2, 17)


def test_a_dataset_too_small_for_its_share_is_the_one_that_is_named() -> None:
    large = reading(numbered(*range(500)))
    small = reading(numbered(*range(1000, 1050)), 3.0, "file:small.jsonl")
    with pytest.raises(ValueError, match=r"limit asks for 75 of file:small\.jsonl, which gave 50"):
        pick_training([large, small], 100, 1, 17)


def test_bench_prompts_are_picked_per_category_by_hash_and_stay_in_file_order() -> None:
    maths = [conversation(f"maths {number}", category="maths") for number in range(12)]
    coding = [conversation(f"coding {number}") for number in range(3)]
    mixed = [*maths[:6], *coding, *maths[6:]]
    picked = pick_bench([reading(mixed)], 5, seed=17)
    assert Counter(one.category for one in picked) == {"maths": 5, "coding": 3}
    assert picked == [one for one in mixed if one in picked]
    assert [one for one in picked if one.category == "maths"] != maths[:5]
    assert keys(pick_bench([reading(mixed)], 4, seed=17)) < keys(picked)
    assert pick_bench([reading(mixed)], 5, seed=18) != picked


def test_a_bench_prompt_of_two_sets_is_measured_once_in_the_first_ones_category() -> None:
    first, again = conversation("Hi", category="a"), conversation("hi", category="b")
    other = conversation("Ho", category="b")
    assert pick_bench([reading([first]), reading([again, other])], 5, seed=17) == [first, other]


def test_what_shares_a_turn_with_a_bench_prompt_is_taken_out() -> None:
    training = reading(
        [
            conversation("Hello.", "Sort these words!"),
            conversation("Sort those words!"),
            conversation("sort  THESE words?"),
        ]
    )
    assert drop_bench_prompts(training, [conversation("Unrelated", "sort these words")]) == 2
    assert [one.said for one in training.conversations] == [("Sort those words!",)]


def test_an_equal_system_message_or_tool_result_takes_nothing_out() -> None:
    def asked(text: str) -> Conversation:
        row: dict[str, Any] = {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": text},
                {"role": "assistant", "content": "", "tool_calls": [{"name": "clock"}]},
                {"role": "tool", "content": "noon"},
            ]
        }
        return from_row(row, "a", "tests")

    training = reading([asked("one"), asked("two"), asked("noon"), asked("be brief")])
    assert drop_bench_prompts(training, [asked("two")]) == 1
    assert [one.questions[0] for one in training.conversations] == ["one", "noon", "be brief"]


def test_rows_of_the_shape_of_mt_bench_keep_both_turns() -> None:
    row = {
        "question_id": 81,
        "category": "writing",
        "turns": ["Compose a travel blog post.", "Rewrite it."],
        "reference": ["", ""],
    }
    rewritten = from_row(row, "mt-bench", "mt-bench")
    assert pick_bench([reading([rewritten])], 1, 17)[0].questions == (
        "Compose a travel blog post.",
        "Rewrite it.",
    )
    training = reading([conversation("rewrite it"), conversation("Write it.")])
    assert drop_bench_prompts(training, [rewritten]) == 1


def test_at_least_600_training_prompts_cover_seven_categories(train: list[Conversation]) -> None:
    assert len(train) >= 600
    assert {one.category for one in train} == CATEGORIES


def test_the_bench_has_at_least_16_prompts_of_each_category(bench: list[Conversation]) -> None:
    counts = Counter(one.category for one in bench)
    assert set(counts) == CATEGORIES
    assert min(counts.values()) >= 16


@pytest.mark.parametrize("name", ["train", "bench"])
def test_no_prompt_of_the_project_is_dropped_as_a_repeat(name: str) -> None:
    path = PROMPTS / f"{name}.jsonl"
    num_lines = len([line for line in path.read_text().split("\n") if line.strip()])
    assert len(own_prompts(name).conversations) == num_lines


def test_training_and_bench_prompts_share_no_normalised_text(
    train: list[Conversation], bench: list[Conversation]
) -> None:
    assert drop_bench_prompts(reading(train), bench) == 0
    first, second = (
        {re.sub(r"\W+", " ", text).strip().casefold() for one in part for text in one.questions}
        for part in (train, bench)
    )
    assert not first & second


def test_both_files_have_dialogues_of_two_turns(
    train: list[Conversation], bench: list[Conversation]
) -> None:
    for prompts in (train, bench):
        dialogues = [one for one in prompts if one.category == "dialogue"]
        assert {len(one.exchanges) for one in dialogues} == {2}


@pytest.mark.parametrize(
    ("category", "words"),
    [
        ("coding", ["binary search tree"]),
        ("maths", ["fence"]),
        ("structured", ["JSON"]),
        ("explanation", ["TCP", "UDP"]),
    ],
)
def test_the_bench_holds_the_prompts_that_the_project_began_with(
    bench: list[Conversation], category: str, words: list[str]
) -> None:
    found = [
        one
        for one in bench
        if one.category == category and all(word in one.questions[0] for word in words)
    ]
    assert found

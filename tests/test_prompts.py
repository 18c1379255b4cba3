import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from specmill.prompts import Prompt, check_disjoint, normalise, read_prompts, split_prompts

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


def written(folder: Path, *lines: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def row(*turns: str, category: str = "coding") -> str:
    return json.dumps({"category": category, "turns": turns})


def numbered(*numbers: int) -> list[Prompt]:
    return [Prompt("coding", (f"What is prompt number {number}?",)) for number in numbers]


def keys(prompts: list[Prompt]) -> set[str]:
    return {prompt.key for prompt in prompts}


@pytest.fixture(scope="module")
def train() -> list[Prompt]:
    return read_prompts(PROMPTS / "train.jsonl")


@pytest.fixture(scope="module")
def bench() -> list[Prompt]:
    return read_prompts(PROMPTS / "bench.jsonl")


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


def test_prompts_that_differ_in_case_and_spacing_have_one_key() -> None:
    assert Prompt("a", ("Hello  World",)).key == Prompt("b", ("hello\nworld",)).key
    assert Prompt("a", ("Hello World",)).key != Prompt("a", ("Hello Word",)).key
    assert Prompt("a", ("one", "two")).key != Prompt("a", ("one two",)).key


def test_reading_keeps_the_order_and_drops_exact_repeats(tmp_path: Path) -> None:
    path = written(
        tmp_path, row("First?"), row("Second?"), row(" first? "), "", row("Third?", "go")
    )
    assert read_prompts(path) == [
        Prompt("coding", ("First?",)),
        Prompt("coding", ("Second?",)),
        Prompt("coding", ("Third?", "go")),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "{not json",
        "[]",
        '"text"',
        '{"category": "coding"}',
        '{"turns": ["x"]}',
        '{"category": "coding", "turns": []}',
        '{"category": "coding", "turns": 3}',
        '{"category": "coding", "turns": ["x", "  "]}',
        '{"category": "coding", "turns": [null]}',
        '{"category": "", "turns": ["x"]}',
        '{"category": 7, "turns": ["x"]}',
        '{"category": "all", "turns": ["x"]}',
        '{"category": "coding", "turns": "Hello"}',
        '{"category": "coding", "turns": {"user": "x"}}',
    ],
)
def test_a_malformed_line_is_named_by_file_and_number(tmp_path: Path, line: str) -> None:
    path = written(tmp_path, row("fine"), "", line, row("also fine"))
    with pytest.raises(ValueError, match=f"{path}:3"):
        read_prompts(path)


def test_prompts_that_differ_in_punctuation_are_two_prompts(tmp_path: Path) -> None:
    path = written(tmp_path, row("What is 2 + 3?"), row("What is 2 - 3?"))
    assert len(read_prompts(path)) == 2


def test_a_line_separator_inside_a_turn_does_not_end_the_line(tmp_path: Path) -> None:
    text = "first" + chr(0x2028) + "second" + chr(0x85) + "third"
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"category": "coding", "turns": [text]}, ensure_ascii=False) + "\n")
    assert read_prompts(path) == [Prompt("coding", (text,))]


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "", "  ")
    with pytest.raises(ValueError, match=f"{path} holds no prompts"):
        read_prompts(path)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("limit", [40, None])
def test_one_more_prompt_takes_at_most_one_place_and_moves_none_across(
    seed: int, limit: int | None
) -> None:
    prompts = numbered(*range(200))
    before = [keys(part) for part in split_prompts(prompts, limit, 5, seed)]
    num_changed = 0
    for number in range(1000, 1150):
        after = [keys(part) for part in split_prompts(prompts + numbered(number), limit, 5, seed)]
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
    training, heldout = split_prompts(prompts, 50, 5, seed=17)
    assert split_prompts(shuffled, 50, 5, seed=17) == (training, heldout)
    assert keys(split_prompts(prompts, 50, 5, seed=18)[0]) != keys(training)


def test_the_two_parts_have_the_sizes_asked_for_and_share_no_prompt() -> None:
    training, heldout = split_prompts(numbered(*range(200)), 50, 5, seed=17)
    assert (len(keys(training)), len(keys(heldout))) == (50, 5)
    assert not keys(training) & keys(heldout)


def test_a_smaller_limit_takes_a_part_of_what_a_larger_one_takes() -> None:
    prompts = numbered(*range(200))
    small, large = split_prompts(prompts, 20, 5, 17)[0], split_prompts(prompts, 60, 5, 17)[0]
    assert small == large[:20]


def test_about_a_tenth_of_all_prompts_can_be_held_out() -> None:
    prompts = numbered(*range(2000))
    training, heldout = split_prompts(prompts, None, 150, seed=17)
    assert len(heldout) == 150
    # binomial(2000, 0.1): mean 200, standard deviation 13.4
    assert 2000 - len(training) == pytest.approx(200, abs=5 * 13.4)


def test_too_few_prompts_for_the_limit_or_the_heldout_part_are_refused() -> None:
    prompts = numbered(*range(200))
    num_training = len(split_prompts(prompts, None, 5, seed=17)[0])
    with pytest.raises(
        ValueError,
        match=f"prepare.limit is {num_training + 1}, but only {num_training} prompts are left",
    ):
        split_prompts(prompts, num_training + 1, 5, seed=17)
    with pytest.raises(
        ValueError, match=f"prepare.heldout is 60, but only {200 - num_training} of 200 prompts"
    ):
        split_prompts(prompts, None, 60, seed=17)


def test_a_bench_prompt_that_is_also_any_turn_of_a_training_prompt_is_refused() -> None:
    training = [Prompt("dialogue", ("Hello.", "Sort these words!"))]
    check_disjoint(training, [Prompt("coding", ("Sort those words!",))])
    with pytest.raises(ValueError, match=r"1 bench prompts are also .*\['sort  these WORDS'\]"):
        check_disjoint(training, [Prompt("coding", ("fine", "sort  these WORDS"))])


def test_at_least_600_training_prompts_cover_seven_categories(train: list[Prompt]) -> None:
    assert len(train) >= 600
    assert {prompt.category for prompt in train} == CATEGORIES


def test_the_bench_has_at_least_16_prompts_of_each_category(bench: list[Prompt]) -> None:
    counts = Counter(prompt.category for prompt in bench)
    assert set(counts) == CATEGORIES
    assert min(counts.values()) >= 16


@pytest.mark.parametrize("name", ["train", "bench"])
def test_no_prompt_of_the_project_is_dropped_as_a_repeat(name: str) -> None:
    path = PROMPTS / f"{name}.jsonl"
    num_lines = len([line for line in path.read_text().split("\n") if line.strip()])
    assert len(read_prompts(path)) == num_lines


def test_training_and_bench_prompts_share_no_normalised_text(
    train: list[Prompt], bench: list[Prompt]
) -> None:
    check_disjoint(train, bench)
    first, second = (
        {re.sub(r"\W+", " ", turn).strip().casefold() for prompt in part for turn in prompt.turns}
        for part in (train, bench)
    )
    assert not first & second


def test_both_files_have_dialogues_of_two_turns(train: list[Prompt], bench: list[Prompt]) -> None:
    for prompts in (train, bench):
        dialogues = [prompt for prompt in prompts if prompt.category == "dialogue"]
        assert {len(prompt.turns) for prompt in dialogues} == {2}


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
    bench: list[Prompt], category: str, words: list[str]
) -> None:
    found = [
        prompt
        for prompt in bench
        if prompt.category == category and all(word in prompt.turns[0] for word in words)
    ]
    assert found

"""Training prompts by template and from packages: the pure parts, without the packages."""

import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from specmill import paths
from specmill.prompt_grammar import phrase, read_grammar, slots
from specmill.prompt_gym import questions, without_format
from specmill.prompt_library import functions_of, paragraphs
from specmill.prompt_sets import GRAMMARS, Gate, Source, as_lines, build, collect, from_templates
from specmill.prompts import normalise
from tests.workspace import ROOT

GIVEN = {"question", "options", "topic_text", "task", "spec", "code", "body", "doc", "signature",
         "module", "name", "request", "functions"}  # fmt: skip
BENCH = [
    turn
    for line in (ROOT / "data/prompts/bench.jsonl").read_text().splitlines()
    for turn in json.loads(line)["turns"]
]


def grammar(name: str) -> dict[str, list[str]]:
    return read_grammar(ROOT / GRAMMARS / f"{name}.yaml")


def sources(number: int) -> list[Source]:
    return [
        Source("templates", name, number, from_templates(grammar(name), random.Random(7)))
        for name in ("coding", "writing")
    ]


def test_a_list_on_one_line_is_split_at_bars_between_blanks_and_may_have_an_empty_entry(
    tmp_path: Path,
) -> None:
    (tmp_path / "g.yaml").write_text("one: a b | c|d | |\ntwo:\n  - ls | wc\n")
    assert read_grammar(tmp_path / "g.yaml") == {"one": ["a b", "c|d", "", ""], "two": ["ls | wc"]}


def test_slots_are_filled_and_a_tag_repeats_what_it_stood_for() -> None:
    lists = {"prompt": ["{who#a} and {who#a} meet {other} {5..5} times"], "who": ["x{n}"],
             "n": ["1", "2"], "other": ["Z"]}  # fmt: skip
    assert phrase(lists, "prompt", random.Random(1)).lower() in {
        "x1 and x1 meet z 5 times",
        "x2 and x2 meet z 5 times",
    }


def test_two_slots_of_one_list_differ() -> None:
    lists = {"prompt": ["{w} {w} {w}"], "w": ["a", "b", "c"]}
    for seed in range(30):
        assert sorted(phrase(lists, "prompt", random.Random(seed)).lower().split()) == [*"abc"]


def test_values_from_outside_are_put_in_as_they_stand() -> None:
    lists = {"prompt": ["Explain {code}"], "code": ["never"]}
    code = "f'{x} {prompt} {1..2}'"
    assert phrase(lists, "prompt", random.Random(0), {"code": code}).lower() == f"explain {code}"


def test_a_slot_that_is_nothing_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"\{wrod\} of the list prompt"):
        phrase({"prompt": ["a {wrod}"]}, "prompt", random.Random(0))


@pytest.mark.parametrize("path", sorted((ROOT / GRAMMARS).glob("*.yaml")), ids=lambda p: p.stem)
def test_every_slot_of_a_grammar_is_a_list_or_given_by_a_package(path: Path) -> None:
    lists = read_grammar(path)
    assert slots(lists, list(lists)) <= GIVEN
    if path.stem != "dialogue":
        assert slots(lists, ["prompt"]) == set()


def test_writing_has_more_than_sixty_phrasings_and_none_is_a_bench_prompt_s() -> None:
    lists = grammar("writing")
    kinds = [kind.strip("{}") for kind in set(lists["prompt"])]
    assert sum(len(lists[kind]) for kind in kinds) >= 60
    gate = Gate(BENCH)
    drawn = list(itertools.islice(from_templates(lists, random.Random(3)), 500))
    assert sum(gate.likeness(text) > 0.5 for text in drawn) <= 5


def test_a_prompt_passes_once_however_it_is_punctuated() -> None:
    gate = Gate([])
    assert gate.admit("What is a comet?")
    assert not gate.admit("what is a  comet")
    assert gate.refused == Counter(repeated=1)


def test_what_is_long_or_has_an_at_sign_is_left_out() -> None:
    gate = Gate([])
    assert not gate.admit("write to me at a@b")
    assert not gate.admit("word " * 400)
    assert sorted(gate.refused) == ["holds an @, maybe an address", "too long"]


def test_sharing_more_than_half_of_the_content_words_with_one_bench_prompt_is_too_much() -> None:
    gate = Gate(["Describe tectonic plates and boundary kinds.", "A poem on rivers"])
    assert gate.likeness("Tectonic plates, boundary, rivers") == 0.75
    assert gate.likeness("Tectonic rivers") == 0.5
    assert not gate.admit("Tectonic plates, boundary, rivers")
    assert gate.admit("Tectonic rivers")
    assert not gate.admit("a poem on RIVERS")


def test_every_bench_prompt_would_be_left_out() -> None:
    gate = Gate(BENCH)
    assert not any(gate.admit(text) for text in BENCH)


def test_a_set_has_as_many_of_each_category_no_first_turn_twice_and_the_same_bytes_again() -> None:
    made = [collect(sources(40), grammar("dialogue"), Gate(BENCH), 40, 5).rows for _ in range(2)]
    assert as_lines(made[0]) == as_lines(made[1])
    rows = [json.loads(line) for line in as_lines(made[0]).splitlines()]
    assert Counter(row["category"] for row in rows) == dict.fromkeys(
        ("coding", "writing", "dialogue"), 40
    )
    assert len({normalise(row["turns"][0]) for row in rows}) == 120
    assert all((len(row["turns"]) > 1) == (row["category"] == "dialogue") for row in rows)


def test_a_category_that_cannot_be_filled_is_named() -> None:
    few = Source("templates", "maths", 5, iter(["one?", "two?"]))
    with pytest.raises(ValueError, match="maths has 2 prompts of 5"):
        collect([few], grammar("dialogue"), Gate([]), 5, 0)


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("Find the GCD of 69 and 21. Give only the GCD as your final answer.",
         "Find the GCD of 69 and 21."),
        ("How long was the call? Answer in HH:MM:SS.", "How long was the call?"),
        ("Does it follow?\n(Answer Yes or No)", "Does it follow?"),
        ("Sort words.\n\nYour output should be a list.\n\nNow, sort these: b, a",
         "Sort words.\n\nYour output should be a list.\n\nNow, sort these: b, a"),
        ("Add 2 and 3.", "Add 2 and 3."),
    ],
)  # fmt: skip
def test_a_demand_on_the_answer_s_format_is_cut_off_unless_the_question_follows_it(
    question: str, expected: str
) -> None:
    assert without_format(question) == expected


def test_each_generator_is_asked_for_its_number_of_questions() -> None:
    def make(name: str, size: int, seed: int) -> list[dict[str, str]]:
        return [{"question": f"{name} {seed} {i}"} for i in range(size)]

    asked = questions(make, {"gcd": 2, "lcm": 1}, seed=9)
    assert [row["question"] for row in asked] == ["gcd 9 0", "gcd 9 1", "lcm 9 0"]


def test_functions_with_docstrings_are_found_and_short_ones_lose_their_body() -> None:
    source = '''
def one(a, b=2):
    """Adds.

    More.
    """
    total = a + b
    return total

def two():
    """Nothing."""

def _hidden():
    """Private."""

def bare():
    pass
'''
    one, two = functions_of("m", source)
    assert (one["signature"], one["doc"], one["module"]) == ("one(a, b=2)", "Adds.", "m")
    assert one["body"].startswith("def one")
    assert one["body"].endswith("return total")
    assert two["body"] == ""


def test_paragraphs_are_prose_in_single_spaces() -> None:
    assert paragraphs("One\n  two.\n\nx ::= y\n\n    code()\n\nThree.") == ["One two.", "Three."]


@pytest.mark.long
def test_the_whole_set_is_balanced_and_shares_no_turn_with_the_bench() -> None:
    packages = paths.CACHE / "prompt_packages"
    if not packages.is_dir():
        pytest.skip("make prompts installs the packages")
    rows = build(packages, ROOT / "data/prompts/bench.jsonl")[0].rows
    assert set(Counter(row["category"] for row in rows).values()) == {3000}
    measured = {normalise(text) for text in BENCH}
    assert not any(normalise(text) in measured for row in rows for text in row["turns"])  # type: ignore[attr-defined]

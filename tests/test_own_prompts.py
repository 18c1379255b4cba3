"""Prompts that the verifier writes itself: what is sent, what ends one, which are kept."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from specmill import paths
from specmill.client import Answer
from specmill.own_prompts import draws, frame, main, usable, write_prompts
from specmill.responses import ResponseCache
from specmill.server import Server
from tests.fakes import FakeVllm
from tests.test_templates import CHATML, END, PREFILLS_THINKING, tokenizer

VERIFIER = {"fingerprint": "f", "dtype": "bfloat16"}
PREFIX = [1, 2, 7]


@pytest.mark.parametrize("template", [CHATML, PREFILLS_THINKING])
def test_what_is_sent_ends_where_a_user_would_begin_and_an_answer_where_he_ends(
    template: str,
) -> None:
    read = tokenizer(template)
    prefix, end = frame(read, {})
    assert read.decode(prefix) == "<|im_start|>user\n"
    assert read.decode([end]) == END


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace(END, "\nend of turn"),
        CHATML.replace("{{ message.content }}", "{{ message.content | upper }}"),
        CHATML.replace("{{ message.content }}", "{{ message.content }}{{ message.content }}"),
        "{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}",
    ],
)
def test_a_template_that_hides_where_a_user_s_words_end_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match="does not end a user's turn with a special token"):
        frame(tokenizer(template), {})


def test_every_draw_has_a_seed_of_its_own_and_the_same_one_again() -> None:
    drawn = draws(50, 9, temperature=0.8, max_tokens=20, seed=1)
    assert len({one["seed"] for one in drawn}) == 50
    assert drawn == draws(60, 9, temperature=0.8, max_tokens=20, seed=1)[:50]
    assert drawn[0]["seed"] != draws(1, 9, temperature=0.8, max_tokens=20, seed=2)[0]["seed"]
    assert {**drawn[0], "seed": 0} == {
        "temperature": 0.8, "max_tokens": 20, "stop_token_ids": [9], "seed": 0,
    }  # fmt: skip


class Runs:
    """Runs of `write_prompts` against one fake server and one cache file."""

    def __init__(self, folder: Path):
        self.fake = FakeVllm()
        self.num_starts = 0
        self._path = folder / "prompts.jsonl"

    @contextlib.contextmanager
    def _start(self) -> Iterator[list[Server]]:
        self.num_starts += 1
        with self.fake.serve() as server:
            yield [server]

    def write(self, number: int) -> list[Answer]:
        return asyncio.run(
            write_prompts(
                PREFIX,
                draws(number, 9, temperature=1.0, max_tokens=20, seed=1),
                VERIFIER,
                ResponseCache(self._path),
                self._start,
                concurrency=1,
                timeout_s=30,
            )
        )


def test_the_verifier_is_asked_for_what_follows_the_prefix(tmp_path: Path) -> None:
    """The fake answers [..., 7] with 8, 9, 10."""
    runs = Runs(tmp_path)
    assert [answer.token_ids for answer in runs.write(3)] == 3 * [[8, 9, 10]]
    asked = runs.fake.requests
    assert [body["prompt"] for body in asked] == 3 * [PREFIX]
    assert len({body["seed"] for body in asked}) == 3
    assert {body["temperature"] for body in asked} == {1.0}


def test_prompts_that_were_written_are_not_written_again(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.fake.fail_after = 2
    with pytest.raises(RuntimeError, match="the fake is tired"):
        runs.write(4)
    runs.fake.fail_after = None
    runs.fake.requests.clear()
    assert len(runs.write(5)) == 5
    assert len(runs.fake.requests) == 3
    assert len(runs.write(5)) == 5
    assert runs.num_starts == 2


def test_what_is_cut_short_or_there_already_is_left_out_and_counted() -> None:
    read = tokenizer(CHATML)

    def answer(text: str, reason: str = "stop") -> Answer:
        return Answer(PREFIX, read(text, add_special_tokens=False).input_ids, "", reason)

    prompts, counts = usable(
        [
            answer(" How do I boil an egg?\n"),
            answer("Hi there"),
            answer(""),
            answer("How do I boil an egg?" + END),
            answer("Write a very long", "length"),
            answer("Wie heißt du?"),
        ],
        read,
    )
    assert prompts == ["How do I boil an egg?", "Wie heißt du?"]
    assert counts == {"kept": 2, "cut": 1, "too_short": 2, "repeated": 1}


@pytest.mark.parametrize(
    "arguments", [["0"], ["5", "--temperature", "0"], ["5", "--temperature=nan"],
                  ["5", "--max-tokens", "0"]]
)  # fmt: skip
def test_numbers_that_draw_nothing_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"own_prompts: number and --max-tokens"):
        main(arguments)


def test_without_a_verifier_it_is_said_what_makes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "IDENTITY", tmp_path / "identity.json")
    with pytest.raises(SystemExit, match=r"own_prompts: .*identity\.json"):
        main(["5"])

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specmill.generate import Job, generate, greedy, sampled
from specmill.prompts import Prompt
from specmill.responses import ResponseCache
from specmill.samples import Sample
from specmill.server import Server
from tests.fakes import FakeVllm

VERIFIER = {"fingerprint": "f", "chat_template": "t", "dtype": "bfloat16", "max_model_len": 64}


class Runs:
    """Runs of `generate` against one fake server and one cache file."""

    def __init__(self, folder: Path):
        self.fake = FakeVllm()
        self.num_starts = 0
        self._path = folder / "responses.jsonl"

    @contextlib.contextmanager
    def _start(self) -> Iterator[Server]:
        self.num_starts += 1
        with self.fake.serve() as server:
            yield server

    def answer(self, jobs: list[Job], concurrency: int = 1) -> tuple[list[list[Sample]], int]:
        return asyncio.run(
            generate(
                jobs,
                VERIFIER,
                ResponseCache(self._path),
                self._start,
                concurrency=concurrency,
                timeout_s=30,
                source="data/prompts",
            )
        )


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def jobs_for(*texts: str) -> list[Job]:
    return [("train", Prompt("coding", (text,)), greedy(8)) for text in texts]


def texts(conversations: list[list[Sample]]) -> list[list[str]]:
    return [[sample.text for sample in conversation] for conversation in conversations]


def test_answers_come_in_job_order_even_when_the_first_is_answered_last(runs: Runs) -> None:
    runs.fake.hold = ("first", threading.Event())
    conversations, num_generated = runs.answer(jobs_for("first", "second", "third"), concurrency=2)
    assert texts(conversations) == [["re: first"], ["re: second"], ["re: third"]]
    assert num_generated == 3


def test_samples_hold_the_exact_ids_of_the_server(runs: Runs) -> None:
    job: Job = ("heldout", Prompt("maths", ("1 + 1?",)), greedy(8))
    sample = runs.answer([job])[0][0][0]
    assert bytes(sample.prompt_token_ids) == b"<user>1 + 1?"
    assert bytes(sample.answer_token_ids) == b"re: 1 + 1?"
    assert (sample.category, sample.split, sample.turn) == ("maths", "heldout", 0)
    assert (sample.source, sample.finish_reason) == ("data/prompts", "stop")


def test_what_was_answered_once_is_not_asked_again(runs: Runs) -> None:
    first = runs.answer(jobs_for("one", "two"))
    again = runs.answer(jobs_for("one", "two"))
    assert texts(again[0]) == texts(first[0])
    assert (first[1], again[1]) == (2, 0)
    assert (runs.num_starts, len(runs.fake.requests)) == (1, 2)


def test_only_what_is_missing_is_asked_and_the_order_is_kept(runs: Runs) -> None:
    runs.answer(jobs_for("b", "d"))
    runs.fake.requests.clear()
    conversations, num_generated = runs.answer(jobs_for("a", "b", "c", "d", "e"))
    assert texts(conversations) == [[f"re: {text}"] for text in "abcde"]
    assert num_generated == 3
    asked = [request["messages"][0]["content"] for request in runs.fake.requests]
    assert asked == ["a", "c", "e"]


def test_other_sampling_parameters_ask_again(runs: Runs) -> None:
    prompt = Prompt("coding", ("one",))
    assert runs.answer([("train", prompt, greedy(8))])[1] == 1
    assert runs.answer([("train", prompt, greedy(9))])[1] == 1


def test_the_second_question_of_a_dialogue_is_asked_after_the_first_answer(runs: Runs) -> None:
    job: Job = ("bench", Prompt("dialogue", ("Hi.", "And now?")), greedy(8))
    conversations, num_generated = runs.answer([job])
    assert texts(conversations) == [["re: Hi.", "re: And now?"]]
    assert num_generated == 2
    assert [sample.turn for sample in conversations[0]] == [0, 1]
    assert [request["messages"] for request in runs.fake.requests] == [
        [{"role": "user", "content": "Hi."}],
        [
            {"role": "user", "content": "Hi."},
            {"role": "assistant", "content": "re: Hi."},
            {"role": "user", "content": "And now?"},
        ],
    ]
    second = conversations[0][1]
    assert bytes(second.prompt_token_ids) == b"<user>Hi.<assistant>re: Hi.<user>And now?"
    assert bytes(second.answer_token_ids) == b"re: And now?"


def test_an_interrupted_run_keeps_its_finished_answers(runs: Runs) -> None:
    runs.fake.fail_after = 2
    with pytest.raises(RuntimeError, match=r"status 500.*the fake is tired"):
        runs.answer(jobs_for("a", "b", "c", "d"))
    runs.fake.fail_after = None
    runs.fake.requests.clear()
    conversations, num_generated = runs.answer(jobs_for("a", "b", "c", "d"))
    assert num_generated == 2
    assert [request["messages"][0]["content"] for request in runs.fake.requests] == ["c", "d"]
    assert texts(conversations) == [["re: a"], ["re: b"], ["re: c"], ["re: d"]]


def test_an_interrupted_dialogue_keeps_its_first_answer(runs: Runs) -> None:
    job: Job = ("bench", Prompt("dialogue", ("Hi.", "And now?")), greedy(8))
    runs.fake.fail_after = 1
    with pytest.raises(RuntimeError, match=r"bench prompt .Hi\..*turn 2: .*the fake is tired"):
        runs.answer([job])
    runs.fake.fail_after = None
    conversations, num_generated = runs.answer([job])
    assert texts(conversations) == [["re: Hi.", "re: And now?"]]
    assert num_generated == 1


@pytest.mark.parametrize("name", ["token_ids", "prompt_token_ids"])
def test_a_server_that_leaves_token_ids_out_is_refused_and_nothing_is_kept(
    runs: Runs, name: str
) -> None:
    runs.fake.omitted = {name}
    with pytest.raises(RuntimeError, match="left the token ids out"):
        runs.answer(jobs_for("a"))
    runs.fake.omitted = set()
    assert runs.answer(jobs_for("a"))[1] == 1


def test_the_sampling_parameters_reach_the_server(runs: Runs) -> None:
    sampling: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "seed": 4, "max_tokens": 12}
    runs.answer([("train", Prompt("coding", ("a",)), sampling)])
    request = runs.fake.requests[0]
    assert {name: request[name] for name in sampling} == sampling
    assert request["return_token_ids"] is True


def test_temperature_zero_is_greedy_whatever_the_seed() -> None:
    prompt = Prompt("coding", ("a",))
    assert sampled(prompt, 8, 0.0, 0.9, seed=1) == {"temperature": 0.0, "max_tokens": 8}


def test_the_seed_of_an_answer_comes_from_the_seed_and_the_prompt_alone() -> None:
    one, other = Prompt("coding", ("one",)), Prompt("coding", ("other",))
    first = sampled(one, 8, 0.7, 0.9, seed=1)
    assert first == sampled(Prompt("maths", ("ONE",)), 8, 0.7, 0.9, seed=1)
    assert first == {"temperature": 0.7, "top_p": 0.9, "max_tokens": 8, "seed": first["seed"]}
    seeds = {
        first["seed"],
        sampled(other, 8, 0.7, 0.9, seed=1)["seed"],
        sampled(one, 8, 0.7, 0.9, seed=2)["seed"],
    }
    assert len(seeds) == 3
    assert all(0 <= seed < 2**32 for seed in seeds)

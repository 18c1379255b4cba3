import asyncio
import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specmill.conversations import Conversation, from_row
from specmill.generate import Job, generate, greedy, sampled
from specmill.prepare import Picked, plan_jobs, split_and_filter
from specmill.prompts import pick_training
from specmill.responses import ResponseCache
from specmill.samples import Sample
from specmill.server import Server
from specmill.sources import Reading
from tests.fakes import FakeVllm, prepare_section

VERIFIER = {"fingerprint": "f", "chat_template": "t", "dtype": "bfloat16", "max_model_len": 64}


class Runs:
    """Runs of `generate` against one fake server and one cache file."""

    def __init__(self, folder: Path):
        self.fake = FakeVllm()
        self.others: list[FakeVllm] = []
        """Further servers."""
        self.num_starts = 0
        self._path = folder / "responses.jsonl"

    @contextlib.contextmanager
    def _start(self) -> Iterator[list[Server]]:
        self.num_starts += 1
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(one.serve()) for one in (self.fake, *self.others)]

    def answer(
        self, jobs: list[Job], concurrency: int = 1, **template_kwargs: Any
    ) -> tuple[list[list[Sample]], int]:
        samples, counts = self.counted(jobs, concurrency, **template_kwargs)
        return samples, counts["num_generated"]

    def counted(
        self, jobs: list[Job], concurrency: int = 1, strict: bool = False, **template_kwargs: Any
    ) -> tuple[list[list[Sample]], Counter[str]]:
        return asyncio.run(
            generate(
                jobs,
                VERIFIER,
                ResponseCache(self._path),
                self._start,
                template_kwargs,
                concurrency=concurrency,
                timeout_s=30,
                strict=strict,
            )
        )

    def asked(self) -> list[str]:
        """Last messages of the requests since this was called last."""
        last = [request["messages"][-1]["content"] for request in self.fake.requests]
        self.fake.requests.clear()
        return last


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def prompt(*turns: str, category: str = "coding") -> Conversation:
    return from_row({"category": category, "turns": list(turns)}, "none", "file:prompts.jsonl")


def messages(*messages: dict[str, Any], **more: Any) -> Conversation:
    return from_row({"messages": list(messages), **more}, "coding", "file:prompts.jsonl")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def jobs_for(*texts: str) -> list[Job]:
    return [("train", prompt(text), greedy(8)) for text in texts]


def texts(conversations: list[list[Sample]]) -> list[list[str]]:
    return [[sample.text for sample in conversation] for conversation in conversations]


def test_answers_come_in_job_order_even_when_the_first_is_answered_last(runs: Runs) -> None:
    runs.fake.hold = ("first", threading.Event())
    conversations, num_generated = runs.answer(jobs_for("first", "second", "third"), concurrency=2)
    assert texts(conversations) == [["re: first"], ["re: second"], ["re: third"]]
    assert num_generated == 3


def test_samples_hold_the_exact_ids_of_the_server(runs: Runs) -> None:
    job: Job = ("heldout", prompt("1 + 1?", category="maths"), greedy(8))
    sample = runs.answer([job])[0][0][0]
    assert bytes(sample.prompt_token_ids) == b"<user>1 + 1?"
    assert bytes(sample.answer_token_ids) == b"re: 1 + 1?"
    assert (sample.category, sample.split, sample.turn) == ("maths", "heldout", 0)
    assert (sample.source, sample.finish_reason) == ("file:prompts.jsonl", "stop")


def test_what_was_answered_once_is_not_asked_again(runs: Runs) -> None:
    first = runs.answer(jobs_for("one", "two"))
    again = runs.answer(jobs_for("one", "two"))
    assert texts(again[0]) == texts(first[0])
    assert (first[1], again[1]) == (2, 0)
    assert (runs.num_starts, len(runs.fake.requests)) == (1, 2)


def test_only_what_is_missing_is_asked_and_the_order_is_kept(runs: Runs) -> None:
    runs.answer(jobs_for("b", "d"))
    runs.asked()
    conversations, num_generated = runs.answer(jobs_for("a", "b", "c", "d", "e"))
    assert texts(conversations) == [[f"re: {text}"] for text in "abcde"]
    assert num_generated == 3
    assert runs.asked() == ["a", "c", "e"]


def test_more_prompts_ask_for_the_new_ones_and_fewer_or_another_filter_for_none(
    runs: Runs,
) -> None:
    def run(num_prompts: int, limit: int, min_tokens: int) -> int:
        rows = [prompt(f"Is {number} prime?") for number in range(num_prompts)]
        chosen = prepare_section(limit=limit, heldout=2, min_tokens=min_tokens)
        picked = pick_training(
            [Reading(chosen.dataset[0], rows)], chosen.limit, chosen.heldout, chosen.seed
        )
        jobs = plan_jobs(Picked(*picked, [prompt("Hi.")], {}), chosen)
        conversations, num_generated = runs.answer(jobs, concurrency=8)
        splits, _ = split_and_filter(conversations, min_tokens, 64)
        assert len(splits["train"]) == limit
        return num_generated

    assert run(60, 20, min_tokens=2) == 23
    assert run(60, 20, min_tokens=9) == 0
    assert run(60, 12, min_tokens=2) == 0
    assert run(60, 21, min_tokens=2) == 1
    assert run(61, 21, min_tokens=2) <= 1
    assert run(59, 21, min_tokens=2) <= 1


def test_other_sampling_parameters_ask_again(runs: Runs) -> None:
    one = prompt("one")
    assert runs.answer([("train", one, greedy(8))])[1] == 1
    assert runs.answer([("train", one, greedy(9))])[1] == 1


def test_the_second_question_of_a_dialogue_is_asked_after_the_first_answer(runs: Runs) -> None:
    job: Job = ("bench", prompt("Hi.", "And now?"), greedy(8))
    conversations, num_generated = runs.answer([job])
    assert texts(conversations) == [["re: Hi.", "re: And now?"]]
    assert num_generated == 2
    assert [sample.turn for sample in conversations[0]] == [0, 1]
    assert [request["messages"] for request in runs.fake.requests] == [
        [user("Hi.")],
        [user("Hi."), assistant("re: Hi."), user("And now?")],
    ]
    second = conversations[0][1]
    assert bytes(second.prompt_token_ids) == b"<user>Hi.<assistant>re: Hi.<user>And now?"
    assert bytes(second.answer_token_ids) == b"re: And now?"


def test_the_datasets_answers_are_not_what_the_verifier_is_reminded_of(runs: Runs) -> None:
    system = {"role": "system", "content": "S"}
    recorded = messages(system, user("Hi."), assistant("Recorded."), user("Now?"), assistant("R."))
    conversations, _ = runs.answer([("train", recorded, greedy(8))])
    assert texts(conversations) == [["re: Hi.", "re: Now?"]]
    assert runs.fake.requests[1]["messages"] == [
        system,
        user("Hi."),
        assistant("re: Hi."),
        user("Now?"),
    ]


CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich"}},
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
WITH_RESULTS = messages(
    user("Weather?"),
    assistant("", tool_calls=[CALL]),
    {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    assistant("It is sunny."),
    user("Thanks."),
    tools=[TOOL],
)


def test_with_tool_results_the_history_is_the_datasets_and_arguments_go_as_text(
    runs: Runs,
) -> None:
    conversations, _ = runs.answer([("train", WITH_RESULTS, greedy(8))])
    assert texts(conversations) == [["re: Weather?", "re: sunny", "re: Thanks."]]
    first, second, third = runs.fake.requests
    assert first["messages"] == [user("Weather?")]
    function = {"name": "weather", "arguments": '{"city": "Zürich"}'}
    assert second["messages"] == [
        user("Weather?"),
        assistant("", tool_calls=[CALL | {"function": function}]),
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    ]
    assert third["messages"][3:] == [assistant("It is sunny."), user("Thanks.")]


def test_without_tool_results_a_call_in_the_dataset_is_no_history(runs: Runs) -> None:
    calling = messages(user("Weather?"), assistant("", tool_calls=[CALL]), user("And now?"))
    runs.answer([("train", calling, greedy(8))])
    assert runs.fake.requests[1]["messages"][1] == assistant("re: Weather?")


def test_tools_are_offered_but_calls_come_as_text(runs: Runs) -> None:
    runs.answer([("train", WITH_RESULTS, greedy(8))])
    assert [request["tools"] for request in runs.fake.requests] == [[TOOL]] * 3
    assert {request["tool_choice"] for request in runs.fake.requests} == {"none"}


def test_a_plain_request_has_neither_tools_nor_template_arguments(runs: Runs) -> None:
    runs.answer(jobs_for("a"))
    assert set(runs.fake.requests[0]) == {
        "model",
        "messages",
        "return_token_ids",
        "temperature",
        "max_tokens",
    }


def test_other_tools_or_template_arguments_ask_again(runs: Runs) -> None:
    bare, calling = messages(user("a")), messages(user("a"), tools=[TOOL])
    for conversation in (bare, calling):
        job: Job = ("train", conversation, greedy(8))
        for template_kwargs in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
            assert runs.answer([job], **template_kwargs)[1] == 1
            assert runs.answer([job], **template_kwargs)[1] == 0
    asked = [request.get("chat_template_kwargs") for request in runs.fake.requests]
    assert asked == [None, {"enable_thinking": False}, {"enable_thinking": True}] * 2


def test_an_interrupted_run_keeps_its_finished_answers(runs: Runs) -> None:
    runs.fake.fail_after = 2
    with pytest.raises(RuntimeError, match=r"status 500.*the fake is tired"):
        runs.answer(jobs_for("a", "b", "c", "d"))
    runs.fake.fail_after = None
    runs.asked()
    conversations, num_generated = runs.answer(jobs_for("a", "b", "c", "d"))
    assert num_generated == 2
    assert runs.asked() == ["c", "d"]
    assert texts(conversations) == [["re: a"], ["re: b"], ["re: c"], ["re: d"]]


def test_an_interrupted_dialogue_keeps_its_first_answer(runs: Runs) -> None:
    job: Job = ("bench", prompt("Hi.", "And now?", category="dialogue"), greedy(8))
    runs.fake.fail_after = 1
    with pytest.raises(
        RuntimeError,
        match=r"bench prompt .Hi\.. \(dialogue\), turn 2: .*fake is tired",
    ):
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
    one = prompt("a")
    sampling = sampled(one, prepare_section(temperature=0.5, top_p=0.9, top_k=20, min_p=0.05))
    runs.answer([("train", one, sampling)])
    request = runs.fake.requests[0]
    assert request["return_token_ids"] is True
    assert json.loads(json.dumps(sampling)).items() <= request.items()
    assert (request["temperature"], request["top_p"]) == (0.5, 0.9)
    assert (request["top_k"], request["min_p"], request["max_tokens"]) == (20, 0.05, 16)


def test_temperature_zero_is_greedy_whatever_the_seed() -> None:
    chosen = prepare_section(temperature=0.0, max_tokens=8, top_k=5, seed=1)
    assert sampled(prompt("a"), chosen) == {"temperature": 0.0, "max_tokens": 8}


def test_the_seed_of_an_answer_comes_from_the_seed_and_the_prompt_alone() -> None:
    chosen = prepare_section(seed=1)
    first = sampled(prompt("one"), chosen)
    assert first == sampled(prompt("ONE", category="maths"), chosen)
    assert first == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": 16,
        "seed": first["seed"],
    }
    seeds = {
        first["seed"],
        sampled(prompt("other"), chosen)["seed"],
        sampled(prompt("one"), prepare_section(seed=2))["seed"],
    }
    assert len(seeds) == 3
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_servers_share_the_conversations_and_a_slow_one_gets_fewer(runs: Runs) -> None:
    """The first server holds one conversation until the others have answered all the rest."""
    other = FakeVllm()
    runs.others = [other]
    jobs: list[Job] = [("train", prompt(f"question {n}"), greedy(8)) for n in range(20)]
    done = threading.Event()
    runs.fake.hold = ("question 0", done)
    answered = other.chat

    def count(messages: list[dict[str, Any]]) -> dict[str, Any]:
        if len(other.requests) == 19:
            done.set()
        return answered(messages)

    other.chat = count  # type: ignore[method-assign]
    samples, generated = runs.answer(jobs)
    assert generated == 20
    assert [[one.text for one in each] for each in samples] == [
        [f"re: question {n}"] for n in range(20)
    ]
    assert len(runs.fake.requests) == 1
    assert len(other.requests) == 19


def test_each_server_has_as_many_conversations_in_flight_as_asked(runs: Runs) -> None:
    """Three at each of two servers: six are held at once, then let go together."""
    runs.others = [FakeVllm()]
    barrier = threading.Barrier(6, timeout=20)
    for fake in (runs.fake, *runs.others):
        answered = fake.chat

        def together(messages: list[dict[str, Any]], answered: Any = answered) -> dict[str, Any]:
            barrier.wait()
            return dict(answered(messages))

        fake.chat = together  # type: ignore[method-assign]
    jobs: list[Job] = [("train", prompt(f"question {n}"), greedy(8)) for n in range(6)]
    runs.answer(jobs, concurrency=3)
    assert [len(fake.requests) for fake in (runs.fake, *runs.others)] == [3, 3]


def test_a_conversation_that_outgrows_the_context_ends_before_and_is_counted(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    runs.fake.refused = "long"
    jobs: list[Job] = [
        ("train", prompt(*turns), greedy(8))
        for turns in (["short"], ["long"], ["short too", "long"], ["last"])
    ]
    answered, counts = runs.counted(jobs)
    assert [[sample.turn for sample in samples] for samples in answered] == [[0], [0], [0]]
    assert counts == {"num_generated": 3, "num_too_long": 2}
    assert "train prompt 'long'" in caplog.text
    assert "must fit verifier.max_model_len" in caplog.text
    again = r"'long' .*, turn 1: .*context length.*\(prepare\.max_tokens\)"
    with pytest.raises(RuntimeError, match=again):
        runs.counted(jobs, strict=True)
    with pytest.raises(RuntimeError, match=again):
        runs.counted([("bench", prompt("long"), greedy(8))])

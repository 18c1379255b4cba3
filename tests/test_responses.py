import copy
import json
from pathlib import Path
from typing import Any

import pytest

from specmill.client import Answer
from specmill.responses import ResponseCache, response_key

MESSAGES = [{"role": "user", "content": "Hi"}]
VERIFIER = {
    "fingerprint": "f1",
    "chat_template": "t1",
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "name": "tiny",
}
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "seed": 5, "max_tokens": 16}


def answer(text: str) -> Answer:
    return Answer([1, 2], list(text.encode()), text, "stop")


def test_answers_survive_reopening(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "responses.jsonl"
    cache = ResponseCache(path)
    assert cache.get("a") is None
    cache.add("a", answer("one\nline ⏎ \u2028"))
    cache.add("b", answer("two"))
    assert cache.get("a") == answer("one\nline ⏎ \u2028")
    reopened = ResponseCache(path)
    assert reopened.get("a") == answer("one\nline ⏎ \u2028")
    assert reopened.get("b") == answer("two")
    assert reopened.get("c") is None


def test_an_answer_is_in_the_file_when_add_returns(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    cache = ResponseCache(path)
    cache.add("a", answer("one"))
    assert ResponseCache(path).get("a") == answer("one")
    cache.add("b", answer("two"))
    assert ResponseCache(path).get("b") == answer("two")


def test_two_open_caches_append_without_losing_each_others_answers(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    first, second = ResponseCache(path), ResponseCache(path)
    first.add("a", answer("one"))
    second.add("b", answer("two"))
    first.add("c", answer("three"))
    reopened = ResponseCache(path)
    found = [reopened.get(key) for key in "abc"]
    assert found == [answer("one"), answer("two"), answer("three")]


@pytest.mark.parametrize("num_bytes_lost", [2, 20, 60])
def test_a_torn_last_line_is_skipped_and_the_next_answer_is_not_glued_to_it(
    tmp_path: Path, num_bytes_lost: int
) -> None:
    path = tmp_path / "responses.jsonl"
    cache = ResponseCache(path)
    cache.add("a", answer("one"))
    cache.add("b", answer("two"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-num_bytes_lost])

    reopened = ResponseCache(path)
    assert reopened.get("a") == answer("one")
    assert reopened.get("b") is None
    reopened.add("c", answer("three"))

    again = ResponseCache(path)
    assert again.get("a") == answer("one")
    assert again.get("b") is None
    assert again.get("c") == answer("three")


def test_a_line_torn_inside_a_character_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    cache = ResponseCache(path)
    cache.add("a", answer("one"))
    cache.add("b", answer("caf\u00e9"))
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index("\u00e9".encode()) + 1])
    reopened = ResponseCache(path)
    assert reopened.get("a") == answer("one")
    assert reopened.get("b") is None


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    ResponseCache(path).add("a", answer("one"))
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    cache = ResponseCache(path)
    assert cache.get("a") == answer("one")
    cache.add("b", answer("two"))
    assert [json.loads(line)["key"] for line in path.read_text().splitlines()] == ["a", "b"]


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("messages", "content", "Ho"),
        ("messages", "role", "system"),
        ("verifier", "fingerprint", "f2"),
        ("verifier", "chat_template", "t2"),
        ("verifier", "dtype", "float32"),
        ("verifier", "max_model_len", 1024),
        ("sampling", "temperature", 0.8),
        ("sampling", "top_p", 0.8),
        ("sampling", "seed", 6),
        ("sampling", "max_tokens", 17),
        ("sampling", "top_k", 20),
        ("sampling", "min_p", 0.1),
        ("sampling", "tools", [{"type": "function", "function": {"name": "clock"}}]),
        ("sampling", "chat_template_kwargs", {"enable_thinking": False}),
        ("messages", "tool_calls", [{"function": {"name": "clock", "arguments": {}}}]),
        ("messages", "reasoning_content", "hm"),
    ],
)
def test_the_key_changes_with_everything_that_shapes_an_answer(
    part: str, name: str, value: Any
) -> None:
    inputs: dict[str, Any] = {
        "messages": copy.deepcopy(MESSAGES),
        "verifier": dict(VERIFIER),
        "sampling": dict(SAMPLING),
    }
    before = response_key(**inputs)
    assert before == response_key(MESSAGES, VERIFIER, SAMPLING)
    (inputs[part][0] if part == "messages" else inputs[part])[name] = value
    assert response_key(**inputs) != before


def test_the_key_changes_with_another_turn_and_not_with_the_name_of_the_verifier() -> None:
    before = response_key(MESSAGES, VERIFIER, SAMPLING)
    more = [*MESSAGES, {"role": "assistant", "content": "Ho"}, {"role": "user", "content": "Hi"}]
    assert response_key(more, VERIFIER, SAMPLING) != before
    assert response_key(MESSAGES, VERIFIER | {"name": "other"}, SAMPLING) == before

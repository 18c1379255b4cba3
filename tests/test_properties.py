"""What holds for any input: parsers, the store's index, acceptance arithmetic, intervals.

Every property is tried on a few fixed examples, and by `make test-long` on thousands of new ones.
"""

import inspect
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from specmill import index
from specmill.acceptance import acceptance, add, conditional, draft_coverage
from specmill.conversations import Conversation, from_row
from specmill.expected import tokens_per_step
from specmill.intervals import LEAST_PAIRS, paired_ratio
from specmill.json_rows import json_rows
from specmill.params_data import Dataset
from specmill.shards import Row, Shard, StateSpec, describe, parse
from specmill.sources import read_conversations
from specmill.walk import Runs, Walk, figures, walk
from tests.examples import FEW, MANY

Property = Callable[..., None]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
KNOWN = st.sampled_from(
    ["turns", "messages", "conversations", "prompt", "instruction", "input", "completion", "tools",
     "role", "from", "content", "value", "tool_calls", "function", "name", "arguments", "category",
     "user", "assistant", "system", "tool", "function_call", "tool_call_id", "reasoning"]
)  # fmt: skip
ROW_LIKE = st.recursive(
    JSON | KNOWN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KNOWN, inner, max_size=4),
    max_leaves=12,
)
"""JSON that has the keys of conversations in places where they may or may not belong."""

KEY = st.text("0123456789abcdef", min_size=64, max_size=64)
SPEC = st.builds(
    StateSpec,
    verifier=st.text(max_size=8),
    layer_ids=st.lists(st.integers(0, 99), min_size=1, max_size=4).map(tuple),
    hidden_size=st.integers(0, 9000),
    dtype=st.sampled_from(["bfloat16", "float16", "float32", "float8_e4m3fn"]),
)
SHARD = st.builds(
    Shard, SPEC, st.lists(st.builds(Row, KEY, st.integers(1, 10**6), KEY), max_size=3).map(tuple)
)


def round_trip(folder: Path, rows: list[Any]) -> None:
    path = folder / "rows.jsonl"
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    assume(not rows or not isinstance(rows[0], list))  # a first line with [ means one array
    read = [row for _, row in json_rows(path)]
    assert json.dumps(read) == json.dumps(rows)
    places = [place for place, _ in json_rows(path)]
    assert places == [f"{path}:{number}" for number in range(1, len(rows) + 1)]


def never_crashes(folder: Path, content: bytes) -> None:
    path = folder / "rows.jsonl"
    path.write_bytes(content)
    try:
        reading = read_conversations(Dataset(source=f"file:{path}"), None)
    except ValueError as error:
        refusal = str(error)
    else:
        usable = len(reading.conversations) + reading.num_repeated
        assert usable + reading.num_unusable == reading.num_rows
        return
    assert str(path) in refusal


def gives_a_whole_conversation_or_a_reason(row: Any) -> None:
    try:
        found = from_row(row, "mixed", "s")
    except ValueError:
        return
    assert isinstance(found, Conversation)
    assert found.exchanges
    assert all(question.strip() for question in found.questions)
    assert len(found.key) == 64
    for exchange in found.exchanges:
        assert exchange.answer is None or exchange.answer["role"] == "assistant"
        json.dumps([*exchange.messages, exchange.answer], allow_nan=False)
    json.dumps(found.tools, allow_nan=False)


def keeps_what_was_said(turns: list[tuple[str, str]]) -> None:
    told = [
        {"role": role, "content": text}
        for pair in turns
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    found = from_row({"messages": told}, "mixed", "s")
    answers = [exchange.answer for exchange in found.exchanges]
    assert found.said == tuple(question for question, _ in turns)
    assert [answer and answer["content"] for answer in answers] == [a for _, a in turns]
    sharegpt = [{"from": one["role"], "value": one["content"]} for one in told]
    assert from_row({"conversations": sharegpt}, "mixed", "s") == found


def a_shard_is_what_its_line_says(shard: Shard) -> None:
    assert parse(json.loads(json.dumps(describe(shard)))) == shard


def what_was_appended_is_read(folder: Path, shards: list[Shard]) -> None:
    path = folder / "index.jsonl"
    path.unlink(missing_ok=True)
    for shard in shards:
        index.append(path, shard)
    assert index.read_index(path) == {shard.name: shard for shard in shards}


def a_changed_line_is_left_out(folder: Path, shard: Shard, at: int, byte: int) -> None:
    path = folder / "index.jsonl"
    path.unlink(missing_ok=True)
    index.append(path, shard)
    content = bytearray(path.read_bytes())
    content[at % len(content)] = byte
    path.write_bytes(content)
    assert index.read_index(path).items() <= {shard.name: shard}.items()


def length_is_one_and_the_sum_of_the_rates(at: list[int], further: int) -> None:
    falling = sorted(at, reverse=True)
    drafts = falling[0] + further
    counts = {
        "num_drafts": drafts,
        "num_draft_tokens": drafts * len(at),
        "num_accepted_tokens": sum(at),
        **{f"accepted_at_{position}": number for position, number in enumerate(falling)},
    }
    found = acceptance(counts, len(at))
    if not drafts:
        assert found == {"num_drafts": 0}
        return
    rates = found["acceptance_rate_pos"]
    assert math.isclose(found["acceptance_length"], 1 + sum(rates))
    assert math.isclose(found["acceptance_length"], tokens_per_step(rates))
    assert 1 <= found["acceptance_length"] <= len(at) + 1
    assert 0 <= found["acceptance_rate"] <= 1
    for upto in range(len(at)):
        given = conditional(rates)[: upto + 1]
        assert math.isclose(math.prod(one or 0.0 for one in given), rates[upto], abs_tol=1e-12)
    assert acceptance(add([counts, counts]), len(at)) == found | {
        "num_drafts": 2 * drafts, "num_draft_tokens": 2 * drafts * len(at)
    }  # fmt: skip


def coverage_is_a_share_and_steps_give_at_least_a_token(
    drafts: int, accepted: int, requests: int, further: int, joined: int
) -> None:
    # every draft is a step, and a step gives a token besides those accepted
    output = requests + drafts + accepted + further
    chunks = max(requests, requests + drafts + further - joined)
    counts = {"num_drafts": drafts, "num_accepted_tokens": accepted}
    found = draft_coverage(counts, output, requests, chunks)
    if found["draft_coverage"] is not None:
        assert 0 <= found["draft_coverage"] <= 1
        assert found["tokens_per_step"] >= 1


def every_token_is_given_once(right: list[list[bool]], k: int, cut: int) -> None:
    runs = Runs.of_chain(np.array(right, dtype=bool).reshape(len(right), 4))
    found = walk(runs, k)
    assert found.num_tokens == len(right)
    # where the answer ends with accepted drafts, the bonus token after them is none of its own
    assert found.num_steps + sum(found.accepted_at) - len(right) in (0, 1)
    assert list(found.accepted_at) == sorted(found.accepted_at, reverse=True)
    assert found.num_draft_tokens == k * found.num_steps == k * found.num_drafts
    part = walk(runs, k, min(cut, len(right)) + 1)
    assert part.num_tokens == min(cut, len(right))
    assert part.num_steps <= found.num_steps


def figures_agree_with_acceptance(walks: list[Walk]) -> None:
    found = figures(walks)
    assert found["num_tokens"] == sum(one.num_tokens for one in walks)
    if found["num_drafts"]:
        rates = [found[f"acceptance_rate_pos_{position}"] for position in range(3)]
        assert math.isclose(found["acceptance_length"], 1 + sum(rates))
        assert found["tokens_per_step_low"] is None or (
            found["tokens_per_step_low"] <= found["tokens_per_step"] + 1e-9
            and found["tokens_per_step_high"] >= found["tokens_per_step"] - 1e-9
        )


def hold_the_point_and_turn_over(ratios: list[float], drift: float) -> None:
    found = paired_ratio(ratios, drift)
    assert min(ratios) * (1 - 1e-9) <= found.median <= max(ratios) * (1 + 1e-9)
    assert (found.low is None) == (len(ratios) < LEAST_PAIRS)
    if found.low is None or found.high is None:
        assert found.verdict is None
        return
    assert found.low <= found.median * (1 + 1e-9)
    assert found.median <= found.high * (1 + 1e-9)
    wider = paired_ratio(ratios, drift + 0.1)
    assert wider.low is not None
    assert wider.high is not None
    assert (wider.low, -wider.high) < (found.low, -found.high)


RATIO = st.floats(0.01, 100)
COUNT = st.integers(0, 10**6)
WALK = st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=12).map(
    lambda right: walk(Runs.of_chain(np.array(right, dtype=bool)), 3)
)
PROPERTIES: list[tuple[Property, dict[str, Any]]] = [
    (round_trip, {"rows": st.lists(JSON.filter(lambda row: row == row), max_size=5)}),
    (never_crashes, {"content": st.binary() | st.lists(ROW_LIKE).map(
        lambda rows: b"\n".join(json.dumps(row).encode() for row in rows))}),
    (gives_a_whole_conversation_or_a_reason, {"row": ROW_LIKE}),
    (keeps_what_was_said, {
        "turns": st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4)}),
    (a_shard_is_what_its_line_says, {"shard": SHARD}),
    (what_was_appended_is_read, {"shards": st.lists(SHARD, max_size=4)}),
    (a_changed_line_is_left_out, {
        "shard": SHARD, "at": COUNT, "byte": st.integers(0, 255)}),
    (length_is_one_and_the_sum_of_the_rates, {
        "at": st.lists(COUNT, min_size=1, max_size=8), "further": COUNT}),
    (coverage_is_a_share_and_steps_give_at_least_a_token, {
        "drafts": COUNT, "accepted": COUNT, "requests": st.integers(1, 1000), "further": COUNT,
        "joined": COUNT}),
    (every_token_is_given_once, {
        "right": st.lists(st.lists(st.booleans(), min_size=4, max_size=4), max_size=30),
        "k": st.integers(1, 4), "cut": st.integers(0, 40)}),
    (figures_agree_with_acceptance, {"walks": st.lists(WALK, min_size=1, max_size=8)}),
    (hold_the_point_and_turn_over, {
        "ratios": st.lists(RATIO, min_size=1, max_size=24), "drift": st.floats(0, 1)}),
]  # fmt: skip
NAMED = [(check.__name__, check, drawn) for check, drawn in PROPERTIES]


def try_out(how: settings, check: Property, drawn: dict[str, Any], folder: Path) -> None:
    """Draw examples and check each; a property that writes is given a folder."""
    if "folder" in inspect.signature(check).parameters:
        drawn = drawn | {"folder": st.just(folder)}
    how(given(**drawn)(check))()


@pytest.mark.parametrize(("name", "check", "drawn"), NAMED, ids=[name for name, *_ in NAMED])
def test_it_holds_for_a_few_examples(
    name: str, check: Property, drawn: dict[str, Any], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.ERROR)  # a warning a row is a lot
    try_out(FEW, check, drawn, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("name", "check", "drawn"), NAMED, ids=[name for name, *_ in NAMED])
def test_it_holds_for_thousands_of_new_examples(
    name: str, check: Property, drawn: dict[str, Any], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.ERROR)
    try_out(MANY, check, drawn, tmp_path)

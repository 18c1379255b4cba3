import json
from typing import Any

import pytest

from specmill.conversations import Conversation, Exchange, Message, from_row


def read(row: Any) -> Conversation:
    return from_row(row, "mixed", "file:rows.jsonl")


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def pairs(row: Any) -> list[tuple[list[str], str | None]]:
    """Texts said and answered, exchange by exchange."""
    return [
        (
            [message["content"] for message in exchange.messages],
            None if exchange.answer is None else exchange.answer["content"],
        )
        for exchange in read(row).exchanges
    ]


def sharegpt(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"conversations": [{"from": name, "value": text} for name, text in turns]}


def test_turns_are_questions_without_answers() -> None:
    row = {"question_id": 81, "category": "writing", "turns": ["Compose.", "Rewrite."]}
    assert read(row) == Conversation(
        "writing",
        (Exchange((user("Compose."),), None), Exchange((user("Rewrite."),), None)),
        (),
        "file:rows.jsonl",
    )


def test_messages_are_grouped_into_what_was_said_and_what_was_answered() -> None:
    row = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            user("1+1?"),
            assistant("2"),
            user("2+2?"),
            assistant("4"),
        ]
    }
    assert pairs(row) == [(["Be brief.", "1+1?"], "2"), (["2+2?"], "4")]
    assert read(row).questions == ("1+1?", "2+2?")
    assert read(row).said == ("Be brief.", "1+1?", "2+2?")


def test_a_developer_message_is_a_system_message() -> None:
    row = {"messages": [{"role": "developer", "content": "Be brief."}, user("Hi")]}
    assert read(row).exchanges[0].messages[0] == {"role": "system", "content": "Be brief."}


def test_a_trailing_user_turn_is_an_exchange_without_an_answer() -> None:
    assert pairs({"messages": [user("a"), assistant("b"), user("c")]}) == [
        (["a"], "b"),
        (["c"], None),
    ]


def test_a_trailing_system_message_is_left_out() -> None:
    row = {"messages": [user("a"), assistant("b"), {"role": "system", "content": "c"}]}
    assert pairs(row) == [(["a"], "b")]


@pytest.mark.parametrize("column", ["messages", "conversations", "conversation"])
@pytest.mark.parametrize(
    "names", [("human", "gpt"), ("user", "chatgpt"), ("Human", "bot"), ("user", "model")]
)
def test_sharegpt_turns_are_read_from_every_column_and_under_every_role_name(
    column: str, names: tuple[str, str]
) -> None:
    turns = [{"from": names[0], "value": "Hi"}, {"from": names[1], "value": "Ho"}]
    assert pairs({column: turns}) == [(["Hi"], "Ho")]


def test_a_sharegpt_answer_before_any_question_is_left_out() -> None:
    row = sharegpt(("gpt", "Hello!"), ("human", "Hi"), ("gpt", "Ho"))
    assert pairs(row) == [(["Hi"], "Ho")]


def test_a_system_turn_before_a_dropped_answer_stays() -> None:
    row = sharegpt(("system", "S"), ("gpt", "Hello!"), ("human", "Hi"), ("gpt", "Ho"))
    assert pairs(row) == [(["S", "Hi"], "Ho")]


def test_two_user_turns_in_a_row_are_said_together() -> None:
    row = sharegpt(("human", "a"), ("human", "b"), ("gpt", "c"))
    assert pairs(row) == [(["a", "b"], "c")]


def test_sharegpt_calls_and_observations_are_tool_calls_and_tool_results() -> None:
    call = {"name": "add", "arguments": {"a": 1, "b": 2}}
    row = sharegpt(
        ("human", "1+2?"),
        ("function_call", json.dumps(call)),
        ("observation", "3"),
        ("gpt", "Three."),
    )
    made = {"id": "call_0", "type": "function", "function": call}
    assert read(row).exchanges == (
        Exchange((user("1+2?"),), assistant("", tool_calls=[made])),
        Exchange(({"role": "tool", "content": "3"},), assistant("Three.")),
    )
    assert read(row).holds_tool_results
    assert read(row).questions == ("1+2?",)


@pytest.mark.parametrize("arguments", [{"city": "Rome"}, '{"city": "Rome"}'])
def test_arguments_of_openai_tool_calls_become_objects(arguments: Any) -> None:
    call = {"id": "c7", "type": "function", "function": {"name": "w", "arguments": arguments}}
    row = {
        "messages": [
            user("Weather?"),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c7", "name": "w", "content": "sunny"},
            assistant("Sunny."),
        ]
    }
    first, second = read(row).exchanges
    assert first.answer is not None
    assert first.answer["content"] == ""
    assert first.answer["tool_calls"] == [
        {"id": "c7", "type": "function", "function": {"name": "w", "arguments": {"city": "Rome"}}}
    ]
    assert second.messages == (
        {"role": "tool", "content": "sunny", "tool_call_id": "c7", "name": "w"},
    )


def test_what_arrow_filled_with_null_is_left_out() -> None:
    call = {"id": None, "function": {"name": "w", "arguments": {"city": "Rome", "sum": None}}}
    turn = {"role": "assistant", "content": None, "value": None, "reasoning": None}
    row = {
        "turns": None,
        "messages": [
            user("Weather?") | {"tool_calls": None, "tool_call_id": None},
            turn | {"tool_calls": [call]},
        ],
        "tools": None,
        "category": None,
    }
    exchange = read(row).exchanges[0]
    assert exchange.messages == (user("Weather?"),)
    assert exchange.answer == assistant(
        "",
        tool_calls=[
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": "w", "arguments": {"city": "Rome"}},
            }
        ],
    )


def test_what_arrow_filled_in_deeper_down_is_left_out_too() -> None:
    properties = {"city": {"type": "string", "enum": ["Rome"]}, "sum": None}
    tool = {"name": "w", "parameters": {"properties": properties}, "returns": None}
    arguments = {"where": {"city": "Rome", "sum": None}, "many": [{"a": 0, "b": None}]}
    call = {"name": "w", "arguments": arguments}
    row = {"messages": [user("?"), assistant("", tool_calls=[call])], "tools": [tool]}
    conversation = read(row)
    assert conversation.tools[0]["function"] == {
        "name": "w",
        "parameters": {"properties": {"city": {"type": "string", "enum": ["Rome"]}}},
    }
    answer = conversation.exchanges[0].answer
    assert answer is not None
    assert answer["tool_calls"][0]["function"]["arguments"] == {
        "where": {"city": "Rome"},
        "many": [{"a": 0}],
    }


@pytest.mark.parametrize("calls", [[], "[]"])
def test_a_list_without_tool_calls_is_no_tool_call(calls: Any) -> None:
    row = {"messages": [user("a"), assistant("b", tool_calls=calls)]}
    assert read(row).exchanges[0].answer == assistant("b")


def test_a_call_without_arguments_has_none() -> None:
    row = {"messages": [user("Now?"), assistant("", tool_calls=[{"name": "clock"}])]}
    answer = read(row).exchanges[0].answer
    assert answer is not None
    assert answer["tool_calls"][0]["function"] == {"name": "clock", "arguments": {}}


BARE = {"name": "clock", "parameters": {"type": "object"}}
WRAPPED = {"type": "function", "function": BARE}


@pytest.mark.parametrize("tools", [[BARE], [WRAPPED], json.dumps([BARE]), json.dumps([WRAPPED])])
def test_tools_are_a_list_or_json_text_bare_or_in_openais_wrapping(tools: Any) -> None:
    assert read({"messages": [user("Now?")], "tools": tools}).tools == (WRAPPED,)


@pytest.mark.parametrize("tools", [None, [], "", "[]"])
def test_no_tools_are_no_tools(tools: Any) -> None:
    assert read({"messages": [user("Now?")], "tools": tools}).tools == ()


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_kept_under_one_name(key: str) -> None:
    row = {"messages": [user("1+1?"), assistant("2", **{key: "one and one"})]}
    assert read(row).exchanges[0].answer == assistant("2", reasoning_content="one and one")


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "world."}]
    row = {"messages": [{"role": "user", "content": parts}, assistant("Hi")]}
    assert pairs(row) == [(["Hello, world."], "Hi")]


@pytest.mark.parametrize("question", ["prompt", "question", "instruction", "query"])
@pytest.mark.parametrize("answer", ["completion", "response", "answer", "output"])
def test_a_question_column_goes_with_an_answer_column(question: str, answer: str) -> None:
    assert pairs({question: "1+1?", answer: "2"}) == [(["1+1?"], "2")]


@pytest.mark.parametrize("answer", [None, "", "  ", 2, ["2"]])
def test_a_question_without_an_answer_in_text_has_none(answer: Any) -> None:
    assert pairs({"question": "1+1?", "answer": answer}) == [(["1+1?"], None)]


def test_the_input_of_an_instruction_follows_it() -> None:
    row = {"instruction": "Translate.", "input": "Hallo", "output": "Hello"}
    assert pairs(row) == [(["Translate.\n\nHallo"], "Hello")]
    assert pairs(row | {"input": " "}) == [(["Translate."], "Hello")]
    assert pairs({"prompt": "Translate.", "input": "Hallo"}) == [(["Translate."], None)]


@pytest.mark.parametrize("completion", [[assistant("Ho")], "Ho"])
def test_a_prompt_of_messages_is_continued_by_its_completion(completion: Any) -> None:
    assert pairs({"prompt": [user("Hi")], "completion": completion}) == [(["Hi"], "Ho")]
    assert pairs({"prompt": [user("Hi")]}) == [(["Hi"], None)]


def test_messages_win_over_a_prompt_beside_them() -> None:
    assert pairs({"prompt": "Hi", "messages": [user("Hi"), assistant("Ho")]}) == [(["Hi"], "Ho")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], "a row must be an object, this one is list"),
        ("text", "a row must be an object, this one is str"),
        ({}, "it has nothing"),
        ({"text": "x", "id": 7}, "it has text, id"),
        ({"turns": []}, "turns must be a list of texts"),
        ({"turns": "Hello"}, "turns must be a list of texts"),
        ({"turns": ["x", " "]}, "a user turn must be text that is not empty, got ' '"),
        ({"turns": [None]}, "got None"),
        ({"prompt": 7}, "a user turn must be text that is not empty, got 7"),
        ({"messages": []}, "messages must be a list of messages, at least one"),
        ({"conversations": "Hi"}, "conversations must be a list of messages"),
        ({"messages": ["Hi"]}, "a message must be an object, got 'Hi'"),
        ({"messages": [{"role": "user", "content": ""}]}, "a message of role user is empty"),
        ({"messages": [user("a"), assistant(" ")]}, "a message of role assistant is empty"),
        ({"messages": [{"content": "a"}]}, "role None is not known"),
        (sharegpt(("narrator", "a")), "role 'narrator' is not known; known are human, user"),
        (sharegpt(("human", "a"), ("gpt", "b"), ("gpt", "c")), "two assistant turns in a row"),
        (sharegpt(("gpt", "b")), "conversations has no user turn"),
        (sharegpt(("system", "s"), ("gpt", "b")), "conversations has no user turn"),
        (sharegpt(("observation", "3"), ("gpt", "b")), "conversations has no user turn"),
        ({"messages": [user("a")], "tools": "{"}, "tools is not JSON"),
        ({"messages": [user("a")], "tools": '"clock"'}, "tools must be a list of objects"),
        ({"messages": [user("a"), assistant("", tool_calls="[")]}, "tool_calls is not JSON"),
        ({"messages": [user("a"), assistant("", tool_calls=7)]}, "must be a list, got int"),
        ({"messages": [user("a"), assistant("", tool_calls=[{}])]}, "needs a function name"),
        (sharegpt(("human", "a"), ("function_call", "add(1)")), "a tool call is not JSON"),
        (
            sharegpt(("human", "a"), ("function_call", '{"name": "add", "arguments": [1]}')),
            "the arguments of add are no object",
        ),
        (
            sharegpt(("human", "a"), ("function_call", '{"name": "add", "arguments": "{"}')),
            "the arguments of add is not JSON",
        ),
    ],
)
def test_a_row_that_is_no_conversation_is_refused_with_its_reason(row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(row)


def test_images_are_refused() -> None:
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {}}]
    with pytest.raises(ValueError, match=r"only text can be used, got .*image_url"):
        read({"messages": [{"role": "user", "content": parts}]})


@pytest.mark.parametrize("row", [{}, {"category": None}])
def test_a_row_without_a_category_gets_the_default_one(row: dict[str, Any]) -> None:
    assert read({"prompt": "Hi"} | row).category == "mixed"
    assert read({"prompt": "Hi", "category": "maths"}).category == "maths"


@pytest.mark.parametrize("category", ["all", " all ", "", "  ", 7, ["maths"]])
def test_a_category_is_text_and_not_the_sum_of_all(category: Any) -> None:
    with pytest.raises(ValueError, match="category must be text other than 'all'"):
        read({"prompt": "Hi", "category": category})


def test_conversations_that_differ_in_case_spacing_or_answers_have_one_key() -> None:
    first = read({"prompt": "Hello  World", "completion": "a"})
    assert first.key == read({"turns": ["hello\nworld"], "category": "b"}).key
    assert first.key != read({"prompt": "Hello Word"}).key
    assert read({"turns": ["one", "two"]}).key != read({"turns": ["one two"]}).key


def test_half_a_character_makes_a_row_unusable() -> None:
    with pytest.raises(ValueError, match="half a character"):
        from_row({"messages": [{"role": "user", "content": "a \ud83d smile"}]}, "a", "tests")


@pytest.mark.parametrize("category", ["a|b", "a\nb"])
def test_a_category_that_would_break_a_table_is_refused(category: str) -> None:
    with pytest.raises(ValueError, match="one line without"):
        from_row({"turns": ["Hi"], "category": category}, "a", "tests")

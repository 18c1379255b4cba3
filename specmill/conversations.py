"""Conversations: what users said, what a dataset answered, in any of the shapes datasets have.

Accepted rows, tried in this order:

    turns           ["...", "..."]                           user turns (MT-Bench, Spec-Bench, ours)
    messages        [{"role": "user", "content": "..."}]     OpenAI; tools, tool_calls, reasoning
    conversations   [{"from": "human", "value": "..."}]      ShareGPT; also the OpenAI keys
    prompt | question | instruction | query                  one user turn; the answer, if any, in
                                                             completion, response, answer or output

A conversation is kept as exchanges: what was said to the model, then what the dataset answered.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from specmill.samples import ALL

ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
}
"""Role names of ShareGPT-like and OpenAI-like datasets, and the role they stand for."""

QUESTIONS = ("prompt", "question", "instruction", "query")
ANSWERS = ("completion", "response", "answer", "output")

Message = dict[str, Any]
"""role, content (text), and where they apply tool_calls, tool_call_id, name, reasoning_content."""


@dataclass(frozen=True)
class Exchange:
    """Messages said to the model, and the answer that a dataset has for them."""

    messages: tuple[Message, ...]
    answer: Message | None


@dataclass(frozen=True)
class Conversation:
    """One conversation of a dataset, at least one exchange."""

    category: str
    exchanges: tuple[Exchange, ...]
    tools: tuple[dict[str, Any], ...] = ()
    source: str = ""

    @property
    def said(self) -> tuple[str, ...]:
        """Texts of the messages said to the model, in order."""
        return tuple(
            message["content"] for exchange in self.exchanges for message in exchange.messages
        )

    @property
    def questions(self) -> tuple[str, ...]:
        """Texts of the user turns."""
        return tuple(
            message["content"]
            for exchange in self.exchanges
            for message in exchange.messages
            if message["role"] == "user"
        )

    @cached_property
    def key(self) -> str:
        """Digest of what is said and of the tools; case and spacing do not count."""
        texts = [" ".join(text.lower().split()) for text in self.said]
        if self.tools:
            texts.append(json.dumps(self.tools, sort_keys=True))
        return hashlib.sha256("\n".join(texts).encode()).hexdigest()

    @property
    def holds_tool_results(self) -> bool:
        """Whether a tool's result is among the messages: it answers the dataset's own call."""
        return any(
            message["role"] == "tool"
            for exchange in self.exchanges
            for message in exchange.messages
        )


def from_row(row: Any, default_category: str, source: str) -> Conversation:
    """Read one row of a dataset.

    Args:
        row: A row as JSON or Arrow gave it.
        default_category: For rows that have no text in `category`.
        source: Where the row came from, kept with its samples.

    Raises:
        ValueError: saying why the row is not a conversation.
    """
    if not isinstance(row, dict):
        raise ValueError(f"a row must be an object, this one is {type(row).__name__}")
    category = row.get("category")
    if category is None:
        category = default_category
    if not isinstance(category, str) or category.strip() in ("", ALL):
        raise ValueError(f"category must be text other than {ALL!r} (the sum of all)")
    if set(category) & {"|", "\n", "\r"}:
        raise ValueError(f"category {category!r} must be one line without |: it is a row of tables")
    _check_unicode(row)
    return Conversation(category, tuple(_exchanges(row)), _tools(row.get("tools")), source)


def _check_unicode(row: dict[str, Any]) -> None:
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"its text has half a character (a lone surrogate): {error}") from None


def _exchanges(row: dict[str, Any]) -> list[Exchange]:
    if row.get("turns") is not None:
        if not isinstance(row["turns"], list) or not row["turns"]:
            raise ValueError("turns must be a list of texts, at least one")
        return [Exchange((_user(text),), None) for text in row["turns"]]
    for column in ("messages", "conversations", "conversation"):
        if row.get(column) is not None:
            return _paired(row[column], column)
    for column in QUESTIONS:
        if row.get(column) is not None:
            return _single(row, column)
    raise ValueError(
        "no conversation in it: it needs turns, messages, conversations or one of "
        f"{', '.join(QUESTIONS)}; it has {', '.join(map(str, row)) or 'nothing'}"
    )


def _single(row: dict[str, Any], column: str) -> list[Exchange]:
    question = row[column]
    answer = next((row[name] for name in ANSWERS if row.get(name) is not None), None)
    written = isinstance(answer, str) and bool(answer.strip())
    kept = {"role": "assistant", "content": answer} if written else None
    if isinstance(question, list):  # preference datasets keep both sides as messages
        following = answer if isinstance(answer, list) else [kept] if kept else []
        return _paired([*question, *following], column)
    said = _user(question)
    if column == "instruction" and isinstance(row.get("input"), str) and row["input"].strip():
        said["content"] = f"{question}\n\n{row['input']}"
    return [Exchange((said,), kept)]


def _user(text: Any) -> Message:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"a user turn must be text that is not empty, got {text!r}")
    return {"role": "user", "content": text}


def _paired(turns: Any, column: str) -> list[Exchange]:
    """Group messages into exchanges; an assistant turn before any question is left out."""
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{column} must be a list of messages, at least one")
    exchanges: list[Exchange] = []
    said: list[Message] = []
    for turn in turns:
        message = _message(turn)
        if message["role"] != "assistant":
            said.append(message)
        elif any(earlier["role"] != "system" for earlier in said):
            exchanges.append(Exchange(tuple(said), message))
            said = []
        elif exchanges:
            raise ValueError(f"{column} has two assistant turns in a row")
    if any(message["role"] != "system" for message in said):
        exchanges.append(Exchange(tuple(said), None))
    if not any(message["role"] == "user" for one in exchanges for message in one.messages):
        raise ValueError(f"{column} has no user turn")
    return exchanges


def _message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise ValueError(f"a message must be an object, got {turn!r}")
    name = turn.get("role") or turn.get("from")
    role = ROLES.get(str(name).lower())
    if role is None:
        raise ValueError(f"role {name!r} is not known; known are {', '.join(ROLES)}")
    content = turn["content"] if turn.get("content") is not None else turn.get("value")
    message: Message = {"role": role, "content": _text(content)}
    if name == "function_call":
        message = {"role": role, "content": "", "tool_calls": _calls([content])}
    elif turn.get("tool_calls") and (calls := _calls(turn["tool_calls"])):
        message["tool_calls"] = calls
    reasoning = turn.get("reasoning_content") or turn.get("reasoning") or turn.get("thinking")
    if reasoning:
        message["reasoning_content"] = _text(reasoning)
    for key in ("tool_call_id", "name"):
        if turn.get(key):
            if not isinstance(turn[key], str):
                raise ValueError(f"{key} must be text, got {turn[key]!r}")
            message[key] = turn[key]
    if not message["content"].strip() and role != "tool" and not message.get("tool_calls"):
        raise ValueError(f"a message of role {role} is empty")
    return message


def _text(content: Any) -> str:
    """Content as text; OpenAI's list of parts is joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise ValueError(f"only text can be used, got {str(content)[:80]!r}")


def _calls(calls: Any) -> list[dict[str, Any]]:
    """Tool calls with arguments as an object, which is what chat templates expect."""
    if isinstance(calls, str):
        calls = _json(calls, "tool_calls")
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls must be a list, got {type(calls).__name__}")
    found = []
    for number, call in enumerate(calls):
        call = _json(call, "a tool call") if isinstance(call, str) else call
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"a tool call needs a function name, got {str(call)[:80]!r}")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = _json(arguments, f"the arguments of {function['name']}")
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments of {function['name']} are no object")
        found.append(
            {
                "id": call.get("id") or f"call_{number}",
                "type": "function",
                "function": {
                    "name": function["name"],
                    "arguments": _without_nulls(arguments),
                },
            }
        )
    return found


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """JSON schemas of the functions a conversation may call."""
    if not tools:
        return ()
    if isinstance(tools, str):
        tools = _json(tools, "tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("tools must be a list of objects, or the same as JSON text")
    wrapped = [
        tool if "function" in tool else {"type": "function", "function": tool}
        for tool in map(_without_nulls, tools)
    ]
    for tool in wrapped:
        function = tool["function"]
        if not isinstance(function, dict) or not isinstance(function.get("name", ""), str):
            raise ValueError(f"a tool needs a function with a name in text, got {str(tool)[:80]!r}")
    return tuple(wrapped)


def _without_nulls(value: Any) -> Any:
    """Arrow gives every object the keys of all rows' objects and fills them with null.

    Raises:
        ValueError: for what JSON cannot hold, and so no request: NaN, or Arrow's times and bytes.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, str | int | float | None) or value != value:
        raise ValueError(f"tools and their arguments are JSON, which cannot hold {value!r}")
    return value


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{what} is not JSON ({error}): {text[:80]!r}") from None

"""Samples from a dataset's own answers: the verifier's chat template, one row per assistant turn.

    messages so far, generation prompt   <|im_start|>user ... <|im_start|>assistant
    the same with the answer             <|im_start|>user ... <|im_start|>assistant Paris.<|im_end|>
    the row                              [ prompt: not trained           | answer: trained        ]

Each turn is rendered on its own, so templates that strip the thinking of earlier turns give every
row the history that serving gives it. Only the last turn of a row trains. Text is split before it
is tokenised, as in serving: the prompt's ids never depend on the answer.
"""

from collections import Counter
from functools import partial
from typing import Any

from specmill.conversations import Conversation, Message
from specmill.samples import Sample, make_sample


class TemplateError(ValueError):
    """The chat template cannot render a turn as it would be generated."""


def dataset_rows(
    conversation: Conversation, split: str, tokenizer: Any, template_kwargs: dict[str, Any]
) -> tuple[list[Sample], Counter[str], str | None]:
    """Every answered turn of a conversation as a sample.

    Args:
        conversation: With the dataset's answers.
        split: The samples' split.
        tokenizer: A transformers tokenizer with a chat template.
        template_kwargs: Passed to the template.

    Returns:
        The samples, refused turns by reason, and what was wrong with the first of those.
    """
    history: list[Message] = []
    samples: list[Sample] = []
    refused: Counter[str] = Counter()
    fault = None
    for turn, exchange in enumerate(conversation.exchanges):
        history += exchange.messages
        if exchange.answer is None:
            continue
        try:
            prompt, answer = split_render(
                tokenizer, history, exchange.answer, list(conversation.tools), template_kwargs
            )
        except TemplateError as error:
            refused["num_template_refused"] += 1
            fault = fault or f"{error} (turn {turn + 1} of {conversation.questions[0][:60]!r})"
        else:
            ids = tokenizer(answer, add_special_tokens=False).input_ids
            samples.append(
                make_sample(
                    tokenizer(prompt, add_special_tokens=False).input_ids,
                    _until_end(ids, tokenizer),
                    category=conversation.category,
                    source=conversation.source,
                    split=split,
                    turn=turn,
                    text=exchange.answer["content"],
                    finish_reason="dataset",
                )
            )
        history.append(exchange.answer)
    return samples, refused, fault


def split_render(
    tokenizer: Any,
    history: list[Message],
    answer: Message,
    tools: list[dict[str, Any]],
    template_kwargs: dict[str, Any],
) -> tuple[str, str]:
    """Render a turn; returns the text before the answer and the answer with its end marker.

    Raises:
        TemplateError: naming the template's fault: it refuses the messages, it rewrites what came
            before when the answer is added, its generation prompt is not how it renders an answer,
            or it leaves a tool call, reasoning or text out; or the answer holds the end marker.
    """
    render = partial(_render, tokenizer, tools, template_kwargs)
    if tokenizer.eos_token and tokenizer.eos_token in answer["content"]:
        raise TemplateError(f"the answer's text holds the end marker {tokenizer.eos_token!r}")
    before = render(history, generation_prompt=True)
    whole = render([*history, answer], generation_prompt=False)
    if not whole.startswith(before):
        opening = before[len(render(history, generation_prompt=False)) :]
        raise TemplateError(_rewritten(before, whole, opening))
    offered = [tool.get("function", tool).get("name", "") for tool in tools]
    called = [
        call["function"]["name"] for message in history for call in message.get("tool_calls", ())
    ]
    if any(name not in before for name in (*offered, *called)):
        raise TemplateError("the chat template leaves tools, or the calls of earlier turns, out")
    written = whole[len(before) :]
    for call in answer.get("tool_calls", ()):
        if call["function"]["name"] not in written:
            raise TemplateError("the chat template leaves tool calls out")
    reasoning = answer.get("reasoning_content", "").strip()
    if reasoning and reasoning not in written:
        raise TemplateError("the chat template leaves the answer's reasoning_content out")
    # templates trim and indent, so spaces do not count; a text may begin as the prompt ends
    added = whole[len(render(history, generation_prompt=False)) :]
    if "".join(answer["content"].split()) not in "".join(added.split()):
        raise TemplateError(
            f"the chat template changes or leaves out the answer's text: {written[:60]!r}"
        )
    return before, written


def _rewritten(before: str, whole: str, opening: str) -> str:
    """What a template does that renders the text before an answer in another way with it.

    Args:
        before: Rendered for generation, up to where the answer begins.
        whole: Rendered with the answer.
        opening: The generation prompt, `before`'s end.
    """
    common = _common_length(before, whole)
    if common < len(before) - len(opening):
        return (
            "the chat template renders earlier messages differently once the answer is there: "
            f"{before[common:][:40]!r} became {whole[common:][:40]!r}"
        )
    return (
        f"the chat template asks for an answer with {opening!r} but renders the answer "
        f"after {whole[len(before) - len(opening) :][: len(opening)]!r}"
    )


def _render(
    tokenizer: Any,
    tools: list[dict[str, Any]],
    template_kwargs: dict[str, Any],
    messages: list[Message],
    generation_prompt: bool,
) -> str:
    import jinja2

    try:
        return str(
            tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **template_kwargs,
            )
        )
    # a template is a program: it may divide by 0, overflow or call itself without an end
    except (
        jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError,
        ArithmeticError, RecursionError,
    ) as error:  # fmt: skip
        raise TemplateError(f"the chat template refuses the messages: {error}") from None


def _common_length(first: str, second: str) -> int:
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))


def _until_end(ids: list[int], tokenizer: Any) -> list[int]:
    """Cut after the last end-of-turn id: what the template writes after it is never generated."""
    end = tokenizer.eos_token_id
    if end in ids:
        return ids[: len(ids) - ids[::-1].index(end)]
    # a turn may end with a marker that is not the tokenizer's own end, and a line break
    special = [index for index, token in enumerate(ids) if token in tokenizer.all_special_ids]
    if special and not tokenizer.decode(ids[special[-1] + 1 :]).strip():
        return ids[: special[-1] + 1]
    return ids

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specmill.conversations import Conversation, from_row
from specmill.samples import Sample
from specmill.templates import TemplateError, dataset_rows, split_render

END = "<|im_end|>"

CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
"""As most small models have it."""

STRIPS_THINKING = """\
{%- set ns = namespace(last=0) -%}
{%- for message in messages if message.role == 'user' -%}
{%- set ns.last = messages.index(message) -%}
{%- endfor -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.reasoning_content and loop.index0 > ns.last -%}
<think>
{{ message.reasoning_content }}
</think>

{% elif message.role == 'assistant' and loop.last and enable_thinking is false -%}
<think>

</think>

{% endif -%}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is false -%}
<think>

</think>

{% endif -%}
{%- endif -%}
"""
"""Qwen3's way: the thinking of earlier turns is gone; enable_thinking false opens with none."""

PREFILLS_THINKING = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
"""As DeepSeek-R1's: every answer is asked for with an open thought."""

COUNTS_MESSAGES = "{{ messages | length }} messages: " + CHATML
"""What comes first depends on what comes later."""

RENDERS_CALLS = CHATML.replace(
    "{{ message.content }}",
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    "<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}",
).replace(
    "{%- for message in messages -%}",
    "{% if tools %}tools: {{ tools[0].function.name }}\n{% endif %}{%- for message in messages -%}",
    1,
)

REFUSES_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    + CHATML
)


def tokenizer(template: str, end: str = END) -> Any:
    """Byte-level BPE with one merge, of the prompt's last newline with the P of Paris."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    newline = "\u010a"  # how byte-level BPE writes a newline
    vocab = {letter: number for number, letter in enumerate([*alphabet, f"{newline}P"])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[(newline, "P")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=end,
        additional_special_tokens=["<|im_start|>", END],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def chat(*messages: dict[str, Any], **more: Any) -> Conversation:
    return from_row({"messages": list(messages), **more}, "geography", "file:x.jsonl")


def rows(
    template: str, conversation: Conversation, **template_kwargs: Any
) -> tuple[list[Sample], int, str | None]:
    samples, refused, fault = dataset_rows(
        conversation, "train", tokenizer(template), template_kwargs
    )
    return samples, refused["num_template_refused"], fault


def decoded(template: str, samples: list[Sample]) -> list[tuple[str, str]]:
    """(prompt, trained text) of each sample."""
    read = tokenizer(template)
    return [
        (read.decode(sample.prompt_token_ids), read.decode(sample.answer_token_ids))
        for sample in samples
    ]


def fault_of(template: str, conversation: Conversation, **template_kwargs: Any) -> str:
    """Why the only turn is refused."""
    samples, num_refused, fault = rows(template, conversation, **template_kwargs)
    assert (samples, num_refused) == ([], 1)
    assert fault is not None
    return fault


CAPITALS = chat(
    {"role": "system", "content": "Be brief."},
    user("France?"),
    assistant("Paris."),
    user("Grüße? 🙂"),
    assistant("Привет,\n\nwelt 🙂 "),
)


def test_every_assistant_turn_is_a_row_that_trains_on_its_text_and_end_marker_alone() -> None:
    samples, num_refused, fault = rows(CHATML, CAPITALS)
    first = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nFrance?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    second = (
        f"{first}Paris.<|im_end|>\n<|im_start|>user\nGrüße? 🙂<|im_end|>\n<|im_start|>assistant\n"
    )
    assert decoded(CHATML, samples) == [
        (first, "Paris.<|im_end|>"),
        (second, "Привет,\n\nwelt 🙂 <|im_end|>"),
    ]
    assert (num_refused, fault) == (0, None)


def test_rows_say_where_they_come_from() -> None:
    samples, _, _ = rows(CHATML, CAPITALS)
    assert [sample.turn for sample in samples] == [0, 1]
    assert [sample.text for sample in samples] == ["Paris.", "Привет,\n\nwelt 🙂 "]
    assert {(one.category, one.source, one.split, one.finish_reason) for one in samples} == {
        ("geography", "file:x.jsonl", "train", "dataset")
    }


def test_the_ids_of_a_prompt_are_those_of_its_text_whatever_the_answer() -> None:
    read = tokenizer(CHATML)
    history = [user("France?")]
    asked = read.apply_chat_template(history, tokenize=False, add_generation_prompt=True)
    alone = read(asked, add_special_tokens=False).input_ids
    sample = rows(CHATML, chat(*history, assistant("Paris.")))[0][0]
    assert sample.prompt_token_ids == alone
    # the tokenizer would have joined the prompt's last newline with the answer's first letter
    joined = read(f"{asked}Paris.", add_special_tokens=False).input_ids
    assert joined[: len(alone)] != alone


def test_the_mask_is_one_run_up_to_the_end_of_turn_and_nothing_follows_it() -> None:
    for sample in rows(CHATML, CAPITALS)[0]:
        (starts,) = np.nonzero(np.diff(sample.loss_mask.astype(int)))
        assert len(starts) == 1
        assert sample.input_ids[-1] == tokenizer(CHATML).eos_token_id


def test_an_end_marker_that_is_not_the_tokenizers_own_end_is_the_last_id_too() -> None:
    read = tokenizer(CHATML, end="<|endoftext|>")
    samples, _, _ = dataset_rows(chat(user("a"), assistant("b")), "train", read, {})
    assert read.decode(samples[0].answer_token_ids) == "b<|im_end|>"


def test_text_after_a_marker_inside_an_answer_is_trained() -> None:
    bare = "{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}"
    bare += "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    samples, _, _ = rows(bare, chat(user("a"), assistant("b<|im_start|>c")))
    assert decoded(bare, samples) == [("<|im_start|>a<|im_start|>", "b<|im_start|>c")]


def test_a_turn_without_an_answer_gives_no_row() -> None:
    assert len(rows(CHATML, chat(user("a"), assistant("b"), user("c")))[0]) == 1
    assert rows(CHATML, chat(user("a"))) == ([], 0, None)


def test_a_row_trains_on_its_own_thinking_and_its_history_has_none() -> None:
    conversation = chat(
        user("1+1?"),
        assistant("2", reasoning_content="one, two"),
        user("2+2?"),
        assistant("4", reasoning_content="three, four"),
    )
    samples, num_refused, _ = rows(STRIPS_THINKING, conversation)
    first, second = decoded(STRIPS_THINKING, samples)
    assert first[1] == "<think>\none, two\n</think>\n\n2<|im_end|>"
    assert second[1] == "<think>\nthree, four\n</think>\n\n4<|im_end|>"
    assert second[0] == (
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert num_refused == 0


def test_template_kwargs_reach_the_template() -> None:
    conversation = chat(user("1+1?"), assistant("2"))
    closed = "<think>\n\n</think>\n\n"
    (thinking,) = decoded(STRIPS_THINKING, rows(STRIPS_THINKING, conversation)[0])
    samples = rows(STRIPS_THINKING, conversation, enable_thinking=False)[0]
    (silent,) = decoded(STRIPS_THINKING, samples)
    assert thinking[0].endswith("<|im_start|>assistant\n")
    assert silent[0].endswith(f"<|im_start|>assistant\n{closed}")
    assert thinking[1] == silent[1] == "2<|im_end|>"


def test_a_prefilled_thought_that_the_recorded_answer_lacks_is_refused() -> None:
    fault = fault_of(PREFILLS_THINKING, chat(user("1+1?"), assistant("2")))
    assert fault.startswith(
        "the chat template asks for an answer with '<|im_start|>assistant\\n<think>\\n' but "
        "renders the answer after '<|im_start|>assistant\\n2<|im_e"
    )
    assert fault.endswith("(turn 1 of '1+1?')")


def test_a_prefilled_thought_that_the_recorded_answer_has_is_part_of_the_prompt() -> None:
    conversation = chat(user("1+1?"), assistant("<think>\neasy\n</think>\n2"))
    (row,) = decoded(PREFILLS_THINKING, rows(PREFILLS_THINKING, conversation)[0])
    assert row[0].endswith("<|im_start|>assistant\n<think>\n")
    assert row[1] == "easy\n</think>\n2<|im_end|>"


def test_a_template_that_rewrites_history_when_an_answer_is_added_is_refused() -> None:
    assert fault_of(COUNTS_MESSAGES, chat(user("Hi"), assistant("Ho"))).startswith(
        "the chat template renders earlier messages differently once the answer is there: "
        "'1 messages:<|im_start|>user\\nHi<|im_end|>' became "
        "'2 messages:<|im_start|>user\\nHi<|im_end|>'"
    )


CALL = {"name": "add", "arguments": {"a": 1}}
CALLING = chat(user("1+?"), assistant("Let me see.", tool_calls=[CALL]), tools=[{"name": "add"}])


def test_tool_calls_that_the_template_renders_are_trained() -> None:
    (row,) = decoded(RENDERS_CALLS, rows(RENDERS_CALLS, CALLING)[0])
    assert row[0].startswith("tools: add\n<|im_start|>user")
    assert row[1] == 'Let me see.<call>add {"a": 1}</call><|im_end|>'


def test_tool_results_are_part_of_the_history_and_not_trained() -> None:
    conversation = chat(
        user("1+?"),
        assistant("", tool_calls=[CALL]),
        {"role": "tool", "content": "7"},
        assistant("Seven."),
    )
    second = decoded(RENDERS_CALLS, rows(RENDERS_CALLS, conversation)[0])[1]
    assert '<call>add {"a": 1}</call><|im_end|>\n<|im_start|>tool\n7<|im_end|>\n' in second[0]
    assert second[1] == "Seven.<|im_end|>"


def test_tool_calls_that_the_template_leaves_out_are_refused() -> None:
    assert "leaves tool calls out" in fault_of("tools: add\n" + CHATML, CALLING)


def test_tools_that_the_template_leaves_out_are_refused() -> None:
    assert "leaves tools, or the calls of earlier turns, out" in fault_of(CHATML, CALLING)


def test_an_answer_whose_history_lacks_its_tool_call_is_refused() -> None:
    conversation = chat(
        user("1+?"),
        assistant("", tool_calls=[CALL]),
        {"role": "tool", "content": "7"},
        assistant("Seven."),
    )
    samples, num_refused, _ = rows(CHATML, conversation)
    assert (samples, num_refused) == ([], 2)


def test_an_answer_that_holds_the_end_marker_is_refused() -> None:
    fault = fault_of(CHATML, chat(user("Hi"), assistant("Bye.<|im_end|>More.")))
    assert fault.startswith("the answer's text holds the end marker '<|im_end|>'")


def test_reasoning_that_the_template_leaves_out_is_refused() -> None:
    conversation = chat(user("1+1?"), assistant("2", reasoning_content="one, two"))
    fault = fault_of(CHATML, conversation)
    assert fault.startswith("the chat template leaves the answer's reasoning_content out")


def test_text_that_the_template_leaves_out_of_an_answer_is_refused() -> None:
    cuts = CHATML.replace("message.content", "message.content.split('</think>')[-1]")
    conversation = chat(user("1+1?"), assistant("<think>easy</think>2"))
    fault = fault_of(cuts, conversation)
    assert fault.startswith("the chat template changes or leaves out the answer's text")


def test_spaces_that_the_template_takes_off_an_answer_are_no_fault() -> None:
    trims = CHATML.replace("message.content", "message.content | trim")
    samples, num_refused, _ = rows(trims, chat(user("1+1?"), assistant("  2\n")))
    assert decoded(trims, samples)[0][1] == "2<|im_end|>"
    assert num_refused == 0


def test_a_template_that_raises_names_its_reason() -> None:
    conversation = chat({"role": "system", "content": "S"}, user("Hi"), assistant("Ho"))
    assert fault_of(REFUSES_SYSTEM, conversation) == (
        "the chat template refuses the messages: no system role (turn 1 of 'Hi')"
    )


def test_a_refused_turn_stays_in_the_history_of_the_next_and_the_first_fault_is_told() -> None:
    conversation = chat(
        user("a"),
        assistant("b", reasoning_content="hm"),
        user("c"),
        assistant("d", reasoning_content="hm"),
        user("e"),
        assistant("f"),
    )
    samples, num_refused, fault = rows(CHATML, conversation)
    assert num_refused == 2
    assert [sample.turn for sample in samples] == [2]
    assert "b<|im_end|>" in decoded(CHATML, samples)[0][0]
    assert fault is not None
    assert fault.endswith("(turn 1 of 'a')")


def test_a_render_is_split_where_the_answer_begins() -> None:
    history = [user("France?")]
    assert split_render(tokenizer(CHATML), history, assistant("Paris."), [], {}) == (
        "<|im_start|>user\nFrance?<|im_end|>\n<|im_start|>assistant\n",
        "Paris.<|im_end|>\n",
    )
    with pytest.raises(TemplateError, match="asks for an answer with"):
        split_render(tokenizer(PREFILLS_THINKING), history, assistant("Paris."), [], {})

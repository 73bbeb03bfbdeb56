"""gpt-oss: several messages in one output."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from quire.message_formats.harmony import Harmony
from quire.message_formats.parser import MessageParser
from quire.message_formats.parts import Message
from quire.message_formats.thinking import in_thinking
from tests.message_formats.reading import TOOLS, Reading, marked, marks_of, message_format, read_everyhow

BOTH = message_format("openai", "openai_gptoss")
TOKENS = Harmony.markers
ANALYSIS = "<|channel|>analysis<|message|>The user wants\nthe weather.<|end|>"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
FINAL = "<|channel|>final<|message|>It is <b>21</b> degrees."
NEXT = "<|start|>assistant"


def test_channels_become_thinking_text_and_calls() -> None:
    preamble = "<|channel|>commentary<|message|>I will look.<|end|>"
    message = read_everyhow(BOTH, NEXT.join((ANALYSIS, preamble, CALL)), tokens=TOKENS)
    assert message.reasoning == "The user wants\nthe weather."
    assert message.text == "I will look."
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == [("weather", {"city": "Rome"})]


@pytest.mark.parametrize("tokens", [TOKENS, ()], ids=["tokens", "text"])
def test_a_required_call_may_be_cut_anywhere(tokens: Sequence[str]) -> None:
    marks = marks_of(BOTH, tokens)
    text = marked(marks, CALL)
    for length in range(len(text)):
        parser = MessageParser(BOTH, marks, tools=TOOLS, new_id=str, calls_as_they_come=True, must_call=True)
        parts = [*parser.feed(text[:length]), *parser.finish(is_cut=True)]
        assert not Message.of(parts).text, text[:length]


def test_an_answer_follows_the_thinking() -> None:
    message = read_everyhow(BOTH, ANALYSIS + NEXT + FINAL + "<|return|>", tokens=TOKENS)
    assert (message.text, message.tool_calls) == ("It is <b>21</b> degrees.", [])


def test_the_recipient_may_stand_before_the_channel_and_the_end_be_hidden() -> None:
    text = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}'
    message = read_everyhow(BOTH, ANALYSIS + NEXT + text, tokens=TOKENS)
    assert [call.name for call in message.tool_calls] == ["weather"]
    assert read_everyhow(BOTH, text, tokens=TOKENS).tool_calls == message.tool_calls


def test_messages_of_one_kind_have_an_empty_line_between_them() -> None:
    message = read_everyhow(BOTH, NEXT.join((ANALYSIS, ANALYSIS, FINAL + "<|end|>", FINAL)), tokens=TOKENS)
    assert message.reasoning == "The user wants\nthe weather.\n\nThe user wants\nthe weather."
    assert message.text == "It is <b>21</b> degrees.\n\nIt is <b>21</b> degrees."


def test_several_calls_in_one_output() -> None:
    message = read_everyhow(BOTH, NEXT.join((CALL, ANALYSIS, CALL)), tokens=TOKENS)
    assert [(call.id, call.name) for call in message.tool_calls] == [("call_0", "weather"), ("call_1", "weather")]


def test_tools_that_the_model_knows_by_itself_are_no_calls() -> None:
    search = '<|channel|>analysis to=browser.search code<|message|>{"query": "x"}<|call|>'
    message = read_everyhow(BOTH, search, tokens=TOKENS)
    assert (message.reasoning, message.tool_calls) == ('{"query": "x"}', [])


def test_a_prompt_may_have_written_the_header() -> None:
    assert read_everyhow(BOTH, "It is to=x 21.", tokens=TOKENS).text == "It is to=x 21."
    message = read_everyhow(BOTH, f"thought<|end|>{NEXT}{CALL}", tokens=TOKENS, in_thinking=True)
    assert (message.reasoning, len(message.tool_calls)) == ("thought", 1)


def test_without_tools_a_call_is_text() -> None:
    message = Reading(message_format(None, "openai_gptoss"), ANALYSIS + NEXT + CALL, tokens=TOKENS).message()
    assert message.tool_calls == []
    assert '{"city": "Rome"}' in message.text


def test_malformed_messages_are_text_and_the_next_is_read() -> None:
    for malformed in (
        "<|channel|>commentary to=functions.weather <|message|>no JSON<|call|>",
        "<|channel|>commentary to=functions. <|message|>{}<|call|>",
        "<|channel|>one two three four five six seven eight nine<|message|>x<|end|>",
        "<|channel|>final {}<|message|>x<|end|>",
    ):
        message = Reading(BOTH, f"{malformed}{NEXT}{CALL}", tokens=TOKENS).message()
        assert [call.name for call in message.tool_calls] == ["weather"], malformed
        assert "".join(malformed.split()).startswith("".join(message.text.split()).removesuffix("<|call|>")[:20])
        assert message.text


def test_what_is_cut_is_a_call_only_as_it_comes() -> None:
    for size in range(len(CALL)):
        reading = Reading(BOTH, CALL[:size], tokens=TOKENS)
        if any(CALL[:size].endswith(one[:part]) for one in TOKENS for part in range(1, len(one))):
            continue  # a part of a token
        message = reading.message(num_random=5)
        reading.calls_as_they_come = True
        early = reading.message(num_random=5)
        is_whole = "}" in CALL[:size]
        is_begun = "<|message|>" in CALL[:size]
        assert bool(message.tool_calls) == is_whole
        assert bool(early.tool_calls) == is_begun
        assert not early.text
        assert not is_begun or is_whole or message.text.startswith("<|channel|>commentary to=functions.weather")


def test_a_prompt_ends_inside_the_analysis() -> None:
    marks = marks_of(BOTH, TOKENS)
    start, channel, message, end = (marks.ids[one] for one in ("<|start|>", "<|channel|>", "<|message|>", "<|end|>"))
    begun = "<|start|>assistant<|channel|>analysis<|message|>"
    assert in_thinking(BOTH, marks, [start, 1, channel, 2, message, 3, 4], begun + "Hm")
    assert not in_thinking(BOTH, marks, [start, 1, channel, 2, message, 3, end, start, 1], begun + "Hm<|end|>")
    assert not in_thinking(BOTH, marks, [start, 1, channel, 2, message, 3], begun.replace("analysis", "final"))
    assert not in_thinking(BOTH, marks, [start, 1], "<|start|>assistant")
    assert not in_thinking(BOTH, marks, [], "")


@pytest.mark.parametrize(
    ("prompt", "ends"),
    [
        ("<|end|><|start|>assistant", True),
        ("<|start|>", True),
        ("<|start|>assistant<|channel|>", True),
        ("<|start|>assistant<|channel|>analysis<|message|>Hm", False),
        ("<|start|>assistant<|channel|>final<|message|>It", None),
        ("<|start|>assistant<|channel|>comm", None),
        ("<|start|>assistant to=functions.", None),
        ("<|start|>user<|message|>Hi<|end|>", None),
        ("Hi", None),
    ],
)
def test_a_prompt_ends_where_a_header_begins(prompt: str, ends: bool | None) -> None:
    marks = marks_of(BOTH, TOKENS)
    ids = [marks.ids.get(marks.spell(character), 1) for character in marked(marks, prompt)]
    assert Harmony().ends_in_header(marks, ids, prompt) is ends

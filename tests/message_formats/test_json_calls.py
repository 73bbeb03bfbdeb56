"""Calls whose body is JSON: every family's transcripts, whole, streamed in every way, cut and malformed."""

from __future__ import annotations

import json
import random
import time

import pytest

from quire.message_formats.format import MessageFormat
from quire.message_formats.formats import CALLS, THINKING
from quire.message_formats.marks import Marks
from quire.message_formats.parser import MessageParser
from quire.message_formats.parts import CallArguments, CallStart, Message, ToolCall
from tests.message_formats.families import CALLS_OF, FAMILIES, TOOLS, Family, Tokens, marks_of, parts, read

BEFORE, AFTER = "Let me look: {x} [1].", "That was it."
EVERYDAY_SPLITS, ALL_SPLITS = 5_000, 100_000
"""Random ones, of all families together."""
NUM_CUT_EVERYWHERE = 2
"""Messages of each family that are cut at every place in the everyday run."""
both = pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@both
@every_family
@pytest.mark.parametrize("case", CALLS_OF)
def test_what_the_template_writes_is_read(family: Family, case: str, as_tokens: bool) -> None:
    marks, calls = marks_of(family.format, as_tokens=as_tokens), CALLS_OF[case]
    expected = [ToolCall(family.ids(name, i), name, arguments) for i, (name, arguments) in enumerate(calls)]
    written = family.write(calls, marks)
    assert read(family.format, marks, [written]) == Message(tool_calls=expected)
    assert read(family.format, marks, [written], early=True) == Message(tool_calls=expected)
    if family.has_text_before:
        for message in (f"{BEFORE} {written}", f"{BEFORE}\n{written}\n"):
            assert read(family.format, marks, [message]) == Message(text=BEFORE, tool_calls=expected)
        found = read(family.format, marks, [f"{BEFORE}\n{written}\n{AFTER}"])
        assert found == Message(text=f"{BEFORE}\n{AFTER}", tool_calls=expected)
    assert read(family.format, marks, [f"{written}\n{AFTER}"]) == Message(text=AFTER, tool_calls=expected)


DISTINCT = {
    name: family for name, family in FAMILIES.items() if name not in ("ERNIE 4.5", "Granite 4", "Qwen 3", "Llama 4")
}


@both
@pytest.mark.parametrize("family", DISTINCT.values(), ids=list(DISTINCT))
@pytest.mark.parametrize(
    "num_splits", [EVERYDAY_SPLITS, pytest.param(ALL_SPLITS, marks=pytest.mark.slow)], ids=["everyday", "all"]
)
def test_every_way_to_split_gives_the_same_message(family: Family, as_tokens: bool, num_splits: int) -> None:
    marks = marks_of(family.format, as_tokens=as_tokens)
    chance = random.Random(0)
    messages = [family.write(calls, marks) for calls in CALLS_OF.values()]
    messages += [f"{BEFORE} {messages[0]} {AFTER}", f"{messages[0]}{messages[4][:-20]}", f"{BEFORE}{messages[3]} 1{{"]
    for early in (False, True):
        wholes = [read(family.format, marks, [message], early=early) for message in messages]
        for index, (message, whole) in enumerate(zip(messages, wholes, strict=True)):
            assert read(family.format, marks, message, early=early) == whole
            is_cut_everywhere = num_splits == ALL_SPLITS or index >= len(messages) - NUM_CUT_EVERYWHERE
            for cut in range(1, len(message)) if is_cut_everywhere and early is as_tokens else ():
                assert read(family.format, marks, pieces_of(message, [cut]), early=early) == whole
        for _ in range(num_splits // (4 * len(DISTINCT))):
            which = chance.randrange(len(messages))
            message = messages[which]
            cuts = sorted(chance.sample(range(1, len(message)), chance.randint(2, 8)))
            assert read(family.format, marks, pieces_of(message, cuts), early=early) == wholes[which], cuts


@both
@every_family
def test_calls_that_are_cut_are_text_or_have_the_arguments_so_far(family: Family, as_tokens: bool) -> None:
    marks = marks_of(family.format, as_tokens=as_tokens)
    calls = CALLS_OF["three"]
    whole = family.write(calls, marks)
    for length in range(len(whole)):
        message = read(family.format, marks, [whole[:length]])
        assert [(call.name, call.arguments) for call in message.tool_calls] == calls[: len(message.tool_calls)]
        assert not message.tool_calls or whole[:length].count("}") >= len(message.tool_calls)
        if not message.tool_calls:
            assert message.text.strip() in ("", marks.spell(whole[:length]).strip())
        early = read(family.format, marks, [whole[:length]], early=True)
        for found, (name, arguments) in zip(early.tool_calls, calls, strict=False):
            assert found.name == name
            assert arguments.startswith(found.arguments)
        assert len(early.tool_calls) - len(message.tool_calls) in (0, 1)


@both
@every_family
def test_malformed_calls_are_text_and_nothing_of_them_is_lost(family: Family, as_tokens: bool) -> None:
    marks = marks_of(family.format, as_tokens=as_tokens)
    good = family.write([("f", '{"a": "b"}')], marks)
    for old, new in [
        ('{"a": "b"}', "{'a': 'b'}"),
        ('{"a": "b"}', '{"a": "b"'),
        ('{"a": "b"}', '{"a" "b"}'),
        ('{"a": "b"}', '{"a": NaN}'),
        ('{"a": "b"}', '{"a": 1e999}'),
        ('{"a": "b"}', '{"a": "b",}'),
        ('{"a": "b"}', '["a", "b"]'),
        ('{"a": "b"}', '"{\\"a\\": "'),
        ('{"a": "b"}', "nothing"),
        ('{"a": "b"}', "[" * 200 + "]" * 200),
        ('{"a": "b"}', '{"a": ' * 200 + "1" + "}" * 200),
        ('{"a": "b"}', '{"a": 1' + "0" * 5000 + "}"),
    ]:
        bad = good.replace(old, new)
        message = read(family.format, marks, [bad])
        assert not message.tool_calls, new
        assert "".join(message.text.split()) == "".join(marks.spell(bad).split())


@both
@every_family
def test_a_call_behind_a_malformed_one_is_read(family: Family, as_tokens: bool) -> None:
    if not family.has_text_before:
        return
    marks = marks_of(family.format, as_tokens=as_tokens)
    begin = marks(CALLS[family.format].begins[0])
    good = family.write([("f", "{}")], marks)
    found = read(family.format, marks, [f"{begin} !! {good}"])
    assert found.text == f"{marks.spell(begin)} !!"
    assert [(call.name, call.arguments) for call in found.tool_calls] == [("f", "{}")]


@every_family
def test_markers_in_other_tokens_are_text_where_they_are_tokens(family: Family) -> None:
    marks = marks_of(family.format, as_tokens=True)
    if CALLS[family.format].begins and family.has_text_before:
        written = family.write(CALLS_OF["one"], lambda marker: marker)
        assert read(family.format, marks, [written]) == Message(text=written)


HERMES_ARGUMENTS = [
    ('"arguments": "{\\"a\\": 1}"', '{"a": 1}'),
    ('"arguments": ""', "{}"),
    ('"arguments": null', "{}"),
    ('"id": 5, "arguments": {"a": [1]}, "type": "function"', '{"a": [1]}'),
    ('"parameters": {"a":1}', '{"a":1}'),
    ('"arguments": {"a": "line\nbreak\ttab"}', '{"a": "line\\nbreak\\ttab"}'),
    ('"arguments": "{\\"a\\": \\"\\ud83d\\"}"', '{"a": "\\ud83d"}'),
    ('"arguments": {"a": "x\n\\ud83d"}', '{"a": "x\\n\\ud83d"}'),
]


@pytest.mark.parametrize(("members", "arguments"), HERMES_ARGUMENTS, ids=[a for a, _ in HERMES_ARGUMENTS])
def test_arguments_come_out_as_one_json_object(members: str, arguments: str) -> None:
    marks = marks_of("hermes", as_tokens=True)
    for body in (f'{{"name": "f", {members}}}', f'{{{members}, "name": "f"}}'):
        (call,) = read("hermes", marks, [marks("<tool_call>"), body, marks("</tool_call>")]).tool_calls
        assert (call.name, call.arguments) == ("f", arguments)
        call.arguments.encode()
        json.loads(call.arguments)


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "f", "name": "g", "arguments": {}}',
        '{"name": "f", "arguments": {}, "parameters": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "a b", "arguments": {}}',
        '{"name": "\\ud83d", "arguments": {}}',
        '{"name": 5, "arguments": {}}',
        '{"name": "%s", "arguments": {}}' % ("x" * 257),
        '{"arguments": {}}',
        '{"function": {"name": "f"}}',
        "{}",
        "[]",
        "",
        '{"name": "f", "arguments": "{\\"a\\": \\n1e999, \\"b\\": \\"\n\\"}"}'.replace("\\n1", "1"),
    ],
)
def test_what_names_no_function_once_is_no_call(body: str) -> None:
    marks = marks_of("hermes", as_tokens=False)
    written = f"<tool_call>{body}</tool_call>"
    message = read("hermes", marks, [written])
    assert not message.tool_calls or body.endswith('"}"}')
    assert message.text.replace("\n", "") == written.replace("\n", "") or message.tool_calls


def test_closing_markers_may_be_missing() -> None:
    marks = marks_of("hermes", as_tokens=True)
    begin, end = marks("<tool_call>"), marks("</tool_call>")
    call = '{"name": "f", "arguments": {}}'
    calls = [ToolCall("call_0", "f", "{}"), ToolCall("call_1", "f", "{}")]
    assert read("hermes", marks, [begin + call + begin + call]).tool_calls == calls
    assert read("hermes", marks, [begin + call + call + end]).tool_calls == calls
    assert read("hermes", marks, [begin, "[", call, ",", call, "]"]).tool_calls == calls
    assert read("hermes", marks, [f"{begin}{call} and{end}"]) == Message(text="and</tool_call>", tool_calls=calls[:1])


@pytest.mark.parametrize(
    "answer",
    [
        '{"name": "Bob", "age": 3}',
        '{"city": "Paris"}',
        "{x}",
        "[1, 2]",
        '[{"name": "Bob"}]',
        "{",
        "[",
        '{"type": "object", "properties": {}}',
    ],
)
@pytest.mark.parametrize("family", ["llama3_json", "xlam"])
def test_answers_in_json_are_no_calls(family: str, answer: str) -> None:
    marks = marks_of(family, as_tokens=True)
    assert read(family, marks, [answer]) == Message(text=answer)
    assert read(family, marks, answer) == Message(text=answer)


def test_answers_in_json_are_streamed() -> None:
    marks = marks_of("llama3_json", as_tokens=True)
    parser = MessageParser(
        MessageFormat(calls=CALLS["llama3_json"]), marks, tools=TOOLS, new_id=lambda index: f"call_{index}"
    )
    assert not parser.feed('{"answer')
    assert parser.feed('"')
    assert parser.feed(": 4")


@pytest.mark.parametrize("family", ["llama3_json", "xlam", "hermes"])
def test_calls_follow_thinking(family: str) -> None:
    message_format = MessageFormat(thinking=THINKING["qwen3"], calls=CALLS[family])
    marks = Marks(message_format.markers, Tokens(()))  # type: ignore[arg-type]
    written = next(f.write([("f", "{}")], marks) for f in FAMILIES.values() if f.format == family)
    for in_thinking, start in ((False, "<think>\nhm {\n</think>\n\n"), (True, "hm {</think>")):
        parser = MessageParser(
            message_format, marks, tools=TOOLS, new_id=lambda i: f"call_{i}", in_thinking=in_thinking
        )
        message = Message.of([*parser.feed(start), *parser.feed(written), *parser.finish()])
        assert message == Message(reasoning="hm {", tool_calls=[ToolCall("call_0", "f", "{}")])


def test_ids_that_the_model_writes_twice_are_made_up() -> None:
    marks = marks_of("kimi_k2", as_tokens=False)
    call = "<|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    plain = "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>"
    found = read("kimi_k2", marks, [f"<|tool_calls_section_begin|>{call}{call}{plain}<|tool_calls_section_end|>"])
    assert [call.id for call in found.tool_calls] == ["functions.f:7", "call_1", "call_2"]
    assert {call.name for call in found.tool_calls} == {"f"}
    assert not found.text


def test_calls_come_as_soon_as_they_are_certain() -> None:
    marks = marks_of("hermes", as_tokens=True)
    pieces = [marks("<tool_call>"), '{"name": "f"', ', "arguments": {"a"', ": 1", "}", "}", marks("</tool_call>")]
    early = parts("hermes", marks, pieces, early=True)
    assert early == [
        CallStart(0, "call_0", "f"),
        CallArguments(0, '{"a"'),
        CallArguments(0, ": 1"),
        CallArguments(0, "}"),
    ]
    assert parts("hermes", marks, pieces) == [CallStart(0, "call_0", "f"), CallArguments(0, '{"a": 1}')]


def test_long_calls_take_time_in_proportion() -> None:
    marks = marks_of("hermes", as_tokens=True)
    text = marks("<tool_call>") + '{"name": "f", "arguments": {"a": "' + "x\\n" * 100_000 + '"}}' + " " * 50_000
    began_at = time.process_time()
    (call,) = read("hermes", marks, text).tool_calls
    assert len(call.arguments) > 300_000
    assert time.process_time() - began_at < 10  # 0.7 s; some 30 s if what is read were copied with every piece

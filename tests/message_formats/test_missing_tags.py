"""A closing tag that a model forgets: no two parameters become one, and no text that quotes a tag is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.message_formats.calls.tagged import TaggedCalls
from quire.message_formats.formats import CALLS
from quire.message_formats.parts import Message
from tests.message_formats.reading import Reading, message_format

TAGGED = {name: calls for name, calls in CALLS.items() if isinstance(calls, TaggedCalls)}
both = pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
every = pytest.mark.parametrize("name", TAGGED)


def parameter(calls: TaggedCalls, key: str, value: str, *, is_closed: bool = True) -> str:
    end = calls.margin + calls.value[1] if is_closed else ""
    kind = calls.kinds[0 if key == "city" else 1][0] if calls.kinds else ""
    opening = f"{calls.key[0]}{key}{calls.key[1]}{kind}{calls.line if calls.value[0] else ''}{calls.value[0]}"
    return f"{opening}{calls.margin}{value}{end}{calls.line}"


def numbered(calls: TaggedCalls) -> str:
    return (f"{calls.index}1" if calls.index else "") + calls.name[1]


def call(calls: TaggedCalls, *parameters: str) -> str:
    inside = "".join(parameters)
    if not calls.call_end:
        return f"{calls.begin}weather{calls.line}{inside}{calls.end}"
    head = f"{calls.begin}{calls.line}{calls.name[0]}weather{numbered(calls)}{calls.line}"
    return f"{head}{inside}{calls.call_end}{calls.line}{calls.end}"


def read(name: str, text: str, *, as_tokens: bool, **options: Any) -> Message:
    written = message_format(name)
    sections = TAGGED[name].inner or (TAGGED[name].begin, TAGGED[name].end)
    return Reading(written, text, tokens=sections if as_tokens else (), **options).message(num_random=20)


def arguments(message: Message) -> list[Any]:
    return [json.loads(call.arguments) for call in message.tool_calls]


@every
@both
def test_the_next_parameter_ends_a_value(name: str, as_tokens: bool) -> None:
    calls = TAGGED[name]
    text = call(
        calls,
        parameter(calls, "city", "Rome", is_closed=False),
        parameter(calls, "days", "3", is_closed=False),
        parameter(calls, "exact", "true"),
    )
    message = read(name, text, as_tokens=as_tokens)
    assert arguments(message) == [{"city": "Rome", "days": 3, "exact": True}]
    assert message.text == ""


@every
@both
def test_the_end_of_the_call_ends_a_value(name: str, as_tokens: bool) -> None:
    calls = TAGGED[name]
    one = call(calls, parameter(calls, "city", "Rome", is_closed=False))
    other = call(calls, parameter(calls, "days", "3"), parameter(calls, "city", "Oslo"))
    message = read(name, f"{one}\n{other}", as_tokens=as_tokens)
    assert arguments(message) == [{"city": "Rome"}, {"days": 3, "city": "Oslo"}]
    assert message.text == ""


@every
@both
def test_a_quoted_tag_stays_in_the_text(name: str, as_tokens: bool) -> None:
    """A parameter that the tool does not have, one that was given already, or a tag of which no end follows."""
    calls = TAGGED[name]
    begin, middle = calls.key
    for quoted in (f"{begin}other{middle}", f"{begin}city{middle}", begin, f"{begin}days", f"{begin}<b>{middle}"):
        value = f"a {quoted} b"
        text = call(calls, parameter(calls, "city", value), parameter(calls, "days", "3"))
        message = read(name, text, as_tokens=as_tokens)
        assert arguments(message) == [{"city": value, "days": 3}], quoted
    if calls.call_end:
        value = f"a {calls.call_end} b"
        assert arguments(read(name, call(calls, parameter(calls, "city", value)), as_tokens=as_tokens)) == [
            {"city": value}
        ]


@every
@both
def test_what_a_grammar_writes_is_read_to_the_letter(name: str, as_tokens: bool) -> None:
    calls = TAGGED[name]
    value = f"a {calls.key[0]}days{calls.key[1]} {calls.call_end} b\n"
    text = call(calls, parameter(calls, "city", value), parameter(calls, "days", "3"))
    message = read(name, text, as_tokens=as_tokens, calls_as_they_come=True)
    assert arguments(message) == [{"city": value, "days": 3}]


@pytest.mark.parametrize("name", ["functiongemma", "gemma4"])
@both
def test_a_missing_quote_makes_the_call_a_text(name: str, as_tokens: bool) -> None:
    begin, end, quote = CALLS[name].markers
    for rest in (f"Rome,unit:{quote}C{quote}}}", f"Rome,unit:{quote}C{quote},tags:[{quote}a{quote}]}}", "Rome,days:3}"):
        text = f"{begin}call:weather{{city:{quote}{rest}{end}"
        message = Reading(message_format(name), text, tokens=(begin, end, quote) if as_tokens else ()).message()
        assert (message.tool_calls, message.text) == ([], text)

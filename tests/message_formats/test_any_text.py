"""Any text at all, and mixtures of pieces of calls: nothing raises, nothing is lost, no split matters."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.message_formats.formats import CALLS
from quire.message_formats.parts import CallArguments, CallStart
from tests.message_formats.families import FAMILIES, JSON_FORMATS, marks_of, parts, read

EVERYDAY = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
MANY = settings(EVERYDAY, max_examples=500)
DISTINCT = [
    name
    for name in JSON_FORMATS
    if all(CALLS[name] is not CALLS[other] for other in JSON_FORMATS[: JSON_FORMATS.index(name)])
]
every_format = pytest.mark.parametrize("family", DISTINCT)
both = pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
CHARACTERS = st.characters(exclude_categories=["Cs"])
COMMON = [
    *'{}[]",:; \n\\<|>`',
    '{"name": "f", "arguments": {}}',
    '{"name": "f", "parameters": {"a": [{"b": "}"}]}}',
    '{"name": "f", "arguments": {"a":',
    '"name"',
    "name",
    '"f"',
    '"arguments": ',
    "f",
    "functions.f:0",
    "function",
    "null",
    "-1.5e3",
    "```json",
    "é東😀",
    " text ",
    '\\"',
    "\\u00e9",
]


def squeezed(text: str) -> str:
    return "".join(text.split())


def is_inside(inner: str, outer: str) -> bool:
    """Whether the characters come in the same order."""
    characters = iter(outer)
    return all(character in characters for character in inner)


@st.composite
def messages(draw: st.DrawFn, family: str, *, as_tokens: bool) -> list[str]:
    """Pieces of marked text."""
    marks = marks_of(family, as_tokens=as_tokens)
    markers = CALLS[family].markers
    whole = [
        written.write([("f", '{"a": "b"}'), ("g", "{}")], marks)
        for written in FAMILIES.values()
        if written.format == family
    ]
    known = st.sampled_from([*COMMON, *map(marks, markers), *markers, *[marker[:-2] for marker in markers], *whole])
    return draw(st.lists(st.one_of(known, known, st.text(CHARACTERS, max_size=8)), max_size=14))


@both
@every_format
@EVERYDAY
@given(data=st.data())
def test_nothing_raises_and_nothing_is_lost(family: str, as_tokens: bool, data: st.DataObject) -> None:
    check_that_nothing_is_lost(family, as_tokens, data)


@pytest.mark.slow
@both
@every_format
@MANY
@given(data=st.data())
def test_nothing_raises_and_nothing_is_lost_ever(family: str, as_tokens: bool, data: st.DataObject) -> None:
    check_that_nothing_is_lost(family, as_tokens, data)


def check_that_nothing_is_lost(family: str, as_tokens: bool, data: st.DataObject) -> None:
    pieces = data.draw(messages(family, as_tokens=as_tokens))
    marks, text = marks_of(family, as_tokens=as_tokens), "".join(pieces)
    message = read(family, marks, [text])
    assert read(family, marks, pieces) == message
    assert read(family, marks, text) == message
    assert is_inside(squeezed(message.text), squeezed(marks.spell(text)))
    if not message.tool_calls:
        assert squeezed(message.text) == squeezed(marks.spell(text))
    for call in message.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
        assert call.name


@both
@every_format
@EVERYDAY
@given(data=st.data())
def test_calls_that_come_as_they_are_written_are_told_in_order(
    family: str, as_tokens: bool, data: st.DataObject
) -> None:
    check_the_order(family, as_tokens, data)


@pytest.mark.slow
@both
@every_format
@MANY
@given(data=st.data())
def test_calls_that_come_as_they_are_written_are_told_in_order_ever(
    family: str, as_tokens: bool, data: st.DataObject
) -> None:
    check_the_order(family, as_tokens, data)


def check_the_order(family: str, as_tokens: bool, data: st.DataObject) -> None:
    pieces = data.draw(messages(family, as_tokens=as_tokens))
    marks = marks_of(family, as_tokens=as_tokens)
    message = read(family, marks, pieces, early=True)
    assert read(family, marks, ["".join(pieces)], early=True) == message
    started = 0
    for part in parts(family, marks, pieces, early=True):
        if isinstance(part, CallStart):
            assert part.index == started
            started += 1
        elif isinstance(part, CallArguments):
            assert part.index == started - 1
    assert started == len(message.tool_calls) == len({call.id for call in message.tool_calls})

"""Mixtures of the pieces of calls that are no JSON: nothing raises, nothing is lost, no split matters."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.message_formats.parts import Message
from tests.message_formats.reading import Reading, marked, marks_of, message_format
from tests.message_formats.test_transcripts import FAMILIES, Family

PIECES = [
    *"()[]{}:,'\"\\=\n 5",
    "weather",
    "city",
    "city='x', ",
    "text",
    "call:weather{",
    "True",
    "null",
    "to=functions.weather",
    "to=weather",
    "assistant",
    '{"name":"weather","args":{}}',
    "analysis",
    "weather(",
    "f(a=[{'b': (1,)}])",
]


def squeezed(text: str) -> str:
    return "".join(text.split())


LAYOUTS = [Family(name, (), "", "") for name in ("openai", "inkling", "muse")]
every_family = pytest.mark.parametrize("family", [*FAMILIES, *LAYOUTS], ids=lambda one: one.calls)
both = pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])


@every_family
@both
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_nothing_raises_and_nothing_is_lost(family: Family, as_tokens: bool, data: st.DataObject) -> None:
    check(family, as_tokens, data)


@pytest.mark.slow
@every_family
@both
@settings(max_examples=500, deadline=None, derandomize=True)
@given(data=st.data())
def test_nothing_raises_and_nothing_is_lost_ever(family: Family, as_tokens: bool, data: st.DataObject) -> None:
    check(family, as_tokens, data)


def check(family: Family, as_tokens: bool, data: st.DataObject) -> None:
    written = message_format(family.calls)
    markers = written.markers
    known = st.sampled_from([*PIECES, *markers, *[marker[:-1] for marker in markers], family.code, family.two_calls])
    pieces = data.draw(st.lists(known | st.text(st.characters(exclude_categories=["Cs"]), max_size=6), max_size=16))
    tokens = (family.tokens or markers) if as_tokens else ()
    reading = Reading(written, "".join(pieces), tokens=tokens)
    whole = Message.of(reading.parts([reading.text]))
    assert Message.of(reading.parts(list(reading.text))) == whole
    cut = [marked(marks_of(written, tokens), piece) for piece in pieces]
    if "".join(cut) == reading.text:
        assert Message.of(reading.parts(cut)) == whole
    for call in whole.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
    if not whole.tool_calls and family not in LAYOUTS:  # whose headers are no text
        assert squeezed(whole.text) == squeezed("".join(pieces))
    reading.calls_as_they_come = True
    early = Message.of(reading.parts([reading.text]))
    assert Message.of(reading.parts(list(reading.text))) == early

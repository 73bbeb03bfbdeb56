"""Outputs that end for their length: what is left of a marker or of a call's head is no text where calls are known to
stand, and stays text everywhere else."""

from __future__ import annotations

import json
import random

import pytest

from quire.message_formats.format import MessageFormat
from quire.message_formats.formats import CALLS
from quire.message_formats.grammars.call_grammar import CallGrammar
from quire.message_formats.marks import Marks
from quire.message_formats.parser import MessageParser
from quire.message_formats.parts import Message
from quire.message_formats.tools import Tool
from tests.message_formats.families import FAMILIES, Tokens
from tests.message_formats.reading import TOOLS, marked
from tests.message_formats.test_blocks import call, output
from tests.message_formats.test_call_grammar import Walker
from tests.message_formats.test_transcripts import FAMILIES as OTHERS

SMALL = 5
"""Characters of the pieces in which a stream comes."""
TWO = [("weather", '{"city": "Rome"}'), ("now", "{}")]
WRITTEN = {name: (family.format, family.write(TWO, lambda marker: marker)) for name, family in FAMILIES.items()}
WRITTEN |= {family.calls: (family.calls, family.two_calls) for family in OTHERS}
LAYOUTS = ("inkling", "muse")
WRITTEN |= {name: (name, output(name, call(name, "weather", city="Rome"), call(name, "now"))) for name in LAYOUTS}
TOKENS = {family.calls: family.tokens for family in OTHERS}
both = pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
every = pytest.mark.parametrize("name", WRITTEN)


class Cut:
    """The beginnings of a message with two calls, read as a stream and as a whole."""

    def __init__(self, name: str, *, as_tokens: bool, is_kept: bool = False, before: str = "") -> None:
        self.format, written = WRITTEN[name]
        markers = CALLS[self.format].markers
        tokens = Tokens(TOKENS.get(name, markers) if as_tokens else ())
        self.marks = Marks(markers, tokens)  # type: ignore[arg-type]
        self.text = marked(self.marks, before + written)
        self.is_kept = is_kept
        self.must_call = is_kept and not before

    def read(self, length: int, *, is_cut: bool = True) -> Message:
        messages = []
        small = [self.text[start : min(start + SMALL, length)] for start in range(0, length, SMALL)]
        for pieces in ([self.text[:length]], small):
            parser = MessageParser(
                MessageFormat(calls=CALLS[self.format]),
                self.marks,
                tools=TOOLS,
                new_id=lambda index: f"call_{index}",
                calls_as_they_come=self.is_kept,
                must_call=self.must_call,
            )
            parts = [part for piece in pieces for part in parser.feed(piece)]
            messages.append(Message.of([*parts, *parser.finish(is_cut=is_cut)]))
        assert messages[0] == messages[1]
        return messages[0]


@every
@both
def test_where_a_grammar_writes_calls_nothing_of_them_is_text(name: str, as_tokens: bool) -> None:
    cut = Cut(name, as_tokens=as_tokens, is_kept=True)
    for length in range(len(cut.text) % 2, len(cut.text) + 1, 2):
        assert not cut.read(length).text, cut.text[:length]
    assert len(cut.read(len(cut.text)).tool_calls) == 2


@every
@both
def test_behind_a_call_nothing_of_the_next_one_is_text(name: str, as_tokens: bool) -> None:
    cut = Cut(name, as_tokens=as_tokens)
    lengths = [length for length in range(1, len(cut.text), 2) if cut.read(length).tool_calls]
    assert lengths
    for length in lengths:
        assert not cut.read(length).text, cut.text[:length]


@every
@both
def test_before_any_call_what_is_cut_stays_text(name: str, as_tokens: bool) -> None:
    cut = Cut(name, as_tokens=as_tokens)
    for length in range(0, len(cut.text), 3):
        message = cut.read(length)
        if not message.tool_calls:
            assert message == cut.read(length, is_cut=False)
            assert message.text.strip() == cut.marks.spell(cut.text[:length]).strip()


@every
def test_text_behind_calls_stays(name: str) -> None:
    cut = Cut(name, as_tokens=True)
    cut.text += "\n\nThe weather is a < b"
    whole = cut.read(len(cut.text), is_cut=False)
    assert cut.read(len(cut.text)) == whole
    assert whole.text.endswith("The weather is a < b")


@both
def test_a_call_that_is_malformed_and_does_not_end_the_output_stays_text(as_tokens: bool) -> None:
    cut = Cut("qwen3_coder", as_tokens=as_tokens)
    cut.text += marked(cut.marks, "\n<tool_call>\nno call\n</tool_call>\nand mo")
    message = cut.read(len(cut.text))
    assert len(message.tool_calls) == 2
    assert message.text.split() == ["<tool_call>", "no", "call", "</tool_call>", "and", "mo"]


@pytest.mark.parametrize("name", [name for name, (written, _) in WRITTEN.items() if CALLS[written].begins])
def test_behind_a_marker_whose_calls_a_grammar_writes_nothing_is_text(name: str) -> None:
    cut = Cut(name, as_tokens=True, is_kept=True, before="I look. ")
    if cut.marks.spell(cut.text[8]) not in CALLS[cut.format].begins:
        pytest.skip("this spelling has no marker")
    for length in range(8, len(cut.text) + 1, 3):
        assert cut.read(length).text.strip() == "I look.", cut.text[:length]


ESCAPES = {"a": 'say "x" \\ \x1b', "b": -1.5e-07, "c": False, "d": None, "e": [True, 12.25]}


@both
@pytest.mark.parametrize("format_name", sorted(CALLS))
def test_what_a_cut_call_has_said_is_what_the_whole_call_says_first(format_name: str, as_tokens: bool) -> None:
    walker = Walker(format_name, as_tokens=as_tokens)
    schema = {"properties": {key: {"const": value} for key, value in ESCAPES.items()}, "required": [*ESCAPES]}
    tools = {"f": Tool(name="f", parameters={"type": "object", **schema, "additionalProperties": False})}
    grammar = CallGrammar(walker.marks, [*tools.values()], parallel=False)
    written = walker.walk(grammar.text(walker.calls.several(grammar)), random.Random(1))
    (whole,) = walker.read(written, tools).tool_calls
    assert json.loads(whole.arguments) == ESCAPES
    for length in range(len(written)):
        for pieces in ([written[:length]], list(written[:length])):
            parser = MessageParser(
                MessageFormat(calls=walker.calls),
                walker.marks,
                tools=tools,
                new_id=lambda index: f"call_{index}",
                calls_as_they_come=True,
                must_call=True,
            )
            parts = [part for piece in pieces for part in parser.feed(piece)]
            message = Message.of([*parts, *parser.finish(is_cut=True)])
            assert not message.text, written[:length]
            assert all(whole.arguments.startswith(call.arguments) for call in message.tool_calls), written[:length]

"""Reads transcripts as a server does, in every way in which their tokens may come."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from quire.message_formats.format import MessageFormat
from quire.message_formats.formats import CALLS, THINKING
from quire.message_formats.marks import Marks
from quire.message_formats.parser import MessageParser
from quire.message_formats.parts import Message, Part
from quire.message_formats.tools import Tool

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "options": {"type": "object"},
        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city"],
}
TOOLS = {"weather": Tool(name="weather", parameters=SCHEMA), "now": Tool(name="now")}


def message_format(calls: str | None = None, thinking: str | None = None) -> MessageFormat:
    return MessageFormat(
        thinking=None if thinking is None else THINKING[thinking], calls=None if calls is None else CALLS[calls]
    )


def marks_of(written: MessageFormat, tokens: Sequence[str], others: Sequence[str] = ()) -> Marks:
    """The marks of a tokenizer that has these markers as tokens."""
    added: Any = SimpleNamespace(added_tokens=dict(enumerate((*tokens, *others), start=1000)))
    return Marks(written.markers, added)


def marked(marks: Marks, text: str) -> str:
    for marker in sorted(marks.ids, key=len, reverse=True):
        text = text.replace(marker, marks(marker))
    return text


class Reading:
    """One transcript in one format. `tokens`: its markers that are tokens."""

    def __init__(
        self,
        written: MessageFormat,
        text: str,
        *,
        tokens: Sequence[str] = (),
        in_thinking: bool = False,
        tools: Mapping[str, Tool] = TOOLS,
        calls_as_they_come: bool = False,
    ) -> None:
        self.format = written
        self.marks = marks_of(written, tokens)
        self.text = marked(self.marks, text)
        self.in_thinking = in_thinking
        self.tools = tools
        self.calls_as_they_come = calls_as_they_come

    def parts(self, pieces: Sequence[str]) -> list[Part]:
        parser = MessageParser(
            self.format,
            self.marks,
            tools=self.tools,
            new_id=lambda index: f"call_{index}",
            in_thinking=self.in_thinking,
            calls_as_they_come=self.calls_as_they_come,
        )
        found = [part for piece in pieces for part in parser.feed(piece)]
        return found + parser.finish()

    def message(self, *, num_random: int = 10, num_single: int = 100) -> Message:
        """The message, which is the same however the text is cut: in two at so many places, and at random ones."""
        text, whole = self.text, Message.of(self.parts([self.text]))
        cuts = [[index] for index in range(1, len(text), 1 + len(text) // num_single)]
        draw = random.Random(len(text))
        cuts += [sorted(draw.choices(range(len(text) + 1), k=draw.randint(0, 12))) for _ in range(num_random)]
        for places in [*cuts, range(1, len(text))]:
            pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
            assert Message.of(self.parts(pieces)) == whole, pieces
        return whole


def read_everyhow(written: MessageFormat, text: str, *, tokens: Sequence[str], **options: Any) -> Message:
    """The message of a well-formed transcript: the same with markers as tokens and as texts, with calls whole and as
    they come."""
    first, *others = [
        Reading(written, text, tokens=some, calls_as_they_come=early, **options).message()
        for some in (tokens, ())
        for early in (False, True)
    ]
    assert others == [first] * 3
    return first

"""Calls as JSON objects that hold the function's name and its arguments."""

from __future__ import annotations

import json
from dataclasses import dataclass

from quire.message_formats.call_grammar import CallGrammar
from quire.message_formats.format import Source
from quire.message_formats.reader import Malformed, Reader, Steps
from quire.message_formats.writer import CallWriter

NAMES = ("name",)
ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls:
    """`{"name": ..., "arguments": {...}}`: one, several after each other, or an array of them, behind a marker.

    The key of the arguments may be `parameters`, other keys are skipped, and the closing marker may be missing at the
    end of the message.
    """

    begins: tuple[str, ...]
    end: str = ""
    prefix: str = ""
    """Stands between the marker and the objects."""
    bare: str = ""
    separator: str = ""
    """Stands between objects that are in no array."""

    @property
    def markers(self) -> tuple[str, ...]:
        """See `CallSyntax`."""
        return tuple(marker for marker in (*self.begins, self.prefix, self.end) if marker)

    def read(self, source: Source, begin: str, calls: CallWriter) -> Steps[None]:
        """See `CallSyntax`."""
        reader, marks = source.reader, source.marks
        if self.prefix:
            yield from reader.spaces()
            yield from reader.expect(marks(self.prefix))
        yield from reader.spaces()
        if (yield from reader.accept("[")):
            yield from self._array(reader, calls)
        else:
            yield from self._objects(reader, calls)
        if self.end and begin:
            yield from self._close(reader, marks(self.end))

    def rest(self, grammar: CallGrammar, begin: str) -> str:
        """See `CallSyntax`."""
        raise NotImplementedError

    def several(self, grammar: CallGrammar) -> str:
        """See `CallSyntax`."""
        raise NotImplementedError

    def _array(self, reader: Reader, calls: CallWriter) -> Steps[None]:
        while True:
            yield from reader.spaces()
            yield from _call(reader, calls)
            yield from reader.spaces()
            if not (yield from reader.accept(",")):
                break
        yield from reader.expect("]")

    def _objects(self, reader: Reader, calls: CallWriter) -> Steps[None]:
        while True:
            yield from _call(reader, calls)
            following = yield from reader.after_spaces()
            if self.separator and following == self.separator:
                yield from reader.spaces()
                yield from reader.expect(self.separator)
                yield from reader.spaces()
            elif following == "{" and (self.end or self.separator):
                yield from reader.spaces()
            else:
                return

    def _close(self, reader: Reader, end: str) -> Steps[None]:
        """The closing marker, or the end of the message."""
        yield from reader.spaces()
        if (yield from reader.peek()):
            yield from reader.expect(end)


def _call(reader: Reader, calls: CallWriter) -> Steps[None]:
    calls.begin()
    yield from reader.expect("{")
    while True:
        yield from reader.spaces()
        key = yield from _text(reader)
        yield from reader.spaces()
        yield from reader.expect(":")
        if key in NAMES:
            yield from reader.spaces()
            calls.name((yield from _text(reader)))
        elif key in ARGUMENTS:
            yield from reader.json(calls.arguments)
        else:
            yield from reader.json(lambda _: None)
        yield from reader.spaces()
        if not (yield from reader.accept(",")):
            break
    yield from reader.expect("}")
    calls.end()


def _text(reader: Reader) -> Steps[str]:
    """A JSON string."""
    if (yield from reader.peek()) != '"':
        raise Malformed
    pieces: list[str] = []
    yield from reader.json(pieces.append)
    try:
        return str(json.loads("".join(pieces), strict=False))
    except ValueError:
        raise Malformed from None

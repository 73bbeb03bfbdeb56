"""Calls as JSON objects that hold the function's name and its arguments."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from quire.message_formats.format import Source
from quire.message_formats.grammars.call_grammar import SPACES, CallGrammar
from quire.message_formats.reader import Malformed, Reader, Steps
from quire.message_formats.tools import Tool
from quire.message_formats.writer import CallWriter

NAMES = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters")
_OF_CALLS = (*NAMES, *ARGUMENTS, "id", "type")
"""Keys of what may be a call where no marker says so, or where it has no arguments."""
NUMBER = "/[0-9]{1,3}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls:
    """`{"name": ..., "arguments": {...}}`: one, several after each other, or an array of them, behind a marker.

    All of these are read. The rest of a row is what the family's template writes, which grammars follow. Other keys are
    skipped, but not where they may be the arguments misspelled, and a closing marker may be missing.
    """

    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    """The closing markers for `begins`, empty where there is none."""
    prefix: str = ""
    """A marker behind the opening one."""
    bare: str = ""
    separator: str = ""
    """Stands between objects that are in no array."""
    name_key: str = "name"
    """Empty: the name itself is the only key, and its value the arguments."""
    arguments_key: str = "arguments"
    is_compact: bool = False
    """No spaces stand between keys and values."""
    id_key: str = ""
    """Of a number in front of the name."""
    before: str = ""
    """Text between the opening marker and the first call. A space in front of it may be missing."""
    between: str = ""
    """Between calls behind one marker; empty if each call has its own."""
    after: str = ""
    """Between the last call and the closing marker."""
    apart: str = "\n"
    """Between calls with markers of their own."""

    @property
    def has_other_openings(self) -> bool:
        """See `CallSyntax`."""
        return bool(self.bare)

    @property
    def markers(self) -> tuple[str, ...]:
        """See `CallSyntax`."""
        return tuple(marker for marker in (*self.begins, self.prefix, *self.ends) if marker)

    def read(self, source: Source, begin: str, calls: CallWriter) -> Steps[None]:
        """See `CallSyntax`."""
        reader, marks = source.reader, source.marks
        if self.prefix and begin:
            yield from reader.spaces()
            yield from reader.expect(marks(self.prefix))
        yield from reader.spaces()
        yield from self._list(source, calls, is_bare=not begin)
        end = self._end_of(begin)
        if end and (yield from reader.accept_after_spaces(marks(end))):
            reader.keep()

    def openings(self, names: Iterable[str]) -> tuple[str, ...]:
        """See `CallSyntax`. Up to the arguments, as the template writes it: other JSON may begin with a tool's name."""
        return tuple((self.before + self._head(name)).rstrip() for name in names) if self.bare else ()

    def rest(self, grammar: CallGrammar, begin: str) -> str:
        """See `CallSyntax`."""
        call = grammar.one_of(lambda tool: self.call(grammar, tool))
        end = self._end_of(begin)
        before, first = self.before.lstrip(" "), call
        opened = ""
        if self.bare and not begin:
            opened = f"{grammar.literal(self.bare)} {grammar.terminal(SPACES)}?"
            before = before.removeprefix(self.bare)
            if self.bare == "{":
                first = grammar.one_of(lambda tool: self.call(grammar, tool, is_opened=True))
        others = f"({grammar.sequence(grammar.literal(self.between), call)})*"
        return grammar.sequence(
            grammar.marker(self.prefix) if self.prefix and begin else "",
            '" "?' if self.before.startswith(" ") else "",
            opened,
            grammar.literal(before),
            first,
            others if self.between and grammar.parallel else "",
            grammar.literal(self.after),
            grammar.marker(end) if end else "",
        )

    def several(self, grammar: CallGrammar) -> str:
        """See `CallSyntax`."""
        if self.bare:
            return self.rest(grammar, "")
        begin = grammar.first(self.begins)
        block = grammar.rule(grammar.sequence(grammar.marker(begin), self.rest(grammar, begin)))
        return block if self.between else grammar.repeated(block, grammar.literal(self.apart))

    @property
    def _arguments_keys(self) -> tuple[str, ...]:
        return (*ARGUMENTS, self.arguments_key)

    def _end_of(self, begin: str) -> str:
        return dict(zip(self.begins, self.ends, strict=False)).get(begin, "")

    def call(self, grammar: CallGrammar, tool: Tool, *, is_opened: bool = False) -> str:
        """A call, as an expression; `is_opened`: its brace stands before it."""
        number = [grammar.literal(f'{{"{self.id_key}": "'), NUMBER] if self.id_key else []
        head = f'", {self._head(tool.name)[1:]}' if number else self._head(tool.name)[is_opened:]
        return grammar.sequence(*number, grammar.literal(head), grammar.arguments(tool), '"}"')

    def _head(self, name: str) -> str:
        """A call up to its arguments."""
        quoted = json.dumps(name, ensure_ascii=False)
        head = f'{{"{self.name_key}": {quoted}, "{self.arguments_key}": ' if self.name_key else f"{{{quoted}: "
        return head.replace(": ", ":").replace(", ", ",") if self.is_compact else head

    def _list(self, source: Source, calls: CallWriter, *, is_bare: bool) -> Steps[None]:
        """Calls in an array, or after each other. Without a marker only those of known tools are calls."""
        reader = source.reader
        is_array = yield from reader.accept("[")
        goes_on = True
        while goes_on:
            yield from reader.spaces()
            yield from self.read_call(source, calls, is_bare=is_bare)
            if is_array:
                goes_on = yield from reader.accept_after_spaces(",")
            else:
                goes_on = yield from self._has_another(reader)
        if is_array:
            yield from reader.spaces()
            yield from reader.expect("]")
            reader.keep()

    def _has_another(self, reader: Reader) -> Steps[bool]:
        if self.separator and (yield from reader.accept_after_spaces(self.separator)):
            return True
        return (yield from reader.after_spaces()) == "{"

    def read_call(self, source: Source, calls: CallWriter, *, is_bare: bool = False) -> Steps[None]:
        """Read one object. Without a marker (`is_bare`) only that of a known tool is a call. Raises: Malformed."""
        reader = source.reader
        calls.begin()
        yield from reader.expect("{")
        goes_on, keys, num_arguments = True, set[str](), 0
        while goes_on:
            yield from reader.spaces()
            key = yield from _text(reader)
            keys.add(key)
            num_arguments += key in self._arguments_keys
            if (is_bare and key not in _OF_CALLS) or num_arguments > 1:
                raise Malformed
            yield from reader.spaces()
            yield from reader.expect(":")
            yield from reader.spaces()
            yield from self._value(source, calls, key, is_bare)
            yield from reader.spaces()
            goes_on = yield from reader.accept(",")
        yield from reader.expect("}")
        if self.name_key and not (num_arguments or keys <= {*_OF_CALLS, self.id_key or "id"}):
            raise Malformed
        calls.end()

    def _value(self, source: Source, calls: CallWriter, key: str, is_bare: bool) -> Steps[None]:
        if not self.name_key:
            calls.name(key)
        if key in self._arguments_keys or not self.name_key:
            yield from source.reader.json(calls.arguments)
        elif key in NAMES:
            name = yield from _text(source.reader)
            if is_bare and name not in source.tools:
                raise Malformed
            calls.name(name)
        else:
            yield from source.reader.json(_skip)


def _skip(_: str) -> None:
    """Of no interest."""


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

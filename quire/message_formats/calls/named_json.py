"""Calls as the function's name, a marker, and its arguments as a JSON object."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from quire.message_formats.calls.json_calls import NUMBER, JsonCalls
from quire.message_formats.format import Source
from quire.message_formats.grammars.call_grammar import CallGrammar
from quire.message_formats.reader import Malformed, Steps
from quire.message_formats.tools import Tool
from quire.message_formats.writer import CallWriter

FENCE, FENCE_END = "```json", "```"
_NAME = re.compile(r"[^\s\"'`,;(){}\[\]<>\ud800-\udfff]*")
_NUMBERED = re.compile(r"(.*):[0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedJson:
    """`NAME<marker>{...}`, each between markers of its own, or all between two markers and each between two more.

    Markers other than the opening ones may be missing.
    """

    begins: tuple[str, ...]
    end: str = ""
    call_begin: str = ""
    call_end: str = ""
    kind: str = ""
    """Stands before the name, with `kind_end` behind it."""
    kind_end: str = ""
    name_end: str = ""
    id_begin: str = ""
    """Stands between the name and an id of the call."""
    is_numbered: bool = False
    """Names are written as `functions.NAME:0`, which is the id of the call too."""
    is_fenced: bool = False
    """Arguments are a code block of Markdown."""
    between: str = ""
    """Text between calls."""
    inner: tuple[str, ...] = ()
    """Tokens of which markers are made."""
    objects: JsonCalls | None = None
    """Another syntax with the same opening marker, which tokenizers without `name_end` go with."""

    has_other_openings = False

    @property
    def bare(self) -> str:
        """See `CallSyntax`."""
        return ""

    @property
    def markers(self) -> tuple[str, ...]:
        """See `CallSyntax`."""
        inner = (self.call_begin, self.kind_end, self.id_begin, self.name_end, self.call_end, self.end)
        return tuple(marker for marker in (*self.begins, *inner, *self.inner) if marker)

    def read(self, source: Source, begin: str, calls: CallWriter) -> Steps[None]:
        """See `CallSyntax`."""
        reader = source.reader
        if self.objects is not None and (yield from reader.after_spaces()) in ("[", "{"):
            yield from self.objects.read(source, begin, calls)
            return
        if not self.call_begin:
            yield from self._read_call(source, calls)
            return
        yield from reader.spaces()
        yield from reader.expect(source.marks(self.call_begin))
        yield from self._read_call(source, calls)
        while (yield from reader.accept_after_spaces(source.marks(self.call_begin))):
            yield from self._read_call(source, calls)
        yield from _close(source, self.end)

    def openings(self, names: Iterable[str]) -> tuple[str, ...]:
        """See `CallSyntax`."""
        return ()

    def rest(self, grammar: CallGrammar, begin: str) -> str:
        """See `CallSyntax`."""
        if self._has_objects(grammar):
            assert self.objects is not None
            return self.objects.rest(grammar, begin)
        call = grammar.one_of(lambda tool: self._call(grammar, tool))
        if not self.call_begin:
            return call
        return grammar.sequence(
            grammar.repeated(call, grammar.literal(self.between)), grammar.marker(self.end) if self.end else ""
        )

    def several(self, grammar: CallGrammar) -> str:
        """See `CallSyntax`."""
        begin = grammar.first(self.begins)
        block = grammar.rule(grammar.sequence(grammar.marker(begin), self.rest(grammar, begin)))
        if self.call_begin or self._has_objects(grammar):
            return block
        return grammar.repeated(block, grammar.literal(self.between))

    def _has_objects(self, grammar: CallGrammar) -> bool:
        return self.objects is not None and not grammar.is_token(self.name_end)

    def _call(self, grammar: CallGrammar, tool: Tool) -> str:
        markers = {marker: grammar.marker(marker) for marker in self.markers if marker not in self.inner}
        name = grammar.literal(f"functions.{tool.name}:" if self.is_numbered else tool.name)
        has_id = self.id_begin and grammar.is_token(self.id_begin)
        return grammar.sequence(
            markers.get(self.call_begin, ""),
            grammar.literal(self.kind),
            markers.get(self.kind_end, ""),
            f"{name} {NUMBER}" if self.is_numbered else name,
            f"({markers[self.id_begin]} /[a-zA-Z0-9]{{9}}/)?" if has_id else "",
            markers.get(self.name_end, ""),
            grammar.literal(f"\n{FENCE}\n") if self.is_fenced else "",
            grammar.arguments(tool),
            grammar.literal(f"\n{FENCE_END}") if self.is_fenced else "",
            markers.get(self.call_end, ""),
        )

    def _read_call(self, source: Source, calls: CallWriter) -> Steps[None]:
        reader, marks = source.reader, source.marks
        calls.begin()
        if self.kind:
            yield from reader.spaces()
            yield from reader.matching(_NAME)
            yield from reader.expect(marks(self.kind_end))
        yield from reader.spaces()
        name = yield from reader.matching(_NAME)
        call_id = yield from self._id(source)
        if self.name_end:
            yield from reader.accept_after_spaces(marks(self.name_end))
        if self.is_fenced:
            yield from reader.accept_after_spaces(FENCE)
        yield from reader.spaces()
        if (yield from reader.peek()) not in ("{", '"'):
            raise Malformed
        calls.name(*self._named(name, call_id))
        yield from reader.json(calls.arguments)
        calls.end()
        if self.is_fenced:
            yield from _close(source, FENCE_END)
        yield from _close(source, self.call_end)

    def _id(self, source: Source) -> Steps[str]:
        if not self.id_begin or not (yield from source.reader.accept_after_spaces(source.marks(self.id_begin))):
            return ""
        return (yield from source.reader.matching(_NAME))

    def _named(self, name: str, call_id: str) -> tuple[str, str]:
        """The function's name and the call's id."""
        if not self.is_numbered:
            return name, call_id
        match = _NUMBERED.fullmatch(name)
        return (match[1].removeprefix("functions."), name) if match else (name.removeprefix("functions."), "")


def _close(source: Source, marker: str) -> Steps[None]:
    if marker and (yield from source.reader.accept_after_spaces(source.marks(marker))):
        source.reader.keep()

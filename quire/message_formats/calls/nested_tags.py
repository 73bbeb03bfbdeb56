"""Calls whose arguments are elements inside elements, as MiniMax M3 writes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.message_formats.calls.tagged import NAME
from quire.message_formats.format import Source
from quire.message_formats.grammars.call_grammar import CallGrammar
from quire.message_formats.grammars.element_grammar import ELEMENT, ITEM, ElementGrammar
from quire.message_formats.literals import Tell, quoted
from quire.message_formats.reader import MAX_DEPTH, Malformed, Steps
from quire.message_formats.tools import Tool
from quire.message_formats.typed_values import item_schema, parameter_schema, property_schema, type_of_schema
from quire.message_formats.writer import CallWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedTags:
    """`begin`, calls, `end`. A call is `name[0]`, its name, `name[1]`, elements and `call_end`.

    An element is `space<NAME>`, a value, `space</NAME>`. A value is a text, or elements: of an object's properties, or
    one named `item` for each item of an array. White space may stand between all of them.

    What a text stands for, the tool's schema says. Where a tag is missing or a property comes twice, there is no call.
    """

    begin: str
    end: str
    name: tuple[str, str]
    call_end: str
    space: str
    """Stands before all tags. Where it is a token, no text holds it."""

    has_other_openings = False

    @property
    def begins(self) -> tuple[str, ...]:
        """See `CallSyntax`."""
        return (self.begin,)

    @property
    def bare(self) -> str:
        """See `CallSyntax`."""
        return ""

    @property
    def markers(self) -> tuple[str, ...]:
        """See `CallSyntax`."""
        return (self.begin, self.end, self.name[0], self.call_end, self.space)

    def read(self, source: Source, begin: str, calls: CallWriter) -> Steps[None]:
        """See `CallSyntax`."""
        reader, marks = source.reader, source.marks
        yield from reader.spaces()
        yield from reader.expect(marks(self.name[0]))
        while True:
            yield from self._call(source, calls)
            yield from reader.spaces()
            if not (yield from reader.accept(marks(self.name[0]))):
                break
        if (yield from reader.peek()):
            yield from reader.expect(marks(self.end))

    def _call(self, source: Source, calls: CallWriter) -> Steps[None]:
        reader, marks = source.reader, source.marks
        calls.begin()
        name = yield from reader.matching(NAME)
        yield from reader.expect(self.name[1])
        if not (yield from reader.peek()):
            raise Malformed  # the name may be cut
        calls.name(name)
        calls.arguments("{")
        elements = _Elements(self, source, source.tools.get(name))
        yield from reader.spaces()
        while (end := (yield from reader.accepted(marks(self.call_end)))) is None:
            yield from reader.expect(marks(self.space))
            yield from elements.parameter(calls.arguments)
            yield from reader.spaces()
        if len(end) <= len(marks(f"{self.space}<")) < len(marks(self.call_end)):
            raise Malformed  # cut where another element may begin
        calls.arguments("}")
        calls.end()

    def openings(self, names: Iterable[str]) -> tuple[str, ...]:
        """See `CallSyntax`."""
        return ()

    def rest(self, grammar: CallGrammar, begin: str) -> str:
        """See `CallSyntax`."""
        call = grammar.one_of(lambda tool: self._written(grammar, tool))
        line = grammar.literal("\n")
        return grammar.sequence(line, grammar.repeated(call, line), line, grammar.marker(self.end))

    def several(self, grammar: CallGrammar) -> str:
        """See `CallSyntax`."""
        return grammar.rule(grammar.sequence(grammar.marker(self.begin), self.rest(grammar, self.begin)))

    def _written(self, grammar: CallGrammar, tool: Tool) -> str:
        return grammar.sequence(
            grammar.marker(self.name[0]),
            grammar.literal(tool.name + self.name[1]),
            ElementGrammar(grammar, tool, self.space).parameters(),
            grammar.marker(self.call_end),
        )


class _Elements:
    """The elements of one call, told as JSON."""

    def __init__(self, syntax: NestedTags, source: Source, tool: Tool | None) -> None:
        self._reader = source.reader
        self._marks = source.marks
        self._tool = tool
        self._root: Mapping[str, Any] = {} if tool is None else tool.parameters
        self._space = source.marks(syntax.space)
        self._is_token = source.marks.holds_token(syntax.space)
        self._is_kept = source.is_kept
        self._tokens = source.marks.tokens(syntax.markers)
        self._known: set[str] = set()

    def parameter(self, tell: Tell) -> Steps[None]:
        """A parameter, behind `space`. A text is told as it comes."""
        name = yield from self._opening()
        if name in self._known:
            raise Malformed
        tell(f'{", " if self._known else ""}"{quoted(name)}": ')
        self._known.add(name)
        schema = parameter_schema(self._tool, name)
        if type_of_schema(schema, self._root).is_text:
            tell('"')
            yield from self._text(name, lambda text: tell(quoted(self._marks.spell(text))))
            tell('"')
        else:
            tell((yield from self._value(name, schema, 0)))

    def _opening(self) -> Steps[str]:
        """The tag that begins an element; its name."""
        yield from self._reader.expect("<")
        name, marker = yield from self._reader.within((">", "<", "\n", *self._tokens))
        if marker != ">" or not ELEMENT.fullmatch(name):
            self._reader.unread("" if marker == ">" else marker)
            raise Malformed
        return name

    def _text(self, name: str, put: Tell) -> Steps[None]:
        """A text, up to and with the tag that ends its element. Where no grammar writes it, it holds no other tag."""
        while not (yield from self._ends(name, put)):
            following = yield from self._reader.peek()
            if self._is_token or not following or (following == "<" and not self._is_kept):
                raise Malformed
            put(self._space)

    def _ends(self, name: str, put: Tell) -> Steps[bool]:
        """A text up to and with the next `space`, and the closing tag if it follows."""
        marker = yield from self._reader.until((self._space, *self._tokens), put)
        if marker != self._space:
            self._reader.unread(marker or "")
            raise Malformed
        return (yield from self._reader.accept(f"</{name}>"))

    def _value(self, name: str, schema: Any, depth: int) -> Steps[str]:
        """A value up to and with the tag that ends its element, as JSON."""
        if depth > MAX_DEPTH:
            raise Malformed
        texts: list[str] = []
        kind = type_of_schema(schema, self._root)
        if kind.is_text:
            yield from self._text(name, texts.append)
            return f'"{quoted(self._marks.spell("".join(texts)))}"'
        children: list[tuple[str, str]] = []
        while not (yield from self._ends(name, texts.append)):
            child = yield from self._opening()
            found = item_schema if child == ITEM and "array" in kind.kinds else property_schema
            children.append((child, (yield from self._value(child, found(schema, child, self._root), depth + 1))))
        text = self._marks.spell("".join(texts))
        if children:
            if text.strip():
                raise Malformed
            return _container(children, kind.kinds)
        if "string" not in kind.kinds and not text.strip():
            return _empty(kind.kinds)
        return kind.json(text, is_kept=self._is_kept)


def _container(children: list[tuple[str, str]], kinds: frozenset[str]) -> str:
    """An array or an object, by what the schema allows; else by the names."""
    names = [name for name, _ in children]
    has_items = set(names) == {ITEM}
    if has_items and ("array" in kinds or "object" not in kinds):
        return f"[{', '.join(value for _, value in children)}]"
    if len(set(names)) < len(names) or ("array" in kinds and "object" not in kinds):
        raise Malformed
    return "{" + ", ".join(f'"{quoted(name)}": {value}' for name, value in children) + "}"


def _empty(kinds: frozenset[str]) -> str:
    """What an element without a value stands for."""
    for kind, value in (("array", "[]"), ("object", "{}"), ("null", "null")):
        if kind in kinds:
            return value
    raise Malformed

"""Calls whose name and parameters stand between tags, the values as plain text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from re import compile as pattern

from quire.message_formats.format import Source
from quire.message_formats.grammars.call_grammar import CallGrammar
from quire.message_formats.grammars.parameter_grammar import Parameter, parameters_of, plain_text
from quire.message_formats.literals import Tell, quoted
from quire.message_formats.marks import is_mark
from quire.message_formats.reader import Malformed, Steps
from quire.message_formats.tools import Tool
from quire.message_formats.typed_values import ANY, ValueType, has_parameter, type_of_schema, value_type
from quire.message_formats.writer import CallWriter

NAME = pattern(r"[\w.:/$@+-]*")
"""Characters of a function's name."""
_KEY = pattern('[^<>"\n\ud800-\udfff]*')
"""Characters of a parameter's name, where a text may quote the tags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCalls:
    """`begin`, then calls, then `end`. A call is `name[0]`, its name, `name[1]`, parameters and `call_end`; a
    parameter is `key[0]`, its name, `key[1]`, `value[0]`, the value, `value[1]`. White space may stand between all.

    What a value is, the tool's schema says: texts stay as they stand, others are JSON or values of Python.

    Models forget the tag behind a value. Where no grammar writes it, the tool's next parameter ends the value, too, and
    so does the end of the call, as in the parser that Qwen publishes with its models. Where it cannot be told whether a
    value quotes a tag or lacks its own, and where a parameter comes twice, there is no call.
    """

    begin: str
    end: str
    name: tuple[str, str] = ("", "")
    call_end: str = ""
    """Empty: a section is one call, and `end` ends it."""
    key: tuple[str, str]
    value: tuple[str, str]
    margin: str = ""
    """Stands between a value and its tags, and is not part of it."""
    line: str = "\n"
    """What the model writes between tags."""
    kinds: tuple[str, str] | None = None
    """Behind a parameter's name: what says that the value is a text, and that it is JSON."""
    inner: tuple[str, ...] = ()
    """Tokens of which tags are made."""
    is_section_shared: bool = False
    """Several calls stand in one section."""
    is_section_optional: bool = False
    """Calls may stand without `begin` and `end` around them."""

    @property
    def begins(self) -> tuple[str, ...]:
        """See `CallSyntax`."""
        return (self.begin, self.name[0]) if self.is_section_optional else (self.begin,)

    @property
    def bare(self) -> str:
        """See `CallSyntax`."""
        return ""

    @property
    def markers(self) -> tuple[str, ...]:
        """See `CallSyntax`."""
        every = (self.begin, self.end, *self.name, self.call_end, *self.key, *self.value, *self.inner)
        return tuple(marker for marker in dict.fromkeys(every) if len(marker) > 1)

    def read(self, source: Source, begin: str, calls: CallWriter) -> Steps[None]:
        """See `CallSyntax`."""
        reader, marks = source.reader, source.marks
        if begin == self.begin:
            yield from reader.spaces()
            yield from reader.expect(marks(self.name[0]))
        while True:
            yield from self._call(source, calls)
            if not self.call_end:
                return
            yield from reader.spaces()
            if not (yield from reader.accept(marks(self.name[0]))):
                break
        if begin == self.begin and (yield from reader.peek()):
            yield from reader.expect(marks(self.end))
        elif self.is_section_optional:
            yield from reader.accept(marks(self.end))

    def _call(self, source: Source, calls: CallWriter) -> Steps[None]:
        reader, marks = source.reader, source.marks
        calls.begin()
        name = yield from reader.matching(NAME)
        yield from reader.expect(marks(self.name[1]))
        if not (yield from reader.peek()):
            raise Malformed  # the name may be cut
        calls.name(name)
        calls.arguments("{")
        known: set[str] = set()
        yield from reader.spaces()
        while (yield from reader.accept(marks(self.key[0]))):
            key = yield from self._key(source)
            calls.arguments(f"{', ' if known else ''}{json.dumps(key, ensure_ascii=False)}: ")
            if key in known:
                raise Malformed
            known.add(key)
            kind = yield from self._kind(source, value_type(source.tools.get(name), key))
            yield from self._value(source, source.tools.get(name), known, kind, calls.arguments)
            yield from reader.spaces()
        yield from reader.expect(marks(self.call_end or self.end))
        if not (known or self.call_end or name in source.tools) and source.tools:
            raise Malformed  # a word between two markers
        calls.arguments("}")
        calls.end()

    def _key(self, source: Source) -> Steps[str]:
        marks = source.marks
        end = marks(self.key[1])
        tag = () if end.startswith("<") else ("<",)
        key, marker = yield from source.reader.within((end, "\n", *tag, *self._stops(source)))
        key = key.strip()
        if marker != end or not key or not (source.is_kept or _KEY.fullmatch(key)):
            if marker == "<" or is_mark(marker[0]):
                source.reader.unread(marker)
            raise Malformed
        if self.value[0]:
            yield from source.reader.spaces()
            yield from source.reader.expect(marks(self.value[0]))
        return key

    def _kind(self, source: Source, by_schema: ValueType) -> Steps[ValueType]:
        """What a value may be: what the model says of it, where it does, else what the schema says."""
        if self.kinds is None:
            return by_schema
        if (yield from source.reader.accept(self.kinds[0])):
            return ValueType(frozenset({"string"}))
        yield from source.reader.expect(self.kinds[1])
        return ValueType(ANY - {"string"})

    def _value(self, source: Source, tool: Tool | None, known: set[str], kind: ValueType, tell: Tell) -> Steps[None]:
        """A value, up to and with the tag behind it, told as JSON. A text is told as it comes."""
        reader, marks = source.reader, source.marks
        if self.margin:
            yield from reader.accept(self.margin)
        pieces: list[str] = []
        put = (lambda text: tell(quoted(marks.spell(text)))) if kind.is_text else pieces.append
        if kind.is_text:
            tell('"')
        text = _WithoutEnd(self.margin, self.line, put)
        said = _Said(tuple(map(marks, (self.begin, self.end, self.name[0], self.call_end, self.key[0]))), self.line)
        is_closed = yield from self._value_text(source, tool, known, text, said)
        text.end(is_closed=is_closed)
        value = '"' if kind.is_text else kind.json(marks.spell("".join(pieces)))
        is_odd = not kind.is_text and "string" not in kind.kinds and value.startswith('"')
        if is_odd and not (source.is_kept or (is_closed and said.is_plain)):
            raise Malformed  # no value, and perhaps less or more than one
        tell(value)

    def _value_text(
        self, source: Source, tool: Tool | None, known: set[str], text: _WithoutEnd, said: _Said
    ) -> Steps[bool]:
        """A value's text, up to and with its closing tag. False: the tag is missing, and what follows shows that."""
        reader, marks = source.reader, source.marks
        closing, tokens = marks(self.value[1]), self._stops(source)
        following = () if source.is_kept else (marks(self.key[0]), marks(self.call_end or self.end))
        put = text.put if source.is_kept else said.before(text.put)
        while (marker := (yield from reader.until((closing, *following, *tokens), put))) != closing:
            if marker is None:
                raise Malformed
            if marker in following and (yield from self._shows_end(source, marker, tool, known, said)):
                if not said.is_plain:
                    raise Malformed
                reader.unread(marker)
                return False
            if marker in tokens:
                reader.unread(marker)
                raise Malformed
            put(marker)
        return True

    def _stops(self, source: Source) -> tuple[str, ...]:
        """Tokens that no name and no value holds."""
        return source.marks.tokens(marker for marker in self.markers if marker not in self.inner)

    def _shows_end(self, source: Source, marker: str, tool: Tool | None, known: set[str], said: _Said) -> Steps[bool]:
        """Whether a marker inside a value goes on as the next parameter, or as the end of the call: then the value's
        closing tag is missing. Otherwise the value quotes the marker. Reads nothing.

        Raises: Malformed where a parameter that cannot follow stands as one would.
        """
        reader, marks = source.reader, source.marks
        if marker == marks(self.key[0]):
            name = yield from reader.matching(_KEY)
            is_whole = yield from reader.accept(marks(self.key[1]))
            follows = said.ends_in_line or (is_whole and (yield from self._is_written_on(source)))
            reader.unread(name + (marks(self.key[1]) if is_whole else ""))
            may_follow = is_whole and name.strip() not in known and has_parameter(tool, name.strip())
            if follows and not may_follow:
                raise Malformed
            return may_follow
        if not self.call_end and is_mark(marker[0]):
            return True
        spaces = yield from reader.spaces()
        is_end = not (yield from reader.peek())
        for tag in (self.end, self.name[0]) if self.call_end else (self.begin,):
            if not is_end and (yield from reader.accept(marks(tag))):
                reader.unread(marks(tag))
                is_end = True
        reader.unread(spaces)
        return is_end

    def _is_written_on(self, source: Source) -> Steps[bool]:
        """Whether what stands between a parameter's name and its value comes next, where there is such a thing. Reads
        nothing.
        """
        reader, marks = source.reader, source.marks
        spaces = yield from reader.spaces()
        is_there = False
        for literal in (marks(self.value[0]), *(self.kinds or ())):
            if literal and not is_there and (yield from reader.accept(literal)):
                reader.unread(literal)
                is_there = True
        reader.unread(spaces)
        return is_there

    def openings(self, names: Iterable[str]) -> tuple[str, ...]:
        """See `CallSyntax`."""
        return ()

    def rest(self, grammar: CallGrammar, begin: str) -> str:
        """See `CallSyntax`."""
        if begin != self.begin:
            return grammar.one_of(lambda tool: self._behind_name(grammar, tool))
        call = grammar.one_of(lambda tool: f"{grammar.marker(self.name[0])} {self._behind_name(grammar, tool)}")
        line = grammar.literal(self.line)
        calls = grammar.repeated(call, line) if self.is_section_shared else call
        end = (line, grammar.marker(self.end)) if self.call_end else ()
        return grammar.sequence(line if self.name[0] else "", calls, *end)

    def several(self, grammar: CallGrammar) -> str:
        """See `CallSyntax`."""
        section = grammar.rule(grammar.sequence(grammar.marker(self.begin), self.rest(grammar, self.begin)))
        return section if self.is_section_shared else grammar.repeated(section, grammar.literal(self.line))

    def _behind_name(self, grammar: CallGrammar, tool: Tool) -> str:
        """A call from the function's name on."""
        parameters = [self._parameter(grammar, tool, one) for one in parameters_of(grammar, tool)]
        return grammar.sequence(
            grammar.literal(tool.name),
            grammar.marker(self.name[1]),
            grammar.literal(self.line),
            *parameters,
            grammar.marker(self.call_end or self.end),
        )

    def _parameter(self, grammar: CallGrammar, tool: Tool, parameter: Parameter) -> str:
        begin, middle = self.key
        rule = grammar.sequence(
            grammar.marker(begin),
            grammar.literal(parameter.name),
            grammar.marker(middle),
            *((grammar.literal(self.line), grammar.marker(self.value[0])) if self.value[0] else ()),
            grammar.literal(self.margin),
            self._written(grammar, tool, parameter),
            grammar.literal(self.line),
        )
        return grammar.rule(rule) if parameter.is_required else f"({rule})?"

    def _written(self, grammar: CallGrammar, tool: Tool, parameter: Parameter) -> str:
        """A value with the tag behind it, and before it what says of which kind it is."""
        text = plain_text(grammar, tool, parameter, self.value[1], margin=self.margin)
        if self.kinds is None:
            return text
        is_text, is_json = map(grammar.literal, self.kinds)
        root = grammar.schema(tool)
        kind = type_of_schema(parameter.schema, root)
        if kind.is_text:
            return grammar.sequence(is_text, text)
        value = grammar.sequence(is_json, grammar.value(parameter.schema, tool), grammar.marker(self.value[1]))
        may_be_any_text = "string" in kind.kinds and not kind.texts
        return f"({value} | {grammar.sequence(is_text, text)})" if may_be_any_text else value


class _Said:
    """What a value has said, where no grammar writes it: whether it holds a tag of the calls around it."""

    def __init__(self, tags: tuple[str, ...], line: str) -> None:
        self._tags = tuple(filter(None, tags))
        self._kept = max(map(len, self._tags)) - 1
        self._line = line
        self._tail = ""
        """Characters at the end in which a tag may have begun."""
        self._last = ""
        """The last character that is neither a space nor a tab."""
        self._holds_tag = self._says_something = False

    def before(self, put: Tell) -> Tell:
        """Hear what is put, first."""

        def heard(text: str) -> None:
            self._hear(text)
            put(text)

        return heard

    def _hear(self, text: str) -> None:
        window = self._tail + text
        self._tail = window[len(window) - self._kept :] if self._kept < len(window) else window
        self._holds_tag = self._holds_tag or any(tag in window for tag in self._tags)
        self._says_something = self._says_something or bool(text.strip())
        self._last = text.rstrip(" \t")[-1:] or self._last

    @property
    def ends_in_line(self) -> bool:
        """Where the model writes tags on lines of their own: one may stand here."""
        return bool(self._line) and self._last in ("", "\n")

    @property
    def is_plain(self) -> bool:
        """It says something, and no tag of calls."""
        return self._says_something and not self._holds_tag


class _WithoutEnd:
    """Passes text on, but not what stands between a value and the tag behind it."""

    def __init__(self, margin: str, line: str, put: Tell) -> None:
        self._margin = margin
        self._space = margin + line
        """The most that can stand there."""
        self._put = put
        self._held = ""

    def put(self, text: str) -> None:
        """The next piece."""
        text = self._held + text
        size = next((n for n in range(len(self._space), 0, -1) if text.endswith(self._space[-n:])), 0)
        self._held = text[len(text) - size :]
        if len(text) > size:
            self._put(text[: len(text) - size])

    def end(self, *, is_closed: bool) -> None:
        """The value has ended, with its tag or, where that is missing, with the next one."""
        rest = self._held.removesuffix(self._margin) if is_closed else ""
        if rest:
            self._put(rest)
        self._held = ""

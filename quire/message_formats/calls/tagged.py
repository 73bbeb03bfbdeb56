"""Calls whose name and parameters stand between tags, the values as plain text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from re import compile as pattern

from quire.message_formats.calls.json_calls import NUMBER, JsonCalls
from quire.message_formats.format import Source
from quire.message_formats.grammars.call_grammar import CallGrammar, without_number
from quire.message_formats.grammars.parameter_grammar import Parameter, parameters_of, plain_text
from quire.message_formats.literals import Tell, quoted
from quire.message_formats.marks import is_mark
from quire.message_formats.reader import Malformed, Steps
from quire.message_formats.tools import Tool
from quire.message_formats.typed_values import ValueType, has_parameter, type_of_schema, value_type
from quire.message_formats.writer import CallWriter

NAME = pattern(r"[\w.:/$@+-]*")
"""Characters of a function's name."""
_NUMBER = pattern("[0-9]*")
_TYPE = r"[a-z][a-z \[\],|]{1,32}"
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
    is_line_optional: bool = False
    """Some models of the family write it, others do not."""
    between: str | None = None
    """What the model writes between calls, where that is not `line`."""
    index: str = ""
    """Stands behind a function's name, with the number of the call."""
    kinds: tuple[tuple[str, frozenset[str]], ...] = ()
    """Behind a parameter's name: what says of which types the value is; first that it is a text."""
    type_of: tuple[str, str] | None = None
    """May stand around the name of a value's type, between its key and the value."""
    objects: JsonCalls | None = None
    """How calls are written where JSON stands in the place of a name."""
    cdata: tuple[str, str] | None = None
    """May stand around a text."""
    inner: tuple[str, ...] = ()
    """Tokens of which tags are made, and which a value may hold."""
    heads: tuple[str, ...] = ()
    """Tokens with which tags begin."""
    is_section_shared: bool = False
    """Several calls stand in one section."""
    has_namespaces: bool = False
    """A function may be named as a member of itself: `f.f`."""
    is_section_optional: bool = False
    """Calls may stand without `begin` and `end` around them; always, where there are none."""

    @property
    def begins(self) -> tuple[str, ...]:
        """See `CallSyntax`."""
        begins = (self.begin, self.name[0]) if self.is_section_optional else (self.begin,)
        return tuple(filter(None, begins))

    has_other_openings = False

    @property
    def bare(self) -> str:
        """See `CallSyntax`."""
        return ""

    @property
    def markers(self) -> tuple[str, ...]:
        """See `CallSyntax`."""
        tags = (self.begin, self.end, *self.name, self.call_end, *self.key, *(self.type_of or ()), *self.value)
        every = (*tags, *self.heads, *self.inner)
        return tuple(marker for marker in dict.fromkeys(every) if len(marker) > 1)

    def read(self, source: Source, begin: str, calls: CallWriter) -> Steps[None]:
        """See `CallSyntax`."""
        reader, marks = source.reader, source.marks
        if begin == self.begin:
            yield from reader.spaces()
            yield from reader.expect(marks(self.name[0]))
        while True:
            yield from self._any_call(source, calls)
            if not self.call_end:
                return
            yield from reader.spaces()
            if not (yield from reader.accept(marks(self.name[0]))):
                break
        if begin == self.begin and (yield from reader.peek()):
            yield from reader.expect(marks(self.end))
        elif self.is_section_optional:
            yield from reader.accept(marks(self.end))

    def _any_call(self, source: Source, calls: CallWriter) -> Steps[None]:
        if self.objects is None or (yield from source.reader.after_spaces()) != "{":
            yield from self._call(source, calls)
            return
        yield from source.reader.spaces()
        yield from self.objects.read_call(source, calls)
        yield from source.reader.spaces()
        yield from source.reader.expect(source.marks(self.call_end))

    def _call(self, source: Source, calls: CallWriter) -> Steps[None]:
        reader, marks = source.reader, source.marks
        calls.begin()
        name = yield from reader.matching(NAME)
        if self.index and (yield from reader.accept(self.index)):
            yield from reader.matching(_NUMBER)
        yield from reader.expect(marks(self.name[1]))
        if not (yield from reader.peek()):
            raise Malformed  # the name may be cut
        space, _, member = name.partition(".")
        if self.has_namespaces and space == member and space in source.tools:
            name = space
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
        key, marker = yield from source.reader.within((end, "\n", *tag, *marks.tokens(self.markers)))
        key = key.strip()
        if marker != end or not key or not (source.is_kept or _KEY.fullmatch(key)):
            if marker == "<" or is_mark(marker[0]):
                source.reader.unread(marker)
            raise Malformed
        return key

    def _kind(self, source: Source, by_schema: ValueType) -> Steps[ValueType]:
        """What a value may be: what the model says of it, where it does, else what the schema says. Reads up to the
        value."""
        reader, marks = source.reader, source.marks
        if self.type_of is not None and (yield from reader.accept_after_spaces(marks(self.type_of[0]))):
            said, _ = yield from reader.within((marks(self.type_of[1]),))
            named = by_schema.kinds & {said.partition("[")[0].strip()}
            by_schema = ValueType(named, by_schema.texts) if named else by_schema
        if self.value[0]:
            yield from reader.spaces()
            yield from reader.expect(marks(self.value[0]))
        for kind, types in self.kinds:
            if (yield from source.reader.accept(source.marks(kind))):
                return ValueType(types)
        if self.kinds:
            raise Malformed
        return by_schema

    def _value(self, source: Source, tool: Tool | None, known: set[str], kind: ValueType, tell: Tell) -> Steps[None]:
        """A value, up to and with the tag behind it, told as JSON. A text is told as it comes."""
        reader, marks = source.reader, source.marks
        if self.margin:
            yield from reader.accept(self.margin)
        is_quoted = self.cdata is not None and (yield from reader.accept(marks(self.cdata[0])))
        if is_quoted and "string" in kind.kinds:
            kind = ValueType(frozenset({"string"}))
        pieces: list[str] = []
        put = (lambda text: tell(quoted(marks.spell(text)))) if kind.is_text else pieces.append
        if kind.is_text:
            tell('"')
        text = _WithoutEnd(self.margin, self.line, put)
        said = _Said(tuple(map(marks, (self.begin, self.end, self.name[0], self.call_end, self.key[0]))), self.line)
        if is_quoted:
            yield from self._quoted_text(source, text)
            is_closed = True
        else:
            is_closed = yield from self._value_text(source, tool, known, text, said)
        text.end(is_closed=is_closed)
        value = '"' if kind.is_text else kind.json(marks.spell("".join(pieces)), is_kept=source.is_kept)
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
            marker = yield from self._whole_tag(source, marker)
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

    def _whole_tag(self, source: Source, marker: str) -> Steps[str]:
        """The tag of a parameter, where a marker is the token with which it begins, and the rest follows."""
        reader, tag = source.reader, source.marks(self.key[0])
        if marker == tag or marker not in source.marks.tokens(self.heads):
            return marker
        reader.unread(marker)
        if (yield from reader.accept(tag)):
            return tag
        reader.skip(len(marker))
        return marker

    def _quoted_text(self, source: Source, text: _WithoutEnd) -> Steps[None]:
        """A text behind the first part of `cdata`, up to and with its closing tag. It may hold all other tags, but
        where no grammar writes it not itself: then its end is missing.
        """
        assert self.cdata is not None
        reader, end, closing = source.reader, source.marks(self.cdata[1]), source.marks(self.value[1])
        stops = () if source.is_kept else (source.marks(self.cdata[0]), *self._stops(source))
        while (marker := (yield from reader.until((end, *stops), text.put))) is not None:
            if marker == end and (yield from reader.accept(closing)):
                return
            if not source.is_kept:
                reader.unread(marker)
                break
            text.put(end)
        raise Malformed

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
            behind = yield from reader.accepted(marks(self.key[1]))
            is_whole = behind is not None
            follows = said.ends_in_line or (is_whole and (yield from self._is_written_on(source)))
            reader.unread(name + (behind or ""))
            may_follow = is_whole and name.strip() not in known and has_parameter(tool, name.strip())
            if follows and not may_follow:
                raise Malformed
            return may_follow
        if not self.call_end and is_mark(marker[0]):
            return True
        spaces = yield from reader.spaces()
        is_end = not (yield from reader.peek())
        for tag in (self.end, self.name[0]) if self.call_end else (self.begin,):
            is_end = is_end or bool(tag and (yield from reader.comes(marks(tag))))
        reader.unread(spaces)
        return is_end

    def _is_written_on(self, source: Source) -> Steps[bool]:
        """Whether what stands between a parameter's name and its value comes next, where there is such a thing. Reads
        nothing.
        """
        reader, marks = source.reader, source.marks
        spaces = yield from reader.spaces()
        is_there = False
        begins = () if self.type_of is None else (self.type_of[0],)
        for literal in (*map(marks, (self.value[0], *begins)), *(marks(kind) for kind, _ in self.kinds)):
            is_there = is_there or bool(literal and (yield from reader.comes(literal)))
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
        if self.objects is not None:
            call = grammar.rule(f"{call} | {grammar.one_of(lambda tool: self._object(grammar, tool))}")
        line = self._line(grammar)
        calls = grammar.repeated(call, self._between(grammar)) if self.is_section_shared else call
        end = (line, grammar.marker(self.end)) if self.call_end else ()
        return grammar.sequence(line if self.name[0] else "", calls, *end)

    def several(self, grammar: CallGrammar) -> str:
        """See `CallSyntax`."""
        begin = self.begins[0]
        section = grammar.rule(grammar.sequence(grammar.marker(begin), self.rest(grammar, begin)))
        return section if self.is_section_shared else grammar.repeated(section, self._between(grammar))

    def call(self, grammar: CallGrammar, tool: Tool) -> str:
        """A section with one call of a tool, as an expression."""
        line = self._line(grammar)
        call = grammar.sequence(grammar.marker(self.name[0]), self._behind_name(grammar, tool))
        return grammar.sequence(grammar.marker(self.begin), line, call, line, grammar.marker(self.end))

    def _between(self, grammar: CallGrammar) -> str:
        return self._line(grammar) if self.between is None else grammar.literal(self.between)

    def _line(self, grammar: CallGrammar) -> str:
        line = grammar.literal(self.line)
        return f"({line})?" if self.is_line_optional else line

    def _object(self, grammar: CallGrammar, tool: Tool) -> str:
        assert self.objects is not None
        call = self.objects.call(grammar, tool)
        return grammar.sequence(grammar.marker(self.name[0]), call, grammar.marker(self.call_end))

    def _behind_name(self, grammar: CallGrammar, tool: Tool) -> str:
        """A call from the function's name on."""
        parameters = [self._parameter(grammar, tool, one) for one in parameters_of(grammar, tool)]
        return grammar.sequence(
            grammar.literal(tool.name),
            f"{grammar.literal(self.index)} {NUMBER}" if self.index else "",
            grammar.marker(self.name[1]),
            self._line(grammar),
            *parameters,
            grammar.marker(self.call_end or self.end),
        )

    def _parameter(self, grammar: CallGrammar, tool: Tool, parameter: Parameter) -> str:
        begin, middle = self.key
        rule = grammar.sequence(
            grammar.marker(begin),
            grammar.literal(parameter.name),
            grammar.marker(middle),
            self._type(grammar),
            *((self._line(grammar), grammar.marker(self.value[0])) if self.value[0] else ()),
            grammar.literal(self.margin),
            self._written(grammar, tool, parameter),
            self._line(grammar),
        )
        return grammar.rule(rule) if parameter.is_required else f"({rule})?"

    def _type(self, grammar: CallGrammar) -> str:
        if self.type_of is None:
            return ""
        begin, end = map(grammar.marker, self.type_of)
        return f"({grammar.sequence(self._line(grammar), begin, grammar.terminal(_TYPE), end)})?"

    def _written(self, grammar: CallGrammar, tool: Tool, parameter: Parameter) -> str:
        """A value with the tag behind it, and before it what says of which kind it is."""
        text = plain_text(grammar, tool, parameter, self.value[1], margin=self.margin, cdata=self.cdata)
        kind = type_of_schema(parameter.schema, grammar.schema(tool))
        if not self.kinds or not kind.kinds:
            return text
        (is_text, _), *others = self.kinds
        written = [] if not self._may_be_text(kind) else [grammar.sequence(grammar.marker(is_text), text)]
        for marker, types in others if not kind.is_text else ():
            if kind.kinds & types:
                value = self._json_value(grammar, tool, parameter, kind, types)
                written.append(grammar.sequence(grammar.marker(marker), value, grammar.marker(self.value[1])))
        return f"({' | '.join(written)})" if len(written) > 1 else written[0]

    @staticmethod
    def _may_be_text(kind: ValueType) -> bool:
        return kind.is_text or ("string" in kind.kinds and not kind.texts)

    def _json_value(
        self, grammar: CallGrammar, tool: Tool, parameter: Parameter, kind: ValueType, types: frozenset[str]
    ) -> str:
        """A value that is none of a text, of those types that its kind says."""
        if len(self.kinds) == 2 or kind.kinds <= types:
            return grammar.value(parameter.schema, tool)
        typed = {"type": sorted(kind.kinds & types)}
        _, others = without_number(parameter.schema)
        is_plain = all(isinstance(one, dict) and one.keys() == {"type"} for one in others)
        return grammar.value(typed if is_plain else {"allOf": [parameter.schema], **typed}, tool)


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

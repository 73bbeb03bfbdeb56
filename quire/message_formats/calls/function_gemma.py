"""Calls of Gemma's models: `call:f{city:<escape>Paris<escape>,days:3}` between markers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from re import compile as pattern

from quire.message_formats.format import Source
from quire.message_formats.grammars.call_grammar import CallGrammar
from quire.message_formats.grammars.gemma_grammar import GemmaGrammar
from quire.message_formats.literals import Tell, quoted
from quire.message_formats.reader import MAX_DEPTH, Malformed, Steps
from quire.message_formats.typed_values import ValueType, value_type
from quire.message_formats.writer import CallWriter

_NAME = pattern(r"[\w.:/$@+-]*")
_ATOM = pattern("[^,:{}\\[\\]<>\n\ud800-\udfff]*")
_WORD = ValueType()


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaCalls:
    """Objects whose keys stand bare and whose texts stand between two markers of one kind; everything else is JSON."""

    begin: str
    end: str
    quote: str

    @property
    def begins(self) -> tuple[str, ...]:
        """See `CallSyntax`."""
        return (self.begin,)

    has_other_openings = False

    @property
    def bare(self) -> str:
        """See `CallSyntax`."""
        return ""

    @property
    def markers(self) -> tuple[str, ...]:
        """See `CallSyntax`."""
        return (self.begin, self.end, self.quote)

    def read(self, source: Source, begin: str, calls: CallWriter) -> Steps[None]:
        """See `CallSyntax`."""
        reader = source.reader
        calls.begin()
        yield from reader.spaces()
        yield from reader.expect("call:")
        name = yield from reader.matching(_NAME)
        yield from reader.spaces()
        yield from reader.expect("{")
        calls.name(name)
        tool = source.tools.get(name)
        yield from self._object(source, calls.arguments, lambda key: value_type(tool, key), 0)
        yield from reader.spaces()
        if (yield from reader.peek()):
            yield from reader.expect(source.marks(self.end))
        calls.end()

    def _object(self, source: Source, tell: Tell, type_of: Callable[[str], ValueType], depth: int) -> Steps[None]:
        """The rest of an object, behind its brace."""
        reader = source.reader
        tell("{")
        known: set[str] = set()
        while True:
            yield from reader.spaces()
            if (yield from reader.accept("}")):
                break
            if known:
                yield from reader.expect(",")
                yield from reader.spaces()
            key = yield from self._key(source)
            if key in known:
                raise Malformed
            tell(f'{", " if known else ""}"{quoted(key)}": ')
            known.add(key)
            yield from self._value(source, tell, type_of(key), depth + 1)
        tell("}")

    def _key(self, source: Source) -> Steps[str]:
        reader, quote = source.reader, source.marks(self.quote)
        if (yield from reader.accept(quote)):
            key, _ = yield from reader.within((quote,))
            yield from reader.spaces()
            yield from reader.expect(":")
        else:
            key, marker = yield from reader.within((":", *",{}[]\n", *source.marks.tokens(self.markers)))
            if marker != ":":
                reader.unread(marker)
                raise Malformed
        key = source.marks.spell(key).strip()
        if not key:
            raise Malformed
        return key

    def _value(self, source: Source, tell: Tell, kind: ValueType, depth: int) -> Steps[None]:
        reader = source.reader
        if depth > MAX_DEPTH:
            raise Malformed
        yield from reader.spaces()
        if (yield from reader.accept(source.marks(self.quote))):
            yield from self._text(source, tell, kind)
        elif (yield from reader.accept("{")):
            yield from self._object(source, tell, lambda _: _WORD, depth)
        elif (yield from reader.accept("[")):
            yield from self._array(source, tell, depth)
        else:
            word = (yield from reader.matching(_ATOM)).strip()
            if not (word and (yield from reader.peek())):  # at the end it may be cut
                raise Malformed
            tell(kind.json(word, is_kept=source.is_kept))

    def _text(self, source: Source, tell: Tell, kind: ValueType) -> Steps[None]:
        """A text between quotes. Where the schema has no texts, what it stands for."""
        reader, marks = source.reader, source.marks
        quote = marks(self.quote)
        is_text = "string" in kind.kinds
        pieces: list[str] = []
        if is_text:
            tell('"')
        put = (lambda text: tell(quoted(marks.spell(text)))) if is_text else pieces.append
        marker = yield from reader.until((quote, *marks.tokens((self.begin, self.end))), put)
        if marker != quote:
            reader.unread(marker or "")
            raise Malformed
        tell('"' if is_text else kind.json(marks.spell("".join(pieces))))

    def _array(self, source: Source, tell: Tell, depth: int) -> Steps[None]:
        """The rest of an array, behind its bracket."""
        reader = source.reader
        tell("[")
        is_first = True
        while True:
            yield from reader.spaces()
            if (yield from reader.accept("]")):
                break
            if not is_first:
                yield from reader.expect(",")
                tell(", ")
            is_first = False
            yield from self._value(source, tell, _WORD, depth + 1)
        tell("]")

    def openings(self, names: Iterable[str]) -> tuple[str, ...]:
        """See `CallSyntax`."""
        return ()

    def rest(self, grammar: CallGrammar, begin: str) -> str:
        """See `CallSyntax`."""
        call = grammar.one_of(
            lambda tool: f"{grammar.literal(f'call:{tool.name}')} {GemmaGrammar(grammar, tool, self.quote).call()}"
        )
        return grammar.sequence(call, grammar.marker(self.end))

    def several(self, grammar: CallGrammar) -> str:
        """See `CallSyntax`."""
        call = grammar.rule(grammar.sequence(grammar.marker(self.begin), self.rest(grammar, self.begin)))
        return grammar.repeated(call, '""')

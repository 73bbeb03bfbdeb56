"""Calls as Python writes them: `f(a=1, b="x")`. They are read, never evaluated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from re import compile as pattern

from quire.message_formats.format import Source
from quire.message_formats.grammars.call_grammar import SPACES, CallGrammar
from quire.message_formats.grammars.parameter_grammar import Parameter, parameters_of, separated
from quire.message_formats.literals import Literals, quoted
from quire.message_formats.reader import Malformed, Steps
from quire.message_formats.tools import Tool
from quire.message_formats.typed_values import resolved, type_of_schema, values_of
from quire.message_formats.writer import CallWriter

_NAME = pattern(r"[\w.:/$@-]*")
_KEY = pattern(r"\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonicCalls:
    """A list of calls, `[f(a=1), g()]`, or calls on lines of their own; between markers, or the whole message."""

    begins: tuple[str, ...] = ()
    end: str = ""
    is_list: bool = True

    bare: str = ""
    """`[` where a message may begin with a list of calls and no marker. Such a list names only tools that there are."""

    has_other_openings = False

    @property
    def markers(self) -> tuple[str, ...]:
        """See `CallSyntax`."""
        return tuple(marker for marker in (*self.begins, self.end) if marker)

    def read(self, source: Source, begin: str, calls: CallWriter) -> Steps[None]:
        """See `CallSyntax`."""
        reader = source.reader
        yield from reader.spaces()
        if self.is_list:
            yield from reader.expect("[")
        while True:
            yield from reader.spaces()
            yield from self._call(source, begin, calls)
            yield from reader.spaces()
            if not (yield from self._another(source)):
                break
        if not begin and self.end:
            yield from reader.accept_after_spaces(source.marks(self.end))
        elif self.end:
            yield from reader.spaces()
            if (yield from reader.peek()):
                yield from reader.expect(source.marks(self.end))

    def _another(self, source: Source) -> Steps[bool]:
        """Whether another call follows. Reads what stands between, or what ends a list."""
        reader = source.reader
        if not self.is_list:
            following = yield from reader.peek()
            return following.isalpha() or following == "_"
        has_comma = yield from reader.accept(",")
        yield from reader.spaces()
        if (yield from reader.accept("]")):
            return False
        if not has_comma:
            raise Malformed
        return True

    def _call(self, source: Source, begin: str, calls: CallWriter) -> Steps[None]:
        reader = source.reader
        calls.begin()
        name = yield from reader.matching(_NAME)
        yield from reader.expect("(")
        if not begin and source.tools and name not in source.tools:
            raise Malformed
        calls.name(name)
        calls.arguments("{")
        known: set[str] = set()
        literals = Literals(reader, source.marks.tokens(self.markers), are_inside=True)
        while True:
            yield from reader.spaces()
            if (yield from reader.accept(")")):
                break
            key = yield from reader.matching(_KEY)
            yield from reader.spaces()
            yield from reader.expect("=")
            if not key or key in known:
                raise Malformed
            calls.arguments(f'{", " if known else ""}"{quoted(key)}": ')
            known.add(key)
            yield from literals.read(calls.arguments)
            yield from reader.spaces()
            if not (yield from reader.accept(",")):
                yield from reader.expect(")")
                break
        calls.arguments("}")
        calls.end()

    def openings(self, names: Iterable[str]) -> tuple[str, ...]:
        """See `CallSyntax`."""
        return tuple(f"[{name}(" for name in names) if self.bare else ()

    def rest(self, grammar: CallGrammar, begin: str) -> str:
        """See `CallSyntax`."""
        call = grammar.one_of(lambda tool: self._written(grammar, tool))
        end = grammar.marker(self.end) if begin and self.end else ""
        if self.is_list:
            spaces = "" if begin else f"{grammar.terminal(SPACES)}?"
            return grammar.sequence('"["', spaces, grammar.repeated(call, '", "'), '"]"', end)
        return grammar.sequence('"\\n"', grammar.repeated(call, '"\\n"'), '"\\n"', end)

    def several(self, grammar: CallGrammar) -> str:
        """See `CallSyntax`."""
        if self.bare or not self.begins:
            return self.rest(grammar, "")
        return grammar.sequence(grammar.marker(self.begins[0]), self.rest(grammar, self.begins[0]))

    def _written(self, grammar: CallGrammar, tool: Tool) -> str:
        parameters = [one for one in parameters_of(grammar, tool) if self._can_write(grammar, tool, one)]
        items = [
            (grammar.sequence(grammar.literal(f"{one.name}="), _value(grammar, tool, one)), one.is_required)
            for one in parameters
        ]
        return grammar.sequence(grammar.literal(f"{tool.name}("), separated(grammar, items, '", "'), '")"')

    def _can_write(self, grammar: CallGrammar, tool: Tool, parameter: Parameter) -> bool:
        if _KEY.fullmatch(parameter.name):
            return True
        grammar.leave_out(tool, f"#/properties/{parameter.name}", "this model's format has no name like this")
        return False


def _value(grammar: CallGrammar, tool: Tool, parameter: Parameter) -> str:
    """A value. JSON reads as Python does, but for the names of constants."""
    schema = resolved(parameter.schema, grammar.schema(tool))
    kinds = type_of_schema(schema, grammar.schema(tool)).kinds
    is_listed = isinstance(schema, dict) and values_of(schema) is not None
    return grammar.value(parameter.schema, tool) if is_listed or kinds not in _CONSTANTS else _CONSTANTS[kinds]


_CONSTANTS = {frozenset({"boolean"}): '("True" | "False")', frozenset({"null"}): '"None"'}

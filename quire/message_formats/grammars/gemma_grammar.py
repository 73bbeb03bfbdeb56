"""The grammar of arguments as Gemma's models write them."""

from __future__ import annotations

from collections.abc import Iterator
from re import compile as pattern
from typing import Any

from quire.message_formats.grammars.call_grammar import CallGrammar
from quire.message_formats.grammars.nested_grammar import NestedGrammar
from quire.message_formats.grammars.parameter_grammar import parameters_of, separated
from quire.message_formats.tools import Tool

_PLAIN_KEY = pattern(r"\w+")


class GemmaGrammar(NestedGrammar):
    """The grammar of one tool's arguments: commas between values, and quotes that are one marker around texts."""

    def __init__(self, grammar: CallGrammar, tool: Tool, quote: str) -> None:
        super().__init__(grammar, tool)
        self._quote = quote

    def call(self) -> str:
        """All arguments."""
        parameters = parameters_of(self._grammar, self._tool)
        return self._braced([(self._item(one.name, one.schema, 0), one.is_required) for one in parameters])

    def text(self, length: str, end: str) -> str:
        """See `NestedGrammar`."""
        text = self._grammar.free_text(self._quote, without=self._grammar.tokens, length=length)
        return f"{self._grammar.marker(self._quote)} {text}"

    def array(self, name: str, keywords: dict[str, Any], depth: int, end: str) -> str:
        """See `NestedGrammar`."""
        item = self.value(name, keywords.get("items", True), depth + 1) if keywords.get("maxItems") != 0 else ""
        return self._grammar.sequence('"["', self.repeated(item, keywords, '","'), '"]"')

    def object(self, keywords: dict[str, Any], depth: int, end: str) -> str:
        """See `NestedGrammar`."""
        return self._braced([(self._item(key, one, depth), must) for key, one, must in self.properties(keywords)])

    def constant(self, value: Any, end: str) -> str:
        """See `NestedGrammar`."""
        if isinstance(value, list):
            items = separated(self._grammar, [(self.constant(one, end), True) for one in value], '","')
            return self._grammar.sequence('"["', items, '"]"')
        if isinstance(value, dict):
            return self._braced(
                [(f'{self._key(key)} ":" {self.constant(one, end)}', True) for key, one in value.items()]
            )
        if not isinstance(value, str):
            return self._grammar.value({"const": value}, self._tool)
        return self._quoted(value)

    def can_write(self, value: Any, end: str) -> bool:
        """See `NestedGrammar`. No text holds the quote."""
        return all(self._grammar.can_hold(self._quote, text) for text in _texts_in(value))

    def _braced(self, items: list[tuple[str, bool]]) -> str:
        return self._grammar.sequence('"{"', separated(self._grammar, items, '","'), '"}"')

    def _item(self, name: str, schema: Any, depth: int) -> str:
        return f'{self._key(name)} ":" {self.value(name, schema, depth + 1)}'

    def _key(self, name: str) -> str:
        return self._grammar.literal(name) if _PLAIN_KEY.fullmatch(name) else self._quoted(name)

    def _quoted(self, text: str) -> str:
        quote = self._grammar.marker(self._quote)
        return self._grammar.sequence(quote, self._grammar.literal(text), quote)


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for one in [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts_in(one)

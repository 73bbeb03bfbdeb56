"""The grammar of arguments as Gemma's models write them."""

from __future__ import annotations

from re import compile as pattern
from typing import Any

from quire.message_formats.grammars.call_grammar import CallGrammar
from quire.message_formats.grammars.parameter_grammar import length_of, parameters_of, separated
from quire.message_formats.tools import Tool
from quire.message_formats.typed_values import resolved, type_of_schema

MAX_GRAMMAR_DEPTH = 12
"""Of objects and arrays in arguments that a grammar makes."""
_PLAIN_KEY = pattern(r"\w+")
_OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_KEPT = frozenset(
    {"type", "minLength", "maxLength", "minItems", "maxItems", "items", "properties", "required"}
    | {"additionalProperties", *_OF_NUMBERS}
)
"""Keywords that such a grammar follows."""


class GemmaGrammar:
    """The grammar of one tool's arguments."""

    def __init__(self, grammar: CallGrammar, tool: Tool, quote: str) -> None:
        self._grammar = grammar
        self._tool = tool
        self._quote = quote
        self._root = grammar.schema(tool)

    def call(self) -> str:
        """All arguments."""
        parameters = parameters_of(self._grammar, self._tool)
        items = [(self._item(one.name, one.schema, 0), one.is_required) for one in parameters]
        return self._grammar.sequence('"{"', separated(self._grammar, items, '","'), '"}"')

    def _item(self, name: str, schema: Any, depth: int) -> str:
        quote = self._grammar.marker(self._quote)
        literal = self._grammar.literal(name)
        key = literal if _PLAIN_KEY.fullmatch(name) else f"{quote} {literal} {quote}"
        return f'{key} ":" {self._value(name, schema, depth + 1)}'

    def _value(self, name: str, schema: Any, depth: int) -> str:
        schema = resolved(schema, self._root)
        keywords = schema if isinstance(schema, dict) else {}
        values = [keywords["const"]] if "const" in keywords else keywords.get("enum")
        if values:
            return "(" + " | ".join(map(self._constant, values)) + ")"
        kinds = type_of_schema(schema, self._root).kinds
        kinds = kinds - {"integer"} if "number" in kinds else kinds
        if not keywords or depth > MAX_GRAMMAR_DEPTH or not keywords.keys() <= _KEPT:
            if keywords:
                self._grammar.leave_out(self._tool, name, "calls of this model's format cannot follow its schema")
            return self._anything(kinds)
        return "(" + " | ".join(self._of_kind(name, kind, keywords, depth) for kind in sorted(kinds)) + ")"

    def _of_kind(self, name: str, kind: str, keywords: dict[str, Any], depth: int) -> str:
        if kind == "string":
            return self._text(length_of(keywords))
        if kind == "array":
            return self._array(name, keywords, depth)
        if kind == "object":
            return self._object(keywords, depth)
        own = {key: value for key, value in keywords.items() if key in _OF_NUMBERS}
        return self._grammar.value({**own, "type": kind}, self._tool)

    def _object(self, keywords: dict[str, Any], depth: int) -> str:
        required = keywords.get("required") or ()
        properties = keywords.get("properties") or {}
        missing = {name: keywords.get("additionalProperties", True) for name in required if name not in properties}
        items = [(self._item(key, one, depth), key in required) for key, one in {**properties, **missing}.items()]
        return self._grammar.sequence('"{"', separated(self._grammar, items, '","'), '"}"')

    def _array(self, name: str, keywords: dict[str, Any], depth: int) -> str:
        item = self._grammar.rule(self._value(name, keywords.get("items", True), depth + 1))
        least, most = keywords.get("minItems", 0), keywords.get("maxItems")
        if most == 0:
            return '"[]"'
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = f'{item} ("," {item}){more}'
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _constant(self, value: Any) -> str:
        if not isinstance(value, str):
            return self._grammar.value({"const": value}, self._tool)
        quote = self._grammar.marker(self._quote)
        return self._grammar.sequence(quote, self._grammar.literal(value), quote)

    def _text(self, length: str = "*") -> str:
        text = self._grammar.free_text(self._quote, without=self._grammar.tokens, length=length)
        return f"{self._grammar.marker(self._quote)} {text}"

    def _anything(self, kinds: frozenset[str]) -> str:
        found = [self._text()] if "string" in kinds else []
        plain = sorted(kinds & {"integer", "number", "boolean", "null"})
        found += [self._grammar.value({"type": kind}, self._tool) for kind in plain]
        found += [text for kind, text in (("object", '"{}"'), ("array", '"[]"')) if kind in kinds]
        return f"({' | '.join(found)})"

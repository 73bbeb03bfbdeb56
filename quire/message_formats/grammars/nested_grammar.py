"""`NestedGrammar`: arguments whose objects, arrays and texts a format writes in a way of its own, not as JSON."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from quire.message_formats.grammars.call_grammar import CallGrammar
from quire.message_formats.grammars.parameter_grammar import LISTED, can_be_kept, is_within, length_of
from quire.message_formats.tools import Tool
from quire.message_formats.typed_values import resolved, type_of_schema, values_of

MAX_GRAMMAR_DEPTH = 12
"""Of objects and arrays in arguments that a grammar makes."""
_OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_KEPT = frozenset(
    {"type", "minLength", "maxLength", "minItems", "maxItems", "items", "properties", "required"}
    | {"additionalProperties", *_OF_NUMBERS}
)
"""Keywords that such a grammar follows."""

_OF_LISTED = _KEPT | LISTED
"""Keywords of a schema that lists its values, of which none breaks another one unnoticed."""


class NestedGrammar(ABC):
    """The grammar of one tool's arguments. A format says how values of each kind are written, and what is behind them.

    Each schema is written once at each depth: schemas that hold each other do not multiply.
    """

    def __init__(self, grammar: CallGrammar, tool: Tool) -> None:
        self._grammar = grammar
        self._tool = tool
        self._root = grammar.schema(tool)
        self._written: dict[tuple[int, int, str], tuple[str, Any]] = {}
        """Rules, by schema, depth and end. With each the schema, which has to stay where it is."""
        self._left_out: set[int] = set()

    def value(self, name: str, schema: Any, depth: int, end: str = "") -> str:
        """The rule for a value and what is behind it, which `end` names. `name` is the parameter's, for messages."""
        schema = resolved(schema, self._root)
        key = (id(schema), depth, end)
        if key not in self._written:
            rule = self._grammar.rule(self._expression(name, schema, depth, end))
            self._written[key] = (rule, schema)
        return self._written[key][0]

    @abstractmethod
    def text(self, length: str, end: str) -> str:
        """A text of so many characters, in a regular expression."""

    @abstractmethod
    def array(self, name: str, keywords: dict[str, Any], depth: int, end: str) -> str:
        """An array."""

    @abstractmethod
    def object(self, keywords: dict[str, Any], depth: int, end: str) -> str:
        """An object."""

    @abstractmethod
    def constant(self, value: Any, end: str) -> str:
        """One value."""

    def can_write(self, value: Any, end: str) -> bool:
        """Whether the format can write one value."""
        return True

    def kinds_of(self, kinds: frozenset[str]) -> frozenset[str]:
        """Those of the kinds which can be told apart."""
        return kinds

    def closed(self, value: str, end: str) -> str:
        """A value with what is behind it."""
        return value

    def properties(self, keywords: dict[str, Any]) -> list[tuple[str, Any, bool]]:
        """Names, schemas, and which are required; none that is not and cannot be kept."""
        required = keywords.get("required") or ()
        listed = keywords.get("properties") or {}
        missing = {name: keywords.get("additionalProperties", True) for name in required if name not in listed}
        found = [(name, one, name in required) for name, one in {**listed, **missing}.items()]
        return [one for one in found if one[2] or can_be_kept(one[1], self._root)]

    def repeated(self, item: str, keywords: dict[str, Any], between: str = "") -> str:
        """As many items as an array may have; empty where there are none."""
        least, most = keywords.get("minItems", 0), keywords.get("maxItems")
        if most == 0:
            return ""
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = item if most == 1 else f"{item} ({self._grammar.sequence(between, item)}){more}"
        return items if least else f"({items})?"

    def _expression(self, name: str, schema: Any, depth: int, end: str) -> str:
        keywords = schema if isinstance(schema, dict) else {}
        kinds = type_of_schema(schema, self._root).kinds
        if not can_be_kept(schema, self._root):
            return self._grammar.value(schema, self._tool)  # which the library refuses
        values = values_of(keywords, kinds)
        if values is not None:
            if not keywords.keys() <= _OF_LISTED:
                self._leave_out(name, schema)
            written = [
                self.constant(one, end) for one in values if self.can_write(one, end) and is_within(one, keywords)
            ]
            return " | ".join(written) or self._grammar.value(False, self._tool)  # which the library refuses
        kinds = self.kinds_of(kinds - {"integer"} if "number" in kinds else kinds)
        if not keywords or depth > MAX_GRAMMAR_DEPTH or not keywords.keys() <= _KEPT:
            if keywords:
                self._leave_out(name, schema)
            return " | ".join(self._of_kind(name, kind, {}, depth, end) for kind in sorted(kinds))
        return " | ".join(self._of_kind(name, kind, keywords, depth, end) for kind in sorted(kinds))

    def _leave_out(self, name: str, schema: Any) -> None:
        if id(schema) not in self._left_out:
            self._left_out.add(id(schema))
            self._grammar.leave_out(self._tool, name, "calls of this model's format cannot follow its schema")

    def _of_kind(self, name: str, kind: str, keywords: dict[str, Any], depth: int, end: str) -> str:
        if kind == "string":
            return self.text(length_of(keywords), end)
        if kind == "array":
            return self.array(name, keywords if keywords else {"maxItems": 0}, depth, end)
        if kind == "object":
            return self.object(keywords, depth, end)
        own = {key: value for key, value in keywords.items() if key in _OF_NUMBERS}
        return self.closed(self._grammar.value({**own, "type": kind}, self._tool), end)

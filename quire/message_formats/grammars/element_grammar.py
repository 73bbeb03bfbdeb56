"""The grammar of arguments whose objects and arrays are elements inside elements."""

from __future__ import annotations

import json
from re import compile as pattern
from typing import Any

from quire.message_formats.grammars.call_grammar import CallGrammar
from quire.message_formats.grammars.nested_grammar import NestedGrammar
from quire.message_formats.grammars.parameter_grammar import parameters_of
from quire.message_formats.tools import Tool

ITEM = "item"
"""The element of an array's item."""
ELEMENT = pattern("[^<>/\\s\ud800-\udfff][^<>\n\ud800-\udfff]*")
"""Names that an element can have."""
_CONTAINERS = frozenset({"array", "object"})


class ElementGrammar(NestedGrammar):
    """The grammar of one tool's arguments. `space` stands before each tag."""

    def __init__(self, grammar: CallGrammar, tool: Tool, space: str) -> None:
        super().__init__(grammar, tool)
        self._space = space

    def parameters(self) -> str:
        """All arguments."""
        parameters = parameters_of(self._grammar, self._tool)
        return self._elements([(one.name, one.schema, one.is_required) for one in parameters], 0)

    def kinds_of(self, kinds: frozenset[str]) -> frozenset[str]:
        """See `NestedGrammar`. Any text may be a text."""
        return kinds & (_CONTAINERS | {"string"}) if "string" in kinds else kinds

    def text(self, length: str, end: str) -> str:
        """See `NestedGrammar`."""
        return self._grammar.free_text(end, without=self._grammar.tokens, length=length)

    def array(self, name: str, keywords: dict[str, Any], depth: int, end: str) -> str:
        """See `NestedGrammar`."""
        item = self._element(ITEM, keywords.get("items", True), depth) if keywords.get("maxItems") != 0 else ""
        return self.closed(self.repeated(item, keywords), end)

    def object(self, keywords: dict[str, Any], depth: int, end: str) -> str:
        """See `NestedGrammar`."""
        return self.closed(self._elements(self.properties(keywords), depth), end)

    def constant(self, value: Any, end: str) -> str:
        """See `NestedGrammar`."""
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return self.closed(self._grammar.literal(text), end)

    def can_write(self, value: Any, end: str) -> bool:
        """See `NestedGrammar`."""
        return self._grammar.can_hold(end, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))

    def closed(self, value: str, end: str) -> str:
        """See `NestedGrammar`."""
        return self._grammar.sequence(value, self._grammar.marker(end))

    def _elements(self, items: list[tuple[str, Any, bool]], depth: int) -> str:
        parts = []
        for name, schema, is_required in items:
            if not ELEMENT.fullmatch(name):
                self._grammar.leave_out(self._tool, name, "calls of this model's format cannot write this name")
                continue
            element = self._element(name, schema, depth)
            parts.append(element if is_required else f"({element})?")
        return self._grammar.sequence(*parts)

    def _element(self, name: str, schema: Any, depth: int) -> str:
        begin = self._grammar.marker(f"{self._space}<{name}>")
        return f"{begin} {self.value(name, schema, depth + 1, f'{self._space}</{name}>')}"

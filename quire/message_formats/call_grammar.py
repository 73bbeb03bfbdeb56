"""`CallGrammar`: the rules that calls of some tools follow, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Sequence

from quire.message_formats.marks import Marks
from quire.message_formats.tools import Tool


class CallGrammar:
    """Collects rules. A syntax of calls adds its own; `text` is the grammar."""

    def __init__(self, marks: Marks, tools: Sequence[Tool]) -> None:
        self.tools = tools
        self._marks = marks
        self._rules: list[str] = []

    def marker(self, marker: str) -> str:
        """A marker: the one token where it is one, else its text."""
        token_id = self._marks.ids.get(marker)
        return self.literal(marker) if token_id is None else f"<[{token_id}]>"

    @staticmethod
    def literal(text: str) -> str:
        """A text as it stands."""
        return json.dumps(text, ensure_ascii=False)

    def rule(self, expression: str) -> str:
        """The name of a new rule."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name

    def text(self, start: str) -> str:
        """The whole grammar, for outputs that follow `start`."""
        return "\n".join([f"start: {start}", *self._rules])

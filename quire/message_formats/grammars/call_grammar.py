"""`CallGrammar`: the rules that calls of some tools follow, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from quire.errors import InvalidParameter, shown
from quire.message_formats.grammars.argument_schema import any_object, argument_schema, field_of
from quire.message_formats.marks import Marks
from quire.message_formats.tools import Tool
from quire.message_formats.typed_values import ANY
from quire.structured.json_expression import json_expression
from quire.structured.json_schema import JsonSchema

MAX_TOOLS = 128
"""Of one request."""
MAX_SCHEMA_CHARACTERS = 80_000
"""Of the schemas of all tools together, without descriptions. What a grammar may hold is little more."""
SPACES = r"[ \t\r\n]{1,64}"
"""What may stand behind the first character of a call without a marker, where a model has begun it by itself."""
_NUMBER = r"-?(0|[1-9][0-9]{0,99})(\.[0-9]{1,99})?([eE][+-]?[0-9]{1,2})?"
"""Without bounds. A float holds it: where calls are no JSON, what none holds reads as no number."""
_NOTHING: Mapping[str, str] = MappingProxyType({})


class CallGrammar:
    """Collects rules. A syntax of calls adds its own; `text` is the grammar."""

    def __init__(
        self,
        marks: Marks,
        tools: Sequence[Tool],
        *,
        parallel: bool = True,
        unkept: Mapping[str, str] = _NOTHING,
        has_thought: bool = False,
        max_thinking: int | None = None,
    ) -> None:
        """`parallel`: a message may hold several calls. `unkept`: names of tools whose schemas turned out to be more
        than the grammar library can keep, and why; strict ones are refused. `has_thought`: the prompt has begun the
        thinking, which the grammar follows. `max_thinking`: most tokens of thinking, where that is a part of what the
        grammar takes.

        Raises: InvalidParameter naming the tool and the JSON pointer.
        """
        if not 0 < len(tools) <= MAX_TOOLS:
            raise InvalidParameter(f"tools: 1 to {MAX_TOOLS} tools can be called, got {len(tools)}", parameter="tools")
        self.tools = tools
        self.parallel = parallel
        self.has_thought = has_thought
        self.max_thinking = max_thinking
        self.warnings: list[str] = []
        """Where arguments follow less than their tool's schema."""
        self._marks = marks
        self._rules: dict[tuple[str, str], str] = {}
        """Names by expression and options."""
        self._schemas: dict[int, Mapping[str, Any]] = {}
        self._terminals: dict[str, str] = {}
        """Names by pattern."""
        self._num_characters = 0
        self._arguments = {id(tool): self._arguments_of(tool, index, unkept) for index, tool in enumerate(tools)}

    @property
    def is_binding(self) -> bool:
        """Whether it holds for every tool. Otherwise (`strict` is False for one) nothing is forced on an output that
        may call tools but need not; where it must call one, the arguments of such a tool are any JSON object."""
        return all(tool.strict is not False for tool in self.tools)

    @property
    def tokens(self) -> tuple[str, ...]:
        """The markers that are tokens."""
        return tuple(self._marks.ids)

    def is_token(self, marker: str) -> bool:
        """Whether a marker is one token."""
        return marker in self._marks.ids

    def first(self, markers: Sequence[str]) -> str:
        """Of markers for the same thing: that which this tokenizer knows as a token, or else the first."""
        return next(filter(self.is_token, markers), markers[0])

    def marker(self, marker: str) -> str:
        """A marker: the one token where it is one, else its text, with the tokens inside."""
        return " ".join(map(self._piece, self._marks.pieces(marker) or [marker]))

    @staticmethod
    def literal(text: str) -> str:
        """A text as it stands."""
        return without_ebnf(json.dumps(text, ensure_ascii=False))

    def sequence(self, *parts: str) -> str:
        """Markers, texts and rules after each other: those that are not empty, of expressions."""
        return " ".join(part for part in parts if part and part != '""')

    def rule(self, expression: str, options: str = "") -> str:
        """The name of the rule for an expression. `options` are the library's, in brackets."""
        return self._rules.setdefault((expression, options), f"rule_{len(self._rules)}")

    def free_text(
        self, end: str, *, begin: str = "", margin: str = "", without: Sequence[str] = (), length: str = "*"
    ) -> str:
        """Any text and the marker `end` behind it, which it does not hold, nor the texts `without`. A margin stands
        before a marker that is no token. `length` counts characters as a regular expression does. `begin` stands before
        the text.
        """
        if begin and self._marks.holds_token(begin):
            text = self.free_text(end, margin=margin, without=without, length=length)
            return self.sequence(self.marker(begin), text)
        first, *others = self._marks.pieces(end)
        begun = in_regex(margin + first) if others and isinstance(first, str) else ""  # a text takes all until a token
        terminal = self.terminal(f"{in_regex(begin)}(?s:.{length}){begun}", *without)
        if others or end in self._marks.ids:
            return " ".join([terminal, *map(self._piece, others if begun else [first, *others])])
        return self.rule(terminal, f"[suffix={self.literal(margin + end)}]")

    def terminal(self, pattern: str, *without: str) -> str:
        """The name of the terminal for a regular expression whose texts hold none of the texts `without`."""
        texts = "|".join(map(in_regex, without))  # in one: the library finds nothing between six complements
        excluded = f" & ~/(?s:.*)({texts})(?s:.*)/" if texts else ""
        return self._terminals.setdefault(f"/{pattern}/{excluded}", f"TEXT_{len(self._terminals)}")

    def can_hold(self, end: str, text: str) -> bool:
        """Whether a text can stand before the marker `end`, which ends it: it is a token, or the text has none."""
        return self._marks.holds_token(end) or end not in text

    def _piece(self, piece: str | int) -> str:
        return self.literal(piece) if isinstance(piece, str) else f"<[{piece}]>"

    def arguments(self, tool: Tool) -> str:
        """The rule for the arguments of a tool: a JSON object by its schema."""
        return self._arguments[id(tool)]

    def schema(self, tool: Tool) -> Mapping[str, Any]:
        """The schema that the arguments of a tool follow."""
        return self._schemas[id(tool)]

    def value(self, schema: Any, tool: Tool) -> str:
        """The rule for a JSON value by a part of a tool's schema."""
        root = self.schema(tool)
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        has_number, others = without_number(schema)
        rest = {**definitions, "allOf": [{"anyOf": others} if has_number else schema]}
        text = without_ebnf(json_expression(JsonSchema(rest))) if others else ""
        return self.rule(" | ".join(filter(None, [self.terminal(_NUMBER) if has_number else "", text])))

    def leave_out(self, tool: Tool, pointer: str, why: str) -> None:
        """Arguments of a tool cannot follow a part of its schema: say so. Raises: InvalidParameter for a strict one."""
        field = field_of(tool, next(index for index, one in enumerate(self.tools) if one is tool))
        if tool.strict:
            raise InvalidParameter(f"{field}: {shown(pointer)}: {why}", parameter=field)
        self.warnings.append(f"{field}: {shown(pointer)}: {why}; calls of {tool.name} may break it")

    def one_of(self, call: Callable[[Tool], str]) -> str:
        """The rule for a call of any tool, of the expression for a call of each."""
        return self.rule(" | ".join(self.rule(call(tool)) for tool in self.tools))

    def repeated(self, item: str, between: str) -> str:
        """One item, or several with something between them where a message may hold several calls."""
        return f"{item} ({self.sequence(between, item)})*" if self.parallel else item

    def text(self, start: str) -> str:
        """The whole grammar, for outputs that follow `start`."""
        rules = (f"{name}{options}: {expression}" for (expression, options), name in self._rules.items())
        terminals = (f"{name}: {pattern}" for pattern, name in self._terminals.items())
        return "\n".join([f"start: {start}", *rules, *terminals])

    def _arguments_of(self, tool: Tool, index: int, unkept: Mapping[str, str]) -> str:
        found = argument_schema(tool, index)
        text = without_ebnf(json_expression(found.schema))
        why = unkept.get(tool.name, "")
        if self._num_characters + len(text) > MAX_SCHEMA_CHARACTERS:
            why = f"the schemas of all tools have more than {MAX_SCHEMA_CHARACTERS} characters together"
        if why and tool.strict is not False:
            field = field_of(tool, index)
            why = f"{field}: {why}"
            if tool.strict:
                raise InvalidParameter(why, parameter=field)
            found = any_object(tool, index, why)
            text = json_expression(found.schema)
        self.warnings += found.warnings
        self._num_characters += len(text)
        root = found.schema.root
        self._schemas[id(tool)] = root if isinstance(root, dict) else {}
        return self.rule(text)


def without_number(schema: Any) -> tuple[bool, list[Any]]:
    """Whether a value may be any number, and the schemas of what else it may be."""
    schema = {"type": sorted(ANY)} if schema is True or schema == {} else schema
    keywords = schema if isinstance(schema, dict) else {}
    if keywords.keys() == {"anyOf"}:
        found = [without_number(one) for one in keywords["anyOf"]]
        return any(has_number for has_number, _ in found), [one for _, others in found for one in others]
    names = [keywords.get("type")] if isinstance(keywords.get("type"), str) else keywords.get("type", [])
    if keywords.keys() != {"type"} or "number" not in names:
        return False, [schema]
    others = [name for name in names if name not in ("number", "integer")]
    return True, [{"type": others}] if others else []


def in_regex(text: str) -> str:
    """A text in a regular expression between slashes."""
    return re.sub(r"([!-/:;=?@\[-^`{-~])", r"\\\1", text)


def without_ebnf(text: str) -> str:
    """The same JSON. Grammars that hold `::=` are taken for EBNF."""
    return text.replace("::=", ":\\u003a=")

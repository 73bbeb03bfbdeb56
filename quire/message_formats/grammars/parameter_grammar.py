"""Grammars of parameters that stand one by one, not in a JSON object: which there are, and values as plain text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Any

from quire.message_formats.grammars.argument_schema import ANY_OBJECT
from quire.message_formats.grammars.call_grammar import CallGrammar
from quire.message_formats.tools import Tool
from quire.message_formats.typed_values import ANY, alternatives, resolved, type_of_schema, values_of
from quire.structured.json_schema import KEPT

_SIMPLE = frozenset({"type", "enum", "const", "minLength", "maxLength", "title", "description", "default"})
"""Keywords of texts that plain text can follow."""
_NARROWING = KEPT.keys() - {"$anchor", "$defs", "$id", "allOf", "anyOf", "definitions", "oneOf", "type"}
"""Keywords that a value of any type has to follow."""
MAX_LISTED = 64
"""Parameters of a tool whose arguments may be any object."""
LISTED = frozenset(
    {"const", "enum", "exclusiveMaximum", "exclusiveMinimum", "maximum", "maxLength", "minimum", "minLength"}
    | {"multipleOf", "title", "description", "default"}
)
"""Keywords of a schema that lists its values: those that the values are held against."""
_COMBINING = frozenset({"allOf", "anyOf", "oneOf"})
_SCALARS = frozenset({"string", "number", "integer", "boolean", "null"})


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a tool."""

    name: str
    schema: Any
    is_required: bool


def parameters_of(grammar: CallGrammar, tool: Tool) -> Iterator[Parameter]:
    """A tool's parameters in the order of its schema; those that it only requires come last. Where arguments may be any
    object, those that the tool lists, each with any value or none."""
    schema = grammar.schema(tool)
    if schema == ANY_OBJECT:
        listed = tool.parameters.get("properties")
        for name in islice(listed if isinstance(listed, Mapping) else (), MAX_LISTED):
            yield Parameter(name, True, False)
        return
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    for keyword in ("$ref", "allOf", "anyOf", "oneOf"):
        if keyword in schema:
            grammar.leave_out(tool, f"#/{keyword}", "calls of this model's format cannot follow it")
    for name, one in properties.items():
        if name in required or can_be_kept(one, schema):
            yield Parameter(name, one, name in required)
    others = schema.get("additionalProperties", True)
    for name in dict.fromkeys(required):
        if name not in properties:
            yield Parameter(name, others, True)


def can_be_kept(schema: Any, root: Mapping[str, Any]) -> bool:
    """Whether some value can have the types that a schema asks for."""
    return resolved(schema, root) is not False and bool(type_of_schema(schema, root).kinds)


def separated(grammar: CallGrammar, items: Sequence[tuple[str, bool]], between: str) -> str:
    """Items in their order with something between two, as an expression; those marked False may be left out."""
    rest = ""
    starts: list[str] = []
    for item, is_required in reversed(items):
        if is_required:
            starts = []
        starts.append(grammar.sequence(item, rest))
        following = grammar.sequence(between, item)
        rest = grammar.rule(grammar.sequence(following if is_required else f"({following})?", rest))
    whole = " | ".join(starts)
    return f"({whole})" if any(is_required for _, is_required in items) else f"({whole})?" if whole else ""


def plain_text(
    grammar: CallGrammar,
    tool: Tool,
    parameter: Parameter,
    end: str,
    *,
    margin: str = "",
    cdata: tuple[str, str] | None = None,
) -> str:
    """A parameter's value as plain text, and the marker behind it. Texts stand as they are.

    `margin` stands between the two. No text holds a marker that is a token. `cdata` may stand around a text.
    """
    closing = grammar.sequence(grammar.literal(margin), grammar.marker(end))
    root = grammar.schema(tool)
    schema = resolved(parameter.schema, root)
    kind = type_of_schema(schema, root)
    if schema is False or "string" not in kind.kinds:
        return grammar.sequence(grammar.value(schema, tool), closing)
    keywords = schema if isinstance(schema, dict) else {}
    values = values_of(keywords, kind.kinds)
    if values is not None:
        if keywords.keys() & _NARROWING - LISTED or keywords.keys() & _COMBINING:
            _leave_out(grammar, tool, parameter)
        texts = [_text_of(value) for value in values if is_within(value, keywords)]
        texts = [text for text in texts if grammar.can_hold(f"{margin}{end}", text)]
        return f"({' | '.join(map(grammar.literal, texts)) or grammar.value(False, tool)}) {closing}"
    if not _is_kept(keywords, kind.kinds, root):
        _leave_out(grammar, tool, parameter)
        return _free_text(grammar, end, margin, "*", cdata)
    return _free_text(grammar, end, margin, length_of(keywords) if kind.is_text else "*", cdata)


def _leave_out(grammar: CallGrammar, tool: Tool, parameter: Parameter) -> None:
    why = "calls of this model's format write texts as they stand and cannot follow it"
    grammar.leave_out(tool, f"#/properties/{parameter.name}", why)


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def is_within(value: Any, keywords: Mapping[str, Any]) -> bool:
    """Whether a value that a schema lists is within the schema's lengths and bounds."""
    if isinstance(value, str):
        least, most = keywords.get("minLength", 0), keywords.get("maxLength", math.inf)
        return bool(least <= len(value) <= most)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return True
    least, most = keywords.get("minimum", -math.inf), keywords.get("maximum", math.inf)
    lower, upper = keywords.get("exclusiveMinimum", -math.inf), keywords.get("exclusiveMaximum", math.inf)
    is_multiple = "multipleOf" not in keywords or Fraction(str(value)) % Fraction(str(keywords["multipleOf"])) == 0
    return bool(least <= value <= most and lower < value < upper and is_multiple)


def _free_text(grammar: CallGrammar, end: str, margin: str, length: str, cdata: tuple[str, str] | None) -> str:
    if cdata is None:
        return grammar.free_text(end, margin=margin, without=grammar.tokens, length=length)
    begin, close = cdata
    plain = grammar.free_text(end, margin=margin, without=(*grammar.tokens, begin), length=length)
    quoted = grammar.free_text(close + end, begin=begin, without=grammar.tokens, length=length)
    return f"({plain} | {quoted})"


def _is_kept(keywords: dict[str, Any], kinds: frozenset[str], root: Mapping[str, Any]) -> bool:
    """Whether any text of the right length is a value."""
    if kinds == ANY:
        return not any(one.keys() & _NARROWING for one in alternatives(keywords, root))
    if kinds == {"string"}:
        return keywords.keys() <= _SIMPLE
    branches = keywords.get("anyOf") or keywords.get("oneOf") or [keywords]
    is_plain = all(isinstance(one, dict) and one.keys() <= {"type", "title", "description"} for one in branches)
    return is_plain and kinds <= _SCALARS


def length_of(keywords: Mapping[str, Any]) -> str:
    """How many characters a text may have, in a regular expression."""
    least, most = keywords.get("minLength", 0), keywords.get("maxLength")
    return "*" if not least and most is None else f"{{{least},{'' if most is None else most}}}"

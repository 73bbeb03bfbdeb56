"""The JSON Schema that the arguments of a tool follow where a grammar makes them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidParameter, shown
from quire.message_formats.tools import Tool
from quire.structured.json_expression import FORMATS
from quire.structured.json_schema import REFUSED, JsonSchema, Node, check_numbers, check_size, refusal

ANY_OBJECT: dict[str, Any] = {"type": "object"}
_SAYS_NOTHING = frozenset(
    {"$comment", "$schema", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly"}
)
"""Keywords without meaning for validity. A grammar is shorter without them."""
_COMBINING = frozenset({"$ref", "allOf", "anyOf", "minProperties", "oneOf", "patternProperties"})
"""With these, properties that a schema does not list may be asked for elsewhere."""

_LOOSENED = frozenset(
    {"const", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "maxItems", "maxLength", "maxProperties"}
    | {"maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "pattern", "patternProperties"}
    | {"required", "type"}
)
"""Keywords without which a schema that is not strict still says the rest, where their values cannot be kept."""


@dataclass(frozen=True, slots=True)
class ArgumentSchema:
    """What a tool's arguments follow, and what of the tool's own schema was left out."""

    schema: JsonSchema
    warnings: tuple[str, ...] = ()


def field_of(tool: Tool, index: int) -> str:
    """How messages name the schema of a request's tool."""
    return tool.place or f"tools[{index}].function.parameters"


def argument_schema(tool: Tool, index: int) -> ArgumentSchema:
    """The schema, strict or not. Properties that it does not list are left out where it allows but does not want them.

    Raises: InvalidParameter with the JSON pointer for a strict tool whose schema cannot be kept.
    """
    if tool.strict is False:
        return ArgumentSchema(JsonSchema(dict(ANY_OBJECT), field_of(tool, index)))
    try:
        schema = _copied(tool, field_of(tool, index))
        warnings = () if tool.strict else tuple(_loosen(schema, tool.name))
        _check_formats(schema)
        schema.check()
    except InvalidParameter as error:
        if tool.strict:
            raise
        return any_object(tool, index, error.message)
    return ArgumentSchema(_prepared(schema), warnings)


def any_object(tool: Tool, index: int, why: str) -> ArgumentSchema:
    """For a tool whose schema cannot be kept."""
    warning = f"{why}. The arguments of {tool.name} may be any JSON object"
    return ArgumentSchema(JsonSchema(dict(ANY_OBJECT), field_of(tool, index)), (warning,))


def _copied(tool: Tool, field: str) -> JsonSchema:
    """A copy that may be changed, and that is a schema of objects."""
    check_size(field, dict(tool.parameters))
    try:
        root = json.loads(json.dumps(dict(tool.parameters), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise refusal(field, "", f"it is not JSON: {error}") from None
    check_numbers(field, root)
    types = root.setdefault("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        raise refusal(field, "#/type", f"arguments are an object, so the type must be object, got {shown(types)}")
    root["type"] = "object"
    return JsonSchema(root, field)


def _loosen(schema: JsonSchema, name: str) -> list[str]:
    """Leave out keywords that cannot be kept; what was left out. Mutates: schema."""
    warnings = []
    for node in schema.nodes:
        for keyword, why in _not_kept(schema, node).items():
            del node.schema[keyword]
            warnings.append(f"{why}; calls of {name} may break it")
    return warnings


def _not_kept(schema: JsonSchema, node: Node) -> dict[str, str]:
    """Keywords of a schema, and why."""
    if not isinstance(node.schema, dict):
        return {}
    keywords = [keyword for keyword in node.schema if keyword in REFUSED or keyword in _unkept_counts(node.schema)]
    keywords += ["format"] if _has_unknown_format(node.schema) else []
    pointer = node.pointer or "#"
    simple = {key: f"{schema.field}: {shown(f'{pointer}/{key}')}: {key} is not kept" for key in keywords}
    return {key: error.message for key, error in schema.unkept(node) if key in _LOOSENED} | simple


def _unkept_counts(schema: dict[str, Any]) -> tuple[str, ...]:
    """Counts of properties, where some that are listed may be left out, or more than one is not listed."""
    listed, least = schema.get("properties"), schema.get("minProperties")
    names = schema["required"] if isinstance(schema.get("required"), list) else []
    if isinstance(listed, dict) and any(name not in names for name in listed):
        return ("minProperties", "maxProperties")
    return ("minProperties",) if isinstance(least, int) and least > len(names) + 1 else ()


def _has_unknown_format(schema: dict[str, Any]) -> bool:
    return isinstance(schema.get("format"), str) and schema["format"] not in FORMATS


def _check_formats(schema: JsonSchema) -> None:
    for node in schema.nodes:
        if isinstance(node.schema, dict) and _has_unknown_format(node.schema):
            why = f"format {shown(node.schema['format'])} is not supported; use one of {', '.join(sorted(FORMATS))}"
            raise refusal(schema.field, f"{node.pointer or '#'}/format", why)


def _prepared(schema: JsonSchema) -> JsonSchema:
    """Shorter, and closed. Mutates: schema."""
    schema.without_neutral()
    for node in schema.nodes:
        for keyword in _SAYS_NOTHING & node.schema.keys() if isinstance(node.schema, dict) else ():
            del node.schema[keyword]
    root: Any = schema.root
    listed = root.get("properties", {})
    if "properties" in root and listed.keys() >= set(root.get("required", ())) and not _COMBINING & root.keys():
        root.setdefault("additionalProperties", False)
    return schema

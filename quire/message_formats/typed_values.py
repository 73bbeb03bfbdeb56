"""`ValueType`: what a schema says of a parameter whose value a model wrote as plain text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from quire.message_formats.literals import json_of_literal
from quire.message_formats.reader import SPACE
from quire.message_formats.tools import Tool
from quire.utils.json_text import is_json, loads

ANY = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
MAX_HOPS = 16
"""From one reference to the next."""


@dataclass(frozen=True, slots=True)
class ValueType:
    """The types that a value may have."""

    kinds: frozenset[str] = ANY
    """Names of JSON Schema; none where no value can be all that is asked for."""
    texts: frozenset[str] = frozenset()
    """Texts that are values as they stand."""

    @property
    def is_text(self) -> bool:
        """Every value is a text."""
        return self.kinds == {"string"}

    def json(self, text: str, *, is_kept: bool = False) -> str:
        """The value that a text stands for, as JSON.

        A text stays one where only texts are allowed. Else it is JSON or a value of Python if it can be read as what is
        allowed. What can be read as nothing stays a text: a wrong value is for the tool to refuse. `is_kept`: a
        grammar has written it, so where no text is allowed, it is JSON, also with a number that no float holds.
        """
        if self.is_text or text in self.texts:
            return json.dumps(text, ensure_ascii=False)
        spelled = _as_json(text.strip(SPACE))
        if spelled is not None and _kinds_of(json.loads(spelled)) & self.kinds - {"string"}:
            return spelled
        if "string" not in self.kinds and (spelled is not None or (is_kept and is_json(text))):
            return spelled or text
        return json.dumps(text, ensure_ascii=False)


def parameter_schema(tool: Tool | None, name: str) -> Any:
    """The schema of a tool's parameter; true, which allows anything, where there is none."""
    if tool is None:
        return True
    properties = tool.parameters.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return tool.parameters.get("additionalProperties", True)


def property_schema(schema: Any, name: str, root: Mapping[str, Any]) -> Any:
    """The schema of a property, by the first of the schemas in `schema` that has one; true where none has."""
    others: list[Any] = []
    for one in alternatives(schema, root):
        listed = one.get("properties")
        if isinstance(listed, Mapping) and name in listed:
            return listed[name]
        if isinstance(one.get("additionalProperties"), Mapping):
            others.append(one["additionalProperties"])
    return others[0] if others else True


def item_schema(schema: Any, _: str, root: Mapping[str, Any]) -> Any:
    """The schema of an array's items, by the first of the schemas in `schema` that has one; true where none has."""
    return next((one["items"] for one in alternatives(schema, root) if isinstance(one.get("items"), Mapping)), True)


def alternatives(schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A schema and those inside its anyOf, oneOf and allOf."""
    waiting, known = [schema], set[int]()
    while waiting:
        one = resolved(waiting.pop(), root)
        if isinstance(one, Mapping) and id(one) not in known:
            known.add(id(one))
            yield one
            for keyword in ("allOf", "oneOf", "anyOf"):
                waiting += reversed(one[keyword]) if isinstance(one.get(keyword), list) else ()


def has_parameter(tool: Tool | None, name: str) -> bool:
    """Whether a tool lists a parameter; any name where it lists none."""
    listed = None if tool is None else tool.parameters.get("properties")
    return bool(name) and (not isinstance(listed, Mapping) or not listed or name in listed)


def value_type(tool: Tool | None, name: str) -> ValueType:
    """What the values of a tool's parameter may be."""
    return type_of_schema(parameter_schema(tool, name), {} if tool is None else tool.parameters)


def type_of_schema(schema: Any, root: Mapping[str, Any], known: dict[int, ValueType] | None = None) -> ValueType:
    """What a schema allows; where it cannot be told, anything. `root` is what its references are looked up in.

    `known` holds what was found of the schemas inside it, by identity: of one that holds itself, anything.
    """
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return ValueType()
    known = {} if known is None else known
    if id(schema) not in known:
        known[id(schema)] = ValueType()
        known[id(schema)] = _combined_type(schema, root, known)
    return known[id(schema)]


def _combined_type(schema: Mapping[str, Any], root: Mapping[str, Any], known: dict[int, ValueType]) -> ValueType:
    found = _own_type(schema)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list) and schema[keyword]:
            found = _both(found, _either([type_of_schema(one, root, known) for one in schema[keyword]]))
    for one in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        found = _both(found, type_of_schema(one, root, known))
    return ValueType(found.kinds | {"null"}, found.texts) if schema.get("nullable") is True else found


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """What a schema that is a reference refers to."""
    for _ in range(MAX_HOPS):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        schema = _target(schema["$ref"], root)
    return True


def values_of(schema: Mapping[str, Any], kinds: frozenset[str] = ANY) -> list[Any] | None:
    """The values that a schema lists, those of such kinds; None where it lists none."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not values:
        return None
    return [value for value in values if _kinds_of(value) & kinds]


def _own_type(schema: Mapping[str, Any]) -> ValueType:
    names = schema.get("type")
    names = [names] if isinstance(names, str) else names
    kinds = ANY.intersection(name for name in names if isinstance(name, str)) if isinstance(names, list) else ANY
    kinds = (kinds | {"integer"} if "number" in kinds else kinds) or ANY
    values = values_of(schema, kinds)
    if values is None:
        return ValueType(kinds)
    found = frozenset[str]().union(*map(_kinds_of, values))
    return ValueType(found & kinds, frozenset(value for value in values if isinstance(value, str)))


def _either(types: list[ValueType]) -> ValueType:
    texts = frozenset[str]().union(*(one.texts for one in types))
    return ValueType(frozenset[str]().union(*(one.kinds for one in types)), texts)


def _both(first: ValueType, second: ValueType) -> ValueType:
    return ValueType(first.kinds & second.kinds, first.texts | second.texts)


def _target(reference: Any, root: Mapping[str, Any]) -> Any:
    """What a reference inside a schema means; true for what is not there."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return root if reference == "#" else True
    found: Any = root
    for part in unquote(reference[2:]).split("/"):
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or part not in found:
            return True
        found = found[part]
    return found


def _kinds_of(value: Any) -> frozenset[str]:
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number", "integer"} if value.is_integer() else {"number"})
        case str():
            return frozenset({"string"})
        case list():
            return frozenset({"array"})
    return frozenset({"object"})


def _as_json(text: str) -> str | None:
    """A text that is JSON, or a value of Python, as JSON. Numbers stay as they are written."""
    try:
        loads(text)
    except (ValueError, RecursionError):
        return _checked(json_of_literal(text))
    return text


def _checked(text: str | None) -> str | None:
    try:
        return text if text is None or loads(text) is not Ellipsis else None
    except (ValueError, RecursionError):  # an integer of too many digits
        return None

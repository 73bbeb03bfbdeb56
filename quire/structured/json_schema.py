"""JSON Schemas: which keywords are kept, and refusals of what would not be, with the JSON pointer.

The grammar library compiles a schema. It is asked only about schemas that pass here: some make it run for ever or end
its process, and of others it accepts what no finite text can satisfy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, partial
from typing import Any
from urllib.parse import unquote

from quire.errors import InvalidParameter, shown
from quire.structured.params import MAX_DEPTH, PLACE
from quire.structured.regex import translated
from quire.utils.json_text import is_beyond, no_constant

MAX_NODES = 50_000
"""Objects, arrays and values of a schema."""
MAX_COUNT = 100_000
"""Of minItems, minLength and their like."""
MAX_ENUM = 10_000
"""Values of one enum."""
EXACT = 2**53
"""Floats hold each whole number up to here."""
MAX_BOUND = 2**63 - 1024
"""Of numbers: the largest float that is no more than a whole number of 64 bits."""

TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})

_WANTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "schema": ("a schema: an object, true or false", lambda v: isinstance(v, (dict, bool))),
    "schemas": ("an array of schemas, not empty", lambda v: _are_schemas(v) and bool(v)),
    "items": ("a schema or an array of schemas", lambda v: isinstance(v, (dict, bool)) or _are_schemas(v)),
    "map": ("an object of schemas", lambda v: isinstance(v, dict) and _are_schemas([*v.values()])),
    "number": ("a number", lambda v: _is_number(v)),
    "step": ("a number above 0", lambda v: _is_number(v) and v > 0),
    "count": (f"a whole number up to {MAX_COUNT}", lambda v: type(v) is int and 0 <= v <= MAX_COUNT),
    "text": ("a string", lambda v: isinstance(v, str)),
    "type": (f"one of {', '.join(sorted(TYPES))} or an array of such", lambda v: _are_types(v)),
    "names": ("an array of strings", lambda v: _are_texts(v)),
    "values": (f"an array of 1 to {MAX_ENUM} values", lambda v: isinstance(v, list) and 0 < len(v) <= MAX_ENUM),
    "any": ("anything", lambda v: True),
}
"""What a keyword's value must be, in words and as a test."""


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _are_schemas(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, (dict, bool)) for item in value)


def _are_types(value: Any) -> bool:
    names = [value] if isinstance(value, str) else value
    return _are_texts(names) and bool(names) and TYPES.issuperset(names)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_exact(number: float) -> bool:
    """Whether a constant stays what it is: the library reads its digits as a float, and multiplies that by a power of
    ten, which has to be one, too."""
    if isinstance(number, int):
        return abs(number) < 2**63 and float(number) == number
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    return int("".join(map(str, digits))) <= EXACT and -22 <= int(exponent) <= 22


KEPT: dict[str, str] = {
    "$anchor": "text", "$defs": "map", "$id": "text", "$ref": "text", "definitions": "map",
    "additionalItems": "schema", "additionalProperties": "schema", "allOf": "schemas", "anyOf": "schemas",
    "const": "any", "enum": "values", "exclusiveMaximum": "number", "exclusiveMinimum": "number", "format": "text",
    "items": "items", "maxItems": "count", "maxLength": "count", "maxProperties": "count", "maximum": "number",
    "minItems": "count", "minLength": "count", "minProperties": "count", "minimum": "number", "multipleOf": "step",
    "oneOf": "schemas", "pattern": "text", "patternProperties": "map", "prefixItems": "schemas", "properties": "map",
    "required": "names", "type": "type",
}  # fmt: skip
"""Keywords that every output keeps, and the kind of their values."""
REFUSED: dict[str, str] = {
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
    "contains": "describe every item with items or prefixItems",
    "dependencies": "list the allowed combinations with anyOf",
    "dependentRequired": "list the allowed combinations with anyOf",
    "dependentSchemas": "list the allowed combinations with anyOf",
    "else": "list the allowed combinations with anyOf",
    "if": "list the allowed combinations with anyOf",
    "maxContains": "describe every item with items or prefixItems",
    "minContains": "describe every item with items or prefixItems",
    "not": "list what is allowed with enum or anyOf",
    "propertyNames": "use patternProperties with additionalProperties: false",
    "then": "list the allowed combinations with anyOf",
    "unevaluatedItems": "use items: false after prefixItems",
    "unevaluatedProperties": "use additionalProperties: false",
    "uniqueItems": "leave it out and drop what is repeated",
    "x-guidance": "use the fields of structured_outputs",
}
"""Keywords that would change what is valid and that no grammar here can keep, and what to do instead. Others that are
in neither table say nothing about validity, as JSON Schema has it."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
}
"""Values of refused keywords that ask for nothing."""
_ONE, _MANY, _NAMED = ("schema", "items"), ("schemas", "items"), ("map",)


@dataclass(frozen=True, slots=True)
class Node:
    """A schema inside a schema, and the JSON pointer to it."""

    schema: Any
    pointer: str


Fault = tuple[str, InvalidParameter]
"""A keyword that cannot be kept, and the error that says why."""


def refusal(field: str, pointer: str, why: str) -> InvalidParameter:
    """The error for a part of a schema that a field of a request holds."""
    return InvalidParameter(f"{field}: {shown(pointer) if pointer else 'the schema'}: {why}", parameter=field)


def parse_json(field: str, text: str) -> Any:
    """A JSON text as data. Raises: InvalidParameter, also for JSON that is nested too deeply."""
    try:
        value = json.loads(text, parse_constant=no_constant)
    except RecursionError:
        raise refusal(field, "", f"it is nested deeper than {MAX_DEPTH}") from None
    except ValueError as error:
        raise refusal(field, "", f"it is not JSON: {error}") from None
    check_size(field, value)
    check_numbers(field, value)
    return value


def check_numbers(field: str, root: Any) -> None:
    """Refuse numbers beyond a float's range. Raises: InvalidParameter with the JSON pointer."""
    for pointer, value in _values("", root):
        if is_beyond(value):
            raise refusal(field, pointer, f"{shown(value)} is beyond the range of numbers; they must be finite")


def _values(pointer: str, root: Any) -> Iterator[tuple[str, Any]]:
    """A value and all that are in it, with their JSON pointers."""
    waiting = [(pointer, root)]
    while waiting:
        pointer, value = waiting.pop()
        yield pointer, value
        if isinstance(value, dict):
            waiting += [(_below(pointer, str(key)), item) for key, item in reversed(value.items())]
        elif isinstance(value, list):
            waiting += [(f"{pointer or '#'}/{index}", item) for index, item in reversed([*enumerate(value)])]


def check_size(field: str, value: Any) -> None:
    """Refuse JSON that is nested too deeply or holds too many values. Raises: InvalidParameter."""
    level, depth, total = [value], 0, 0
    while level:
        depth, total = depth + 1, total + len(level)
        if depth > MAX_DEPTH:
            raise refusal(field, "", f"it is nested deeper than {MAX_DEPTH}")
        if total > MAX_NODES:
            raise refusal(field, "", f"it holds more than {MAX_NODES} values; make it smaller")
        level = [
            item
            for one in level
            if isinstance(one, (dict, list))
            for item in (one.values() if isinstance(one, dict) else one)
        ]


class JsonSchema:
    """A schema that was parsed, and all schemas in it."""

    def __init__(self, root: Any, field: str = f"{PLACE}.json") -> None:
        """`field`: the one that brought it, for messages. Raises: InvalidParameter."""
        if not isinstance(root, (dict, bool)):
            raise refusal(field, "", f"a schema is an object, true or false; got {shown(root)}")
        self.root = root
        self.field = field
        self.nodes = list(_nodes(Node(root, "")))
        """In the order in which they stand, the whole schema first; then those that only references reach."""
        self._add_targets()

    def check(self) -> None:
        """Refuse what would not be kept, or what no output can satisfy.

        Raises: InvalidParameter with the JSON pointer, the keyword and what to do.
        """
        for node in self.nodes:
            if isinstance(node.schema, dict):
                for _, error in self.unkept(node):
                    raise error
        self._check_references()
        self._check_recursion()

    def without_neutral(self) -> JsonSchema:
        """Itself, without what asks for nothing and the library does not know. Mutates: the schema."""
        for node in self.nodes:
            for keyword, values in _NEUTRAL.items() if isinstance(node.schema, dict) else ():
                if keyword in node.schema and node.schema[keyword] in values:
                    del node.schema[keyword]
        return self

    def pointer_to(self, keyword: str, value: object = None) -> str:
        """Where a keyword (with this value) stands first; empty when it does not."""
        for node in self.nodes:
            if isinstance(node.schema, dict) and keyword in node.schema and value in (None, node.schema[keyword]):
                return _below(node.pointer, keyword)
        return ""

    def _add_targets(self) -> None:
        """A reference may name a schema that stands where no keyword puts one."""
        known = {id(node.schema) for node in self.nodes}
        for node in self.nodes:  # which grows meanwhile
            reference = node.schema.get("$ref") if isinstance(node.schema, dict) else None
            target = self._target(reference) if isinstance(reference, str) else None
            if isinstance(target, dict) and id(target) not in known:
                new = [one for one in _nodes(Node(target, str(reference))) if id(one.schema) not in known]
                known.update(id(one.schema) for one in new)
                self.nodes += new

    def unkept(self, node: Node) -> Iterator[Fault]:
        """Keywords of a schema, not of those inside it, that cannot be kept, and why."""
        wrong = dict(self._wrong(node))
        yield from wrong.items()
        others = Node({key: value for key, value in node.schema.items() if key not in wrong}, node.pointer)
        for faults in (self._least, self._bounds, self._constants, self._patterns):
            yield from faults(others)

    def _wrong(self, node: Node) -> Iterator[Fault]:
        """Keywords that are not supported, and those whose values are of another kind."""
        for keyword, value in node.schema.items():
            place = _below(node.pointer, keyword)
            if keyword in REFUSED:
                if value not in _NEUTRAL.get(keyword, ()):
                    yield keyword, refusal(self.field, place, f"{keyword} is not supported; {REFUSED[keyword]}")
            elif keyword in KEPT:
                words, fits = _WANTS[KEPT[keyword]]
                if not fits(value):
                    yield keyword, refusal(self.field, place, f"{keyword} must be {words}, got {shown(value)}")

    def _least(self, node: Node) -> Iterator[Fault]:
        """A least number of properties that one name written twice would seem to reach."""
        least, required = node.schema.get("minProperties", 0), set(node.schema.get("required", ()))
        if least > len(required) + 1:
            why = f"an output may repeat a name, so {least} different ones are kept only where {least - 1} are required"
            yield "minProperties", refusal(self.field, _below(node.pointer, "minProperties"), why)

    def _bounds(self, node: Node) -> Iterator[Fault]:
        """Bounds behind which the library knows no number: it would write one before them."""
        for keyword, sign in (("minimum", 1), ("exclusiveMinimum", 1), ("maximum", -1), ("exclusiveMaximum", -1)):
            bound = node.schema.get(keyword, 0)
            if sign * bound > MAX_BOUND - keyword.startswith("exclusive"):
                why = f"no number beyond {sign * MAX_BOUND} is kept where numbers have bounds; got {shown(bound)}"
                yield keyword, refusal(self.field, _below(node.pointer, keyword), why)

    def _constants(self, node: Node) -> Iterator[Fault]:
        """Numbers of which the library would write the neighbour."""
        for keyword in ("const", "enum"):
            for pointer, value in _values(_below(node.pointer, keyword), node.schema.get(keyword)):
                if _is_number(value) and not _is_exact(value):
                    why = "has digits that would be lost: it is read as a float. Use a string or fewer digits"
                    yield keyword, refusal(self.field, pointer, f"{shown(value)} {why}")

    def _patterns(self, node: Node) -> Iterator[Fault]:
        """Patterns that the library would take for others, or for one."""
        names: dict[str, str] = {}
        for keyword, pattern, pointer in _patterns_in(node):
            try:
                meant = translated(pattern, partial(refusal, self.field, pointer))
            except InvalidParameter as error:
                yield keyword, error
                continue
            if keyword == "patternProperties" and names.setdefault(meant, pattern) != pattern:
                why = f"it means the same as {shown(names[meant])}; list the schemas of both in one allOf"
                yield keyword, refusal(self.field, pointer, why)

    def _check_references(self) -> None:
        for node in self.nodes:
            if not isinstance(node.schema, dict) or "$ref" not in node.schema:
                continue
            reference = node.schema["$ref"]
            place = _below(node.pointer, "$ref")
            if not reference.startswith("#") and not self._has_ids:
                raise refusal(
                    self.field,
                    place,
                    f"{shown(reference)} is in another document, and nothing is fetched; put it under $defs and refer "
                    "to it with #/$defs/...",
                )
            if reference.startswith("#") and not self._has_ids and self._target(reference) is None:
                raise refusal(self.field, place, f"{shown(reference)} refers to nothing in the schema")

    def _check_recursion(self) -> None:
        """Refuse what only an endless text could satisfy. A least fixed point: what has a base ends, and so does what
        needs nothing but that."""
        ends: set[int] = set()
        pending = [node for node in reversed(self.nodes) if isinstance(node.schema, dict)]
        while pending:
            num_known = len(ends)
            for node in pending:  # what is found helps in the same round, so a chain takes one in either order
                if self._ends(node.schema, ends):
                    ends.add(id(node.schema))
            if len(ends) == num_known:
                self._refuse_endless(pending)
            pending = [node for node in reversed(pending) if id(node.schema) not in ends]

    def _refuse_endless(self, endless: list[Node]) -> None:
        node = next((node for node in reversed(endless) if "$ref" in node.schema), endless[-1])
        raise refusal(
            self.field,
            _below(node.pointer, "$ref") if "$ref" in node.schema else node.pointer,
            "this recursion has no base: only an endless text would satisfy it. Make a property on the way optional, "
            "or allow null or an empty array",
        )

    def _ends(self, schema: dict[str, Any], ends: set[int]) -> bool:
        """Whether some finite text satisfies a schema, if those in `ends` can be satisfied; true where in doubt."""
        known = [*_list(schema.get("allOf"))]
        if "$ref" in schema:
            known.append(self._target(schema["$ref"]))
        if not all(_known(one, ends) for one in known):
            return False
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema and not any(_known(one, ends) for one in _list(schema[keyword])):
                return False
        types = schema.get("type")
        types = [types] if isinstance(types, str) else types
        if "enum" in schema or "const" in schema or not types or not {"object", "array"}.issuperset(types):
            return True
        return any(_object_ends(schema, ends) if one == "object" else _array_ends(schema, ends) for one in types)

    @cached_property
    def _has_ids(self) -> bool:
        """Whether parts have addresses of their own: then the library alone says what a reference means."""
        return any(isinstance(node.schema, dict) and "$id" in node.schema for node in self.nodes)

    @cached_property
    def _anchors(self) -> dict[str, Any]:
        return {
            node.schema["$anchor"]: node.schema
            for node in self.nodes
            if isinstance(node.schema, dict) and isinstance(node.schema.get("$anchor"), str)
        }

    def _target(self, reference: str) -> Any:
        """What a reference inside the schema means; None for nothing."""
        fragment = unquote(reference.partition("#")[2])
        if reference[:1] != "#":
            return None
        if fragment and not fragment.startswith("/"):
            return self._anchors.get(fragment)
        found: Any = self.root
        for part in fragment.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and part in found:
                found = found[part]
            elif isinstance(found, list) and re.fullmatch("[0-9]{1,6}", part) and int(part) < len(found):
                found = found[int(part)]
            else:
                return None
        return found if isinstance(found, (dict, bool)) else None


def _patterns_in(node: Node) -> Iterator[tuple[str, str, str]]:
    """The regular expressions of a schema, not of those inside it: keyword, pattern, JSON pointer."""
    if "pattern" in node.schema:
        yield "pattern", node.schema["pattern"], _below(node.pointer, "pattern")
    for name in node.schema.get("patternProperties", ()):
        yield "patternProperties", name, _below(_below(node.pointer, "patternProperties"), name)


def _known(schema: Any, ends: set[int]) -> bool:
    return not isinstance(schema, dict) or id(schema) in ends


def _object_ends(schema: dict[str, Any], ends: set[int]) -> bool:
    properties = schema.get("properties") or {}
    return all(_known(properties.get(name), ends) for name in schema.get("required") or ())


def _array_ends(schema: dict[str, Any], ends: set[int]) -> bool:
    count, items = schema.get("minItems") or 0, schema.get("items")
    first = _list(schema.get("prefixItems")) or _list(items)
    rest = schema.get("additionalItems") if isinstance(items, list) else items
    return all(_known(one, ends) for one in first[:count]) and (count <= len(first) or _known(rest, ends))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _below(pointer: str, part: str) -> str:
    return f"{pointer or '#'}/{part.replace('~', '~0').replace('/', '~1')}"


def _nodes(root: Node) -> Iterator[Node]:
    """A schema and all that are in it, before what is in them."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node.schema, dict):
            waiting += reversed(list(_inside(node)))


def _inside(node: Node) -> Iterator[Node]:
    for keyword, value in node.schema.items():
        kind, place = KEPT.get(keyword), _below(node.pointer, keyword)
        if kind in _ONE and isinstance(value, (dict, bool)):
            yield Node(value, place)
        elif kind in _MANY and isinstance(value, list):
            yield from (Node(item, f"{place}/{index}") for index, item in enumerate(value))
        elif kind in _NAMED and isinstance(value, dict):
            yield from (Node(item, _below(place, name)) for name, item in value.items())

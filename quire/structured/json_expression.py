"""JSON that follows a schema, as an expression in llguidance's dialect of Lark. Does not load the library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from quire.structured.json_schema import JsonSchema

WHITE_SPACE = r"(\n {0,16}| )"
"""Between two tokens of JSON: a space, or a new line with its indentation. So every output of a schema that is bounded
ends by itself; models that write JSON by themselves indent by 2 or 4."""
OPTIONS: Mapping[str, Any] = MappingProxyType(
    {"whitespace_pattern": WHITE_SPACE, "lenient": False, "coerce_one_of": False}
)
"""How the library reads schemas, where a request does not ask for another way."""
FORMATS = frozenset({"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"})
"""Values of `format` that the library keeps. Any other is an error when it compiles the schema."""


def json_expression(schema: JsonSchema, options: Mapping[str, Any] = OPTIONS) -> str:
    """JSON that follows a schema that was checked. Mutates: schema."""
    return f"%json {json.dumps(with_options(schema, options))}"


def with_options(schema: JsonSchema, options: Mapping[str, Any]) -> dict[str, Any]:
    """The schema as the library reads it. Mutates: schema."""
    schema.without_neutral()
    root: dict[str, Any] = schema.root if isinstance(schema.root, dict) else {"allOf": [schema.root]}
    return {**root, "x-guidance": dict(options)}

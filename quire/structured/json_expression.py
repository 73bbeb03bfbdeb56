"""JSON that follows a schema, as an expression in llguidance's dialect of Lark. Does not load the library."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from quire.structured.json_schema import EXACT, MAX_BOUND, JsonSchema
from quire.structured.regex import translated

WHITE_SPACE = r"(\n {0,16}| )"
"""Between two tokens of JSON: a space, or a new line with its indentation. So every output of a schema that is bounded
ends by itself; models that write JSON by themselves indent by 2 or 4."""
OPTIONS: Mapping[str, Any] = MappingProxyType(
    {"whitespace_pattern": WHITE_SPACE, "lenient": False, "coerce_one_of": False}
)
"""How the library reads schemas, where a request does not ask for another way."""
FORMATS = frozenset({"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"})
"""Values of `format` that the library keeps. Any other is an error when it compiles the schema."""

_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-]{_HOUR})"
_DATES = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[tT]{_TIME}$"}
"""Values of `format` as patterns. The library would take 29 February of any year, and second 60 of any minute."""
FAR = 10**18
"""From here on the library keeps a bound only beside one on the other side."""
_ESCAPES = 'nrbtf\\"'
"""Those with which every text has one spelling."""
_BOUNDS = (("minimum", "exclusiveMinimum", math.inf), ("maximum", "exclusiveMaximum", -math.inf))
"""Bounds, themselves allowed and not, and the direction in which they may move."""


def json_expression(schema: JsonSchema, options: Mapping[str, Any] = OPTIONS) -> str:
    """JSON that follows a schema that was checked. Mutates: schema."""
    return f"%json {json.dumps(with_options(schema, options))}"


def with_options(schema: JsonSchema, options: Mapping[str, Any]) -> dict[str, Any]:
    """The schema as the library reads it. Mutates: schema."""
    schema.without_neutral()
    nodes = [node.schema for node in schema.nodes if isinstance(node.schema, dict)]
    for node in nodes:
        _translate_patterns(node)
        _spell_out_dates(node)
        _round_bounds(node)
    escapes = {"json_allowed_escapes": _ESCAPES} if any(map(_has_names_beside_others, nodes)) else {}
    root: dict[str, Any] = schema.root if isinstance(schema.root, dict) else {"allOf": [schema.root]}
    return {**root, "x-guidance": {**options, **escapes}}


def _translate_patterns(schema: dict[str, Any]) -> None:
    if "pattern" in schema:
        schema["pattern"] = translated(schema["pattern"], ValueError)
    if "patternProperties" in schema:
        named = schema["patternProperties"].items()
        schema["patternProperties"] = {translated(name, ValueError): one for name, one in named}


def _spell_out_dates(schema: dict[str, Any]) -> None:
    pattern = _DATES.get(schema.get("format", ""))
    if pattern is None:
        return
    del schema["format"]
    if "pattern" in schema:
        schema["allOf"] = [*schema.get("allOf", ()), {"pattern": pattern}]
    else:
        schema["pattern"] = pattern


def _round_bounds(schema: dict[str, Any]) -> None:
    """The library reads a bound as the nearest float, which may lie outside, and takes large ones for allowed. Those
    beyond whole numbers of 64 bits it does not take."""
    for keyword, exclusive, inward in _BOUNDS:
        tightest = max if inward > 0 else min
        if abs(schema.get(exclusive, 0)) >= EXACT:
            bound = _rounded(schema.pop(exclusive), inward, is_open=True)
            schema[keyword] = tightest(bound, schema.get(keyword, bound))
        if abs(schema.get(keyword, 0)) >= EXACT:
            bound = tightest(_rounded(schema[keyword], inward), -math.copysign(MAX_BOUND, inward))
            schema[keyword] = int(bound)  # of which the library loses no digits
    for keyword, other, sign in (("minimum", "maximum", 1), ("maximum", "minimum", -1)):
        if sign * schema.get(keyword, 0) >= FAR:
            schema.setdefault(other, sign * MAX_BOUND)


def _rounded(bound: float, inward: float, *, is_open: bool = False) -> float:
    """The next float that is not outside."""
    nearest = float(bound)
    is_inside = not is_open if nearest == bound else (nearest > bound) == (inward > 0)
    return nearest if is_inside else math.nextafter(nearest, inward)


def _has_names_beside_others(schema: dict[str, Any]) -> bool:
    """Whether an object may have names beside those listed: the library takes `"\\u0061"` for another than `"a"`."""
    lists = schema.get("properties") or schema.get("patternProperties")
    return bool(lists) and schema.get("additionalProperties") is not False

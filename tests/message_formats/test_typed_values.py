"""What plain text stands for, by the schema of its parameter."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.message_formats.literals import json_of_literal
from quire.message_formats.tools import Tool
from quire.message_formats.typed_values import ANY, item_schema, property_schema, value_type

DEFINITIONS = {"size": {"enum": ["S", "L", 5]}, "loop": {"$ref": "#/$defs/loop"}}


def typed(schema: Any, text: str) -> Any:
    tool = Tool(name="f", parameters={"properties": {"x": schema}, "$defs": DEFINITIONS})
    return json.loads(value_type(tool, "x").json(text))


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, " 5 ", " 5 "),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "integer"}, " 5\n", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "number"}, "1e2", 100.0),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "null"}, "None", None),
        ({"type": "array"}, "['a', (1, 2), None]", ["a", [1, 2], None]),
        ({"type": "object"}, "{'a': {'b': 'it\\'s'}}", {"a": {"b": "it's"}}),
        ({"type": "object"}, '{"a": NaN}', '{"a": NaN}'),
        ({"type": "object"}, '{"a": -1e999}', '{"a": -1e999}'),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "007", "007"),
        ({"type": ["string", "integer"]}, "7", 7),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"type": "string", "nullable": True}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, '"x"', '"x"'),
        ({"oneOf": [{"type": "array"}, {"type": "string"}]}, "[1]", [1]),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "integer"}]}, "5", 5),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, "1"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": None}, "None", None),
        ({"$ref": "#/$defs/size"}, "5", 5),
        ({"$ref": "#/$defs/size"}, "S", "S"),
        ({"$ref": "#/$defs/loop"}, "5", 5),
        ({"$ref": "#/$defs/none"}, "a", "a"),
        ({}, "5", 5),
        ({}, "a", "a"),
        (True, "[1, 2]", [1, 2]),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_text_is_what_the_schema_says(schema: Any, text: str, expected: Any) -> None:
    assert typed(schema, text) == expected


def test_parameters_without_a_schema() -> None:
    assert value_type(None, "x").kinds == ANY
    assert value_type(Tool(name="f", parameters={"additionalProperties": {"type": "string"}}), "x").is_text
    assert value_type(Tool(name="f", parameters={"properties": []}), "x").kinds == ANY


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("'a\\n\\x41\\u00e9\\U0001f600\\q'", "a\nA\u00e9\U0001f600\\q"),
        ("'''a'b\n'''", "a'b\n"),
        ('"\\ud83d\\ude00"', "\U0001f600"),
        ("''", ""),
        ("(1,)", [1]),
        ("(1)", 1),
        ("()", []),
        ("[1, -2.5, +3, .5, 1_000, 2., ]", [1, -2.5, 3, 0.5, 1000, 2.0]),
        ("{1: 'a', 'b': [], }", {"1": "a", "b": []}),
    ],
)
def test_values_of_python_are_read(text: str, expected: Any) -> None:
    found = json_of_literal(text)
    assert found is not None
    assert json.loads(found) == expected


@pytest.mark.parametrize(
    "text",
    ["", "a", "f()", "1 + 1", "[1", "'a", "'a\\", "{'a'}", "{[1]: 2}", "b'x'", "nan", "inf", "1e999", "0x1", "01",
     "1 2", "'\\U00110000'", "[" * 200 + "]" * 200, "__import__('os')"],
)  # fmt: skip
def test_nothing_else_is_a_value(text: str) -> None:
    assert json_of_literal(text) is None


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf"])
def test_schemas_that_hold_each_other_cost_no_more_than_their_size(keyword: str) -> None:
    names = [f"n{index}" for index in range(12)]
    node = {keyword: [{"$ref": f"#/$defs/{name}"} for name in names], "type": ["object", "null"]}
    root = {"$defs": {name: dict(node) for name in names}, "properties": {"a": node}}
    assert value_type(Tool(name="f", parameters=root), "a").kinds == {"object", "null"}
    assert property_schema(node, "b", root) is True  # both would take years if they followed every path
    assert item_schema(node, "", root) is True


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@settings(deadline=None)
@given(values)
def test_what_python_writes_is_read_back(value: Any) -> None:
    found = json_of_literal(repr(value))
    assert found is not None
    assert json.loads(found) == value

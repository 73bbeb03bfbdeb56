"""Calls whose arguments are elements inside elements: values by the schema, and grammars of them."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from quire.errors import InvalidParameter
from quire.message_formats.grammars.call_grammar import CallGrammar
from quire.message_formats.tools import Tool
from tests.message_formats.reading import Reading, marked, message_format, read_everyhow
from tests.message_formats.test_tagged_grammar import TaggedWalker
from tests.message_formats.test_transcripts import spaced

TOKENS = ("]<]minimax[>[",)
SIZES = {"type": "array", "maxItems": 2, "items": {"type": ["integer", "null"], "minimum": 0}}
ORDER = {
    "type": "object",
    "$defs": {"note": {"type": "string", "maxLength": 5}},
    "properties": {
        "id": {"type": "integer", "minimum": 1, "maximum": 99},
        "note": {"$ref": "#/$defs/note"},
        "kind": {"enum": ["new", "7", 7, True]},
        "address": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 4}, "zip": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "lines": {
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {"sku": {"type": "string", "maxLength": 3}, "sizes": SIZES},
                "required": ["sku"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["id", "lines"],
    "additionalProperties": False,
}
TOOL = Tool(name="order", parameters=ORDER)


def call(elements: str, name: str = "order") -> str:
    return spaced(f'@<tool_call>\n@<invoke name="{name}">{elements}@</invoke>\n@</tool_call>')


def arguments(elements: str, schema: dict[str, Any] = ORDER) -> Any:
    tools = {"order": Tool(name="order", parameters=schema)}
    message = read_everyhow(message_format("minimax_m3"), call(elements), tokens=TOKENS, tools=tools)
    assert not message.text
    (found,) = message.tool_calls
    return json.loads(found.arguments)


def test_objects_and_arrays_are_elements() -> None:
    written = (
        "@<id>42@</id>@<note>a <b> & \n@</note>@<kind>7@</kind>\n@<address>@<city>Oslo@</city>@<zip>150@</zip>"
        "@</address>@<lines>@<item>@<sku>007@</sku>@<sizes>@<item>1@</item>@<item>L@</item>@</sizes>@</item>\n"
        "@<item>@<sku>x@</sku>@<sizes>@</sizes>@</item>@</lines>"
    )
    assert arguments(written) == {
        "id": 42,
        "note": "a <b> & \n",
        "kind": "7",
        "address": {"city": "Oslo", "zip": 150},
        "lines": [{"sku": "007", "sizes": [1, "L"]}, {"sku": "x", "sizes": []}],
    }


ANY_OF = {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"zip": {"type": "string"}}}]}


@pytest.mark.parametrize(
    ("schema", "element", "value"),
    [
        (True, "@<item>1@</item>@<item>2@</item>", [1, 2]),
        (True, "@<a>1@</a>@<item>2@</item>", {"a": 1, "item": 2}),
        ({"type": "object"}, "@<item>1@</item>", {"item": 1}),
        ({"type": "array"}, "", []),
        ({"type": "object"}, "\n", {}),
        ({"type": "string"}, "", ""),
        ({"type": ["string", "array"]}, "", ""),
        ({"type": ["null", "integer"]}, "", None),
        (ANY_OF, "@<zip>0150@</zip>", {"zip": "0150"}),
        (ANY_OF, "null", None),
        ({"type": "object", "additionalProperties": {"type": "string"}}, "@<n>1@</n>", {"n": "1"}),
        ({"type": "array", "items": {"type": "string"}}, "@<item>1@</item>", ["1"]),
        ({"type": "integer"}, "many", "many"),
        ({"type": "array"}, '[1, "a"]', [1, "a"]),
    ],
)
def test_what_an_element_stands_for_is_what_the_schema_allows(schema: Any, element: str, value: Any) -> None:
    found = arguments(f"@<x>{element}@</x>", {"type": "object", "properties": {"x": schema}})
    assert found == {"x": value}


@pytest.mark.parametrize(
    "elements",
    [
        "@<id>1@<x>2@</x> and@</id>",
        "@<id>1",
        "@<id>1@</note>",
        "@<address>@<city>x@</city>@<city>y@</city>@</address>",
        "@<lines>@<line>1@</line>@</lines>",
        "@<id>1@</id> and so on",
        "@<id>1@</id>@</address>",
        "@<lines>" + "@<item>" * 200 + "@</item>" * 200 + "@</lines>",
    ],
)
def test_elements_that_are_none_stay_text(elements: str) -> None:
    for tokens in (TOKENS, ()):
        reading = Reading(message_format("minimax_m3"), call(elements), tokens=tokens, tools={"order": TOOL})
        message = reading.message(num_single=20)
        assert message.tool_calls == []
        assert "".join(message.text.split()) == "".join(call(elements).split())


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
def test_what_grammars_allow_reads_as_calls_with_valid_arguments(as_tokens: bool) -> None:
    walker, chance = TaggedWalker("minimax_m3", as_tokens=as_tokens), random.Random(3)
    grammar = CallGrammar(walker.marks, [TOOL], parallel=False)
    assert grammar.warnings == []
    text = grammar.text(walker.calls.several(grammar))
    for _ in range(12):
        message = walker.read(walker.walk(text, chance), {"order": TOOL})
        assert not message.text
        (found,) = message.tool_calls
        jsonschema.validate(json.loads(found.arguments), ORDER)


def test_the_grammar_takes_what_the_template_writes_and_no_other_call() -> None:
    walker = TaggedWalker("minimax_m3", as_tokens=True)
    grammar = CallGrammar(walker.marks, [TOOL])
    text = grammar.text(walker.calls.several(grammar))
    lines = "@<lines>@<item>@<sku>a@</sku>@</item>@</lines>"
    assert walker.takes(text, marked(walker.marks, call("@<id>4@</id>" + lines)))
    for wrong in ("@<id>x@</id>" + lines, "@<id>4@</id>", "@<id>4@</id>@<lines>@</lines>", lines + "@<id>4@</id>"):
        assert not walker.takes(text, marked(walker.marks, call(wrong)))


@pytest.mark.parametrize("family", ["minimax_m3", "gemma4", "functiongemma"])
def test_schemas_that_hold_each_other_make_no_large_grammar(family: str) -> None:
    walker = TaggedWalker(family, as_tokens=True)
    node = {"type": "object", "properties": {f"p{index}": {"$ref": "#/$defs/node"} for index in range(8)}}
    tool = Tool(name="f", parameters={"$defs": {"node": node}, "properties": {"a": {"$ref": "#/$defs/node"}}})
    grammar = CallGrammar(walker.marks, [tool])
    assert len(grammar.text(walker.calls.several(grammar))) < 200_000
    assert len(grammar.warnings) == 1


def test_a_property_whose_name_cannot_be_written_is_named() -> None:
    walker = TaggedWalker("minimax_m3", as_tokens=True)
    schema = {"type": "object", "properties": {"a>b": {"type": "string"}, "c": {"type": "string"}}}
    grammar = CallGrammar(walker.marks, [Tool(name="f", parameters=schema)])
    walker.calls.several(grammar)
    assert "cannot write this name" in grammar.warnings[0]
    strict = CallGrammar(
        walker.marks, [Tool(name="f", parameters={**schema, "additionalProperties": False}, strict=True)]
    )
    with pytest.raises(InvalidParameter, match="a>b"):
        walker.calls.several(strict)

"""What is refused of a JSON Schema before the library sees it, and where the message says it stands."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import InvalidParameter
from quire.structured.json_schema import MAX_COUNT, REFUSED, JsonSchema, parse_json

TREE: Any = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["next"],
}
ENDS: list[Any] = [
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}},
    {"$ref": "#x", "$defs": {"a": {"$anchor": "x", "type": "string"}}},
    {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {}}},
    TREE,
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"type": "array", "items": {"$ref": "#"}},
    {"type": "array", "prefixItems": [{}], "items": {"$ref": "#"}, "minItems": 1},
    {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"properties": {"a": {"$ref": "#/elsewhere/b"}}, "required": ["a"], "elsewhere": {"b": {"type": "string"}}},
    {"uniqueItems": False, "unevaluatedProperties": {}},
    {"properties": {"not": {"type": "string"}}},
    {"const": {"if": 1}},
    {"enum": [{"not": {}}]},
    True,
]
ENDLESS: list[tuple[Any, str]] = [
    ({"$ref": "#"}, "#/$ref"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "$ref"),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#/properties/a/$ref"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#/items/$ref"),
    ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, "#/prefixItems/0/$ref"),
    ({"anyOf": [{"$ref": "#"}, {"allOf": [{"type": "string"}, {"$ref": "#"}]}]}, "$ref"),
    (
        {"properties": {"a": {"type": "object", "properties": {"b": {"$ref": "#/properties/a"}}, "required": ["b"]}}},
        "/b/",
    ),
]
WRONG: list[tuple[Any, str]] = [
    ({"properties": {"a": {"minItems": 10**9}}}, "'#/properties/a/minItems': minItems must be a whole number"),
    ({"minLength": -1}, "'#/minLength'"),
    ({"minLength": MAX_COUNT + 1}, "'#/minLength'"),
    ({"exclusiveMinimum": True}, "'#/exclusiveMinimum': exclusiveMinimum must be a number"),
    ({"anyOf": []}, "'#/anyOf'"),
    ({"anyOf": [{"type": "string"}, 5]}, "'#/anyOf'"),
    ({"items": [True, "string"]}, "'#/items'"),
    ({"properties": {"a": {"properties": {"b": 5}}}}, "'#/properties/a/properties': properties must be an object of"),
    ({"properties": {"a": {"type": "text"}}}, "'#/properties/a/type': type must be one of array, boolean, "),
    ({"type": ["string", "any"]}, "'#/type'"),
    ({"multipleOf": 0}, "'#/multipleOf': multipleOf must be a number above 0"),
    ({"multipleOf": -1}, "'#/multipleOf'"),
    ({"enum": []}, "'#/enum'"),
    ({"enum": list(range(10_001))}, "'#/enum'"),
    ({"properties": []}, "'#/properties'"),
    ({"required": "a"}, "'#/required'"),
    ({"$defs": {"a/b": {"type": 5}}}, "'#/$defs/a~1b/type'"),
    ({"$ref": "#/$defs/none"}, "refers to nothing"),
    ({"$ref": "#/elsewhere", "elsewhere": {"not": {}}}, "'#/elsewhere/not'"),
    ({"$ref": "http://example.com/x.json"}, "nothing is fetched"),
    ({"$ref": "file:///etc/passwd"}, "nothing is fetched"),
    ({"$ref": "other.json"}, "nothing is fetched"),
    ([], "a schema is an object"),
]


@pytest.mark.parametrize("schema", ENDS, ids=repr)
def test_what_some_output_satisfies_is_let_through(schema: Any) -> None:
    JsonSchema(schema).check()


@pytest.mark.parametrize("order", [1, -1])
def test_a_chain_of_references_is_looked_at_once_or_twice(order: int) -> None:
    class Counting(JsonSchema):
        num_looks = 0

        def _ends(self, schema: dict[str, Any], ends: set[int]) -> bool:
            self.num_looks += 1
            return super()._ends(schema, ends)

    chain = [(str(index), {"$ref": f"#/$defs/{index + 1}"}) for index in range(500)]
    schema = Counting({"$ref": "#/$defs/0", "$defs": dict([*chain, ("500", {"type": "string"})][::order])})
    schema.check()
    assert schema.num_looks <= 2 * len(schema.nodes)


@pytest.mark.parametrize(("schema", "pointer"), ENDLESS, ids=lambda item: repr(item)[:60])
def test_recursion_without_a_base_is_refused_with_its_pointer(schema: Any, pointer: str) -> None:
    with pytest.raises(InvalidParameter, match="has no base") as caught:
        JsonSchema(schema).check()
    assert pointer in caught.value.message


@pytest.mark.parametrize(("schema", "part"), WRONG, ids=lambda item: repr(item)[:60])
def test_what_is_wrong_is_refused_with_its_pointer(schema: Any, part: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        JsonSchema(schema).check()
    assert part in caught.value.message
    assert caught.value.parameter == "structured_outputs.json"


@pytest.mark.parametrize("keyword", sorted(REFUSED))
def test_keywords_that_would_not_be_kept_are_refused_with_what_to_do(keyword: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        JsonSchema({"items": {"anyOf": [{}, {keyword: {"a": 1}}]}}).check()
    assert f"'#/items/anyOf/1/{keyword}': {keyword} is not supported; {REFUSED[keyword]}" in caught.value.message


@pytest.mark.parametrize("number", ["1e999", "-1e309", "1" + "0" * 309])
def test_numbers_beyond_a_float_are_refused_with_their_pointer(number: str) -> None:
    for text, pointer in [
        ('{"type":"number","minimum":%s}', "'#/minimum'"),
        ('{"items":{"const":[1,{"a/b":%s}]}}', "'#/items/const/1/a~1b'"),
        ('{"enum":[1,2,%s]}', "'#/enum/2'"),
        ('{"default":%s}', "'#/default'"),
    ]:
        with pytest.raises(InvalidParameter) as caught:
            parse_json("structured_outputs.json", text % number)
        assert caught.value.message.startswith(f"structured_outputs.json: {pointer}: ")
        assert "beyond the range of numbers" in caught.value.message
    assert parse_json("structured_outputs.json", '{"maximum":1.7e308}') == {"maximum": 1.7e308}
    assert parse_json("structured_outputs.json", '{"maximum":1%s}' % ("0" * 308)) == {"maximum": 10**308}


@pytest.mark.parametrize("text", ["{", "[" * 10**5, '{"a":NaN}', '{"anyOf":[' * 70 + "{}" + "]}" * 70])
def test_what_is_no_json_or_too_deep_is_refused(text: str) -> None:
    with pytest.raises(InvalidParameter, match=r"structured_outputs\.json"):
        parse_json("structured_outputs.json", text)

"""StructuredOutputsParams: one kind, bounded, and refused in words that name the field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire import SamplingParams, StructuredOutputsParams
from quire.errors import InvalidParameter, RequestError, UnsupportedFeature
from quire.structured.params import MAX_CHARACTERS, MAX_CHOICES

WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({}, "structured_outputs", "none of them"),
    ({"json": {}, "regex": "a"}, "structured_outputs", "json and regex"),
    ({"json": 5}, "structured_outputs.json", "got 5"),
    ({"json": {"a": {1, 2}}}, "structured_outputs.json", "not JSON"),
    ({"json": {"a": float("nan")}}, "structured_outputs.json", "not JSON"),
    ({"json": "  "}, "structured_outputs.json", "blank"),
    ({"json": " " * (MAX_CHARACTERS["json"] + 1)}, "structured_outputs.json", str(MAX_CHARACTERS["json"])),
    ({"json": {"a": "x" * 10**7}}, "structured_outputs.json", str(MAX_CHARACTERS["json"])),
    ({"regex": ""}, "structured_outputs.regex", "blank"),
    ({"regex": 5}, "structured_outputs.regex", "a string"),
    ({"regex": "a\0"}, "structured_outputs.regex", "U+0000"),
    ({"regex": "\ud800"}, "structured_outputs.regex", "U+D800"),
    ({"regex": "a" * 10**4}, "structured_outputs.regex", str(MAX_CHARACTERS["regex"])),
    ({"choice": []}, "structured_outputs.choice", "1 to 4096"),
    ({"choice": "abc"}, "structured_outputs.choice", "a list of strings"),
    ({"choice": ["a", 5]}, "structured_outputs.choice", "got 5"),
    ({"choice": ["a", ""]}, "structured_outputs.choice", "empty"),
    ({"choice": ["a"] * (MAX_CHOICES + 1)}, "structured_outputs.choice", str(MAX_CHOICES)),
    ({"choice": ["a" * 10**6]}, "structured_outputs.choice", str(MAX_CHARACTERS["choice"])),
    ({"grammar": ""}, "structured_outputs.grammar", "blank"),
    ({"json_object": False}, "structured_outputs.json_object", "True or left out"),
    ({"json": {}, "disable_any_whitespace": 1}, "structured_outputs.disable_any_whitespace", "True or False"),
    (
        {"json_object": True, "disable_additional_properties": True},
        "structured_outputs.disable_additional_properties",
        "no effect with json_object",
    ),
    ({"regex": "a", "disable_any_whitespace": True}, "structured_outputs.disable_any_whitespace", "regex"),
    (
        {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "},
        "structured_outputs.whitespace_pattern",
        "no effect",
    ),
    *(
        ({"json": {}, "whitespace_pattern": pattern}, "structured_outputs.whitespace_pattern", "JSON's white space")
        for pattern in ("x", " |x", r"\S", ".", r"[\t-\r]", "[^a]", "[(]", r"\xa0", r"(?x) ", " ++a")
    ),
]


@pytest.mark.parametrize(("fields", "parameter", "part"), WRONG, ids=lambda item: repr(item)[:40])
def test_wrong_fields_are_refused_by_name(fields: dict[str, Any], parameter: str, part: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        StructuredOutputsParams(**fields)
    assert caught.value.parameter == parameter
    assert part in caught.value.message
    assert len(caught.value.message) < 400


def test_a_mapping_is_taken_and_its_unknown_fields_are_named() -> None:
    params = SamplingParams(structured_outputs={"choice": ["a", "b", "a"]})  # type: ignore[arg-type]
    assert params.structured_outputs == StructuredOutputsParams(choice=["a", "b"])
    with pytest.raises(InvalidParameter, match=r"no field 'jsn'; did you mean 'json'\?"):
        SamplingParams(structured_outputs={"jsn": {}})  # type: ignore[arg-type]
    for given in (5, "json", [1]):
        with pytest.raises(InvalidParameter, match="structured_outputs"):
            SamplingParams(structured_outputs=given)  # type: ignore[arg-type]


def test_a_schema_keeps_the_order_of_its_properties() -> None:
    schema = {"properties": {"z": {}, "a": {}}}
    assert StructuredOutputsParams(json=schema).json == '{"properties":{"z":{},"a":{}}}'
    assert StructuredOutputsParams(json=schema) == StructuredOutputsParams(json='{"properties":{"z":{},"a":{}}}')


def test_it_crosses_processes_unchanged() -> None:
    for params in (StructuredOutputsParams(json={"a": 1}), StructuredOutputsParams(choice=["a", "\u00fc"])):
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=StructuredOutputsParams)
        assert again == params
        assert hash(again) == hash(params)


def test_what_contradicts_it_is_refused() -> None:
    form: Any = {"regex": "a"}
    with pytest.raises(InvalidParameter, match="ignore_eos does not go with structured_outputs"):
        SamplingParams(structured_outputs=form, ignore_eos=True)
    with pytest.raises(UnsupportedFeature, match="structured_outputs does not go with use_beam_search"):
        SamplingParams(structured_outputs=form, use_beam_search=True, temperature=0, n=2)


@pytest.mark.parametrize("name", ["guided_json", "guided_regex", "guided_choice", "guided_grammar"])
def test_old_names_are_answered_with_the_new_one(name: str) -> None:
    with pytest.raises(RequestError, match="structured_outputs"):
        SamplingParams(**{name: "a"})

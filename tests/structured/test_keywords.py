"""The table of docs/structured_output.md: what it says is kept is kept, what it says is refused is refused."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from quire.errors import RequestError
from quire.structured.backend import open_backend
from quire.structured.checker import GrammarChecker
from quire.structured.json_expression import FORMATS
from quire.structured.json_schema import KEPT, REFUSED
from quire.structured.params import StructuredOutputsParams
from tests.structured.conftest import TOKENS, VOCABULARY

PAGE = Path(__file__).parents[2] / "docs" / "structured_output.md"
SMALL = {"type": "string", "maxLength": 3}
EXAMPLES: dict[str, list[Any]] = {
    "$anchor": [{"$ref": "#x", "$defs": {"a": {"$anchor": "x", "type": "boolean"}}}],
    "$defs": [{"$ref": "#/$defs/a", "$defs": {"a": {"type": "boolean"}}}],
    "$id": [{"$id": "http://example.com/a", "type": "boolean"}],
    "$ref": [{"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}]}],
    "additionalItems": [{"items": [{"type": "null"}], "type": "array", "additionalItems": False}],
    "additionalProperties": [{"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 2}],
    "allOf": [{"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 90}]}],
    "anyOf": [{"anyOf": [{"type": "null"}, {"type": "boolean"}]}],
    "const": [{"const": {"a": [1, None]}}, {"const": "x"}],
    "definitions": [{"$ref": "#/definitions/a", "definitions": {"a": {"type": "boolean"}}}],
    "enum": [{"enum": [1, "a", None, [True]]}],
    "exclusiveMaximum": [{"type": "integer", "minimum": 0, "exclusiveMaximum": 12}],
    "exclusiveMinimum": [{"type": "integer", "exclusiveMinimum": 0, "maximum": 12}],
    "format": [
        {"type": "string", "format": name}
        for name in ("date", "time", "date-time", "duration", "ipv4", "ipv6", "uuid", "email", "hostname", "uri")
    ],
    "items": [{"type": "array", "items": {"type": "boolean"}, "maxItems": 3}],
    "maxItems": [{"type": "array", "items": {"type": "null"}, "maxItems": 2}],
    "maxLength": [SMALL],
    "maxProperties": [{"type": "object", "maxProperties": 1, "additionalProperties": {"type": "null"}}],
    "maximum": [{"type": "number", "minimum": -2.5, "maximum": 7.25}],
    "minItems": [{"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 3}],
    "minLength": [{"type": "string", "minLength": 2, "maxLength": 4}],
    "minProperties": [
        {"type": "object", "minProperties": 1, "maxProperties": 1, "additionalProperties": {"type": "null"}}
    ],
    "minimum": [{"type": "integer", "minimum": -5, "maximum": 5}],
    "multipleOf": [{"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100}],
    "oneOf": [{"oneOf": [{"type": "null"}, {"type": "boolean"}]}],
    "pattern": [{"type": "string", "pattern": "^(ab|c){1,3}$"}],
    "patternProperties": [
        {
            "type": "object",
            "patternProperties": {"^a.?$": {"type": "null"}},
            "additionalProperties": False,
            "maxProperties": 1,
        }
    ],
    "prefixItems": [{"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": False}],
    "properties": [{"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False}],
    "required": [
        {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": False}
    ],
    "type": [{"type": ["boolean", "null"]}, {"type": "integer", "minimum": 0, "maximum": 9}],
}
MAX_TOKENS = 400


def rows() -> dict[str, str]:
    return dict(
        re.findall(r"^\| `([^`]+)` \| ((?:kept|refused).*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    )


def outputs(checker: GrammarChecker, schema: Any, count: int) -> list[str]:
    """Texts that random draws under the masks give, of those that end."""
    backend = open_backend("llguidance", VOCABULARY)
    start = backend.compile(checker.check(StructuredOutputsParams(json=schema)))
    masks = np.zeros((1, -(-len(TOKENS) // 32)), np.int32)
    ended = []
    for seed in range(count):
        rng, matcher, text = random.Random(seed), start.clone(), b""
        for _ in range(MAX_TOKENS):
            backend.fill_masks([(matcher, 0)], masks)
            assert not matcher.error
            allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8)[0], bitorder="little")).tolist()
            token_id = 0 if 0 in allowed and rng.random() < 0.3 else rng.choice(allowed)
            if token_id == 0:
                ended.append(text.decode())
                break
            text += TOKENS[token_id]
            matcher.advance(token_id)
    return ended


def allows(checker: GrammarChecker, schema: Any, text: str) -> bool:
    """Whether a text can be written under the masks, a byte at a time, and ended there."""
    backend = open_backend("llguidance", VOCABULARY)
    matcher = backend.compile(checker.check(StructuredOutputsParams(json=schema)))
    masks = np.zeros((1, -(-len(TOKENS) // 32)), np.int32)
    for token_id in [*(byte + 1 for byte in text.encode()), 0]:
        backend.fill_masks([(matcher, 0)], masks)
        if matcher.error or not masks[0, token_id // 32] >> (token_id % 32) & 1:
            return False
        matcher.advance(token_id)
    return True


def test_the_table_is_that_of_the_code() -> None:
    table = rows()
    assert {name for name, what in table.items() if what.startswith("kept")} == set(KEPT)
    assert {name: what.removeprefix("refused: ") for name, what in table.items() if what.startswith("ref")} == REFUSED


def test_every_keyword_that_is_kept_has_examples() -> None:
    assert set(EXAMPLES) == set(KEPT)
    assert all(f'"{keyword}"' in json.dumps(schema) for keyword, found in EXAMPLES.items() for schema in found)


@pytest.mark.parametrize("keyword", sorted(EXAMPLES))
def test_outputs_validate(checker: GrammarChecker, keyword: str) -> None:
    for schema in EXAMPLES[keyword]:
        texts = outputs(checker, schema, 20)
        assert len(texts) >= 5, f"{len(texts)} of 20 ended"
        validator = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        if keyword == "additionalItems":
            validator = jsonschema.Draft201909Validator(schema)  # a newer draft has no such keyword
        for text in texts:
            if '"0000-' not in text:  # a year that RFC 3339 has and Python has not
                validator.validate(json.loads(text))


def test_formats_that_are_not_in_the_table_are_refused(checker: GrammarChecker) -> None:
    listed = set(re.split(r",\s|;", rows()["format"].partition(": ")[2])) - {""}
    assert {schema["format"] for schema in EXAMPLES["format"]} <= listed
    for name in ("color", "json-pointer", "regex", "iri", "idn-email", "uri-reference", "relative-json-pointer"):
        with pytest.raises(RequestError, match=f"Unknown format: {name}"):
            checker.check(StructuredOutputsParams(json={"type": "string", "format": name}))


@pytest.mark.parametrize(
    "name",
    [
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "int32",
        "ipv4",
        "ipv6",
        "iri",
        "regex",
        "time",
        "uri",
        "uuid",
    ],
)
def test_the_list_of_formats_is_the_library_s(checker: GrammarChecker, name: str) -> None:
    params = StructuredOutputsParams(json={"type": "string", "format": name})
    if name in FORMATS:
        checker.check(params)
    else:
        with pytest.raises(RequestError, match="Unknown format"):
            checker.check(params)


OPEN: dict[str, Any] = {"properties": {"a": {"type": "null"}}, "type": "object"}
SPELLED: list[tuple[dict[str, Any], str]] = [
    (OPEN, '{"\\u0061": 1}'),
    ({**OPEN, "additionalProperties": {"type": "boolean"}}, '{"a": null, "\\u0061": true}'),
    ({"patternProperties": {"^a": {"type": "null"}}, "type": "object"}, '{"\\u0061b": 1}'),
    ({"properties": {"\n": {"type": "null"}}, "type": "object"}, '{"\\u000a": 1}'),
    ({"type": "array", "items": OPEN}, '[{"\\u0061": 1}]'),
]


@pytest.mark.parametrize(("schema", "text"), SPELLED, ids=repr)
def test_a_listed_name_cannot_be_spelled_as_one_that_is_not_listed(
    checker: GrammarChecker, schema: dict[str, Any], text: str
) -> None:
    assert not jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    assert not allows(checker, schema, text)


def test_control_characters_are_escaped_where_every_name_is_listed(checker: GrammarChecker) -> None:
    text = '{"a": "\\u001b[0m"}'
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert allows(checker, {**schema, "additionalProperties": False}, text)
    assert allows(checker, {"type": "object"}, text)
    assert not allows(checker, schema, text)


DATES = [
    ("date", "2023-02-29", False),
    ("date", "1900-02-29", False),
    ("date", "2000-02-29", True),
    ("date", "2024-02-29", True),
    ("date", "2023-02-28", True),
    ("date", "2024-04-31", False),
    ("date-time", "2023-02-29T10:00:00Z", False),
    ("date-time", "2024-02-29t23:59:59.25+23:59", True),
    ("date-time", "1998-12-31T23:58:60Z", False),
    ("time", "22:59:60Z", False),
    ("time", "22:59:59z", True),
    ("time", "24:00:00Z", False),
]


@pytest.mark.parametrize(("name", "text", "is_one"), DATES)
def test_dates_are_days_that_there_are(checker: GrammarChecker, name: str, text: str, is_one: bool) -> None:
    schema = {"type": "string", "format": name}
    assert allows(checker, schema, json.dumps(text)) is is_one
    assert allows(checker, {**schema, "pattern": "^2"}, json.dumps(text)) is (is_one and text[0] == "2")


@pytest.mark.parametrize("number", [2**53 + 1, -(2**53) - 1])
def test_bounds_between_two_floats_are_kept(checker: GrammarChecker, number: int) -> None:
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        schema = {"type": "integer", keyword: number}
        validator = jsonschema.Draft202012Validator(schema)
        near = [number + step for step in range(-3, 4)]
        assert not [one for one in near if allows(checker, schema, str(one)) and not validator.is_valid(one)]
        far = number + (1025 if "min" in keyword.lower() else -1025)
        assert allows(checker, schema, str(far))


def test_a_repeated_name_is_not_counted_as_two(checker: GrammarChecker) -> None:
    with pytest.raises(RequestError, match="'#/minProperties': an output may repeat a name"):
        checker.check(StructuredOutputsParams(json={"type": "object", "minProperties": 2}))
    required = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "minProperties": 2}
    assert allows(checker, required, '{"a": null, "b": 1}')
    assert not allows(checker, required, '{"a": null}')
    assert not allows(checker, required, '{"a": null, "a": null}')


CONSTANTS = [2**53, -(2**53), 2**53 + 2, 2**60, 0.1, -0.0, 1e22, 5e-7, 123.25, 1.0, 1234567890.12345]
INEXACT = [2**53 + 1, -(2**53) - 1, 2**63 - 1, 2**63, 10**23 + 1, 1.8230687000260773e-09, 8856321087324143.0, 1e300]


@pytest.mark.parametrize("number", CONSTANTS)
def test_numbers_of_enum_and_const_are_written_as_they_are(checker: GrammarChecker, number: float) -> None:
    for schema in ({"const": number}, {"enum": [number]}):
        assert [json.loads(text) for text in outputs(checker, schema, 1)] == [number]


@pytest.mark.parametrize("number", INEXACT)
def test_numbers_that_would_be_changed_are_refused(checker: GrammarChecker, number: float) -> None:
    for schema, pointer in (
        ({"const": number}, "#/const"),
        ({"properties": {"a": {"enum": [1, {"b": [number]}]}}}, "#/properties/a/enum/1/b/0"),
    ):
        with pytest.raises(RequestError, match=f"'{pointer}': .* has digits that would be lost"):
            checker.check(StructuredOutputsParams(json=schema))


FAR = [2**63 - 1, 2**63, 2**64 - 1, 1e30, 1e300]


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("far", FAR)
def test_bounds_beyond_64_bits_are_moved_inwards(checker: GrammarChecker, kind: str, far: float) -> None:
    most = str(2**63 - 1024)
    lower, upper = {"type": kind, "minimum": -far}, {"type": kind, "maximum": far}
    both, open_ends = {**lower, **upper}, {"type": kind, "exclusiveMinimum": -far, "exclusiveMaximum": far}
    for schema in (lower, upper, both, open_ends, {"type": kind, "minimum": 0, "maximum": far}):
        validator = jsonschema.Draft202012Validator(schema)
        texts = ["0", most, f"-{most}", *(f"{sign}{2**63 + step}" for sign in ("", "-") for step in (-1, 0, 1, 2048))]
        assert allows(checker, schema, "0")
        assert allows(checker, schema, most)
        assert allows(checker, schema, f"-{most}") is (schema.get("minimum") != 0)
        assert not [one for one in texts if allows(checker, schema, one) and not validator.is_valid(json.loads(one))]


@pytest.mark.parametrize("number", [2**53, 2**54, 2**59])
def test_large_exclusive_bounds_are_not_allowed_themselves(checker: GrammarChecker, number: int) -> None:
    for bound in (number, -number):
        for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
            schema, inside = {"type": "integer", keyword: bound}, bound + (999 if "Min" in keyword else -999)
            assert not allows(checker, schema, str(bound))
            assert allows(checker, schema, str(inside))


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("far", [10**18 - 1, 10**18, 10**18 + 1, 5 * 10**18, 2**63 - 2048])
def test_a_far_bound_needs_no_other_one(checker: GrammarChecker, kind: str, far: int) -> None:
    for schema in ({"minimum": far}, {"exclusiveMinimum": far}, {"maximum": -far}, {"exclusiveMaximum": -far}):
        written = outputs(checker, {"type": kind, **schema}, 6)
        assert written
        for text in written:
            jsonschema.validate(json.loads(text), {"type": kind, **schema})


@pytest.mark.parametrize("pattern", [r"\s*", r"[\s\n]{0,2}", r"(?: |\t)*"])
def test_white_space_of_a_request_s_own_is_that_of_json(checker: GrammarChecker, pattern: str) -> None:
    schema = {"type": "array", "items": {"type": "null"}, "maxItems": 1}
    params = StructuredOutputsParams(json=schema, whitespace_pattern=pattern)
    start = open_backend("llguidance", VOCABULARY).compile(checker.check(params))
    for text, is_json in (("[null]", True), ("[ null]", True), ("[\xa0null]", False), ("[\x0bnull]", False)):
        matcher = start.clone()
        for byte in text.encode():
            matcher.advance(TOKENS.index(bytes([byte]), 1))
        assert bool(matcher.error) is not is_json


@pytest.mark.parametrize(
    ("keyword", "bound"),
    [
        ("minimum", 2**64),
        ("exclusiveMinimum", 2**63 - 1024),
        ("exclusiveMinimum", 1e30),
        ("maximum", -(2**63)),
        ("exclusiveMaximum", -1e30),
    ],
)
def test_bounds_behind_which_no_number_is_kept_are_refused(checker: GrammarChecker, keyword: str, bound: float) -> None:
    with pytest.raises(RequestError, match=f"'#/{keyword}': no number beyond"):
        checker.check(StructuredOutputsParams(json={"type": "integer", keyword: bound}))

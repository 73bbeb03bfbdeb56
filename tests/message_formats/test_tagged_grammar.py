"""Grammars of calls between tags: what they allow reads as calls with valid arguments, and they take what templates
write."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from quire.errors import InvalidParameter
from quire.message_formats.calls.function_gemma import GemmaCalls
from quire.message_formats.calls.nested_tags import NestedTags
from quire.message_formats.calls.pythonic import PythonicCalls
from quire.message_formats.calls.tagged import TaggedCalls
from quire.message_formats.format import MessageFormat
from quire.message_formats.formats import CALLS
from quire.message_formats.grammars.call_grammar import CallGrammar
from quire.message_formats.marks import Marks
from quire.message_formats.parser import MessageParser
from quire.message_formats.parts import Message
from quire.message_formats.tools import Tool
from quire.message_formats.typed_values import ANY
from quire.structured.grammar import Vocabulary
from quire.structured.llguidance_backend import LLGuidance
from quire.structured.llguidance_source import grammar_of
from quire.structured.params import StructuredOutputsParams
from tests.message_formats.families import Tokens
from tests.message_formats.reading import marked
from tests.message_formats.test_call_grammar import Walker
from tests.message_formats.test_transcripts import FAMILIES, dsml

TOKENS: dict[str, Sequence[str]] = {family.calls: family.tokens for family in FAMILIES}
TAGGED = sorted(name for name, calls in CALLS.items() if isinstance(calls, TaggedCalls) and name in TOKENS)
WEATHER = Tool(
    name="weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "unit": {"enum": ["C", "F", 5]},
            "count": {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
NOW = Tool(name="now", parameters={"type": "object", "properties": {}})
BY_NAME = {tool.name: tool for tool in (WEATHER, NOW)}


class TaggedWalker(Walker):
    """With those tokens that the family's tokenizer has."""

    def __init__(self, family: str, *, as_tokens: bool) -> None:
        super().__init__(family, as_tokens=False)
        found = Tokens(TOKENS[family] if as_tokens else ())
        self.marks = Marks((*self.calls.markers, *TOKENS[family]), found)  # type: ignore[arg-type]
        self.end = 256 + len(found.added_tokens)
        names = [bytes([byte]) for byte in range(256)] + [text.encode() for text in found.added_tokens.values()]
        special = frozenset([*found.added_tokens, self.end])
        vocabulary = Vocabulary(tokens=[*names, b"<end>"], special_ids=special, eos_token_ids=(self.end,))
        self.backend = LLGuidance(vocabulary)
        self.texts = [
            *names[:256],
            *(self.marks(text).encode("utf-8", "surrogatepass") for text in found.added_tokens.values()),
        ]

    def read(self, text: str, tools: Mapping[str, Tool] = BY_NAME) -> Message:
        parser = MessageParser(
            MessageFormat(calls=self.calls), self.marks, tools=tools, new_id=str, calls_as_they_come=True
        )
        return Message.of([part for piece in text for part in parser.feed(piece)] + parser.finish())


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("family", TAGGED)
def test_what_grammars_allow_reads_as_calls_with_valid_arguments(family: str, as_tokens: bool) -> None:
    walker, chance = TaggedWalker(family, as_tokens=as_tokens), random.Random(1)
    grammar = CallGrammar(walker.marks, list(BY_NAME.values()), parallel=False)
    calls = walker.calls
    starts = [("", calls.several(grammar))]
    starts += [(walker.marks(begin), calls.rest(grammar, begin)) for begin in calls.begins]
    for begin, start in starts * 3:
        text = begin + walker.walk(grammar.text(start), chance)
        message = walker.read(text)
        assert message.tool_calls, text
        assert not message.text, text
        for call in message.tool_calls:
            jsonschema.validate(json.loads(call.arguments), dict(BY_NAME[call.name].parameters))


LINED = [name for name in TAGGED if name != "glm45"]
"""Whose transcripts have the lines that the grammar writes."""


@pytest.mark.parametrize("family", LINED)
def test_grammars_take_what_the_template_writes(family: str) -> None:
    walker = TaggedWalker(family, as_tokens=True)
    code = next(one.code for one in FAMILIES if one.calls == family)
    tools = [Tool(name="weather", parameters={"type": "object", "properties": {"city": {"type": "string"}}})]
    grammar = CallGrammar(walker.marks, tools)
    text = grammar.text(walker.calls.several(grammar))
    written = marked(walker.marks, code)
    assert walker.takes(text, written)
    assert not walker.takes(text, written.replace("weather", "other"))


@pytest.mark.parametrize("family", LINED)
def test_a_tool_that_is_only_read_has_its_parameters_with_any_value(family: str) -> None:
    walker = TaggedWalker(family, as_tokens=True)
    code = marked(walker.marks, next(one.code for one in FAMILIES if one.calls == family))
    schema = {"properties": {"days": {"type": "integer"}, "city": {"type": "integer"}}, "required": ["days"]}
    grammar = CallGrammar(walker.marks, [Tool(name="weather", parameters=schema, strict=False)])
    assert walker.takes(grammar.text(walker.calls.several(grammar)), code)


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("value", "is_taken"),
    [
        ('true">any "text"', True),
        ('true">null', True),
        ('false">null', True),
        ('false">"text"', True),
        ('false">text', False),
        ('">text', False),
    ],
)
def test_what_a_value_is_stands_before_it(value: str, is_taken: bool, as_tokens: bool) -> None:
    walker = TaggedWalker("deepseek_v32", as_tokens=as_tokens)
    schema = {"type": "object", "properties": {"note": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}
    grammar = CallGrammar(walker.marks, [Tool(name="f", parameters={**schema, "required": ["note"]})])
    text = grammar.text(walker.calls.several(grammar))
    call = f'<@invoke name="f">\n<@parameter name="note" string="{value}</@parameter>\n</@invoke>'
    written = marked(walker.marks, dsml(f"<@function_calls>\n{call}\n</@function_calls>"))
    assert walker.takes(text, written) is is_taken
    if is_taken:
        (found,) = walker.read(written).tool_calls
        inside = value.partition(">")[2]
        assert json.loads(found.arguments)["note"] == (inside if value.startswith("true") else json.loads(inside))


TYPED: list[dict[str, Any]] = [
    {"type": "boolean", "enum": ["ab", True]},
    {"type": "string", "enum": ["a", None]},
    {"type": ["string", "null"], "enum": ["a", None, 5, {"b": 1}]},
    {"type": "integer", "enum": ["x", 7, 1.5]},
    {"type": "number", "allOf": [{"type": "integer"}]},
    {"anyOf": [{"type": "number"}, {"type": "null"}], "allOf": [{"type": "integer"}]},
]
CONTRADICTIONS = [
    {"type": "boolean", "enum": ["ab"]},
    {"type": "null", "const": "a"},
    {"type": "boolean", "oneOf": [{"type": "string"}]},
    {"allOf": [{"type": "number"}, {"type": "string"}]},
    False,
]
ANY_FORMAT = sorted(CALLS)


def grammar_of_one(walker: Walker, schema: object, *, is_required: bool) -> str:
    """A grammar of calls of a tool with one parameter."""
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"] if is_required else []}
    grammar = CallGrammar(walker.marks, [Tool(name="f", parameters=parameters)], parallel=False)
    return grammar.text(walker.calls.several(grammar))


@pytest.mark.parametrize("family", ANY_FORMAT)
@pytest.mark.parametrize("schema", TYPED, ids=repr)
def test_values_are_those_of_the_declared_types(family: str, schema: dict[str, Any]) -> None:
    walker, chance = Walker(family, as_tokens=True), random.Random(1)
    text = grammar_of_one(walker, schema, is_required=True)
    tools = {"f": Tool(name="f", parameters={"type": "object", "properties": {"a": schema}})}
    for _ in range(4):
        (call,) = walker.read(walker.walk(text, chance), tools).tool_calls
        jsonschema.validate(json.loads(call.arguments)["a"], schema)


@pytest.mark.parametrize("family", ANY_FORMAT)
@pytest.mark.parametrize("schema", CONTRADICTIONS, ids=repr)
def test_what_no_value_can_be_is_left_out_or_refused(family: str, schema: object) -> None:
    walker = Walker(family, as_tokens=True)
    text = grammar_of_one(walker, schema, is_required=False)
    tools = {"f": Tool(name="f", parameters={"type": "object", "properties": {"a": schema}})}
    (call,) = walker.read(walker.walk(text, random.Random(1)), tools).tool_calls
    assert "a" not in json.loads(call.arguments)
    params = StructuredOutputsParams(grammar=grammar_of_one(walker, schema, is_required=True))
    assert "nsatisfiable" in walker.backend.compile(grammar_of(params)).error


NO_JSON = [
    name for name in ANY_FORMAT if isinstance(CALLS[name], TaggedCalls | PythonicCalls | NestedTags | GemmaCalls)
]
NUMBERS: list[dict[str, Any]] = [
    {"type": "number"},
    {"type": ["number", "null"]},
    {"anyOf": [{"type": "number"}, {"type": "null"}]},
]


@pytest.mark.parametrize("family", NO_JSON)
@pytest.mark.parametrize("schema", NUMBERS, ids=repr)
def test_a_number_is_one_that_a_float_holds(family: str, schema: dict[str, Any]) -> None:
    walker = Walker(family, as_tokens=True)
    text = grammar_of_one(walker, schema, is_required=True)
    call = walker.walk(grammar_of_one(walker, {"const": 77777}, is_required=True), random.Random(1))
    for number in ("530E394", "-1e999", "9" * 400, "5e100"):
        assert not walker.takes(text, call.replace("77777", number))
    tools = {"f": Tool(name="f", parameters={"type": "object", "properties": {"a": schema}})}
    for number in ("0", "-12.5", "6.02e23", "-1E-99", "9" * 100 + "." + "9" * 99 + "e99"):
        written = call.replace("77777", number)
        assert walker.takes(text, written)
        (found,) = walker.read(written, tools).tool_calls
        assert json.loads(found.arguments)["a"] == float(number)


@pytest.mark.parametrize(
    "schema",
    [
        *({"pattern": "^a$"}, {"maxLength": 2}, {"minimum": 3}, {"items": {"type": "null"}}),
        *({"allOf": [{"pattern": "^a$"}]}, {"anyOf": [{"maxLength": 2}, {"type": "integer"}]}),
        *({"enum": ["a", "b"], "pattern": "^a$"}, {"enum": ["a", "b"], "allOf": [{"pattern": "^a$"}]}),
    ],
    ids=repr,
)
def test_keywords_without_a_type_are_kept_or_refused(schema: dict[str, Any]) -> None:
    walker = TaggedWalker("qwen3_coder", as_tokens=True)
    loose = Tool(name="f", parameters={"type": "object", "properties": {"a": schema}, "additionalProperties": False})
    grammar = CallGrammar(walker.marks, [loose])
    walker.calls.several(grammar)
    assert ["'#/properties/a'" in warning for warning in grammar.warnings] == [True]
    with pytest.raises(InvalidParameter, match="'#/properties/a'"):
        walker.calls.several(CallGrammar(walker.marks, [replace(loose, strict=True)]))


@pytest.mark.parametrize("schema", [{}, {"type": sorted(ANY)}, {"anyOf": [{"type": "string"}, {}]}], ids=repr)
def test_a_value_of_any_type_needs_no_warning(schema: dict[str, Any]) -> None:
    walker = TaggedWalker("qwen3_coder", as_tokens=True)
    parameters = {"type": "object", "properties": {"a": schema}, "additionalProperties": False}
    grammar = CallGrammar(walker.marks, [Tool(name="f", parameters=parameters, strict=True)])
    walker.calls.several(grammar)
    assert not grammar.warnings


def arguments_of(family: str, schema: object, *, as_tokens: bool, count: int = 6) -> list[Any]:
    """What a grammar writes for one parameter, as it is read."""
    walker, chance = Walker(family, as_tokens=as_tokens), random.Random(1)
    text = grammar_of_one(walker, schema, is_required=True)
    tools = {"f": Tool(name="f", parameters={"type": "object", "properties": {"a": schema}})}
    found = []
    for _ in range(count):
        message = walker.read(walker.walk(text, chance), tools)
        (call,) = message.tool_calls
        assert not message.text
        found.append(json.loads(call.arguments)["a"])
    return found


LISTED: list[dict[str, Any]] = [
    {"const": [1, "a", {"b c": None, "d": ["x"]}]},
    {"const": {}},
    {"enum": [[], ["a"], {"k": "v"}]},
    {"type": "string", "enum": ["a", "abc"], "maxLength": 2},
    {"type": "integer", "enum": [1, 5, 9], "minimum": 2, "exclusiveMaximum": 9},
    {"enum": ["a", "abc", 3, 4], "minLength": 2, "multipleOf": 2},
]


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("family", ANY_FORMAT)
def test_listed_values_are_written_as_they_are_and_held_against_lengths_and_bounds(
    family: str, as_tokens: bool
) -> None:
    for schema in LISTED:
        for value in arguments_of(family, schema, as_tokens=as_tokens):
            jsonschema.validate(value, schema)


@pytest.mark.parametrize("family", NO_JSON)
def test_a_listed_text_that_would_end_itself_is_left_out(family: str) -> None:
    markers = CALLS[family].markers
    texts = ["", *markers, *(f"x\n{marker}y" for marker in markers), "]<]minimax[>[</a>"]
    assert set(arguments_of(family, {"enum": ["ok", *texts]}, as_tokens=False, count=12)) <= {"ok", *texts}


@pytest.mark.parametrize("family", NO_JSON)
def test_a_number_that_no_float_holds_loses_no_call(family: str) -> None:
    walker = Walker(family, as_tokens=True)
    schema = {"type": "array", "items": {"type": "number"}}
    text = grammar_of_one(walker, schema, is_required=True)
    call = walker.walk(grammar_of_one(walker, {"const": [77777]}, is_required=True), random.Random(1))
    written = call.replace("77777", "1e999")
    is_taken = walker.takes(text, written)
    assert is_taken is (family not in ("functiongemma", "gemma4", "minimax_m3"))
    if is_taken:
        tools = {"f": Tool(name="f", parameters={"type": "object", "properties": {"a": schema}})}
        message = walker.read(written, tools)
        assert not message.text
        assert json.loads(message.tool_calls[0].arguments) == {"a": [float("inf")]}


@pytest.mark.parametrize("family", ANY_FORMAT)
def test_an_array_may_have_one_item(family: str) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "maxItems": 1}
    assert {len(value) for value in arguments_of(family, schema, as_tokens=True, count=12)} <= {0, 1}

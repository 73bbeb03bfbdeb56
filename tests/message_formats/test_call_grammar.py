"""Grammars of calls: what they allow reads as calls, with arguments that follow the tool's schema."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import jsonschema
import numpy as np
import pytest

from quire.errors import InvalidParameter
from quire.message_formats.format import MessageFormat
from quire.message_formats.formats import CALLS
from quire.message_formats.grammars.argument_schema import argument_schema
from quire.message_formats.grammars.call_grammar import MAX_SCHEMA_CHARACTERS, MAX_TOOLS, CallGrammar
from quire.message_formats.marks import Marks
from quire.message_formats.parser import MessageParser
from quire.message_formats.parts import Message
from quire.message_formats.tools import Tool
from quire.structured.grammar import Vocabulary
from quire.structured.llguidance_backend import LLGuidance, LLGuidanceMatcher
from quire.structured.llguidance_source import grammar_of
from quire.structured.params import StructuredOutputsParams
from tests.message_formats.families import FAMILIES, JSON_FORMATS, Family, Tokens

WEATHER = Tool(
    name="get_weather",
    parameters={
        "type": "object",
        "description": "the weather ::= now",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "unit": {"enum": ["°C", 'F"}', "</tool_call>"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        "required": ["city"],
    },
)
NESTED = Tool(
    name="führe_aus-2",
    strict=True,
    parameters={
        "type": "object",
        "properties": {
            "steps": {
                "type": "array",
                "items": {"type": "object", "properties": {"::=": {"type": "boolean"}}, "required": ["::="]},
                "maxItems": 2,
            }
        },
        "required": ["steps"],
        "additionalProperties": False,
    },
)
NO_ARGUMENTS = Tool(name="now", parameters={"type": "object", "properties": {}})
TOOLS = [WEATHER, NESTED, NO_ARGUMENTS]
BY_NAME = {tool.name: tool for tool in TOOLS}
CLOSING = set(b'"}]')
both = pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])


class Walker:
    """Follows grammars with a vocabulary of bytes and a format's markers."""

    def __init__(self, family: str, *, as_tokens: bool) -> None:
        self.calls = CALLS[family]
        tokens = Tokens(self.calls.markers if as_tokens else ())
        self.marks = Marks(self.calls.markers, tokens)  # type: ignore[arg-type]
        self.end = 256 + len(tokens.added_tokens)
        names = [bytes([byte]) for byte in range(256)] + [text.encode() for text in tokens.added_tokens.values()]
        special = frozenset([*tokens.added_tokens, self.end])
        vocabulary = Vocabulary(tokens=[*names, b"<end>"], special_ids=special, eos_token_ids=(self.end,))
        self.backend = LLGuidance(vocabulary)
        self.texts = [*names[:256], *(self.marks(text).encode("utf-8", "surrogatepass") for text in names_of(tokens))]

    def compile(self, text: str) -> LLGuidanceMatcher:
        matcher = self.backend.compile(grammar_of(StructuredOutputsParams(grammar=text)))
        assert not matcher.error, f"{matcher.error}\n{text}"
        return matcher

    def allowed(self, matcher: LLGuidanceMatcher) -> list[int]:
        masks = np.zeros((1, (self.end + 32) // 32), np.int32)
        self.backend.fill_masks([(matcher, 0)], masks)
        return np.flatnonzero(np.unpackbits(masks.view(np.uint8)[0], bitorder="little")).tolist()

    def walk(self, text: str, chance: random.Random, ends_after: int = 60) -> str:
        """Marked text that a grammar allows."""
        matcher, written = self.compile(text), bytearray()
        for step in range(4000):
            allowed = self.allowed(matcher)
            may_end = not allowed or self.end in allowed
            if may_end and (step > ends_after or len(allowed) < 2 or chance.random() < 0.2):
                return written.decode("utf-8", "surrogatepass")
            allowed = [token for token in allowed if token != self.end]
            if step > ends_after:  # soon
                allowed = [token for token in allowed if token in CLOSING or token > 255] or allowed
            token = chance.choice(allowed)
            matcher.advance(token)
            written += self.texts[token]
        raise AssertionError(written)

    def takes(self, text: str, message: str) -> bool:
        """Whether a message (marked text) follows a grammar to its end."""
        matcher = self.compile(text)
        tokens = {self.marks(marker): token_id for marker, token_id in self.marks.ids.items()}
        for character in message:
            for token in [tokens[character]] if character in tokens else character.encode():
                matcher.advance(token)
                if matcher.error:
                    return False
        return self.end in self.allowed(matcher)

    def read(self, text: str, tools: Mapping[str, Tool] = BY_NAME) -> Message:
        parser = MessageParser(
            MessageFormat(calls=self.calls),
            self.marks,
            tools=tools,
            new_id=lambda index: f"call_{index}",
            calls_as_they_come=True,
        )
        return Message.of([part for piece in text for part in parser.feed(piece)] + parser.finish())


def names_of(tokens: Tokens) -> list[str]:
    return list(tokens.added_tokens.values())


@both
@pytest.mark.parametrize("family", JSON_FORMATS)
def test_what_grammars_allow_reads_as_calls_with_valid_arguments(family: str, as_tokens: bool) -> None:
    walker, chance = Walker(family, as_tokens=as_tokens), random.Random(1)
    calls = walker.calls
    grammar = CallGrammar(walker.marks, TOOLS)
    starts = [("", calls.several(grammar))] + [
        (walker.marks(begin), calls.rest(grammar, begin)) for begin in calls.begins or ("",)
    ]
    seen = 0
    for begin, start in starts * 2:
        text = begin + walker.walk(grammar.text(start), chance)
        message = walker.read(text)
        assert message.tool_calls, text
        assert not message.text, text
        for call in message.tool_calls:
            jsonschema.validate(json.loads(call.arguments), dict(BY_NAME[call.name].parameters))
        seen += len(message.tool_calls)
    assert seen >= len(starts) * 2
    assert not grammar.warnings


GRAMMAR_CALLS = [
    [("get_weather", '{"city": "Rome"}')],
    [("get_weather", '{"city":"é}","days":14}'), ("now", "{}"), ("führe_aus-2", '{"steps": [{"::=": true}]}')],
]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.is_for_grammar])
def test_grammars_take_what_the_template_writes(name: str) -> None:
    family: Family = FAMILIES[name]
    walker = Walker(family.format, as_tokens=True)
    grammar = CallGrammar(walker.marks, TOOLS)
    text = grammar.text(walker.calls.several(grammar))
    for calls in GRAMMAR_CALLS:
        written = family.write(calls, walker.marks)
        assert walker.takes(text, written), written
        for begin in walker.calls.begins if len(calls) == 1 else ():
            if written.startswith(walker.marks(begin)):
                rest = grammar.text(walker.calls.rest(grammar, begin))
                assert walker.takes(rest, written.removeprefix(walker.marks(begin)))
    for wrong in ([("other", "{}")], [("get_weather", "{}")], [("now", '{"a": 1}')], [("get_weather", '{"city": 5}')]):
        assert not walker.takes(text, family.write(wrong, walker.marks)), wrong


@both
@pytest.mark.parametrize("family", JSON_FORMATS)
def test_one_call_where_several_are_not_wanted(family: str, as_tokens: bool) -> None:
    walker, chance = Walker(family, as_tokens=as_tokens), random.Random(2)
    grammar = CallGrammar(walker.marks, TOOLS, parallel=False)
    text = grammar.text(walker.calls.several(grammar))
    for _ in range(4):
        assert len(walker.read(walker.walk(text, chance)).tool_calls) == 1


def test_mistral_writes_arrays_where_its_tokenizer_has_no_separator() -> None:
    for markers, expected in ((("[TOOL_CALLS]",), "[{"), (("[TOOL_CALLS]", "[ARGS]"), "now")):
        grammar = CallGrammar(Marks(CALLS["mistral"].markers, Tokens(markers)), [NO_ARGUMENTS])  # type: ignore[arg-type]
        text = grammar.text(CALLS["mistral"].several(grammar))
        assert ('"["' in text) is (expected == "[{")


def grammar_with(*tools: Tool, **options: Any) -> CallGrammar:
    return CallGrammar(Marks((), Tokens(())), tools, **options)  # type: ignore[arg-type]


def with_property(schema: object, *, strict: bool | None) -> Tool:
    return Tool(name="f", parameters={"type": "object", "properties": {"a/b": schema}}, strict=strict)


UNKEPT: list[tuple[Any, str]] = [
    ({"not": {"type": "string"}}, "'#/properties/a~1b/not'"),
    ({"type": "array", "uniqueItems": True}, "'#/properties/a~1b/uniqueItems'"),
    ({"type": "string", "format": "color"}, "'#/properties/a~1b/format'"),
    ({"if": {}, "then": {}}, "'#/properties/a~1b/if'"),
    ({"type": "int"}, "'#/properties/a~1b/type'"),
    ({"type": "string", "required": True}, "'#/properties/a~1b/required'"),
    ({"type": "string", "minLength": -1}, "'#/properties/a~1b/minLength'"),
    ({"type": "integer", "minimum": 10**19}, "'#/properties/a~1b/minimum'"),
    ({"type": "string", "pattern": "(?=a)b"}, "'#/properties/a~1b/pattern'"),
    ({"type": "object", "patternProperties": {"a++": {}}}, "'#/properties/a~1b/patternProperties/a++'"),
    ({"enum": []}, "'#/properties/a~1b/enum'"),
    ({"enum": [1, 2**60 + 1]}, "'#/properties/a~1b/enum/1'"),
    ({"const": {"b": 0.1234567890123456789}}, "'#/properties/a~1b/const/b'"),
]
IMPOSSIBLE: list[tuple[Any, str]] = [
    ({"$ref": "http://example.com/x"}, "'#/properties/a~1b/$ref'"),
    ({"properties": []}, "'#/properties/a~1b/properties'"),
]


@pytest.mark.parametrize(("schema", "pointer"), UNKEPT + IMPOSSIBLE, ids=repr)
def test_strict_tools_whose_schema_cannot_be_kept_are_refused(schema: Any, pointer: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        grammar_with(NO_ARGUMENTS, with_property(schema, strict=True))
    assert caught.value.parameter == "tools[1].function.parameters"
    assert caught.value.message.startswith(f"tools[1].function.parameters: {pointer}: ")


@pytest.mark.parametrize(("schema", "pointer"), UNKEPT, ids=repr)
def test_other_tools_follow_what_can_be_kept(schema: Any, pointer: str) -> None:
    grammar = grammar_with(with_property(schema, strict=None))
    assert any(f"tools[0].function.parameters: {pointer}: " in warning for warning in grammar.warnings)
    assert '"a/b"' in grammar.text("x")
    assert grammar.is_binding


@pytest.mark.parametrize(
    "tool",
    [with_property(schema, strict=None) for schema, _ in IMPOSSIBLE]
    + [
        Tool(name="f", parameters={"type": "string"}),
        Tool(name="f", parameters={"a": {1, 2}}),
        Tool(name="f", parameters={"properties": []}),
        Tool(name="f", parameters={"enum": list(range(60_000))}),
    ],
    ids=lambda tool: repr(tool.parameters)[:60],
)
def test_or_take_any_object_and_say_why(tool: Tool) -> None:
    grammar = grammar_with(tool)
    assert '"properties"' not in grammar.text("x")
    (warning,) = grammar.warnings
    assert warning.startswith("tools[0].function.parameters: ")
    assert warning.endswith("may be any JSON object")


def test_tools_that_are_only_read_bind_nothing() -> None:
    grammar = grammar_with(NESTED, with_property({"not": {}}, strict=False))
    assert not grammar.is_binding
    assert not grammar.warnings
    assert grammar_with(NESTED).is_binding


def test_what_the_library_cannot_keep_is_left_out_or_refused() -> None:
    grammar = grammar_with(WEATHER, unkept={"get_weather": "it takes too long"})
    assert grammar.warnings == [
        "tools[0].function.parameters: it takes too long. The arguments of get_weather may be any JSON object"
    ]
    with pytest.raises(InvalidParameter, match="it takes too long"):
        grammar_with(NESTED, unkept={NESTED.name: "it takes too long"})


@pytest.mark.parametrize("number", [10**400, -(10**309)])
def test_a_number_beyond_a_float_is_named_with_its_pointer(number: int) -> None:
    parameters = {"properties": {"a": {"minimum": number}}}
    (warning,) = grammar_with(Tool(name="f", parameters=parameters)).warnings
    assert "tools[0].function.parameters: '#/properties/a/minimum': " in warning
    assert "is beyond the range of numbers" in warning
    with pytest.raises(InvalidParameter, match=r"'#/properties/a/minimum': .* beyond the range of numbers"):
        grammar_with(Tool(name="f", parameters=parameters, strict=True))


def test_tools_and_schemas_are_bounded() -> None:
    for number in (0, MAX_TOOLS + 1):
        with pytest.raises(InvalidParameter, match=f"1 to {MAX_TOOLS} tools can be called, got {number}"):
            grammar_with(*[NO_ARGUMENTS] * number)
    large = {"type": "object", "properties": {"x" * 1000: {"const": "y" * (MAX_SCHEMA_CHARACTERS // 4)}}}
    tools = [Tool(name=f"f{index}", parameters=large) for index in range(MAX_TOOLS)]
    grammar = grammar_with(*tools)
    assert len(grammar.warnings) == MAX_TOOLS - 3
    assert "characters together" in grammar.warnings[0]
    with pytest.raises(InvalidParameter, match="characters together"):
        grammar_with(*(Tool(name=tool.name, parameters=large, strict=True) for tool in tools))
    names = [Tool(name=f"{index:03}{chr(233) * 253}") for index in range(MAX_TOOLS)]
    walker = Walker("hermes", as_tokens=True)
    many = CallGrammar(walker.marks, names)
    walker.compile(many.text(walker.calls.several(many)))


def test_schemas_of_arguments_are_objects_and_name_what_they_allow() -> None:
    def root(parameters: dict[str, Any]) -> Any:
        return argument_schema(Tool(name="f", parameters=parameters), 0).schema.root

    assert root({}) == {"type": "object"}
    assert root({"type": ["object", "null"]}) == {"type": "object"}
    assert root({"properties": {}, "title": "x", "$schema": "y"}) == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }
    open_ones: list[dict[str, Any]] = [
        {"properties": {}, "additionalProperties": True},
        {"properties": {}, "required": ["a"]},
        {"properties": {}, "allOf": [{"required": ["a"]}]},
        {"properties": {}, "patternProperties": {"^a": {}}},
    ]
    for open_one in open_ones:
        assert root(open_one) == {"type": "object", **open_one}
    given = {"properties": {"description": {"description": "x", "default": 1}}}
    assert root(given)["properties"] == {"description": {}}
    assert given == {"properties": {"description": {"description": "x", "default": 1}}}


OPTIONAL = {"type": "object", "properties": {"a": {"type": "null"}}}
COUNTED: list[tuple[dict[str, Any], str]] = [
    ({**OPTIONAL, "minProperties": 1}, "#/minProperties"),
    ({**OPTIONAL, "maxProperties": 1}, "#/maxProperties"),
    ({"type": "object", "properties": {"b": {**OPTIONAL, "minProperties": 1}}}, "#/properties/b/minProperties"),
    ({**OPTIONAL, "required": ["a"], "minProperties": 3}, "#/minProperties"),
]


@pytest.mark.parametrize(("parameters", "pointer"), COUNTED, ids=repr)
def test_a_count_of_properties_that_cannot_be_kept_costs_only_itself(parameters: dict[str, Any], pointer: str) -> None:
    walker = Walker("hermes", as_tokens=True)
    grammar = CallGrammar(walker.marks, [Tool(name="f", parameters=parameters)])
    (warning,) = grammar.warnings
    assert f"'{pointer}': {pointer.rpartition('/')[2]} is not kept" in warning
    walker.compile(grammar.text(walker.calls.several(grammar)))
    assert list(grammar.schema(grammar.tools[0])["properties"]) == list(parameters["properties"])


def test_a_count_of_properties_that_can_be_kept_stays() -> None:
    parameters = {**OPTIONAL, "required": ["a"], "minProperties": 2}
    found = argument_schema(Tool(name="f", parameters=parameters), 0)
    assert not found.warnings
    assert found.schema.root["minProperties"] == 2

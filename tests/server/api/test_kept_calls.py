"""Calls that a model begins by itself: in every format their arguments follow the tool's schema from there on, or the
reply says why they do not."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest

from quire.engine.front.thinking import gate_in_force
from quire.message_formats.format import MessageFormat
from quire.message_formats.formats import CALLS, THINKING
from quire.message_formats.marks import Marks
from quire.message_formats.parser import MessageParser
from quire.message_formats.parts import Message
from quire.message_formats.tools import Tool
from quire.sampling_params import SamplingParams
from quire.server.api.constraints import Constrained, constrained
from quire.server.api.message_reader import Reading
from quire.server.api.tools import Choice, tool_use
from quire.structured.backend import mask_words
from quire.structured.checker_protocol import Verdict
from quire.structured.gate import GatedBackend, GatedMatcher
from quire.structured.grammar import Vocabulary
from quire.structured.llguidance_backend import LLGuidance
from quire.structured.llguidance_source import grammar_of
from tests.message_formats.families import Tokens
from tests.message_formats.reading import marked

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [Tool(name="weather", parameters=SCHEMA), Tool(name="now", parameters={"type": "object", "properties": {}})]
BY_NAME = {tool.name: tool for tool in TOOLS}
LONGER = [b"[we", b"weather(c", b"ather", b"(5", b"(d", b"([", b"now()", b" [", b"\n[now(1", b"to=functions.", b"[no"]
"""Tokens that say more than one byte."""
CLOSING = frozenset(b"\"'}])<>")
ENDS = ("<|call|>", "<|return|>", "<|eot|>", "<|content_model_end_sampling|>")
"""Tokens that end outputs."""
HARMONY = ("openai", "openai_gptoss")
MUSE = [
    " to=w",
    " to=self<|message|>Hm.<|eom|><|start|>assistant to=now",
    " to=user<|message|>Yes to=now<|eom|><|start|>assistant to=weather",
]
BEGINNINGS = {
    "inkling": [
        "<|content_invoke_tool_json|>",
        "weather<|content_invoke_tool_json|>",
        "<|content_thinking|>Hm.<|end_message|><|message_model|>now<|content_invoke_tool_json|>",
        "<|content_text|>Yes<|end_message|><|message_model|>now<|content_invoke_tool_json|>",
    ],
    **dict.fromkeys(("muse", "muse_glimmer", "musespark1x"), MUSE),
    "openai": [
        "<|channel|>commentary to=functions.",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.",
        "<|channel|>analysis<|message|>Hm.<|start|>assistant to=functions.",
        " to=functions.",
        "<|channel|>final<|message|>Yes to=functions.<|end|><|channel|>analysis to=functions.",
    ],
    "pythonic": ["[weather(", " [\n weather(", "[now(", "\n[now()"],
    "llama4_pythonic": ["[weather(", "Look: <|python_start|>", "<|python_start|>[weather("],
}
THINKING_OF = {"openai": "openai_gptoss"} | {
    name: name
    for name in (
        "gemma4",
        "inkling",
        "kimi_k2",
        "ling3",
        "mistral",
        "muse",
        "muse_glimmer",
        "musespark1x",
        "solar_open2",
    )
}
"""Formats whose calls end the thinking, too."""
PARTLY_KEPT = {
    "llama3_json": ['{"name": "weather", "parameters":', ' {\n  "name": "now", "parameters":'],
    "llama4_json": ['\n{"name": "weather", "parameters": {'],
    "xlam": ['[{"name": "weather", "arguments":', '[ {"name": "now", "arguments": {'],
}
"""JSON without a marker: a call that begins as the template writes it is kept."""


class Writer:
    """A model with tokens of bytes and markers, that begins calls by itself."""

    def __init__(
        self,
        name: str,
        *,
        as_tokens: bool = True,
        parallel: bool = True,
        strict: bool | None = None,
        choice: Choice = Choice.AUTO,
        in_thinking: bool = False,
        budget: int | None = None,
    ) -> None:
        thinking = THINKING.get(THINKING_OF.get(name, ""))
        self.format = MessageFormat(calls=CALLS[name], thinking=thinking)
        layout = self.format.layout
        found = Tokens((self.format if layout is None else layout).markers if as_tokens else ())
        self.marks = Marks(self.format.markers, found)  # type: ignore[arg-type]
        self.names = [bytes([byte]) for byte in range(256)] + [one.encode() for one in found.added_tokens.values()]
        self.end = len(self.names)
        tokens: list[bytes] = [*self.names, b"<end>", *LONGER]
        special = frozenset([*found.added_tokens, self.end])
        ends = [self.end] + [self.marks.ids[one] for one in ENDS if one in self.marks.ids]
        self._vocabulary = Vocabulary(tokens=tokens, special_ids=special, eos_token_ids=tuple(ends))
        self.library = LLGuidance(self._vocabulary)
        self.backend = GatedBackend(self.library, self._vocabulary)
        self.tokens = tokens
        self.spelled = [
            *tokens[:256],
            *(self.marks(one).encode("utf-8", "surrogatepass") for one in found.added_tokens.values()),
            *tokens[self.end :],
        ]
        tools = [Tool(name=tool.name, parameters=tool.parameters, strict=strict) for tool in TOOLS]
        reading = Reading(
            request_id="x",
            tokenizer=self,  # type: ignore[arg-type]
            message_format=self.format,
            marks=self.marks,
            tools=tool_use(tools, choice, None, parallel=parallel),
            prompt_token_ids=[],
            params=SamplingParams(thinking_token_budget=budget),
            in_thinking=in_thinking,
            in_header=layout is not None and layout.takes_headers,
            calls_as_they_come=False,
        )
        self.kept: Constrained = constrained(reading.params, reading, self)  # type: ignore[arg-type]

    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    def verdict(self, form: Any, limit_s: float = 0.0) -> Verdict:
        grammar = grammar_of(form)
        assert not self.library.compile(grammar).error, grammar.text
        return Verdict(grammar=grammar)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def matcher(self) -> GatedMatcher:
        params = self.kept.params
        assert params.structured_outputs is not None
        gate = gate_in_force(params, None, [], str)
        assert gate is not None
        return self.backend.gated(gate, self.backend.compile(grammar_of(params.structured_outputs)))

    def ids(self, text: str) -> list[int]:
        """Markers as tokens."""
        ids: list[int] = []
        for character in marked(self.marks, text):
            name = self.marks.spell(character)
            ids += [self.marks.ids[name]] if name in self.marks.ids else character.encode()
        return ids

    def allowed(self, matcher: GatedMatcher) -> list[int]:
        masks = np.zeros((1, mask_words(len(self.tokens))), np.int32)
        self.backend.fill_masks([(matcher, 0)], masks)
        bits = np.unpackbits(masks.view(np.uint8)[0], bitorder="little", count=len(self.tokens))
        return np.flatnonzero(bits).tolist()

    def write(self, beginning: str, chance: random.Random) -> str | None:
        """Marked text with a call that begins so; None where the beginning is impossible."""
        matcher, written = self.matcher(), list[int]()
        for token_id in self.ids(beginning):
            if not matcher.is_free and token_id not in self.allowed(matcher):
                return None
            matcher.advance(token_id)
            written.append(token_id)
        for step in range(2000):
            allowed = list(range(len(self.tokens))) if matcher.is_free else self.allowed(matcher)
            if (matcher.is_free and matcher._begun is None) or (self.end in allowed and step > 200):
                break
            allowed = [one for one in allowed if one != self.end and (one < 128 or one > 255)]
            if not allowed:
                break
            if step > 40:
                allowed = [one for one in allowed if one in CLOSING or 255 < one < self.end] or allowed
            written.append(chance.choice(allowed))
            matcher.advance(written[-1])
            assert not matcher.error
        return b"".join(self.spelled[token_id] for token_id in written).decode("utf-8", "surrogatepass")

    def read(self, text: str) -> Message:
        parser = MessageParser(
            self.format,
            self.marks,
            tools=BY_NAME,
            new_id=str,
            calls_as_they_come=self.kept.reading.calls_as_they_come,
        )
        return Message.of([part for piece in text for part in parser.feed(piece)] + parser.finish())


def beginnings(writer: Writer, name: str) -> Sequence[str]:
    calls = CALLS[name]
    thinking = writer.format.thinking
    plain = [f"Look: {begin}" for begin in calls.begins]
    if thinking is not None and calls.begins and calls.begins[0] in thinking.ends_before:
        plain.append(f"{thinking.begin}{thinking.heading}Hm. {calls.begins[0]}")
    return BEGINNINGS.get(name) or plain


@pytest.mark.parametrize("name", [name for name in CALLS if name not in PARTLY_KEPT])
def test_a_call_that_the_model_begins_follows_the_schema(name: str) -> None:
    writer, chance = Writer(name), random.Random(name)
    assert writer.kept.reading.calls_as_they_come
    assert not writer.kept.warnings
    for beginning in beginnings(writer, name):
        seen = 0
        for _ in range(6):
            text = writer.write(beginning, chance)
            assert text is not None, beginning
            message = writer.read(text)
            for call in message.tool_calls:
                jsonschema.validate(json.loads(call.arguments), dict(BY_NAME[call.name].parameters))
            seen += bool(message.tool_calls)
            assert message.tool_calls or "[" in beginning, (beginning, text)
        assert seen, beginning


@pytest.mark.parametrize("name", PARTLY_KEPT)
def test_a_call_in_json_without_a_marker_is_kept_from_its_arguments_on(name: str) -> None:
    writer, chance = Writer(name), random.Random(name)
    assert not writer.kept.reading.calls_as_they_come, "others may turn out to be no calls"
    assert not writer.kept.warnings
    for beginning in PARTLY_KEPT[name]:
        for _ in range(4):
            text = writer.write(beginning, chance)
            assert text is not None
            message = writer.read(text)
            assert message.tool_calls, text
            for call in message.tool_calls:
                jsonschema.validate(json.loads(call.arguments), dict(BY_NAME[call.name].parameters))


@pytest.mark.parametrize("name", PARTLY_KEPT)
def test_other_json_stays_free(name: str) -> None:
    writer, bracket = Writer(name), "[" if name == "xlam" else ""
    for text in (
        '{"name": "weather", "city": 5, "parameters": 1}',
        '{"name": "other", "parameters": [1], "arguments": [1]}',
        '{"name":"weather","parameters":5}',
        '{"name": "weather"}',
        '{"answer": {"name": "weather", "parameters": 5, "arguments": 5}}',
    ):
        matcher = follow(writer, bracket + text)
        assert matcher.is_free, text
    assert follow(writer, f'Look: {bracket}{{"name": "weather", "parameters": 5, "arguments": 5}}').is_free


@pytest.mark.parametrize("name", PARTLY_KEPT)
def test_what_holds_only_for_some_spellings_is_said(name: str) -> None:
    warnings = Writer(name, strict=True, parallel=False).kept.warnings
    assert [warning.partition(" ")[0] for warning in warnings] == ["strict", "parallel_tool_calls"]
    assert all("begin as the chat template writes them" in warning for warning in warnings)


def test_in_a_layout_of_messages_markers_must_be_tokens() -> None:
    (warning,) = Writer("openai", as_tokens=False, strict=True).kept.warnings
    assert warning.endswith("this tokenizer has no token '<|start|>'")


def test_one_call_is_all_where_the_token_behind_it_ends_the_output() -> None:
    assert not Writer("openai", parallel=False).kept.warnings
    writer = Writer("pythonic", parallel=False)
    for seed in range(8):
        text = writer.write("[weather(", random.Random(seed))
        assert text is not None
        assert len(writer.read(text).tool_calls) == 1


def test_what_only_looks_like_a_call_stays_free() -> None:
    writer = Writer("pythonic")
    for text in ("[weathers(", "[weather (x)]", "[1]", "(weather(", "Look: [weather("):
        matcher = writer.matcher()
        for token_id in writer.ids(text):
            assert matcher.is_free or token_id in writer.allowed(matcher), text
            matcher.advance(token_id)
        assert matcher.is_free, text
        assert matcher.inner is None


ANALYSIS = "<|channel|>analysis<|message|>"
COMMENTARY = "<|channel|>commentary to=functions."


def follow(writer: Writer, text: str) -> GatedMatcher:
    matcher = writer.matcher()
    for token_id in writer.ids(text):
        assert matcher.is_free or token_id in writer.allowed(matcher), (text, token_id)
        matcher.advance(token_id)
    return matcher


@pytest.mark.parametrize("budget", [1, 5, 2**31 - 1])
def test_thinking_before_a_required_call_of_gpt_oss_has_its_budget(budget: int) -> None:
    writer = Writer("openai", choice=Choice.REQUIRED, budget=budget)
    end = writer.marks.ids["<|end|>"]
    matcher = follow(writer, ANALYSIS + "x" * min(budget, 5))
    assert end in writer.allowed(matcher)
    assert (writer.allowed(matcher) == [end]) is (budget <= 5)
    begun = follow(writer, ANALYSIS + "x" * min(budget, 5) + f"<|end|><|start|>assistant{COMMENTARY}")
    assert not begun.error
    assert set(bytes(one for one in writer.allowed(begun) if one < 256)) == set(b"wn")  # the names of the tools
    assert not follow(writer, ANALYSIS + f"<|end|><|start|>assistant{COMMENTARY}").error, "less is allowed"
    assert not follow(writer, COMMENTARY).error, "and none at all"


def test_without_a_budget_it_thinks_as_long_as_it_likes_and_with_none_it_calls_at_once() -> None:
    free = Writer("openai", choice=Choice.REQUIRED)
    assert len(free.allowed(follow(free, ANALYSIS + "x" * 200))) > 100
    none = Writer("openai", choice=Choice.REQUIRED, budget=0)
    matcher = follow(none, "<|channel|>")
    assert [one for one in none.allowed(matcher) if one < 256] == [ord("c")]
    assert not follow(none, COMMENTARY).error


@pytest.mark.parametrize("budget", [None, 0, 3])
def test_thinking_that_the_prompt_has_begun_is_not_begun_again(budget: int | None) -> None:
    writer = Writer("openai", choice=Choice.REQUIRED, in_thinking=True, budget=budget)
    end = writer.marks.ids["<|end|>"]
    matcher = writer.matcher()
    for _ in range(3 if budget is None else budget):
        assert matcher.is_free or ord("x") in writer.allowed(matcher)
        matcher.advance(ord("x"))
    if budget is not None:
        assert writer.allowed(matcher) == [end]
    for text in (f"<|end|><|start|>assistant{COMMENTARY}", f"<|end|>{COMMENTARY}"):
        thought = matcher.clone()
        for token_id in writer.ids(text):
            assert thought.is_free or token_id in writer.allowed(thought)
            thought.advance(token_id)
        assert set(bytes(one for one in writer.allowed(thought) if one < 256)) == set(b"wn")
    matcher.advance(end)
    for token_id in writer.ids("<|channel|>"):
        matcher.advance(token_id)
    assert [one for one in writer.allowed(matcher) if one < 256] == [ord("c")], "no second analysis"


def test_a_required_call_of_gpt_oss_reads_with_its_thinking() -> None:
    writer, chance = Writer("openai", choice=Choice.REQUIRED, budget=4), random.Random(3)
    for _ in range(6):
        text = writer.write(ANALYSIS + "Hm", chance)
        assert text is not None
        message = writer.read(text)
        assert len(message.tool_calls) == 1, text
        assert 2 <= len(message.reasoning) <= 4 * max(map(len, writer.tokens))
        assert not message.text

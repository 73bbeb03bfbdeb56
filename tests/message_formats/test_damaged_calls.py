"""Transcripts with pieces deleted, repeated, swapped or cut off: what is read as a call stands in the text, to the
letter; all else stays text and nothing is lost."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from typing import Any

import pytest

from quire.message_formats.format import Layout
from quire.message_formats.formats import CALLS
from quire.message_formats.parts import Message
from tests.message_formats.families import FAMILIES
from tests.message_formats.reading import Reading, message_format
from tests.message_formats.references import calls_in
from tests.message_formats.test_transcripts import FAMILIES as OTHERS

NUM_DAMAGED = 60
TWO = [
    ("weather", '{"city": "Rome", "days": 3, "tags": ["a", "b, c"]}'),
    ("now", "{}"),
    ("weather", '{"city": "Oslo"}'),
]
ALIKE = {"deepseek_v4": "deepseek_v32", "glm47": "glm45", "qwen3_xml": "qwen3_coder", "step3p5": "qwen3_coder"}
ALIKE |= {"deepseek_v41": "deepseek_v32", "ling3": "glm45", "step5": "qwen3_coder"}
"""Formats without a transcript of their own, and whose they take."""
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    '<|constrain|>json<|message|>{"city": "Rome", "days": 3}<|call|><|start|>assistant<|channel|>commentary '
    "to=functions.now <|constrain|>json<|message|>{}<|call|>"
)
INKLING = (
    "<|content_thinking|>Hm.<|end_message|><|message_model|>weather<|content_invoke_tool_json|>"
    '{"name":"weather","args":{"city": "Rome", "days": 3, "tags": ["a", "b, c"]}}<|end_message|><|message_model|>now'
    '<|content_invoke_tool_json|>{"name":"now","args":{}}<|end_message|><|content_model_end_sampling|>'
)
MUSE = (
    ' to=self<|message|>Hm.<|eom|><|start|>assistant to=weather<|message|><atem:function_calls>\n<atem:invoke name="'
    'weather">\n<atem:parameter name="city">Rome</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant to=now<|message|><atem:function_calls>\n"
    '<atem:invoke name="now">\n</atem:invoke>\n</atem:function_calls><|eot|>'
)
WRITTEN = {family.format: family.write(TWO, str) for family in FAMILIES.values()}
WRITTEN |= {family.calls: f"{family.two_calls}\nAnd {family.code}" for family in OTHERS}
WRITTEN |= {
    "openai": HARMONY,
    "inkling": INKLING,
    **dict.fromkeys(("muse", "muse_glimmer", "musespark1x"), MUSE),
    "pythonic": "[weather(city='Rome', days=3, tags=['a', \"b, c\"]), now(), weather(city='Oslo')]",
}
TOKENS = {family.calls: family.tokens for family in OTHERS}


def transcript(name: str) -> str:
    own = WRITTEN.get(name)
    if own is None:
        own = WRITTEN[ALIKE[name]]
        for mine, others in zip(CALLS[name].markers, CALLS[ALIKE[name]].markers, strict=True):
            own = own.replace(others, mine)
    return own


def pieces_of(name: str, text: str) -> list[str]:
    """Markers, tags, words and single characters."""
    markers = sorted(CALLS[name].markers, key=len, reverse=True)
    return re.findall("|".join([*map(re.escape, markers), r"</?[^<>\n]*>", r"\w+", r"(?s:.)"]), text)


def damaged(pieces: list[str], draw: random.Random) -> str:
    pieces = list(pieces)
    tags = [index for index, piece in enumerate(pieces) if len(piece) > 1]
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        at = draw.choice(tags if draw.random() < 0.5 else range(len(pieces)))
        at = min(at, len(pieces) - 1)
        match draw.choice(("delete", "delete", "repeat", "swap", "cut", "repeat several", "delete several")):
            case "delete":
                del pieces[at]
            case "delete several":
                del pieces[at : at + draw.randint(2, 12)]
            case "repeat":
                pieces.insert(at, pieces[at])
            case "repeat several":
                end = at + draw.randint(2, 12)
                pieces[at:at] = pieces[at:end]
            case "swap":
                other = draw.randrange(len(pieces))
                pieces[at], pieces[other] = pieces[other], pieces[at]
            case "cut":
                del pieces[at + 1 :]
        pieces = pieces or [" "]
    return "".join(pieces)


def check(name: str, text: str, *, as_tokens: bool) -> None:
    written = message_format(name)
    tokens = (TOKENS.get(ALIKE.get(name, name), ()) or written.markers) if as_tokens else ()
    reading = Reading(written, text, tokens=tokens)
    message = Message.of(reading.parts([reading.text]))
    assert Message.of(reading.parts(list(reading.text))) == message
    allowed = iter([(one, stripped(arguments)) for one, arguments in calls_in(name, text)])
    for call in message.tool_calls:
        assert (call.name, stripped(json.loads(call.arguments))) in allowed, (text, message)
    if name == "openai":  # words in whose headers are no text
        return
    if not message.tool_calls and not isinstance(CALLS[name], Layout):  # whose headers are no text
        assert "".join(message.text.split()) == "".join(text.split())
    shown = "".join([message.text, message.reasoning, *(call.name + call.arguments for call in message.tool_calls)])
    lost = words_of(text) - words_of(shown)
    assert not lost, (lost, text, message)


def stripped(arguments: dict[str, Any]) -> dict[str, Any]:
    """How much of the space before a tag is a text's own cannot be told where its own tag is missing."""
    return {key: value.rstrip() if isinstance(value, str) else value for key, value in arguments.items()}


def words_of(text: str) -> Counter[str]:
    """Of what a call says: names and values, not what stands around them."""
    return Counter(re.findall("Rome|Oslo|Paulo|print|b, c", text))


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", CALLS)
def test_a_damaged_call_is_read_to_the_letter_or_is_text(name: str, as_tokens: bool) -> None:
    draw, pieces = random.Random(name), pieces_of(name, transcript(name))
    check(name, "".join(pieces), as_tokens=as_tokens)
    for _ in range(NUM_DAMAGED):
        check(name, damaged(pieces, draw), as_tokens=as_tokens)

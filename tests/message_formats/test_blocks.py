"""Inkling and Muse: outputs of several messages, told apart by markers or by their recipients."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from quire.message_formats.blocks import Blocks
from quire.message_formats.formats import CALLS
from quire.message_formats.grammars.call_grammar import CallGrammar
from quire.message_formats.marks import Marks
from quire.message_formats.parts import Message
from quire.message_formats.tools import Tool
from tests.message_formats.families import Tokens
from tests.message_formats.reading import Reading, marked, marks_of, message_format, read_everyhow
from tests.message_formats.test_call_grammar import Walker

NAMES = ("inkling", "muse", "muse_glimmer")
every = pytest.mark.parametrize("name", NAMES)
ATEM = '<atem:function_calls>\n<atem:invoke name="{}">\n{}</atem:invoke>\n</atem:function_calls>'
PARAMETER = '<atem:parameter name="{}">{}</atem:parameter>\n'


def blocks(name: str) -> Blocks:
    found = CALLS[name]
    assert isinstance(found, Blocks)
    return found


def thought(name: str, text: str) -> str:
    return f"<|content_thinking|>{text}<|end_message|>" if name == "inkling" else f" to=self<|message|>{text}<|eom|>"


def said(name: str, text: str) -> str:
    return f"<|content_text|>{text}<|end_message|>" if name == "inkling" else f" to=user<|message|>{text}<|eom|>"


def call(name: str, function: str, **arguments: object) -> str:
    if name == "inkling":
        body = json.dumps({"name": function, "args": arguments}, separators=(",", ":"))
        return f"{function}<|content_invoke_tool_json|>{body}<|end_message|>"
    parameters = "".join(
        PARAMETER.format(key, value if isinstance(value, str) else json.dumps(value))
        for key, value in arguments.items()
    )
    return f" to={function}<|message|>{ATEM.format(function, parameters)}<|eom|>"


def output(name: str, *messages: str) -> str:
    return ("<|message_model|>" if name == "inkling" else "<|start|>assistant").join(messages)


def read(name: str, *messages: str) -> Message:
    return read_everyhow(message_format(name, name), output(name, *messages), tokens=blocks(name).frame)


@every
def test_messages_become_thinking_text_and_calls(name: str) -> None:
    message = read(
        name,
        thought(name, "They want\nthe weather."),
        said(name, "I will <look>."),
        call(name, "weather", city="Sao Paulo", days=3, tags=["a", "b, c"]),
        call(name, "now"),
        thought(name, "Hm."),
        said(name, "Done."),
    )
    assert message.reasoning == "They want\nthe weather.\n\nHm."
    assert message.text == "I will <look>.\n\nDone."
    assert [(one.name, json.loads(one.arguments)) for one in message.tool_calls] == [
        ("weather", {"city": "Sao Paulo", "days": 3, "tags": ["a", "b, c"]}),
        ("now", {}),
    ]


@every
def test_calls_inside_thinking_and_text_are_none(name: str) -> None:
    quoted = call(name, "now").partition("<|message|>")[2].removesuffix("<|eom|>") or '{"name":"now","args":{}}'
    message = read(name, thought(name, f"First {quoted}"), said(name, f"So {quoted}"))
    assert (message.reasoning, message.text, message.tool_calls) == (f"First {quoted}", f"So {quoted}", [])


def test_recipients_of_muse_say_what_a_body_is() -> None:
    messages = (
        " to=commentary<|message|>Working.<|eom|>",
        " to=developer<|message|>secret<|eom|>",
        "<|message|>Hm.<|eom|>",
        said("muse", "Done."),
    )
    assert read("muse", *messages) == Message(text="Working.\n\nDone.", reasoning="Hm.")
    assert read("muse_glimmer", messages[2], messages[3]).text == "Hm.\n\nDone."


def test_a_function_of_muse_may_be_a_member_of_itself() -> None:
    twice = call("muse", "now.now")
    assert [one.name for one in read("muse", twice).tool_calls] == ["now"]
    assert [one.name for one in read("muse", call("muse", "a.now")).tool_calls] == ["a.now"]


@every
@pytest.mark.parametrize("bad", ['{"name":"now"', '{"args":{}}', "nothing", '<atem:invoke name="x">'])
def test_malformed_calls_are_text(name: str, bad: str) -> None:
    head, _, tail = call(name, "now").partition("{" if name == "inkling" else "<atem:function_calls>")
    end = tail[tail.rindex("<|") :]
    whole = output(name, said(name, "Look:"), head + bad + end, call(name, "now"))
    for tokens in (blocks(name).frame, ()):
        message = Reading(message_format(name, name), whole, tokens=tokens).message()
        assert [one.name for one in message.tool_calls] == ["now"]
        assert message.text.split()[0] == "Look:"
        assert "".join(bad.split()) in "".join(message.text.split())


@every
def test_a_prompt_may_have_begun_the_thinking_or_the_answer(name: str) -> None:
    written = message_format(name, name)
    rest = thought(name, "Hm.").partition("|>")[2] if name == "inkling" else "Hm.<|eom|>"
    whole = output(name, rest, said(name, "Yes."))
    message = read_everyhow(written, whole, tokens=blocks(name).frame, in_thinking=True)
    assert (message.reasoning, message.text) == ("Hm.", "Yes.")
    assert read_everyhow(written, "21 degrees to=x", tokens=blocks(name).frame).text == "21 degrees to=x"


@every
def test_whether_a_prompt_ends_inside_the_thinking_is_told_by_its_last_marker(name: str) -> None:
    layout = blocks(name)
    marks = marks_of(message_format(name, name), layout.frame)
    start = "<|message_model|>" if name == "inkling" else "<|start|>assistant"

    def ids(text: str) -> list[int]:
        return [next((marks.ids[m] for m in marks.ids if marks(m) == c), 5) for c in marked(marks, text)]

    thinks, says = (message.removesuffix(layout.ends[0]) for message in (thought(name, ""), said(name, "")))
    for text, in_thinking, in_header in [
        (start, False, True),
        (start + thinks, True, False),
        (start + thought(name, "Hm.") + start + says, False, None),
        (start + thought(name, "Hm.") + start, False, True),
    ]:
        assert layout.ends_in_thinking(marks, ids(text), text) is in_thinking, text
        assert layout.ends_in_header(marks, ids(text), text) is (in_header if name != "inkling" else False), text


WEATHER = Tool(
    name="weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "maximum": 14}},
        "required": ["city"],
        "additionalProperties": False,
    },
)


class BlockWalker(Walker):
    """With those tokens that frame messages."""

    def __init__(self, name: str) -> None:
        super().__init__(name, as_tokens=True)
        assert self.marks.ids.keys() >= set(blocks(name).frame)


@every
@pytest.mark.parametrize("parallel", [True, False])
def test_what_grammars_allow_reads_as_calls_with_valid_arguments(name: str, parallel: bool) -> None:
    walker, chance = BlockWalker(name), random.Random(2)
    grammar = CallGrammar(walker.marks, [WEATHER, Tool(name="now", parameters={"properties": {}})], parallel=parallel)
    text = grammar.text(walker.calls.several(grammar))
    for _ in range(6):
        written = walker.walk(text, chance)
        reading = Reading(message_format(name, name), "", tools={"weather": WEATHER, "now": Tool(name="now")})
        reading.marks, reading.calls_as_they_come = walker.marks, True
        message = Message.of(reading.parts(list(written)))
        assert not message.text, written
        assert 1 <= len(message.tool_calls) <= (99 if parallel else 1)
        for found in message.tool_calls:
            if found.name == "weather":
                jsonschema.validate(json.loads(found.arguments), dict(WEATHER.parameters))


@every
def test_grammars_take_what_the_template_writes(name: str) -> None:
    walker = BlockWalker(name)
    grammar = CallGrammar(walker.marks, [WEATHER])
    text = grammar.text(walker.calls.several(grammar))
    one = call(name, "weather", city="Rome", days=3)
    for messages in ((one,), (one, one)):
        assert walker.takes(text, marked(walker.marks, output(name, *messages)))
    assert not walker.takes(text, marked(walker.marks, output(name, call(name, "other"))))
    start = marked(walker.marks, output(name, "", one))
    behind = CallGrammar(walker.marks, [WEATHER], has_thought=True)
    assert walker.takes(behind.text(walker.calls.several(behind)), start)


def test_the_grammar_of_muse_takes_the_headers_of_other_messages() -> None:
    walker = BlockWalker("muse")
    grammar = CallGrammar(walker.marks, [WEATHER])
    text = grammar.text(walker.calls.rest(grammar, "<|start|>"))
    for header in ("assistant to=user<|message|>", "assistant to=self<|message|>", " to=commentary<|message|>"):
        assert walker.takes(text, marked(walker.marks, header))
    assert not walker.takes(text, marked(walker.marks, "assistant to=other<|message|>"))


def test_marks_of_another_tokenizer_are_text() -> None:
    marks = Marks(blocks("inkling").markers, Tokens(()))  # type: ignore[arg-type]
    assert not marks.ids

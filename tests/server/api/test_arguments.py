"""Arguments of calls in the APIs that send them as objects."""

from __future__ import annotations

import json

import pytest

from quire.message_formats.parts import CallArguments, CallStart
from quire.server.api.anthropic_messages import blocks_of
from quire.server.api.message_reader import input_of
from quire.server.http.streaming import encode

WHOLE = [
    "{}",
    '{ "a" : [1, {"b": null}] }',
    '{"a": "\\ud800", "b": "\\ud83d\\ude00 é"}',
    '{"a": 1e999, "b": -1E-400}',
    '{"a": 12345678901234567890.123456789012345678901234567890}',
    '{"a": %s}' % ("9" * 5000),
    '{\n  "a":\r\n 1\n}',
    '{"a": 1, "a": 2}',
]


@pytest.mark.parametrize("text", WHOLE, ids=lambda text: text[:30])
def test_whole_arguments_are_sent_to_the_letter_and_in_one_line(text: str) -> None:
    written = encode({"input": input_of(text)}).decode()
    assert written == '{"input":' + text.replace("\r", " ").replace("\n", " ") + "}"


def test_arguments_of_characters_that_there_are_not_are_no_failure() -> None:
    (block,) = blocks_of([CallStart(0, "call_0", "f"), CallArguments(0, '{"a": "\\udfff"}')])
    assert json.loads(encode(block))["input"] == {"a": "\udfff"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", {}), ('{"a": "x', {"a": "x"}), ('{"a": [1, {"b": "c', {"a": [1, {"b": "c"}]}), ('{"a": "x\\', {"a": "x"})],
)
def test_arguments_that_were_cut_are_sent_as_far_as_they_go(text: str, expected: object) -> None:
    assert json.loads(encode(input_of(text))) == expected

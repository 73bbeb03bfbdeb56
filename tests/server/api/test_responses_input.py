"""Input items of /v1/responses: the messages that they make, and what is wrong with them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.server.api.responses.input_items import InputReader
from tests.server.api.test_responses_tools import QUESTION, WEATHER
from tests.server.conftest import Running

REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Oslo"}'}
OTHER = {**CALL, "id": "fc_2", "call_id": "call_2", "arguments": '{"city": "Bergen"}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "Rain."}
SAID = {
    "type": "message",
    "id": "msg_1",
    "status": "completed",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "Let me look.", "annotations": [], "logprobs": []}],
}


def call_of(item: dict[str, Any]) -> dict[str, Any]:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


RESULT = {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "Rain."}
HISTORIES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "agent": (
        [QUESTION, REASONING, CALL, OUTPUT],
        [
            QUESTION,
            {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call_of(CALL)]},
            RESULT,
        ],
    ),
    "all in one message": (
        [QUESTION, REASONING, SAID, CALL, OTHER],
        [
            QUESTION,
            {
                "role": "assistant",
                "content": SAID["content"],
                "reasoning_content": "Hm.",
                "tool_calls": [call_of(CALL), call_of(OTHER)],
            },
        ],
    ),
    "text after calls": (
        [QUESTION, CALL, {"role": "assistant", "content": "I wait."}, OUTPUT],
        [QUESTION, {"role": "assistant", "content": "I wait.", "tool_calls": [call_of(CALL)]}, RESULT],
    ),
    "text around calls": (
        [{"role": "assistant", "content": "A"}, CALL, {"role": "assistant", "content": "B"}],
        [{"role": "assistant", "content": "AB", "tool_calls": [call_of(CALL)]}],
    ),
    "a call after a result": (
        [QUESTION, CALL, OUTPUT, OTHER],
        [
            QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [call_of(CALL)]},
            RESULT,
            {"role": "assistant", "content": None, "tool_calls": [call_of(OTHER)]},
        ],
    ),
    "thinking between calls": (
        [CALL, REASONING, OTHER],
        [
            {"role": "assistant", "content": None, "tool_calls": [call_of(CALL)]},
            {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call_of(OTHER)]},
        ],
    ),
    "thinking without an answer": (
        [QUESTION, REASONING, QUESTION, REASONING],
        [
            QUESTION,
            {"role": "assistant", "content": "", "reasoning_content": "Hm."},
            QUESTION,
            {"role": "assistant", "content": "", "reasoning_content": "Hm."},
        ],
    ),
    "a summary is all there is": (
        [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "In short."}]}, SAID],
        [{"role": "assistant", "content": SAID["content"], "reasoning_content": "In short."}],
    ),
    "two messages": (
        [{"role": "assistant", "content": "A"}, {"role": "assistant", "content": "B"}],
        [{"role": "assistant", "content": "A"}, {"role": "assistant", "content": "B"}],
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_items_of_one_turn_are_one_message(name: str) -> None:
    items, messages = HISTORIES[name]
    reader = InputReader(None)
    for index, item in enumerate(items):
        reader.read(item, f"input[{index}]")
    assert reader.finish() == messages
    assert reader.warnings == []


@pytest.mark.parametrize("name", ["agent", "all in one message", "a call after a result", "two messages"])
def test_items_and_messages_make_the_same_prompt(server: Running, name: str) -> None:
    items, messages = HISTORIES[name]
    function = {key: value for key, value in WEATHER.items() if key != "type"}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/responses": {"input": items, "tools": [WEATHER], "max_output_tokens": 4, "instructions": "Be brief."},
        "/v1/chat/completions": {
            "messages": [{"role": "system", "content": "Be brief."}, *messages],
            "tools": [{"type": "function", "function": function}],
            "max_tokens": 4,
        },
    }
    receipts = []
    for path, body in bodies.items():
        reply = server.client.post(path, json={**body, "temperature": 0}, headers={"x-quire-receipt": "1"})
        assert reply.status_code == 200, reply.text
        (request,) = reply.json()["receipt"]["requests"]
        receipts.append((request["prompt_token_ids"], request["completions"]))
    assert receipts[0] == receipts[1]


def test_reasoning_that_no_template_reads_is_warned_of(server: Running) -> None:
    reply = server.post("/v1/responses", input=[QUESTION, REASONING, SAID], max_output_tokens=1).json()
    assert any("leaves out thoughts" in warning for warning in reply["warnings"])


def test_fields_of_items_without_effect_are_named(server: Running) -> None:
    secret = {**REASONING, "encrypted_content": "abc"}
    items = [QUESTION, secret, {**CALL, "namespace": "x"}, OUTPUT]
    warnings = server.post("/v1/responses", input=items, max_output_tokens=1).json()["warnings"]
    assert "input[1].encrypted_content has no effect" in warnings
    assert any(warning.startswith("unknown parameter 'input[2].namespace' has no effect") for warning in warnings)


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([{"type": "web_search_call", "id": "x"}], "input[0].type"),
        ([{"type": 5}], "input[0].type"),
        ([{"type": {}}], "input[0].type"),
        ([{}], "input[0].role"),
        ([{"role": "robot", "content": "x"}], "input[0].role"),
        ([QUESTION, {"role": "user", "content": 5}], "input[1].content"),
        ([{"role": "user"}], "input[0].content"),
        ([QUESTION, {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[1].content[0]"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{**CALL, "call_id": None}], "input[0].call_id"),
        ([{**CALL, "call_id": "x" * 1025}], "input[0].call_id"),
        ([{**CALL, "name": ""}], "input[0].name"),
        ([{**CALL, "name": "x" * 257}], "input[0].name"),
        ([{**CALL, "arguments": {"city": "Oslo"}}], "input[0].arguments"),
        ([QUESTION, CALL, {**OTHER, "arguments": "{city"}], "input[2].arguments"),
        ([QUESTION, OUTPUT], "input[1].call_id"),
        ([CALL, {**OUTPUT, "call_id": 3}], "input[1].call_id"),
        ([CALL, {**OUTPUT, "output": None}], "input[1].output"),
        ([CALL, {**OUTPUT, "output": [{"type": "input_image", "image_url": "x"}]}], "input[1].output[0]"),
        ([{**REASONING, "content": "Hm."}], "input[0].content"),
        ([{**REASONING, "content": [{"type": "text", "text": "Hm."}]}], "input[0].content[0]"),
        ([{**REASONING, "content": [{"type": "reasoning_text"}]}], "input[0].content[0]"),
        ([{**REASONING, "summary": {"text": "Hm."}}], "input[0].summary"),
        ([{**REASONING, "summary": [{"type": "summary_text", "text": "x"}] * 4097}], "input[0].summary"),
        ([{"type": "item_reference", "id": "msg_1"}], "input[0].id"),
        ([{"type": "item_reference"}], "input[0].id"),
        ([{"id": "msg_1"}], "input[0].id"),
        ([5], "input"),
        ([QUESTION] * 4097, "input"),
        ([{"role": "user", "content": "x " * 30_000}], "input"),
    ],
)
def test_what_is_wrong_with_an_item_is_named(server: Running, items: list[Any], param: str | None) -> None:
    reply = server.post("/v1/responses", input=items, max_output_tokens=1)
    assert reply.status_code == 400, reply.text
    assert param is None or reply.json()["error"]["param"] == param, reply.text
    assert len(reply.text) < 1500


ODD: tuple[Any, ...] = (
    None,
    5,
    -1.5,
    True,
    "",
    "x",
    "\x00",
    [],
    {},
    [None],
    [[]],
    {"type": "text"},
    "x" * 2000,
    [{}] * 3,
)


def test_no_item_whatever_it_holds_breaks_the_server(server: Running) -> None:
    """And one that is refused names a field of the input."""
    draw = random.Random(3)
    seeds = [QUESTION, REASONING, CALL, OTHER, OUTPUT, SAID, {"type": "item_reference", "id": "x"}]
    names = [
        "type",
        "role",
        "content",
        "call_id",
        "name",
        "arguments",
        "output",
        "summary",
        "id",
        "tool_calls",
        "status",
    ]
    for _ in range(400):
        items: list[Any] = [dict(draw.choice(seeds)) for _ in range(draw.randrange(1, 5))]
        for _ in range(draw.randrange(3)):
            draw.choice(items)[draw.choice(names)] = draw.choice(ODD)
        reply = server.post("/v1/responses", input=items, max_output_tokens=1)
        assert reply.status_code in (200, 400), (items, reply.text)
        if reply.status_code == 400:
            assert reply.json()["error"]["param"].startswith("input"), (items, reply.text)
            assert len(reply.text) < 2500
    server.wait_idle()

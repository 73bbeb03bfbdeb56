"""Fields inside of forms, messages, parts and calls that nothing reads are named, or refused with --strict-params.
Those that clients send back with earlier answers are neither."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Running, Serve

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "g"}


def chat(*messages: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": messages or [USER], "max_tokens": 1, **more}


def called(call: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return chat(USER, {"role": "assistant", "content": None, "tool_calls": [call], **more}, RESULT)


def form(**more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True, **more}}


def response(*items: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": items or "hi", "max_output_tokens": 16, **more}


def allowed(one: Any, **more: Any) -> dict[str, Any]:
    """A choice among the tools of a request that has one."""
    listed = {"mode": "auto", "tools": [one], **more}
    return {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": listed}}


TOOL = {"type": "function", "function": {"name": "f"}}


def messages(*more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"messages": [USER, *more], "max_tokens": 1}


FLAT = {"type": "json_schema", "name": "x", "schema": SCHEMA}
THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}], "summary": []}
FLAT_CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
FLAT_RESULT = {"type": "function_call_output", "call_id": "c", "output": "g"}
USED = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
THINKING = {"type": "thinking", "thinking": "a", "signature": ""}
RESULTS = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "g"}]}
TURN = {"role": "assistant", "content": [THINKING, USED]}
UNKNOWN = [
    (chat(response_format={**form(), "shema": 1}), "response_format.shema", None),
    (chat(response_format=form(strct=True)), "response_format.json_schema.strct", "; did you mean 'strict'?"),
    (chat(response_format={"type": "text", "schema": SCHEMA}), "response_format.schema", ""),
    (chat(response_format={"type": "json_object", "strict": True}), "response_format.strict", ""),
    (
        ("/v1/completions", {"prompt": "hi", "max_tokens": 1, "response_format": form(a=1)}),
        "response_format.json_schema.a",
        "",
    ),
    (response(text={"format": {**FLAT, "strickt": 1}}), "text.format.strickt", "; did you mean 'strict'?"),
    (response({"type": "message", **USER, "nme": "x"}), "input[0].nme", "; did you mean 'name'?"),
    (response({**USER, "content": [{"type": "input_text", "text": "a", "x": 1}]}), "input[0].content[0].x", ""),
    (
        ("/v1/messages", {"messages": [USER], "max_tokens": 1, "output_format": {**FLAT, "foo": 1}}),
        "output_format.foo",
        "",
    ),
    (("/v1/messages", {"messages": [USER, {**USER, "foo": 1}], "system": "a", "max_tokens": 1}), "messages[1].foo", ""),
    (response(USER, {**FLAT_CALL, "argument": 1}, FLAT_RESULT), "input[1].argument", "; did you mean 'arguments'?"),
    (response(USER, FLAT_CALL, {**FLAT_RESULT, "is_error": True}), "input[2].is_error", ""),
    (
        response(USER, {**THOUGHT, "content": [{**THOUGHT["content"][0], "foo": 1}]}),  # type: ignore[dict-item]
        "input[1].content[0].foo",
        "",
    ),
    (messages({**TURN, "content": [{**THINKING, "foo": 1}, USED]}, RESULTS), "messages[1].content[0].foo", ""),
    (messages(TURN, {**RESULTS, "nme": 1}), "messages[2].nme", "; did you mean 'name'?"),
    (chat({**USER, "nam": "x"}), "messages[0].nam", "; did you mean 'name'?"),
    (chat(**allowed({**TOOL, "strict": True})), "tool_choice.allowed_tools.tools[0].strict", ""),
    (
        chat(**allowed({**TOOL, "function": {"name": "f", "strict": True}})),
        "tool_choice.allowed_tools.tools[0].function.strict",
        "",
    ),
    (
        response(
            tools=[{"type": "function", "name": "f"}],
            tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f", "x": 1}]},
        ),
        "tool_choice.tools[0].x",
        "",
    ),
    (
        ("/v1/messages/count_tokens", {"messages": [USER], "output_config": {"format": {**FLAT, "foo": 1}}}),
        "output_config.format.foo",
        "",
    ),
    (chat({**USER, "content": [{"type": "text", "text": "a", "txet": 1}]}), "messages[0].content[0].txet", None),
    (chat(USER, {"role": "assistant", "content": "a", "function_call": {"name": "f"}}, USER), None, None),
    (called({**CALL, "foo": 1}), "messages[1].tool_calls[0].foo", ""),
    (
        called({**CALL, "function": {**CALL["function"], "args": 1}}),  # type: ignore[dict-item]
        "messages[1].tool_calls[0].function.args",
        None,
    ),
    (
        ("/api/chat", {"messages": [{**USER, "foo": 1}], "stream": False, "options": {"num_predict": 1}}),
        "messages[0].foo",
        "",
    ),
    (("/tokenize", {"messages": [{**USER, "foo": 1}]}), "messages[0].foo", ""),
    (("/tokenize", {"messages": [USER], "mesages": 1}), "mesages", "; did you mean 'messages'?"),
]


@pytest.mark.parametrize(("request_", "path", "hint"), UNKNOWN, ids=[str(path) for _, path, _ in UNKNOWN])
def test_an_unknown_field_is_named(
    server: Running, request_: tuple[str, dict[str, Any]], path: str | None, hint: str | None
) -> None:
    url, body = request_
    reply = server.client.post(url, json=body)
    assert reply.status_code == 200, reply.text
    warnings = [warning for warning in reply.json()["warnings"] if warning.startswith("unknown")]
    (warning,) = warnings
    path = path or "messages[1].function_call"
    assert warning.startswith(f"unknown parameter '{path}' has no effect")
    if hint is not None:
        assert warning.endswith(f"has no effect{hint}")


def test_strict_servers_refuse_them(serve: Serve) -> None:
    with serve(strict_params=True) as strict:
        for (url, body), path, hint in UNKNOWN:
            reply = strict.client.post(url, json=body)
            assert reply.status_code == 400, (url, body)
            path = path or "messages[1].function_call"
            assert path in reply.text
            assert (hint or "").partition("'")[2].partition("'")[0] in reply.text


KNOWN = [
    called({**CALL, "index": 0}, refusal=None, annotations=[], audio=None, function_call=None),
    called(
        {**CALL, "function": {**CALL["function"], "parsed_arguments": {}}},  # type: ignore[dict-item]
        parsed=None,
    ),
    called(CALL, provider_specific_fields={"a": 1}, thinking_blocks=[{"type": "thinking"}]),
    called(CALL, tool_call_id="", name="f", refusal=""),
    chat({**USER, "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}),
    response(
        USER,
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "phase": "final_answer",
            "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
        },
        USER,
    ),
    ("/v1/messages", {"messages": [USER], "max_tokens": 1, "system": [{"type": "text", "text": "a"}]}),
    response(USER, {**FLAT_CALL, "parsed_arguments": {}, "status": "completed"}, FLAT_RESULT),
    messages({**TURN, "content": [USED]}, RESULTS),
]


@pytest.mark.parametrize("request_", KNOWN)
def test_what_clients_send_back_is_accepted(server: Running, request_: tuple[str, dict[str, Any]]) -> None:
    url, body = request_
    reply = server.client.post(url, json=body)
    assert reply.status_code == 200, reply.text
    assert "warnings" not in reply.json()


def test_an_endless_number_of_them_is_bounded(server: Running) -> None:
    reply = server.post("/v1/chat/completions", messages=[{**USER, **{f"f{n}": 1 for n in range(500)}}], max_tokens=1)
    assert reply.status_code == 200
    assert len(reply.json()["warnings"]) == 100


@pytest.mark.parametrize(
    ("call", "path"),
    [
        ({"id": "c", "type": "function"}, "function"),
        ({**CALL, "function": {"name": "f"}}, "function.arguments"),
        ({**CALL, "function": {"arguments": "{}"}}, "function.name"),
    ],
)
def test_a_call_of_the_history_that_lacks_a_field_is_refused_by_name(server: Running, call: Any, path: str) -> None:
    url, body = called(call)
    error = server.client.post(url, json=body).json()["error"]
    assert error["param"] == f"messages[1].tool_calls[0].{path}"
    assert error["message"].startswith(f"messages[1].tool_calls[0].{path} must be ")

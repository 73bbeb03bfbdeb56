"""Tools on /v1/chat/completions. The model is made to write a given text, so that its reading can be seen."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.server.conftest import MODEL, Running, Serve

QUESTION: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo {}", "days": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60) as made:
        yield made


def written(text: str) -> dict[str, Any]:
    """What makes the model write a text."""
    return {"extra_body": {"structured_outputs": {"choice": [text]}}, "max_tokens": 400}


def ask(client: openai.OpenAI, text: str, **given: Any) -> Any:
    """The choice of a whole reply."""
    (choice,) = client.chat.completions.create(
        **{"model": MODEL, "messages": QUESTION, "tools": [WEATHER], **written(text), **given}
    ).choices
    return choice


def streamed(client: openai.OpenAI, text: str, **given: Any) -> Any:
    """The choice of a streamed reply, as the official client puts it together."""
    given = {"model": MODEL, "messages": QUESTION, "tools": [WEATHER], **written(text), **given}
    with client.chat.completions.stream(**given) as events:
        for _ in events:
            pass
        (choice,) = events.get_final_completion().choices
    return choice


def test_a_call_is_told_from_text(client: openai.OpenAI) -> None:
    for choice in (ask(client, f"Let me look.\n{CALL}"), streamed(client, f"Let me look.\n{CALL}")):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me look."
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments) == {"city": "Oslo {}", "days": 2}
        assert call.id.startswith("call_")


def test_calls_in_parallel_have_ids_of_their_own(client: openai.OpenAI) -> None:
    for choice in (ask(client, f"{CALL}\n{CALL}"), streamed(client, f"{CALL}\n{CALL}")):
        first, second = choice.message.tool_calls
        assert first.id != second.id
        assert first.function == second.function
        assert not choice.message.content


def test_choices_have_ids_of_their_own_unless_the_model_writes_them(server: Running, serve: Serve) -> None:
    begin, middle, end = "<|tool_call_begin|>functions.weather:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    kimi = f'<|tool_calls_section_begin|>{begin}{middle}{{"city": "Oslo"}}{end}<|tool_calls_section_end|>'
    asked: dict[str, Any] = {"messages": QUESTION, "tools": [WEATHER], "n": 2, "max_tokens": 200, "temperature": 1}
    with serve(tool_call_parser="kimi_k2") as other:
        for running, text, num_ids in ((server, CALL, 2), (other, kimi, 1)):
            form = {"choice": [text]}
            choices = running.post("/v1/chat/completions", **asked, structured_outputs=form).json()["choices"]
            ids = [call["id"] for choice in choices for call in choice["message"]["tool_calls"]]
            assert (len(ids), len(set(ids))) == (2, num_ids)


@pytest.mark.parametrize("text", ['<tool_call>\n{"name": "weather", "arg', "<tool_call> {} </tool_call>", "a < b"])
def test_what_is_no_call_stays_text(client: openai.OpenAI, text: str) -> None:
    for choice in (ask(client, text), streamed(client, text)):
        assert choice.message.content == text
        assert not choice.message.tool_calls
        assert choice.finish_reason == "stop"


def test_without_tools_nothing_is_a_call(client: openai.OpenAI) -> None:
    for choice in (ask(client, CALL, tool_choice="none"), ask(client, CALL, tools=openai.NOT_GIVEN)):
        assert choice.message.content == CALL
        assert not choice.message.tool_calls


def test_calls_are_only_read_where_the_end_of_an_output_is_ignored(client: openai.OpenAI) -> None:
    given: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    reply: Any = client.chat.completions.create(**given, tools=[strict], parallel_tool_calls=False)
    assert reply.usage.completion_tokens == 24
    assert [warning.partition(" ")[0] for warning in reply.warnings] == ["strict", "parallel_tool_calls"]
    assert "warnings" not in client.chat.completions.create(**given, tools=[WEATHER]).to_dict()
    with pytest.raises(openai.BadRequestError, match="tool_choice needs a grammar") as caught:
        client.chat.completions.create(**given, tools=[WEATHER], tool_choice="required")
    assert caught.value.param == "tool_choice"


def test_results_go_back_to_the_model(client: openai.OpenAI) -> None:
    call = ask(client, CALL).message.tool_calls[0]
    history = [
        *QUESTION,
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "Rain. <|im_end|> <tool_call>"},
    ]
    reply: Any = client.chat.completions.create(
        model=MODEL,
        messages=history,
        tools=[WEATHER],  # type: ignore[list-item]
        extra_body={"return_prompt_text": True},
        max_tokens=1,
    )
    assert "<tool_response>\nRain. <|im_end|> <tool_call>\n</tool_response><|im_end|>" in reply.prompt_text
    assert CALL in reply.prompt_text


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}, "tools[0].function.strict"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(600)]}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}}, "tool_choice"),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "mcp", "function": {"name": "weather"}}]},
                }
            },
            "tool_choice.tools[0].type",
        ),
        ({"tools": openai.NOT_GIVEN, "tool_choice": "required"}, "tool_choice"),
        ({"tools": []}, "tools"),
        ({"tools": {"a": 1}}, "tools"),
    ],
)
def test_what_is_wrong_with_tools_is_named(client: openai.OpenAI, given: dict[str, Any], param: str) -> None:
    body = {"model": MODEL, "messages": QUESTION, "tools": [WEATHER], **given}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tools": [{**WEATHER, "strct": True}]}, ["tools[0].strct"]),
        ({"tools": [{"type": "function", "function": {"name": "f", "params": {}}}]}, ["tools[0].function.params"]),
        (
            {"tool_choice": {"type": "function", "function": {"name": "weather", "a": 1}, "b": 2}},
            ["tool_choice.b", "tool_choice.function.a"],
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"tools": [{"type": "function", "function": {"name": "weather"}}], "a": 1},
                }
            },
            ["tool_choice.allowed_tools.a"],
        ),
    ],
)
def test_unknown_fields_of_tools_are_named(server: Running, given: dict[str, Any], named: list[str]) -> None:
    body = {"model": MODEL, "messages": QUESTION, "tools": [WEATHER], "max_tokens": 1, **given}
    reply = server.post("/v1/chat/completions", **body)
    assert reply.status_code == 200, reply.text
    warnings = [warning.partition("; did you mean")[0] for warning in reply.json()["warnings"]]
    assert warnings == [f"unknown parameter '{name}' has no effect" for name in named]


def test_unknown_fields_of_tools_are_named_in_other_apis(server: Running) -> None:
    tool = {"name": "weather", "type": "function", "description": "", "foo": 1}
    choice = {"type": "function", "name": "weather", "bar": 2}
    body = {"model": MODEL, "input": "Oslo", "tools": [tool], "tool_choice": choice, "max_output_tokens": 16}
    expected = [f"unknown parameter '{name}' has no effect" for name in ("tools[0].foo", "tool_choice.bar")]
    assert server.post("/v1/responses", **body).json()["warnings"] == expected
    tool = {"name": "weather", "input_schema": {"type": "object"}, "foo": 1, "cache_control": {"type": "ephemeral"}}
    choice = {"type": "auto", "bar": 2}
    body = {"model": MODEL, "messages": QUESTION, "tools": [tool], "tool_choice": choice, "max_tokens": 1}
    assert server.post("/v1/messages", **body).json()["warnings"] == expected


def arguments_of(call: Any) -> dict[str, Any]:
    found = json.loads(call.function.arguments)
    jsonschema.validate(found, WEATHER["function"]["parameters"])
    return dict(found)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("seed", range(3))
def test_a_call_that_must_be_made_follows_its_schema(client: openai.OpenAI, choice: Any, seed: int) -> None:
    given: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": [WEATHER], "tool_choice": choice}
    given |= {"seed": seed, "temperature": 1, "max_tokens": 400, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**given).choices[0]
    pieces = [chunk.choices[0] for chunk in client.chat.completions.create(**given, stream=True) if chunk.choices]
    calls = [call for piece in pieces for call in piece.delta.tool_calls or ()]
    assert whole.finish_reason == pieces[-1].finish_reason == "tool_calls"
    assert whole.message.tool_calls is not None
    assert len(whole.message.tool_calls) == 1
    arguments = "".join(call.function.arguments or "" for call in calls if call.function)
    assert arguments == whole.message.tool_calls[0].function.arguments
    assert len(calls) > 2, "arguments come piece by piece"
    arguments_of(whole.message.tool_calls[0])


def test_a_call_that_is_cut_has_the_arguments_so_far(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": [WEATHER], "tool_choice": "required"}
    given |= {"seed": 1, "temperature": 1}
    full = client.chat.completions.create(**given, max_tokens=400).choices[0].message.tool_calls[0]
    for length in (1, 2, 3, 4, 16, 20, 24):
        whole = client.chat.completions.create(**given, max_tokens=length).choices[0]
        assert whole.finish_reason == "length"
        assert not whole.message.content, "the head of a call is no text"
        for call in whole.message.tool_calls or ():
            assert full.function.arguments.startswith(call.function.arguments)


FIXED: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "move",
        "parameters": {
            "type": "object",
            "properties": {"to": {"const": "north west"}, "by": {"const": 7}},
            "required": ["to", "by"],
            "additionalProperties": False,
        },
    },
}
"""A tool whose calls are all alike."""


@pytest.mark.parametrize("stop", [" west", "7", "}", "</tool_call>"])
@pytest.mark.parametrize("include", [False, True])
def test_a_call_that_a_stop_string_cuts_is_not_told_as_a_whole_one(
    client: openai.OpenAI, stop: str, include: bool
) -> None:
    given: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": [FIXED], "tool_choice": "required"}
    given |= {"parallel_tool_calls": False, "stop": [stop], "max_tokens": 400, "seed": 1}
    given["extra_body"] = {"include_stop_str_in_output": include}
    whole = client.chat.completions.create(**given).choices[0]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**given, stream=True)]
    (call,) = whole.message.tool_calls or ()
    streamed_arguments = [piece.function.arguments for chunk in chunks for piece in chunk.delta.tool_calls or ()]
    assert call.function.arguments == "".join(streamed_arguments)
    try:
        is_whole = json.loads(call.function.arguments) == {"to": "north west", "by": 7}
    except json.JSONDecodeError:
        is_whole = False
    assert is_whole == (stop == "</tool_call>" or (stop == "}" and include))
    assert whole.finish_reason == chunks[-1].finish_reason == ("tool_calls" if is_whole else "stop")


@pytest.mark.parametrize("stop", ["a", "ll>", "{", "name", "move", "arg"])
def test_the_head_of_a_call_that_a_stop_string_cuts_is_no_text(client: openai.OpenAI, stop: str) -> None:
    given: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": [FIXED], "tool_choice": "required"}
    given |= {"stop": [stop], "max_tokens": 400, "seed": 1}
    whole = client.chat.completions.create(**given).choices[0]
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**given, stream=True)]
    assert not whole.message.content
    assert not any(delta.content for delta in deltas)
    assert whole.finish_reason == "stop"


def test_what_is_cut_behind_a_call_is_the_same_streamed_and_whole(client: openai.OpenAI) -> None:
    function = {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
    given: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 1, "tool_choice": "required"}
    given["tools"] = [{"type": "function", "function": function}]
    for length in range(1, 70, 2):  # to the third call
        given |= {"seed": 1, "max_tokens": length, "extra_body": {"min_tokens": length}}
        whole = client.chat.completions.create(**given).choices[0]
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**given, stream=True)]
        pieces = [call for delta in deltas for call in delta.tool_calls or ()]
        calls = whole.message.tool_calls or ()
        assert not whole.message.content
        assert not any(delta.content for delta in deltas)
        assert sum(bool(piece.id) for piece in pieces) == len(calls)
        arguments = "".join(piece.function.arguments for piece in pieces)
        assert arguments == "".join(call.function.arguments for call in calls)
    assert len(calls) > 1


def test_tools_change_nothing_before_a_call_begins(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": [WEATHER], "max_tokens": 60, "seed": 5}
    free = client.chat.completions.create(**given).choices[0].message.content
    plain = client.chat.completions.create(**given, tool_choice="none").choices[0].message.content
    assert free == plain


@pytest.mark.parametrize("strict", [True, None])
def test_a_schema_that_cannot_be_kept_is_told(client: openai.OpenAI, strict: bool | None) -> None:
    function = {**WEATHER["function"], "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}
    tools: Any = [{"type": "function", "function": {**function, "strict": strict}}]
    given: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": tools, "max_tokens": 2}
    if strict:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**given)
        assert "#/properties/a/not" in caught.value.message
        assert caught.value.param == "tools[0].function.parameters"
    else:
        reply: Any = client.chat.completions.create(**given)
        assert any("#/properties/a" in warning for warning in reply.warnings)


def test_a_required_call_has_no_other_form(client: openai.OpenAI) -> None:
    """As in OpenAI's API: `response_format` is the form of texts, and such an answer has none."""
    given: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": [FIXED], "tool_choice": "required"}
    reply: Any = client.chat.completions.create(**given, max_tokens=200, response_format={"type": "json_object"})
    assert reply.choices[0].message.tool_calls
    assert any(warning.startswith("response_format has no effect") for warning in reply.warnings)
    with pytest.raises(openai.BadRequestError, match="structured_outputs for another form") as caught:
        client.chat.completions.create(**given, extra_body={"structured_outputs": {"json_object": True}})
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("seed", range(6))
def test_an_answer_of_a_form_may_be_a_call_instead(client: openai.OpenAI, seed: int) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}},
    }
    given: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": [WEATHER], "response_format": form}
    choice = client.chat.completions.create(**given, seed=seed, temperature=2, max_tokens=400).choices[0]
    assert choice.finish_reason in ("stop", "tool_calls")
    if choice.message.tool_calls:
        arguments_of(choice.message.tool_calls[0])
    else:
        jsonschema.validate(json.loads(choice.message.content or ""), schema)


def test_what_a_grammar_keeps_only_in_some_spellings_is_named(serve: Serve) -> None:
    tool = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    body = {"messages": QUESTION, "tools": [tool], "parallel_tool_calls": False, "max_tokens": 1}
    with serve(tool_call_parser="xlam") as running:
        warnings = running.post("/v1/chat/completions", **body).json()["warnings"]
    with serve(tool_call_parser="pythonic") as running:
        assert "warnings" not in running.post("/v1/chat/completions", **body).json()
    assert [warning.split(" only ")[0] for warning in warnings] == ["strict holds", "parallel_tool_calls holds"]


OVERLAPPING = {"oneOf": [{"type": "object", "properties": {"x": {}}}, {"type": "object", "properties": {"y": {}}}]}
UNKEPT = [
    ({"type": "object", "properties": {"a": OVERLAPPING}}, "oneOf needs schemas of which no two allow the same value"),
    ({"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}, "looks around"),
    (
        {"type": "object", "properties": {"a": {"not": {}}}},
        "'#/properties/a/not': not is not kept; calls of f may break",
    ),
]


@pytest.mark.parametrize(("schema", "why"), UNKEPT)
def test_warnings_about_tools_are_in_words_of_the_request(server: Running, schema: dict[str, Any], why: str) -> None:
    function = {"name": "f", "parameters": schema}
    tools = [WEATHER, {"type": "function", "function": function}]
    body = {"model": MODEL, "messages": QUESTION, "tools": tools, "max_tokens": 1}
    (warning,) = server.post("/v1/chat/completions", **body).json()["warnings"]
    assert warning.startswith("tools[1].function.parameters: ")
    assert why in warning
    assert "f may" in warning
    assert not re.search(r"rule_|TEXT_|[Ll]ark|grammar\b.*:\d|%json|structured_outputs", warning)
    flat = {"model": MODEL, "input": QUESTION, "tools": [{"type": "function", **function}], "max_output_tokens": 16}
    assert any(
        one.startswith("tools[0].parameters: ") for one in server.post("/v1/responses", **flat).json()["warnings"]
    )


def test_errors_about_a_strict_tool_name_it_where_it_stands(server: Running) -> None:
    function = {"name": "f", "parameters": UNKEPT[0][0], "strict": True}
    choice = {"type": "function", "function": {"name": "f"}}
    tools = [WEATHER, {"type": "function", "function": function}]
    body = {"model": MODEL, "messages": QUESTION, "tools": tools, "tool_choice": choice, "max_tokens": 1}
    error = server.post("/v1/chat/completions", **body).json()["error"]
    assert error["param"] == "tools[1].function.parameters"
    assert UNKEPT[0][1] in error["message"]

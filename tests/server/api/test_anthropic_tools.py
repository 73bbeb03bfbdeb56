"""Tools and thinking on /v1/messages. The model is made to write a given text, so that its reading can be seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.server.api.test_tools import FIXED
from tests.server.conftest import MODEL, Running, Serve

QUESTION: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TURN = f"<think>\nOslo is a city.\n</think>\n\nLet me look.\n{CALL}\n{CALL}"


@pytest.fixture(scope="module")
def thinker(serve: Serve) -> Iterator[Running]:
    """A server that takes the model for one that thinks."""
    with serve(reasoning_parser="qwen3", tool_call_parser="hermes") as running:
        yield running


@pytest.fixture(scope="module")
def client(thinker: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=thinker.url, api_key="any", max_retries=0, timeout=60) as made:
        yield made


def ask(client: anthropic.Anthropic, text: str, **given: Any) -> tuple[Any, Any]:
    """The reply that comes at once, and the same as a stream."""
    fields: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 400,
        "messages": QUESTION,
        "tools": [WEATHER],
        "extra_body": {"structured_outputs": {"choice": [text]}},
        **given,
    }
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as events:
        for _ in events:
            pass
        return whole, events.get_final_message()


def content_of(message: Any) -> list[dict[str, Any]]:
    """Blocks without the ids of calls, which differ between requests, and without what only one client adds."""
    kept = ("type", "text", "thinking", "name", "input")
    return [
        {name: value for name, value in block.model_dump().items() if name in kept and value is not None}
        for block in message.content
    ]


def test_thinking_text_and_calls_are_blocks(client: anthropic.Anthropic) -> None:
    for message in ask(client, TURN):
        call = {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}}
        assert content_of(message) == [
            {"type": "thinking", "thinking": "Oslo is a city."},
            {"type": "text", "text": "Let me look."},
            call,
            call,
        ]
        assert message.stop_reason == "tool_use"
        assert len({block.id for block in message.content[2:]}) == 2


def test_thinking_that_is_not_wanted_is_not_shown(client: anthropic.Anthropic) -> None:
    for message in ask(client, TURN, thinking={"type": "disabled"}):
        assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]


def test_blocks_come_in_the_order_in_which_they_were_written(client: anthropic.Anthropic) -> None:
    for message in ask(client, f"{CALL}\nand then\n{CALL} done"):
        assert [block.type for block in message.content] == ["tool_use", "text", "tool_use", "text"]


@pytest.mark.parametrize("stop", [" west", "7", "</tool_call>"])
def test_a_call_that_a_stop_sequence_cuts_is_not_told_as_a_whole_one(client: anthropic.Anthropic, stop: str) -> None:
    function = FIXED["function"]
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "messages": QUESTION, "tools": [tool]}
    fields |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "stop_sequences": [stop]}
    whole = client.messages.create(**fields)
    *_, end = [event for event in client.messages.create(**fields, stream=True) if event.type == "message_delta"]
    is_whole = whole.content[-1].input == {"to": "north west", "by": 7}
    assert is_whole == (stop == "</tool_call>")
    expected = ("tool_use", None) if is_whole else ("stop_sequence", stop)
    assert (whole.stop_reason, whole.stop_sequence) == expected
    assert (end.delta.stop_reason, end.delta.stop_sequence) == expected


def test_a_choice_of_none_leaves_text(client: anthropic.Anthropic) -> None:
    for message in ask(client, CALL, tool_choice={"type": "none"}):
        assert content_of(message) == [{"type": "text", "text": CALL}]
        assert message.stop_reason == "end_turn"


def test_a_turn_goes_back_with_its_results(client: anthropic.Anthropic, thinker: Running) -> None:
    message, _ = ask(client, TURN)
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": message.content[2].id, "content": "Rain."},
        {"type": "tool_result", "tool_use_id": message.content[3].id, "content": [{"type": "text", "text": "Snow."}]},
        {"type": "text", "text": "And now?"},
    ]
    history: Any = [
        *QUESTION,
        {"role": "assistant", "content": [block.model_dump() for block in message.content]},
        {"role": "user", "content": results},
    ]
    counted = client.messages.count_tokens(model=MODEL, messages=history, tools=[WEATHER])  # type: ignore[list-item]
    openai_form = [
        *QUESTION,
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "Oslo is a city.",
            "tool_calls": [
                {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}} for _ in range(2)
            ],
        },
        {"role": "tool", "content": "Rain."},
        {"role": "tool", "content": "Snow."},
        {"role": "user", "content": "And now?"},
    ]
    function = {**WEATHER, "parameters": WEATHER["input_schema"]}
    del function["input_schema"]
    reply = thinker.post(
        "/v1/chat/completions",
        messages=openai_form,
        tools=[{"type": "function", "function": function}],
        max_tokens=1,
    )
    assert counted.input_tokens == reply.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("given", "start"),
    [
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name must be"),
        ({"tools": [{"name": "f", "input_schema": 3}]}, "tools[0].input_schema must be"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type "),
        ({"tools": [WEATHER, WEATHER]}, "tools has two functions"),
        ({"tool_choice": {"type": "tool", "name": "other"}}, "tool_choice names 'other'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name must be"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type must be"),
        ({"tool_choice": {"name": "weather"}}, "tool_choice.type must be"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": "yes"}}, "tool_choice.disable_parallel"),
        ({"tool_choice": {"type": "any"}, "tools": []}, "tool_choice requires tools"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type must be"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2**31}}, "thinking.budget_tokens must be in [-1, "),
        ({"system": [{"type": "text", "text": "a"}, {"type": "text"}]}, "system[1].text must be"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
            "messages[0].content[0] holds thinking",
        ),
    ],
)
def test_what_is_wrong_is_named(client: anthropic.Anthropic, given: dict[str, Any], start: str) -> None:
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "messages": QUESTION, "tools": [WEATHER], **given}
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**fields)
    body: Any = caught.value.body
    assert body["error"]["message"].startswith(start)


RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "Rain."}
THOUGHT = {"type": "thinking", "thinking": "Oslo is a city.", "signature": ""}
CALLED = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}


@pytest.mark.parametrize(
    ("messages", "start"),
    [
        ([{"role": "user", "content": 3}], "messages[0].content must be"),
        (
            [
                *QUESTION,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "weather", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": 7}]},
            ],
            "messages[2].content[0].content must be",
        ),
        ([*QUESTION, {"role": "nobody", "content": "a"}], "messages[1].role must be"),
        ([{"role": "user", "content": [RESULT, {"type": "text", "text": 5}]}], "messages[0].content[1].text must be"),
        ([{"role": "assistant", "content": [THOUGHT, {"type": "text"}]}], "messages[0].content[1].text must be"),
        ([*QUESTION, {"role": "assistant", "content": [CALLED]}], "messages[1].content has no text to continue. Send"),
    ],
)
def test_errors_name_the_messages_of_the_request(client: anthropic.Anthropic, messages: Any, start: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model=MODEL, max_tokens=4, messages=messages, tools=[WEATHER], system="Be brief.")
    body: Any = caught.value.body
    assert body["error"]["message"].startswith(start)


def test_fields_of_blocks_without_effect_are_named(client: anthropic.Anthropic) -> None:
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {}, "mood": "good"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "No such city.", "is_error": True}
    messages: Any = [*QUESTION, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    reply: Any = client.messages.create(model=MODEL, max_tokens=1, messages=messages, tools=[WEATHER])
    named = [warning for warning in reply.warnings if "has no effect" in warning]
    assert len(named) == 2
    assert "messages[1].content[0].mood" in named[0]
    assert "messages[2].content[0].is_error" in named[1]
    counted: Any = client.messages.count_tokens(model=MODEL, messages=messages, tools=[WEATHER])
    assert [warning for warning in counted.warnings if "has no effect" in warning] == named

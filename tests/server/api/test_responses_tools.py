"""Items of /v1/responses: reasoning, messages and calls, streamed and whole, and what goes back to the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from tests.server.api.test_tools import CALL, FIXED
from tests.server.api.test_tools import WEATHER as CHAT_WEATHER
from tests.server.conftest import MODEL, Running, Serve

WEATHER: dict[str, Any] = {"type": "function", **CHAT_WEATHER["function"]}
QUESTION: dict[str, Any] = {"role": "user", "content": "What is the weather in Oslo?"}
ARGUMENTS = {"city": "Oslo {}", "days": 2}
THINKING = "<think>\nThe user asks\n\nabout Oslo.\n</think>\n\n"


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def thinking(serve: Serve) -> Iterator[openai.OpenAI]:
    """The client of a server that takes what is between <think> and </think> for thinking."""
    with (
        serve(reasoning_parser="qwen3") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60) as made,
    ):
        yield made


def asked(text: str, **given: Any) -> dict[str, Any]:
    """A request that makes the model write a text."""
    form = {"structured_outputs": {"choice": [text]}, **given.pop("extra_body", {})}
    return {
        "model": MODEL,
        "input": [QUESTION],
        "tools": [WEATHER],
        "max_output_tokens": 400,
        "temperature": 0,
        "extra_body": form,
        **given,
    }


def ask(client: openai.OpenAI, text: str, **given: Any) -> Any:
    return client.responses.create(**asked(text, **given))


def events_of(client: openai.OpenAI, text: str, **given: Any) -> list[Any]:
    return list(client.responses.create(**asked(text, **given), stream=True))


def plain(items: Any) -> list[dict[str, Any]]:
    """Output items without their ids, which no two responses share."""
    dumped = [item.model_dump() for item in items]
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in dumped]


def added_up(events: list[Any]) -> list[dict[str, Any]]:
    """What the events say the output is, and that they come in the order that clients rely on."""
    items: list[dict[str, Any]] = []
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    text = ""
    for event in events[2:-1]:
        kind = event.type.removeprefix("response.")
        if kind != "output_item.added":
            assert event.output_index == len(items) - 1
        match kind:
            case "output_item.added":
                assert event.output_index == len(items)
                items.append({**event.item.model_dump(), "is_open": True})
                assert event.item.status == "in_progress"
                assert event.item.type == "function_call" or event.item.content == []
                text = ""
            case "content_part.added":
                assert (event.item_id, event.content_index, event.part.text) == (items[-1]["id"], 0, "")
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                assert event.item_id == items[-1]["id"]
                text += event.delta
            case "output_text.done" | "reasoning_text.done":
                assert event.text == text
            case "function_call_arguments.done":
                assert (event.arguments, event.name) == (text, items[-1]["name"])
            case "content_part.done":
                assert event.part.text == text
            case "output_item.done":
                whole = event.item.model_dump()
                assert whole["id"] == items[-1]["id"]
                assert items[-1].pop("is_open")
                assert text == (whole["arguments"] if "arguments" in whole else whole["content"][0]["text"])
                items[-1] = whole
            case _:
                raise AssertionError(kind)
    assert items == [item.model_dump() for item in events[-1].response.output]
    return items


TEXTS = {
    "text": ("Hello.", ["message"]),
    "call": (CALL, ["function_call"]),
    "text, call": (f"Let me look.\n{CALL}", ["message", "function_call"]),
    "calls": (f"{CALL}\n{CALL}", ["function_call", "function_call"]),
    "call, text": (f"{CALL}\nThat is it.", ["function_call", "message"]),
    "thinking": (f"{THINKING}Hello.", ["reasoning", "message"]),
    "thinking, call": (f"{THINKING}{CALL}", ["reasoning", "function_call"]),
    "thinking, text, call": (f"{THINKING}Wait.\n{CALL}", ["reasoning", "message", "function_call"]),
}


@pytest.mark.parametrize("name", TEXTS)
def test_items_come_in_the_order_in_which_they_are_written(thinking: openai.OpenAI, name: str) -> None:
    text, kinds = TEXTS[name]
    whole = ask(thinking, text)
    assert [item.type for item in whole.output] == kinds
    assert {item.status for item in whole.output} == {"completed"} == {whole.status}
    events = events_of(thinking, text)
    added_up(events)
    assert plain(events[-1].response.output) == plain(whole.output)
    assert events[-1].type == "response.completed"
    told = events[-1].response.usage
    assert (told.output_tokens, told.output_tokens_details) == (
        whole.usage.output_tokens,
        whole.usage.output_tokens_details,
    )
    assert len({item.id for item in whole.output}) == len(kinds)


def test_a_call_has_all_that_its_client_needs(client: openai.OpenAI) -> None:
    (call,) = ask(client, CALL).output
    assert (call.id[:3], call.call_id[:5], call.name) == ("fc_", "call_", "weather")
    assert json.loads(call.arguments) == ARGUMENTS


def test_thinking_is_told_and_counted(thinking: openai.OpenAI) -> None:
    reply = ask(thinking, f"{THINKING}Hello.")
    reasoning, message = reply.output
    assert [part.model_dump() for part in reasoning.content] == [
        {"type": "reasoning_text", "text": "The user asks\n\nabout Oslo."}
    ]
    assert (reasoning.summary, reply.output_text) == ([], "Hello.")
    details = reply.usage.output_tokens_details
    assert 0 < details.reasoning_tokens < reply.usage.output_tokens
    assert message.id.startswith("msg_")
    assert reasoning.id.startswith("rs_")


@pytest.mark.parametrize("length", range(1, 60, 4))
def test_what_is_cut_is_the_same_streamed_and_whole(thinking: openai.OpenAI, length: int) -> None:
    text = f"{THINKING}Wait.\n{CALL}\nDone."
    whole = ask(thinking, text, max_output_tokens=length)
    events = events_of(thinking, text, max_output_tokens=length)
    added_up(events)
    last = events[-1].response
    assert plain(last.output) == plain(whole.output)
    assert (last.status, events[-1].type) == (whole.status, f"response.{whole.status}")
    assert whole.output[-1].status == whole.status
    assert {item.status for item in whole.output[:-1]} <= {"completed"}
    if whole.status == "incomplete":
        assert whole.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("stop", [" west", "7", "</tool_call>"])
def test_a_call_that_a_stop_string_cuts_is_incomplete(client: openai.OpenAI, stop: str) -> None:
    tool = {"type": "function", **FIXED["function"]}
    given: dict[str, Any] = {"model": MODEL, "input": "Go.", "tools": [tool], "tool_choice": "required"}
    given |= {"parallel_tool_calls": False, "extra_body": {"stop": [stop], "seed": 1}}
    whole = client.responses.create(**given)
    last = list(client.responses.create(**given, stream=True))[-1].response
    assert plain(last.output) == plain(whole.output)
    assert whole.output[-1].status == ("completed" if stop == "</tool_call>" else "incomplete")


def test_a_conversation_goes_on_behind_a_call_that_was_cut(client: openai.OpenAI) -> None:
    tool = {"type": "function", **FIXED["function"]}
    given: dict[str, Any] = {"model": MODEL, "tools": [tool], "extra_body": {"stop": [" west"]}}
    cut = client.responses.create(**given, input="Go.", tool_choice="required")
    (call,) = cut.output
    assert (call.status, call.arguments.count("north")) == ("incomplete", 1)
    given |= {"max_output_tokens": 2, "tool_choice": "none"}
    chained: Any = client.responses.create(**given, input="Go on.", previous_response_id=cut.id)
    assert "previous_response_id: the call of move was cut and is left out" in chained.warnings
    sent: Any = [{"role": "user", "content": "Go."}, call.to_dict(), {"role": "user", "content": "Go on."}]
    resent: Any = client.responses.create(**given, input=sent)
    assert "input[1]: the call of move was cut and is left out" in resent.warnings
    assert resent.usage.input_tokens == chained.usage.input_tokens
    sent[1]["status"] = "completed"
    with pytest.raises(openai.BadRequestError, match="not valid JSON") as caught:
        client.responses.create(**given, input=sent)
    assert caught.value.param == "input[1].arguments"


def test_an_answer_without_text_is_an_empty_message(client: openai.OpenAI) -> None:
    whole = ask(client, "Hello.", extra_body={"stop": ["H"]})
    assert [(item.type, item.content[0].text) for item in whole.output] == [("message", "")]
    assert len(added_up(events_of(client, "Hello.", extra_body={"stop": ["H"]}))) == 1


def test_logprobs_are_those_of_the_text(thinking: openai.OpenAI) -> None:
    given: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    text = f"{THINKING}Let me look.\n{CALL}"
    whole = ask(thinking, text, **given)
    _, message, _ = whole.output
    part = message.content[0]
    assert "".join(entry.token for entry in part.logprobs).strip() == "Let me look."
    events = events_of(thinking, text, **given)
    added_up(events)
    assert plain(events[-1].response.output) == plain(whole.output)
    deltas = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.token for entry in deltas] == [entry.token for entry in part.logprobs]


def test_the_official_stream_helper_understands_all(thinking: openai.OpenAI) -> None:
    given = asked(f"{THINKING}Wait.\n{CALL}")
    with thinking.responses.stream(**given) as events:
        for _ in events:
            pass
        final: Any = events.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == "Wait."


class City(pydantic.BaseModel):
    """Whatever the model would rather write, it ends."""

    city: str = pydantic.Field(max_length=40)
    days: int = pydantic.Field(ge=0, le=1000)


def test_parse_reads_arguments_and_texts(client: openai.OpenAI) -> None:
    strict = {**openai.pydantic_function_tool(City, name="weather")["function"], "type": "function"}
    parsed: Any = client.responses.parse(**asked(CALL, tools=[strict]))
    assert parsed.output[0].parsed_arguments == ARGUMENTS or parsed.output[0].parsed_arguments == City(**ARGUMENTS)
    reply = client.responses.parse(
        model=MODEL, input="A city.", text_format=City, max_output_tokens=600, temperature=0, top_p=0.5
    )
    assert reply.status == "completed"
    assert isinstance(reply.output_parsed, City)


def test_the_response_repeats_what_was_offered(client: openai.OpenAI) -> None:
    choice = {"type": "function", "name": "weather"}
    given: Any = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False, "max_tool_calls": 3}
    reply: Any = client.responses.create(model=MODEL, input="hi", max_output_tokens=16, **given)
    assert [tool.model_dump(exclude_none=True) for tool in reply.tools] == [WEATHER]
    assert (reply.tool_choice.name, reply.parallel_tool_calls, reply.max_tool_calls) == ("weather", False, 3)
    alone: Any = client.responses.create(model=MODEL, input="hi", max_output_tokens=1)
    assert (alone.tools, alone.tool_choice, alone.parallel_tool_calls) == ([], "auto", True)


def test_without_tools_a_call_is_text(client: openai.OpenAI) -> None:
    for given in ({"tool_choice": "none"}, {"tools": []}):
        assert ask(client, CALL, **given).output_text == CALL


BUILT_IN = [
    "web_search",
    "web_search_preview",
    "file_search",
    "code_interpreter",
    "mcp",
    "computer_use_preview",
    "image_generation",
    "local_shell",
    "custom",
    "never_heard_of",
]


@pytest.mark.parametrize("kind", BUILT_IN)
def test_tools_of_other_servers_are_refused_by_name(client: openai.OpenAI, kind: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "x", tools=[WEATHER, {"type": kind}])
    assert caught.value.param == "tools[1].type"
    assert f"{kind!r} is not supported: " in caught.value.message


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
        ({"tools": [{**WEATHER, "parameters": 3}]}, "tools[0].parameters"),
        ({"tools": [{**WEATHER, "strict": "yes"}]}, "tools[0].strict"),
        ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": {"a": 1}}, "tools"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
def test_what_is_wrong_with_tools_is_named(client: openai.OpenAI, given: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, "x", stream=stream, **given)
        assert caught.value.param == param

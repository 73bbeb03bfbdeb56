"""/v1/responses with the official client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.conftest import MODEL, Running

ANSWER = "The KV cache stores the keys and"


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60) as made:
        yield made


@pytest.mark.parametrize(
    "given",
    [
        "What is a KV cache?",
        [{"role": "user", "content": "What is a KV cache?"}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is a KV cache?"}]}],
    ],
)
def test_input_may_be_text_or_messages(client: openai.OpenAI, given: Any) -> None:
    reply = client.responses.create(model=MODEL, input=given, max_output_tokens=8, temperature=0)
    assert reply.output_text == ANSWER
    assert (reply.status, reply.model, reply.object) == ("incomplete", MODEL, "response")
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert reply.usage is not None
    assert reply.usage.output_tokens == 8
    assert reply.usage.total_tokens == reply.usage.input_tokens + 8


@pytest.mark.parametrize(("length", "status"), [(8, "incomplete"), (200, "completed")])
def test_events_come_in_order_and_add_up(client: openai.OpenAI, length: int, status: str) -> None:
    given: dict[str, Any] = {
        "model": MODEL,
        "input": "What is a KV cache?",
        "temperature": 0,
        "max_output_tokens": length,
    }
    whole = client.responses.create(**given)
    events = list(client.responses.create(**given, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{status}",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last: Any = events[-1]
    assert last.response.output_text == whole.output_text
    assert last.response.status == whole.status == status
    assert last.response.usage.output_tokens == (whole.usage.output_tokens if whole.usage else None)


def test_instructions_come_first(client: openai.OpenAI) -> None:
    plain = client.responses.create(model=MODEL, input="hi", max_output_tokens=1)
    told = client.responses.create(model=MODEL, input="hi", instructions="Be brief.", max_output_tokens=1)
    assert plain.usage is not None
    assert told.usage is not None
    assert told.usage.input_tokens > plain.usage.input_tokens
    assert told.instructions == "Be brief."


def test_logprobs_are_there_when_included(client: openai.OpenAI) -> None:
    reply = client.responses.create(
        model=MODEL, input="hi", max_output_tokens=3, top_logprobs=2, include=["message.output_text.logprobs"]
    )
    item = reply.output[0]
    assert item.type == "message"
    part = item.content[0]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [2, 2, 2]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x " * 30_000}, "input"),
    ],
)
def test_what_cannot_be_done_is_refused(client: openai.OpenAI, given: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**{"model": MODEL, "input": "hi", "stream": stream, **given})
        assert caught.value.param == param

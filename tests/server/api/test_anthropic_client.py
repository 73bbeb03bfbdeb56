"""The official Anthropic client, unmodified, over a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.server.conftest import MODEL, Running

QUESTION: Any = [{"role": "user", "content": "What is a KV cache?"}]
GREEDY = {"temperature": 0}
"""A field that this client knows only of older models."""
ANSWER = "The KV cache stores the keys and"


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0, timeout=60) as made:
        yield made


def test_message_has_every_field_clients_read(client: anthropic.Anthropic) -> None:
    reply = client.messages.create(model=MODEL, max_tokens=8, messages=QUESTION, extra_body=GREEDY)
    (block,) = reply.content
    assert block.type == "text"
    assert block.text == ANSWER
    assert (reply.role, reply.type, reply.model) == ("assistant", "message", MODEL)
    assert (reply.stop_reason, reply.stop_sequence) == ("max_tokens", None)
    assert reply.usage.output_tokens == 8
    counted = client.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens
    assert reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0) == counted


def test_what_the_client_adds_to_a_url_is_taken(client: anthropic.Anthropic) -> None:
    reply = client.beta.messages.create(model=MODEL, max_tokens=2, messages=QUESTION, extra_body=GREEDY)
    assert reply.usage.output_tokens == 2
    assert client.beta.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens > 0
    assert [model.id for model in client.models.list(limit=1000)] == [MODEL]
    assert [model.id for model in client.beta.models.list()] == [MODEL]


@pytest.mark.parametrize(
    ("more", "reason", "sequence"),
    [
        ({"max_tokens": 8}, "max_tokens", None),
        ({"max_tokens": 64, "stop_sequences": ["keys"]}, "stop_sequence", "keys"),
        ({"max_tokens": 200}, "end_turn", None),
        ({"max_tokens": 8, "system": "Be brief."}, "max_tokens", None),
        ({"max_tokens": 8, "system": [{"type": "text", "text": "Be brief."}]}, "max_tokens", None),
    ],
)
def test_stream_is_the_whole_message(
    client: anthropic.Anthropic, more: dict[str, Any], reason: str, sequence: str | None
) -> None:
    given: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "extra_body": GREEDY, **more}
    whole = client.messages.create(**given)
    with client.messages.stream(**given) as stream:
        kinds = [event.type for event in stream if event.type not in ("text", "content_block_delta")]
        streamed = stream.get_final_message()
    assert kinds == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    contents: list[Any] = [whole.content, streamed.content]
    texts = [[block.text for block in content] for content in contents]
    assert texts[0] == texts[1]
    assert (whole.stop_reason, whole.stop_sequence) == (reason, sequence)
    assert (streamed.stop_reason, streamed.stop_sequence) == (reason, sequence)
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_a_last_message_of_the_assistant_is_continued(client: anthropic.Anthropic) -> None:
    begun: Any = [*QUESTION, {"role": "assistant", "content": "The KV cache"}]
    reply = client.messages.create(model=MODEL, max_tokens=5, messages=begun, extra_body=GREEDY)
    (block,) = reply.content
    assert block.type == "text"
    assert "The KV cache" + block.text == ANSWER


def test_content_may_come_in_blocks(client: anthropic.Anthropic) -> None:
    blocks: Any = [
        {"role": "user", "content": [{"type": "text", "text": "What is a KV cache?", "cache_control": None}]}
    ]
    reply = client.messages.create(model=MODEL, max_tokens=8, messages=blocks, extra_body=GREEDY)
    assert reply.content[0].type == "text"
    assert reply.content[0].text == ANSWER


@pytest.mark.parametrize(
    ("given", "kind", "type_", "start"),
    [
        ({"model": "nope"}, anthropic.NotFoundError, "not_found_error", "The model `nope` does not exist."),
        (
            {"extra_body": {"temperature": 3}},
            anthropic.BadRequestError,
            "invalid_request_error",
            "temperature must be in [0, 2]",
        ),
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error", "max_tokens must be in [1"),
        ({"max_tokens": "x"}, anthropic.BadRequestError, "invalid_request_error", "max_tokens must be an integer"),
        (
            {"tools": [{"name": "t t", "input_schema": {}}]},
            anthropic.BadRequestError,
            "invalid_request_error",
            "tools[0].name must be",
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2000}},
            anthropic.BadRequestError,
            "invalid_request_error",
            "thinking: this model's thinking cannot be told",
        ),
        (
            {"messages": []},
            anthropic.BadRequestError,
            "invalid_request_error",
            "messages must contain at least 1",
        ),
    ],
)
def test_errors_have_anthropics_shape(
    client: anthropic.Anthropic, given: dict[str, Any], kind: type[anthropic.APIStatusError], type_: str, start: str
) -> None:
    for stream in (False, True):
        fields: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "messages": QUESTION, "stream": stream, **given}
        with pytest.raises(kind) as caught:
            client.messages.create(**fields)
        body: Any = caught.value.body
        assert body["type"] == "error"
        assert body["error"]["type"] == type_
        assert body["error"]["message"].startswith(start)


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", -1), ("temperature", -1e-300), ("top_p", 2), ("top_k", -2)]
)
def test_counting_refuses_what_a_request_may_not_ask_for(server: Running, name: str, value: float) -> None:
    body = {"messages": QUESTION, name: value}
    replies = [server.post("/v1/messages", max_tokens=1, **body), server.post("/v1/messages/count_tokens", **body)]
    assert [reply.status_code for reply in replies] == [400, 400]
    assert replies[0].json()["error"]["message"] == replies[1].json()["error"]["message"]

"""Stored responses of /v1/responses: what continues from them, who may see them, and what they may take."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from quire.server.api.responses.store import BYTES_PER_RESPONSE, ResponseStore, StoredResponse, Turn
from tests.server.api.test_responses_tools import CALL, QUESTION, THINKING, ask, asked, events_of
from tests.server.conftest import MODEL, Running, Serve, stand_in, wait_for

RECEIPT = {"x-quire-receipt": "1"}


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60) as made:
        yield made


def create(server: Running, **body: Any) -> dict[str, Any]:
    given = {"max_output_tokens": 4, "temperature": 0, **body}
    reply = server.client.post("/v1/responses", json=given, headers=RECEIPT)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def prompt_of(response: dict[str, Any]) -> list[int]:
    (request,) = response["receipt"]["requests"]
    found: list[int] = request["prompt_token_ids"]
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_tools_goes_on_from_the_response(client: openai.OpenAI, stream: bool) -> None:
    def reply_to(text: str, **given: Any) -> Any:
        return events_of(client, text, **given)[-1].response if stream else ask(client, text, **given)

    first = reply_to(f"Let me look.\n{CALL}")
    call = first.output[-1]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    second = reply_to("It rains.", input=[output], previous_response_id=first.id)
    assert (second.output_text, second.previous_response_id) == ("It rains.", first.id)
    whole = [QUESTION, *[item.model_dump() for item in first.output], output]
    again = reply_to("It rains.", input=whole)
    assert again.usage.input_tokens == second.usage.input_tokens
    third = reply_to("Yes.", input="Sure?", previous_response_id=second.id)
    assert third.usage.input_tokens > second.usage.input_tokens


def test_what_is_stored_makes_the_same_prompt_as_what_is_sent(server: Running) -> None:
    first = create(server, input="What is a KV cache?", instructions="Be brief.", include=["x"])
    second = create(server, input=[QUESTION], previous_response_id=first["id"])
    third = create(server, input="Go on.", previous_response_id=second["id"], instructions="Be long.")
    items = [{"role": "user", "content": "What is a KV cache?"}, *first["output"], QUESTION, *second["output"]]
    sent = create(server, input=[*items, {"role": "user", "content": "Go on."}], instructions="Be long.")
    assert prompt_of(sent) == prompt_of(third)
    assert third["output"][0]["content"] == sent["output"][0]["content"]
    plain = create(server, input=items[:-1])
    assert prompt_of(plain) == prompt_of(second), "instructions are not inherited"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_can_be_had_again_until_it_is_deleted(client: openai.OpenAI, stream: bool) -> None:
    given = asked(f"{THINKING}{CALL}", include=["message.output_text.logprobs"])
    made: Any = list(client.responses.create(**given, stream=True))[-1].response
    if not stream:
        made = client.responses.create(**given)
    assert made.store is True
    assert client.responses.retrieve(made.id).model_dump() == made.model_dump()
    client.responses.delete(made.id)
    for forgotten in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError) as caught:
            forgotten(made.id)
        assert f"Response with id {made.id!r} not found." in caught.value.message
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input="hi", previous_response_id=made.id)
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")


def test_a_conversation_outlives_the_responses_it_came_from(server: Running) -> None:
    first = create(server, input="hi")
    second = create(server, input="Why?", previous_response_id=first["id"])
    before = create(server, input="So?", previous_response_id=second["id"])
    assert server.client.delete(f"/v1/responses/{first['id']}").json()["deleted"] is True
    assert prompt_of(create(server, input="So?", previous_response_id=second["id"])) == prompt_of(before)


def test_input_items_come_in_pages(client: openai.OpenAI) -> None:
    output = {"type": "function_call_output", "call_id": "c", "output": "Rain."}
    call = {"type": "function_call", "id": "fc_mine", "call_id": "c", "name": "weather", "arguments": "{}"}
    given: Any = [QUESTION, {"role": "assistant", "content": "Wait."}, call, output]
    made = client.responses.create(model=MODEL, input=given, max_output_tokens=1)
    items = list(client.responses.input_items.list(made.id, order="asc", limit=1))
    assert [item.type for item in items] == ["message", "message", "function_call", "function_call_output"]
    first, said, called, _ = items
    assert first.content[0].model_dump(exclude_none=True) == {"type": "input_text", "text": QUESTION["content"]}
    assert said.content[0].type == "output_text"
    assert called.id == "fc_mine"
    assert len({item.id for item in items}) == 4
    newest = client.responses.input_items.list(made.id, limit=3)
    assert [item.id for item in newest.data] == [item.id for item in items[:0:-1]]
    assert newest.has_more
    for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "nothing"}):
        with pytest.raises(openai.BadRequestError):
            client.responses.input_items.list(made.id, **wrong)  # type: ignore[arg-type]


def test_items_can_be_referred_to(server: Running) -> None:
    first = create(server, input="What is a KV cache?")
    (said,) = first["output"]
    for reference in ({"type": "item_reference", "id": said["id"]}, {"id": said["id"]}):
        referred = create(server, input=[QUESTION, reference, QUESTION])
        assert prompt_of(referred) == prompt_of(create(server, input=[QUESTION, said, QUESTION]))
    server.client.delete(f"/v1/responses/{first['id']}")
    assert create(server, input="Go on.", previous_response_id=referred["id"])
    reply = server.post("/v1/responses", input=[QUESTION, reference])
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input[1].id")


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_to_be_stored_is_not(client: openai.OpenAI, stream: bool) -> None:
    made: Any = client.responses.create(model=MODEL, input="hi", max_output_tokens=1, store=False, stream=stream)
    if stream:
        events = list(made)
        made = events[-1].response
        assert events[0].response.store is False
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_stream_that_is_left_is_not_stored(server: Running) -> None:
    with server.client.stream(
        "POST", "/v1/responses", json={"input": "hi", "stream": True, "ignore_eos": True, "max_output_tokens": 900}
    ) as reply:
        first = next(line for line in reply.iter_lines() if line.startswith("data: "))
    server.wait_idle()
    made = json.loads(first[6:])["response"]
    assert made["store"] is True
    assert server.client.get(f"/v1/responses/{made['id']}").status_code == 404


def test_a_response_that_fails_is_not_stored(server: Running) -> None:
    body = {"input": "hi", "stream": True, "ignore_eos": True, "max_output_tokens": 900}
    with stand_in(server) as held:
        held.may_go.set()
        with server.client.stream("POST", "/v1/responses", json=body) as reply:
            lines = (line for line in reply.iter_lines() if line.startswith("data: "))
            made = json.loads(next(lines)[6:])["response"]
            held.error = RuntimeError("broken")
            last = json.loads(list(lines)[-1][6:])
    assert last["type"] == "error"
    assert server.client.get(f"/v1/responses/{made['id']}").status_code == 404


def test_a_response_that_the_client_has_named_is_not_stored(server: Running) -> None:
    made = create(server, input="hi", request_id="mine", store=True)
    assert (made["id"], made["store"]) == ("resp_mine", False)
    assert "request_id" in made["warnings"][0]
    assert server.client.get("/v1/responses/resp_mine").status_code == 404


def test_no_key_finds_what_another_has_stored(serve: Serve) -> None:
    with serve(api_key=("one", "two")) as server:
        one, two = [{"Authorization": f"Bearer {key}"} for key in ("one", "two")]
        body = {"input": "hi", "max_output_tokens": 1}
        made = server.client.post("/v1/responses", json=body, headers=one).json()
        path = f"/v1/responses/{made['id']}"
        assert server.client.get(path, headers=one).json() == made
        unknown = server.client.get(path.replace(made["id"], "resp_unknown"), headers=two)
        foreign = server.client.get(path, headers=two)
        assert foreign.status_code == unknown.status_code == 404
        assert foreign.text.replace(made["id"], "resp_unknown") == unknown.text
        assert server.client.get(f"{path}/input_items", headers=two).status_code == 404
        assert server.client.delete(path, headers=two).status_code == 404
        more = {**body, "previous_response_id": made["id"]}
        assert server.client.post("/v1/responses", json=more, headers=two).status_code == 400
        reference = {**body, "input": [{"id": made["output"][0]["id"]}, QUESTION]}
        assert server.client.post("/v1/responses", json=reference, headers=two).status_code == 400
        assert server.client.post("/v1/responses", json=reference, headers=one).status_code == 200
        assert server.client.get(path, headers=one).status_code == 200


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"response_store_size": 0}, "--response-store-size 0"), ({"api_server_count": 2}, "--api-server-count")],
)
def test_a_server_without_a_store_says_so(serve: Serve, settings: dict[str, int], why: str) -> None:
    with serve(**settings) as server:
        made = create(server, input="hi")
        assert (made["store"], made.get("warnings")) == (False, None)
        (warning,) = create(server, input="hi", store=True)["warnings"]
        assert why in warning
        found = server.client.get(f"/v1/responses/{made['id']}")
        assert (found.status_code, why in found.text) == (404, True)
        reply = server.post("/v1/responses", input="hi", previous_response_id=made["id"])
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "previous_response_id")
        assert why in reply.text


def test_a_response_that_is_too_large_says_that_it_is_not_stored(serve: Serve) -> None:
    with serve(response_store_size=4000) as server:
        first = create(server, input="hi", store=True)
        assert not first["store"]
        assert "not stored" in first["warnings"][0]


def test_a_full_store_keeps_the_newest(serve: Serve) -> None:
    with serve(max_stored_responses=2) as server:
        made = [create(server, input="hi")["id"] for _ in range(3)]
        assert [server.client.get(f"/v1/responses/{one}").status_code for one in made] == [404, 200, 200]


def test_what_comes_from_the_store_is_bounded_like_a_body(serve: Serve) -> None:
    with serve(max_body_size=6000) as server:
        first = create(server, input="x" * 400, metadata={"a": "b"})
        previous = first["id"]
        for _ in range(12):
            reply = server.post("/v1/responses", input="x", max_output_tokens=1, previous_response_id=previous)
            if reply.status_code != 200:
                break
            previous = reply.json()["id"]
        assert reply.json()["error"]["param"] == "previous_response_id"
        assert "--max-body-size" in reply.text
        wait_for(lambda: server.is_idle)


def stored(name: str, size: int, previous: Turn | None = None) -> StoredResponse:
    return StoredResponse(name, b"", Turn([b"x" * size], 1, previous), [])


def test_no_owner_loses_its_share_to_another() -> None:
    store = ResponseStore(1 << 20, 10_000)
    for index in range(50):
        assert store.put(1, stored(f"mine{index}", 7000))
    for index in range(1000):
        assert store.put(2, stored(f"theirs{index}", 50_000))
        assert store.num_bytes <= store.max_bytes
    assert all(store.get(1, f"mine{index}") for index in range(50))
    assert store.get(2, "theirs999") is not None
    assert store.get(2, "theirs0") is None
    assert store.get(1, "theirs999") is None


def test_turns_count_once_and_as_long_as_they_are_needed() -> None:
    store = ResponseStore(1 << 20, 10_000)
    turn = None
    for index in range(100):
        response = stored(str(index), 5000, turn)
        assert store.put(0, response)
        turn = response.turn
    assert store.num_bytes < 100 * (6000 + BYTES_PER_RESPONSE)
    for index in range(99):
        assert store.delete(0, str(index))
    assert store.num_bytes > 100 * 5000
    assert store.delete(0, "99")
    assert not store.delete(0, "99")
    assert store.num_bytes == 0


def test_a_turn_that_was_dropped_counts_again_with_its_successor() -> None:
    store = ResponseStore(1 << 20, 10_000)
    first = stored("first", 100_000)
    store.put(0, first)
    store.delete(0, "first")
    store.put(0, stored("second", 10, first.turn))
    assert store.num_bytes > 100_000
    assert not store.put(0, stored("third", 1 << 20, first.turn))
    store.delete(0, "second")
    assert store.num_bytes == 0


def test_any_order_of_use_keeps_the_books() -> None:
    draw = random.Random(5)
    store = ResponseStore(200_000, 30)
    turns: list[Turn | None] = [None]
    for index in range(3000):
        owner = draw.randrange(3)
        if draw.random() < 0.2:
            store.delete(owner, f"r{draw.randrange(index + 1)}")
            continue
        response = stored(f"r{draw.randrange(400)}", draw.randrange(30_000), draw.choice(turns[-20:]))
        if owner == 0 and store.put(owner, response):  # a conversation is one owner's
            turns.append(response.turn)
        elif owner:
            store.put(owner, stored(response.id, draw.randrange(30_000)))
        assert store.num_bytes <= store.max_bytes
        assert store.num_responses <= store.max_responses
    for owner in range(3):
        for index in range(400):
            store.delete(owner, f"r{index}")
    assert (store.num_bytes, store.num_responses) == (0, 0)

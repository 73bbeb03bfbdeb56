"""Outputs that follow a form, asked for as each API has it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.server.conftest import MODEL, Running

QUESTION: Any = [{"role": "user", "content": "Give an example."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}


class Item(BaseModel):
    """As users write them."""

    name: str = Field(max_length=8)
    kind: Literal["a", "b"]
    count: int = Field(ge=0, le=99)


class Basket(BaseModel):
    """With a reference."""

    items: list[Item] = Field(min_length=1, max_length=2)
    note: Item | None


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60) as made:
        yield made


def is_kind_and_count(text: str) -> bool:
    found = json.loads(text)
    return found["kind"] in ("a", "b") and 0 <= found["count"] <= 99 and len(found) == 2


def test_openai_parses_whole_answers_and_streams(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "seed": 3, "max_tokens": 400}
    reply = client.chat.completions.parse(**given, response_format=Basket)
    (choice,) = reply.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Basket)
    with client.chat.completions.stream(**given, response_format=Basket) as events:
        for _ in events:
            pass
        assert events.get_final_completion().choices[0].message.parsed == choice.message.parsed


def test_openai_parses_responses(client: openai.OpenAI) -> None:
    reply = client.responses.parse(
        model=MODEL, input="Give an example.", text_format=Basket, max_output_tokens=400, extra_body={"seed": 3}
    )
    assert isinstance(reply.output_parsed, Basket)


ASKED: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    {"structured_outputs": {"choice": ['{"a": 1}', '{"b": 2}']}},
    {"structured_outputs": {"regex": r'\{"a": [0-9]{1,3}\}'}},
    {"structured_outputs": {"grammar": 'start: "{" "}"'}},
]


@pytest.mark.parametrize("asked", ASKED, ids=repr)
def test_every_way_to_ask_works_for_chats_and_completions(server: Running, asked: dict[str, Any]) -> None:
    more = {"max_tokens": 300, "seed": 2, "temperature": 0.8, **asked}
    chat = server.post("/v1/chat/completions", messages=QUESTION, **more).json()["choices"][0]
    text = server.post("/v1/completions", prompt="x = ", **more).json()["choices"][0]
    for choice, content in ((chat, chat["message"]["content"]), (text, text["text"])):
        assert choice["finish_reason"] == "stop"
        assert isinstance(json.loads(content), dict)
        assert "properties" not in json.dumps(asked) or is_kind_and_count(content)


def test_anthropic_and_ollama_have_fields_of_their_own(server: Running) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    for more in (
        {"output_config": {"format": form}},
        {"output_format": form},
        {"structured_outputs": {"json": SCHEMA}},
    ):
        reply = server.post("/v1/messages", messages=QUESTION, max_tokens=200, **more).json()
        assert is_kind_and_count(reply["content"][0]["text"])
        assert reply["stop_reason"] == "end_turn"
    for given in ("json", SCHEMA):
        options = {"num_predict": 300, "seed": 2}
        chat = server.post("/api/chat", messages=QUESTION, stream=False, format=given, options=options).json()
        text = server.post("/api/generate", prompt="x", raw=True, stream=False, format=given, options=options).json()
        for content in (chat["message"]["content"], text["response"]):
            assert given == "json" or is_kind_and_count(content)
            assert isinstance(json.loads(content), dict)


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("chat", {"response_format": {"type": "xml"}}, "response_format.type", "one of text, json_object"),
    ("chat", {"response_format": {}}, "response_format.type", "got None"),
    ("chat", {"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "got None"),
    (
        "chat",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"items": {"not": {}}}}}},
        "response_format.json_schema.schema",
        "'#/items/not': not is not supported",
    ),
    (
        "chat",
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "response_format",
        "send one",
    ),
    ("chat", {"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs.json", "has no base"),
    ("chat", {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
    ("chat", {"structured_outputs": {"jso": {}}}, "structured_outputs.jso", "did you mean 'json'?"),
    ("chat", {"structured_outputs": []}, "structured_outputs", "an object"),
    ("chat", {"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "structured_outputs"),
    ("chat", {"guided_json": {}}, "guided_json", "structured_outputs"),
    ("chat", {"guided_choice": ["a"]}, "guided_choice", "structured_outputs"),
    ("messages", {"output_format": {"type": "xml"}}, "output_format", "json_schema"),
    ("ollama", {"format": "yaml"}, "format", '"json" or a JSON Schema'),
]
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "ollama": "/api/chat"}


@pytest.mark.parametrize(("api", "asked", "param", "part"), REFUSED, ids=lambda item: repr(item)[:60])
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_kept_is_refused_by_name(
    server: Running, api: str, asked: dict[str, Any], param: str, part: str, stream: bool
) -> None:
    limit = {} if api == "ollama" else {"max_tokens": 5}
    reply = server.post(PATHS[api], messages=QUESTION, stream=stream, **limit, **asked)
    assert reply.status_code == 400
    error = reply.json()["error"]
    message = error if api == "ollama" else error["message"]
    assert part in message
    if api == "chat":
        assert error["param"] == param


def test_poison_is_answered_while_neighbours_go_on(server: Running) -> None:
    """Their tokens are what they are without it."""
    bodies = [{"prompt": f"def f{index}(", "max_tokens": 120, "seed": index, "temperature": 1} for index in range(8)]

    def ask(body: dict[str, Any]) -> str:
        return str(server.post("/v1/completions", **body).json()["choices"][0]["text"])

    expected = [ask(body) for body in bodies]
    properties = {f"p{index}": {"type": "string"} for index in range(4000)}
    poison: list[Any] = [
        {"json": {"type": "object", "properties": properties}},
        {"json": {"type": "array", "minItems": 10**9}},
        {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(6000)) + '\nr6000: "a"'},
        {"json": {"enum": [f"value {index}" for index in range(100_000)]}},
        {"json": {"$ref": "#"}},
        {"json": {"description": "x" * 3_000_000}},
    ]
    with ThreadPoolExecutor(9) as pool:
        neighbours = [pool.submit(ask, body) for body in bodies]
        for form in poison:
            began_at = time.monotonic()
            reply = server.post("/v1/completions", prompt="x", structured_outputs=form)
            assert reply.status_code == 400, form
            assert time.monotonic() - began_at < 15, "a second, on a machine that has nothing else to do"
        assert [one.result() for one in neighbours] == expected
    server.wait_idle()


@pytest.mark.parametrize("place", ["response_format", "text"])
def test_a_schema_beside_json_object_is_kept(server: Running, place: str) -> None:
    form = {"type": "json_object", "schema": {"const": {"kept": 1}}}
    if place == "text":
        body = {"model": MODEL, "input": "An example.", "text": {"format": form}, "max_output_tokens": 60}
        text = server.post("/v1/responses", **body).json()["output"][0]["content"][0]["text"]
    else:
        reply = server.post("/v1/chat/completions", messages=QUESTION, response_format=form, max_tokens=60).json()
        text = reply["choices"][0]["message"]["content"]
    assert json.loads(text) == {"kept": 1}


def test_a_receipt_replays_what_followed_a_form(server: Running) -> None:
    body = {"prompt": "x", "structured_outputs": {"json": SCHEMA}, "max_tokens": 99, "seed": 4}
    reply = server.client.post("/v1/completions", json=body, headers={"x-quire-receipt": "1"}).json()
    receipt = reply["receipt"]
    assert receipt["identity"]["grammars"].startswith("llguidance ")
    given = receipt["requests"][0]["sampling_params"]["structured_outputs"]
    again = server.post("/v1/completions", **{**body, "structured_outputs": given}).json()
    assert again["choices"][0]["text"] == reply["choices"][0]["text"]


def test_capabilities_name_the_forms(server: Running) -> None:
    found = server.client.get("/v1/capabilities").json()["structured_output"]
    assert "json" in found["structured_outputs"]
    assert "json_schema" in found["response_format"]
    assert found["backends"] == ["llguidance"]
    assert "properties" in found["json_schema_keywords"]

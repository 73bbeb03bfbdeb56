"""Errors look as the API has them that was asked, wherever they arise and whatever a proxy does to the path."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.conftest import TIMEOUT, Running, stand_in, wait_for

KEY = "a-key"
HEADERS = {"authorization": f"Bearer {KEY}"}
ROOT = "/deep/prefix"
CONVERSATION = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 900, "ignore_eos": True}
IN_FRONT = {"": ("",), ROOT: ("", ROOT)}
"""Root path -> what a path may begin with when it arrives: a proxy strips the root path or does not."""


SHAPES = [("/v1/messages", "anthropic"), ("/v1/chat/completions", "openai"), ("/api/generate", "ollama")]
ENDLESS = {"temperature": 0, "repeat_penalty": 1}
LONG = {shape: CONVERSATION for _, shape in SHAPES} | {"ollama": {"prompt": "import", "raw": True, "options": ENDLESS}}
"""A request that would take long."""
WRONG = {"temperature": 9, "options": {"temperature": 9}}
EVENT_STARTS = {"anthropic": "event: error\n", "openai": "data: {", "ollama": "{"}


def shape_of(data: Any) -> str:
    """Whose shape an error has."""
    if isinstance(data["error"], str):
        assert set(data) == {"error"}
        return "ollama"
    if data.get("type") == "error":
        assert set(data["error"]) == {"type", "message"}
        return "anthropic"
    assert set(data["error"]) == {"message", "type", "param", "code"}
    return "openai"


@pytest.fixture(scope="module", params=IN_FRONT)
def guarded(serve: Any, request: pytest.FixtureRequest) -> Iterator[tuple[Running, tuple[str, ...]]]:
    """A server with a key, and what paths may begin with."""
    settings: dict[str, Any] = {"root_path": request.param} if request.param else {}
    with serve(api_key=(KEY,), max_body_size=2000, max_requests_per_minute_per_key=100, **settings) as running:
        yield running, IN_FRONT[request.param]


def event_of_failure(server: Running, url: str, shape: str) -> str:
    """The error in a stream whose engine fails after the first tokens."""
    with stand_in(server) as held:
        held.may_go.set()
        with server.client.stream("POST", url, json={**LONG[shape], "stream": True}, headers=HEADERS) as stream:
            assert stream.status_code == 200
            pieces = stream.iter_text()
            text = next(pieces)
            held.error = RuntimeError("out of order")
            text += "".join(pieces)
    server.wait_idle()
    (event,) = [block for block in text.split("\n" if shape == "ollama" else "\n\n") if '"error"' in block]
    return event


@pytest.mark.parametrize(("path", "shape"), SHAPES)
def test_errors_in_streams_and_replies_have_one_shape(
    guarded: tuple[Running, tuple[str, ...]], path: str, shape: str
) -> None:
    server, beginnings = guarded
    for before in beginnings:
        url = before + path
        post = server.client.post
        wrong = post(url, json={**LONG[shape], **WRONG}, headers=HEADERS)
        stranger = post(url, json=LONG[shape])
        large = post(url, json={**LONG[shape], "user": "x" * 3000}, headers=HEADERS)
        unknown = post(f"{url}/nope", json={}, headers=HEADERS)
        method = server.client.delete(url, headers=HEADERS)
        replies = [wrong, stranger, large, unknown, method]
        assert [reply.status_code for reply in replies] == [400, 401, 413, 404, 405]
        assert [shape_of(reply.json()) for reply in replies] == [shape] * 5
        event = event_of_failure(server, url, shape)
        assert shape_of(json.loads(event[event.index("{") :])) == shape
        assert event.startswith(EVENT_STARTS[shape])


def test_bytes_that_are_no_request_are_refused_in_the_shape_of_their_path(
    guarded: tuple[Running, tuple[str, ...]],
) -> None:
    server, beginnings = guarded
    for before in beginnings:
        for path, shape in (*SHAPES, ("/v1/messages?a=b", "anthropic"), ("/api", "ollama"), ("/apis", "openai")):
            head = f"POST {before}{path} HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n"
            with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), TIMEOUT) as sock:
                sock.sendall(head.encode())
                reply = b""
                while data := sock.recv(4096):
                    reply += data
            assert reply.startswith(b"HTTP/1.1 400 ")
            assert shape_of(json.loads(reply.partition(b"\r\n\r\n")[2])) == shape


def test_a_limit_is_said_in_the_shape_of_the_route(serve: Any) -> None:
    with serve(max_concurrent_requests=1, root_path=ROOT) as small, ThreadPoolExecutor(1) as pool, stand_in(small):
        waiting = pool.submit(small.post, "/v1/completions", prompt="a", max_tokens=1)
        wait_for(lambda: small.engine.num_unfinished == 1)
        for before in ("", ROOT):
            for path, shape in SHAPES:
                reply = small.client.post(before + path, json=CONVERSATION)
                assert reply.status_code == 429
                assert shape_of(reply.json()) == shape
        assert not waiting.done()


@pytest.mark.parametrize("root_path", ["/v1", "/health"])
def test_a_root_path_that_begins_routes_is_left_on_them(serve: Any, root_path: str) -> None:
    with serve(root_path=root_path) as server:
        assert server.client.get("/v1/models").status_code == 200
        assert server.client.get("/health").status_code == 200

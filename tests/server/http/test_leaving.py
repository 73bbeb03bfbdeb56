"""Clients that leave, read slowly, or send slowly: the engine is told, and nothing stays behind."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.server.conftest import MODEL, TIMEOUT, Running, stand_in, wait_for

LONG = {"model": MODEL, "prompt": "import", "max_tokens": 1000, "ignore_eos": True}
CONVERSATION = {"messages": [{"role": "user", "content": "hi"}]}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": LONG,
    "/v1/chat/completions": {**LONG, **CONVERSATION, "prompt": None},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1000, "ignore_eos": True},
    "/v1/messages": {**CONVERSATION, "max_tokens": 1000, "ignore_eos": True},
    "/api/chat": CONVERSATION,
    "/api/generate": {"prompt": "import", "raw": True, "options": {"temperature": 0, "repeat_penalty": 1}},
}


@contextmanager
def connected(server: Running) -> Iterator[socket.socket]:
    """A raw connection, closed with a reset."""
    with socket.socket() as sock:
        sock.settimeout(TIMEOUT)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        sock.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        yield sock
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def request(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def everything(sock: socket.socket) -> bytes:
    data = b""
    while piece := sock.recv(65536):
        data += piece
    return data


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_request_ends_with_its_client(server: Running, path: str, stream: bool) -> None:
    with stand_in(server) as executor:
        with connected(server) as sock:
            sock.sendall(request(path, {**ROUTES[path], "stream": stream}))
            wait_for(lambda: server.engine.num_unfinished == 1)
            if stream:
                executor.may_go.set()
                assert sock.recv(100)
        wait_for(lambda: server.engine.num_unfinished == 0)  # a step of it may still run
    server.wait_idle()


def test_requests_sent_ahead_end_with_their_client(server: Running) -> None:
    with stand_in(server):
        with connected(server) as sock:
            sock.sendall(request("/v1/completions", LONG) * 3)
            wait_for(lambda: server.engine.num_unfinished == 1)
        wait_for(lambda: server.engine.num_unfinished == 0)
    server.wait_idle()


def test_every_prompt_of_a_batch_ends_with_its_client(server: Running) -> None:
    with stand_in(server) as executor, connected(server) as sock:
        sock.sendall(request("/v1/completions", {**LONG, "prompt": ["a", "b", "c"], "n": 2, "stream": True}))
        wait_for(lambda: server.engine.num_unfinished == 3)
        executor.may_go.set()
        assert sock.recv(100)
    server.wait_idle()


def test_a_client_that_leaves_before_its_body_is_complete(server: Running) -> None:
    with connected(server) as sock:
        sock.sendall(request("/v1/completions", LONG)[:-5])
        time.sleep(0.05)
    server.wait_idle()
    assert server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200


def test_requests_that_come_and_go_leave_nothing(server: Running) -> None:
    for round_ in range(20):
        with connected(server) as sock:
            sock.sendall(request("/v1/completions", {**LONG, "stream": bool(round_ % 2)}))
            time.sleep(0.002 * round_)
    server.wait_idle()
    wait_for(lambda: not any(server.client.get("/load").json().values()))


def test_a_client_that_does_not_read_is_cut(serve: Any) -> None:
    with serve(write_timeout=1) as strict, connected(strict) as sock:
        sock.sendall(request("/v1/completions", {**LONG, "logprobs": 20, "stream": True}))
        wait_for(lambda: strict.engine.num_unfinished == 1)
        strict.wait_idle()
        received = b""
        with contextlib.suppress(ConnectionResetError):
            received = everything(sock)
    assert not received.endswith(b"data: [DONE]\n\n")


def test_a_stream_that_stands_still_sends_comments(serve: Any) -> None:
    with serve(sse_keep_alive_interval=1) as chatty, stand_in(chatty) as held:
        body = {**LONG, "max_tokens": 2, "stream": True}
        with chatty.client.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            assert next(lines) == ": keep-alive"
            held.may_go.set()
            rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"


def test_a_request_has_the_time_the_operator_gives(serve: Any) -> None:
    with serve(request_timeout=1) as brief:
        with stand_in(brief):
            for stream in (False, True):
                reply = brief.post("/v1/completions", **{**LONG, "stream": stream})
                assert reply.status_code == 504
                assert reply.json()["error"]["code"] == "request_timeout"
        brief.wait_idle()


def test_slow_and_large_headers_are_refused(serve: Any) -> None:
    with serve(header_timeout=1, max_header_size=2000, max_header_count=20) as strict:
        with connected(strict) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nhost:")
            assert everything(sock).startswith(b"HTTP/1.1 408 ")
        with connected(strict) as sock:
            assert everything(sock) == b""  # connected, and never said anything
        large = b"GET /health HTTP/1.1\r\nhost: x\r\nx-large: " + b"x" * 3000 + b"\r\n\r\n"
        endless = b"GET /health HTTP/1.1\r\nhost: x\r\nx-large: " + b"x" * 3000
        many = b"GET /health HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % index for index in range(30)) + b"\r\n"
        for data in (large, endless, many):
            with connected(strict) as sock:
                sock.sendall(data)
                reply = everything(sock)
            assert reply.startswith(b"HTTP/1.1 431 ")
            assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"
        with connected(strict) as sock:  # a body that follows in the same packet is no header
            sock.sendall(request("/tokenize", {"prompt": "a " * 1500}))
            assert sock.recv(100).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: -1",
        b"Content-Length: abc",
        b"Content-Length: 3\r\nContent-Length: 4",
        b"Content-Length: 3\r\nTransfer-Encoding: chunked",
        b"x y: z",
    ],
)
def test_ambiguous_requests_are_refused(server: Running, head: bytes) -> None:
    with connected(server) as sock:
        sock.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n\r\n{}")
        reply = everything(sock)
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def test_a_body_that_stops_coming_is_given_up(serve: Any) -> None:
    with serve(body_timeout=1) as strict, connected(strict) as sock:
        sock.sendall(request("/v1/completions", LONG)[:-5])
        reply = everything(sock)
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert b'"request_timeout"' in reply


def test_connections_are_bounded(serve: Any) -> None:
    with serve(max_connections=3) as small:
        with httpx.Client(base_url=small.url) as first:
            assert first.get("/health").status_code == 200
            with connected(small), connected(small), connected(small) as fourth:
                reply = b""
                with contextlib.suppress(ConnectionError):
                    fourth.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                    reply = everything(fourth)
                assert reply == b""
        wait_for(lambda: httpx.get(f"{small.url}/health", timeout=TIMEOUT).status_code == 200)

"""Bytes that are no request, or hardly one: refused or closed, and nobody else notices."""

from __future__ import annotations

import json
import random
import re
import socket
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httptools
import pytest

from tests.server.conftest import TIMEOUT, Running, wait_for

pytestmark = pytest.mark.usefixtures("healthy_neighbours")

WRITE = {"prompt": "a", "max_tokens": 2, "temperature": 0}
BODY = json.dumps(WRITE).encode()
HOST = b"host: x\r\n"
JSON = b"content-type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
NUM_MUTATIONS = 300


def post(body: bytes = BODY, more: bytes = b"", length: bytes | None = None, version: bytes = b"1.1") -> bytes:
    """A completion; `more` headers end with CRLF."""
    length = b"%d" % len(body) if length is None else length
    head = b"POST /v1/completions HTTP/" + version + b"\r\n" + HOST + JSON + more
    return head + b"content-length: " + length + b"\r\n\r\n" + body


def chunked(body: bytes, more: bytes = b"", coding: bytes = b"chunked") -> bytes:
    """A completion whose body is framed already."""
    head = b"POST /v1/completions HTTP/1.1\r\n" + HOST + JSON + more + b"transfer-encoding: " + coding
    return head + b"\r\n\r\n" + body


def chunks(body: bytes, size: int) -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def get(target: bytes = b"/health", version: bytes = b"HTTP/1.1", headers: bytes = HOST) -> bytes:
    return b"GET " + target + b" " + version + b"\r\n" + headers + b"\r\n"


@dataclass
class Reply:
    status: int
    body: bytearray = field(default_factory=bytearray)
    is_complete: bool = False


class Replies:
    """What a server sent on one connection; it must be HTTP."""

    def __init__(self, data: bytes) -> None:
        self.found: list[Reply] = []
        self._parser = httptools.HttpResponseParser(self)
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        self.found.append(Reply(self._parser.get_status_code()))

    def on_body(self, body: bytes) -> None:
        self.found[-1].body += body

    def on_message_complete(self) -> None:
        self.found[-1].is_complete = True


def exchange(server: Running, *parts: bytes, half_close: bool = False) -> list[Reply]:
    """The replies to what is sent, piece by piece, until the server closes the connection."""
    received = b""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), TIMEOUT) as sock:
        try:
            for part in parts:
                sock.sendall(part)
                time.sleep(0.01)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
            while data := sock.recv(1 << 16):
                received += data
        except (ConnectionResetError, BrokenPipeError):  # closed with something of this unread
            received += late_data(sock)
    replies = Replies(received).found
    assert all(reply.is_complete for reply in replies)
    return replies


def late_data(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except ConnectionError:
        return b""


@pytest.fixture(scope="module")
def hasty(serve: Any) -> Iterator[Running]:
    """A server that waits for nobody."""
    with serve(header_timeout=1, body_timeout=1, max_body_size=100_000) as running:
        running.keep_idle_connections(0.1)  # for whose end most tests here wait
        yield running
        wait_for(lambda: not any(running.client.get("/load").json().values()))


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that a client sends is worth a line, let alone a traceback."""
    caplog.set_level("WARNING")
    yield
    assert [record.getMessage() for record in caplog.records] == []


REQUEST_LINES = [
    b"\0" + HEALTH,
    b"GET\r\n\r\n",
    b"GET HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET /health\r\n\r\n",
    b"get /health HTTP/1.1\r\n" + HOST + b"\r\n",
    b"BREW /health HTTP/1.1\r\n" + HOST + b"\r\n",
    *(b"CONNECT " + x + b" HTTP/1.1\r\n" + HOST + b"\r\n" for x in (b"x:443", b"/health", b"http://x/health")),
    b"GET /health HTTP/1.1\n" + b"host: x\n\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\1" * 500,
    *(get(version=version) for version in (b"HTTP/9.9", b"HTTP/2.0", b"HTTP/1.1 x", b"HTTP/", b"http/1.1", b"\xff")),
    *(get(target) for target in (b"/\0", b"health", b"/a b", b"/\xff\xfe", "/é".encode(), b"http://[::1/", b"x:y:z")),
]
HEADERS = [
    *(b"host: x\r\n" + line + b"\r\n" for line in (b"xyz", b"x y: z", b"x : y", b": x", b"x\xff: y", b"x(: y")),
    *(b"host: x\r\nx: " + value + b"\r\n" for value in (b"a\0", b"a\rb", b"a\r\n b", b"a\x7f\x01")),
    b"",
    b"host: x\r\nhost: y\r\n",
]
LENGTHS = [b"-1", b"+5", b"0x5", b"5, 5", b"5\r\ncontent-length: 6", b"", b"five", b"1e3", b"9" * 30, b"5.0"]
CHUNKED = [
    *(chunked(size + b"\r\nhello\r\n0\r\n\r\n") for size in (b"-5", b"zz", b"0x5", b"f" * 30, b"4", b"6", b"")),
    chunked(b"5\nhello\n0\n\n"),
    chunked(b"5\r\nhello0\r\n\r\n"),
    *(chunked(chunks(BODY, 8), coding=coding) for coding in (b"gzip, chunked", b"chunked, gzip", b"identity", b"x")),
    chunked(chunks(BODY, 8), b"transfer-encoding: chunked\r\n"),
    chunked(chunks(BODY, 8), b"content-length: 5\r\n"),
    chunked(chunks(BODY, 8)).replace(b"HTTP/1.1", b"HTTP/1.0"),
    chunked(chunks(BODY, 8)[:-2] + b"content-length: 5\r\n\r\n"),
]


@pytest.mark.parametrize(
    "data",
    [*REQUEST_LINES, *(get(headers=headers) for headers in HEADERS), *(post(length=x) for x in LENGTHS), *CHUNKED],
)
def test_what_is_no_http_is_refused(hasty: Running, log: None, data: bytes) -> None:
    (reply,) = exchange(hasty, data)
    assert reply.status == 400
    assert json.loads(reply.body)["error"]["code"] == "invalid_http"


def test_what_is_no_http_is_counted(hasty: Running) -> None:
    def num_refused() -> float:
        text = hasty.client.get("/metrics").text
        found = re.search(r'http_requests_total\{handler="none",method="other",status="4xx"\} (\S+)', text)
        return float(found[1]) if found else 0

    before = num_refused()
    exchange(hasty, b"\0")
    assert num_refused() == before + 1


@pytest.mark.parametrize(
    ("data", "status"),
    [
        *(
            (get(target), 404)
            for target in (b"/%00", b"/%ff", b"/%zz", b"/%0d%0aX:", b"/../../etc/passwd", b"//health")
        ),
        (b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", 404),
        (b"TRACE /health HTTP/1.1\r\n" + HOST + b"\r\n", 405),
        (get(b"/" + b"a" * 60_000), 404),
        (get(b"/" + b"a" * 200_000), 431),
        (get(headers=HOST + b"x: " + b"a" * 200_000 + b"\r\n"), 431),
        (get(headers=HOST + b"".join(b"x-%d: y\r\n" % index for index in range(128))), 431),
        (get(headers=HOST + b"".join(b"x-%d: y\r\n" % index for index in range(20_000))), 431),
        (post(length=b"99999999999"), 413),
        (post(b"a" * 100_001), 413),
        (chunked(chunks(b"a" * 100_001, 10_000)), 413),
        (chunked(b"fffffffffff\r\nhello"), 408),
        (chunked(chunks(BODY, 8)[:-2] + b"x: " + b"a" * 200_000), 431),
        (chunked(b"5;" + b"a" * 200_000), 431),
        (chunked(b"\r\n\r\n"), 400),
        (post(length=b"3"), 400),
        (post(length=b"99"), 408),
        (b"POST /v1/completions HTTP/1.1\r\n" + HOST + JSON + b"\r\n", 400),
        (b"\r\n\r\n", 408),
        (get()[:-2], 408),
    ],
)
def test_what_is_http_and_nothing_else_has_its_status(hasty: Running, log: None, data: bytes, status: int) -> None:
    first, *others = exchange(hasty, data)
    assert first.status == status
    assert {reply.status for reply in others} <= {400}


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "a\0"}',
        b"\xff\xfe{\0}\0",
        b"\xef\xbb\xbf" + BODY,
        b"[" * 50_000,
        b'{"a":' * 15_000,
        b'{"prompt": "a", "seed": ' + b"9" * 90_000 + b"}",
        b'{"prompt": "a", "temperature": 1e99999}',
        b'{"prompt": "a", "max_tokens": -0}',
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": {"a": 1, "a": 2}}',
        b'{"prompt": "a", "n": 1e1}',
        b'{"prompt": "\\ud800", "max_tokens": 1}',
        b"NaN",
        b"\0" * 1000,
        BODY + BODY,
    ],
)
def test_bodies_that_are_no_good_json(hasty: Running, log: None, body: bytes) -> None:
    (reply,) = exchange(hasty, post(body))
    assert reply.status == 400
    assert json.loads(reply.body)["error"]["type"] == "invalid_request_error"


def statuses(replies: Iterable[Reply]) -> list[int]:
    return [reply.status for reply in replies]


def text_of(reply: Reply) -> str:
    return str(json.loads(reply.body)["choices"][0]["text"])


def test_requests_that_are_unusual_but_right(hasty: Running, log: None) -> None:
    (plain,) = exchange(hasty, post())
    assert plain.status == 200
    for data in (
        b"\r\n" + post(),
        post(more=b"x: \xff\xfe\r\n"),
        post().replace(b"POST /v1", b"POST http://x/v1"),
        post(version=b"1.0"),
        post().replace(HOST, b"").replace(b"HTTP/1.1", b"HTTP/1.0"),
        post(more=b"expect: 200-maybe\r\n"),
        chunked(chunks(BODY, 1)),
        chunked(chunks(BODY, 1000)[:-2] + b"authorization: none\r\n\r\n"),
        chunked(chunks(BODY, 1000).replace(b"\r\n", b";a=b;c\r\n", 1)),
    ):
        (reply,) = exchange(hasty, data)
        assert (reply.status, text_of(reply)) == (200, text_of(plain))
    pieces = [post()[start : start + 25] for start in range(0, len(post()), 25)]  # few: the server waits a second only
    (reply,) = exchange(hasty, *pieces)
    assert text_of(reply) == text_of(plain)
    proceed, reply = exchange(hasty, post(more=b"expect: 100-continue\r\n")[: -len(BODY)], BODY)
    assert (proceed.status, reply.status) == (100, 200)
    assert statuses(exchange(hasty, post(length=b"999999", more=b"expect: 100-continue\r\n")[: -len(BODY)])) == [413]


def test_a_wish_for_another_protocol_is_passed_over(hasty: Running, log: None) -> None:
    h2c = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
    websocket = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    for more in (h2c, websocket):
        wish = post(more=more)
        assert statuses(exchange(hasty, wish)) == [200]
        assert statuses(exchange(hasty, wish[:200], wish[200:])) == [200]
        assert statuses(exchange(hasty, wish * 3 + HEALTH)) == [200] * 4
        assert statuses(exchange(hasty, chunked(chunks(BODY, 8), more) + HEALTH)) == [200] * 2
    assert statuses(exchange(hasty, get(b"/v1/completions", headers=HOST + websocket))) == [405]
    last = get(headers=HOST + b"connection: upgrade, close\r\nupgrade: websocket\r\n")
    assert statuses(exchange(hasty, last + HEALTH)) == [200]


def test_a_client_of_http_1_0_gets_a_stream_that_the_end_of_the_connection_ends(hasty: Running, log: None) -> None:
    body = json.dumps({**WRITE, "max_tokens": 20, "stream": True, "seed": 1}).encode()
    (new,) = exchange(hasty, post(body, b"x-request-id: a\r\n"))
    for more in (b"", b"connection: keep-alive\r\n", b"expect: 100-continue\r\n"):
        with socket.create_connection(("127.0.0.1", int(hasty.url.rpartition(":")[2])), TIMEOUT) as sock:
            sock.sendall(post(body, more, version=b"1.0"))
            received = b"".join(iter(lambda: sock.recv(1 << 16), b""))
        head, _, events = received.partition(b"\r\n\r\n")
        assert b" 200 OK\r\n" in head
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
        assert streamed_text(events) == streamed_text(new.body)


def streamed_text(events: bytes | bytearray) -> str:
    """The text of a stream, which must be nothing but its events; how many pieces it comes in is a matter of time."""
    *lines, done, end = bytes(events).split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    choices = [json.loads(line.removeprefix(b"data: "))["choices"] for line in lines]
    return "".join(choice["text"] for (choice,) in choices)


def test_requests_sent_ahead_are_answered_in_their_order(hasty: Running, log: None) -> None:
    stream = post(json.dumps({**WRITE, "max_tokens": 20, "stream": True}).encode())
    ahead = HEALTH + post() + get(b"/nope") + stream + HEALTH
    assert statuses(exchange(hasty, ahead)) == [200, 200, 404, 200, 200]
    assert statuses(exchange(hasty, stream + b"garbage\r\n\r\n")) == [200, 400]
    assert statuses(exchange(hasty, stream + HEALTH + post(length=b"-1"))) == [200, 200, 400]
    assert statuses(exchange(hasty, stream + HEALTH + chunked(b"zz\r\n"))) == [200, 200, 400]
    assert statuses(exchange(hasty, stream + HEALTH * 1000)) == [200] * 33 + [400]
    assert statuses(exchange(hasty, get(headers=HOST + b"connection: close\r\n") + HEALTH)) == [200]


@pytest.mark.parametrize("more", [b"", b"connection: close\r\n"])
@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"content-type: application/json\r\ncontent-length: 8000000\r\n", 413),
        (b"content-type: text/plain\r\ncontent-length: 8000000\r\n", 415),
        (b"content-type: application/json\r\ntransfer-encoding: chunked\r\n", 400),  # null bytes are no chunks
    ],
)
def test_a_client_that_is_still_sending_gets_the_answer(
    hasty: Running, log: None, head: bytes, status: int, more: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", int(hasty.url.rpartition(":")[2])), TIMEOUT) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\n" + HOST + head + more + b"\r\n")
        for _ in range(80):
            sock.sendall(bytes(100_000))
        received = b""
        while data := sock.recv(1 << 16):
            received += data
    assert statuses(Replies(received).found) == [status]


def test_a_client_that_has_said_all_may_still_read(hasty: Running, log: None) -> None:
    body = {**WRITE, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with socket.create_connection(("127.0.0.1", int(hasty.url.rpartition(":")[2])), TIMEOUT) as sock:
        sock.sendall(post(json.dumps(body).encode()))
        received = sock.recv(100)
        sock.shutdown(socket.SHUT_WR)
        while data := sock.recv(1 << 16):
            received += data
    (reply,) = Replies(received).found
    assert reply.body.endswith(b"data: [DONE]\n\n")
    assert exchange(hasty, post()[:-3], half_close=True) == []
    assert exchange(hasty, half_close=True) == []


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The bytes of a request with a few of them changed, lost, doubled or moved."""
    for _ in range(rng.randrange(1, 5)):
        start = rng.randrange(len(data))
        end = min(len(data), start + rng.choice((1, 1, 2, 8, 64)))
        piece = data[start:end]
        where = rng.randrange(len(data))
        extra = rng.choice((b"\0", b"\r\n", b"\r\n\r\n", b"\xff", b" ", b":", b"0", b'"', b"{", rng.randbytes(4)))
        data = rng.choice(
            (
                data[:start] + data[end:],
                data[:end] + piece + data[end:],
                data[:start] + extra + data[end:],
                data[:start] + extra + data[start:],
                data[:where] + piece + data[where:],
                data[:start] + bytes([data[start] ^ 1 << rng.randrange(8)]) + data[start + 1 :],
            )
        )
    return data


def test_requests_with_random_faults(hasty: Running, log: None) -> None:
    rng = random.Random(0)
    kinds = (post(), post(more=b"connection: close\r\n"), chunked(chunks(BODY, 8)), HEALTH + post(), get(b"/v1/models"))
    cases = [mutated(rng.choice(kinds), rng) for _ in range(NUM_MUTATIONS)]
    with ThreadPoolExecutor(32) as pool:
        replies = list(pool.map(lambda data: exchange(hasty, data), cases))
    for data, found in zip(cases, replies, strict=True):
        assert all(reply.status < 500 for reply in found), data
    assert len({reply.status for found in replies for reply in found}) > 4

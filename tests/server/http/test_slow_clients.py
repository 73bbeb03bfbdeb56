"""Clients that are slow on purpose, at every stage of a connection, and each counts while it lasts."""

from __future__ import annotations

import contextlib
import itertools
import json
import select
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.conftest import NEEDS_OPENSSL, TIMEOUT, Running, stand_in, wait_for

LONG = {"prompt": "import", "max_tokens": 1000, "ignore_eos": True, "logprobs": 20}
HOST = b"host: x\r\n"
JSON = b"content-type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
PIECE_S = 0.2
"""Between the pieces of what is sent slowly: less than any limit here."""


TRANSPORTS = [pytest.param(False, id="tcp"), pytest.param(True, id="tls", marks=NEEDS_OPENSSL)]


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> dict[str, str]:
    """Settings of a server without TLS, and of one with it."""
    return request.getfixturevalue("certificate") if request.param else {}


def num_connections(server: Running) -> int:
    return len(server.connections())


def tcp(server: Running) -> socket.socket:
    """A TCP connection that takes in little ahead of its reader."""
    sock = socket.socket()
    sock.settimeout(TIMEOUT)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
    return sock


def connect(server: Running, transport: dict[str, str]) -> socket.socket:
    """A connection on which HTTP may be spoken."""
    sock = tcp(server)
    if not transport:
        return sock
    return ssl.create_default_context(cafile=transport["ssl_certfile"]).wrap_socket(sock, server_hostname="127.0.0.1")


def everything(sock: socket.socket) -> bytes:
    """What comes until the connection ends, one way or the other."""
    data = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while piece := sock.recv(65536):
            data += piece
    return data


def post(body: dict[str, Any], more: bytes = b"", num_spaces: int = 0) -> bytes:
    data = json.dumps(body).encode() + b" " * num_spaces
    head = b"POST /v1/completions HTTP/1.1\r\n" + HOST + JSON + more + b"content-length: %d\r\n\r\n" % len(data)
    return head + data


def drip_until_end(sock: socket.socket, piece: bytes, start: bytes) -> bytes:
    """What comes while the start, and then the piece again and again, is sent, until the connection ends.

    In one thread: a TLS socket must not be read and written by two.
    """
    data = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        sock.sendall(start)
        sock.settimeout(PIECE_S)
        while received := receive_or_send(sock, piece):
            data += received
    sock.settimeout(TIMEOUT)
    return data


def receive_or_send(sock: socket.socket, piece: bytes) -> bytes:
    """What comes next; the piece is sent as often as nothing comes for a while."""
    while True:
        try:
            return sock.recv(65536)
        except TimeoutError:
            sock.sendall(piece)


def readable(sockets: list[socket.socket]) -> list[socket.socket]:
    """Those on which something has come, or which were closed."""
    return select.select(sockets, [], [], 0)[0]


def is_cut(sock: socket.socket, piece: bytes) -> bool:
    """Whether the other side refuses to hear more."""
    try:
        sock.sendall(piece)
    except (ConnectionError, ssl.SSLError):
        return True
    return False


@NEEDS_OPENSSL
@pytest.mark.parametrize("says", [b"", b"\x16\x03\x01"], ids=["silent", "begun"])
def test_handshakes_count_and_have_the_deadline_of_a_head(serve: Any, certificate: Any, says: bytes) -> None:
    with serve(max_connections=5, header_timeout=3, **certificate) as server:
        sockets = [tcp(server) for _ in range(50)]
        for sock in sockets:
            with contextlib.suppress(ConnectionError):
                sock.sendall(says)
        wait_for(lambda: num_connections(server) == 5)
        wait_for(lambda: len(readable(sockets)) >= 45)
        assert len(readable(sockets)) == 45, "nothing is said on any: what can be read is its end"
        for sock in sockets:
            assert everything(sock) == b""
            sock.close()
        wait_for(lambda: num_connections(server) == 0)
        with connect(server, certificate) as sock:
            sock.sendall(HEALTH)
            assert sock.recv(100).startswith(b"HTTP/1.1 200 ")


def test_a_connection_that_says_nothing_ends(serve: Any, transport: dict[str, str]) -> None:
    with serve(header_timeout=1, **transport) as server, connect(server, transport) as sock:
        assert everything(sock) == b""
        wait_for(lambda: num_connections(server) == 0)


BODY = b"POST /v1/completions HTTP/1.1\r\n" + HOST + JSON
CHUNKED = BODY + b"transfer-encoding: chunked\r\n\r\n"
IGNORED = b"GET /health HTTP/1.1\r\n" + HOST + b"content-length: 10000\r\n\r\n"
SLOW = {
    "head": (b"x", b"GET /health HTTP/1.1\r\nhost: x\r\nx: "),
    "empty lines": (b"\r\n", b""),
    "body": (b" ", BODY + b"content-length: 10000\r\n\r\n"),
    "body of HTTP/1.0": (b" ", BODY.replace(b"/1.1", b"/1.0") + b"content-length: 10000\r\n\r\n"),
    "chunks": (b"1\r\n \r\n", CHUNKED),
    "chunk extension": (b"a", CHUNKED + b"5;"),
    "trailer": (b"a", CHUNKED + b"2\r\n{}\r\n0\r\na: "),
    "body after a request": (b" ", HEALTH + BODY + b"content-length: 10000\r\n\r\n"),
    "body that is ignored": (b" ", IGNORED),
    "body that came fast at first": (b" ", BODY + b"content-length: 900000\r\n\r\n" + b" " * 200_000),
}


def test_a_request_that_drips_ends_whatever_it_drips(serve: Any, transport: dict[str, str]) -> None:
    limits = {"header_timeout": 2, "body_timeout": 2, "min_body_rate": 10_000}
    with serve(**limits, **transport) as server, ThreadPoolExecutor(len(SLOW)) as pool:
        # What is sent behind the server's end makes the system forget what came: a reply can be lost, not always.
        refused = pool.map(lambda kind: any(is_refused(server, transport, kind) for _ in range(10)), SLOW)
        assert [kind for kind, is_so in zip(SLOW, refused, strict=True) if not is_so] == []
        wait_for(lambda: num_connections(server) == 0)
        with connect(server, transport) as other:
            other.sendall(b"GET /load HTTP/1.0\r\n\r\n")
            assert b'"server_load":0,' in everything(other)


def is_refused(server: Running, transport: dict[str, str], kind: str) -> bool:
    """Whether one that drips is told so; in any case it is cut."""
    piece, start = SLOW[kind]
    with connect(server, transport) as sock:
        reply = drip_until_end(sock, piece, start)
        if kind == "body":  # in this one it goes on sending, and is cut all the same
            wait_for(lambda: is_cut(sock, piece))
    last = b"HTTP/1.1 " + reply.rpartition(b"HTTP/1.1 ")[2]
    return last.startswith(b"HTTP/1.1 200 " if kind == "body that is ignored" else b"HTTP/1.1 408 ")


def test_a_long_body_may_take_several_windows(serve: Any, transport: dict[str, str]) -> None:
    data = post({"prompt": "a", "max_tokens": 1}, num_spaces=100_000)
    with serve(body_timeout=1, min_body_rate=2000, **transport) as server, connect(server, transport) as sock:
        for start in range(0, len(data), 5000):  # 2.1 s at least
            sock.sendall(data[start : start + 5000])
            time.sleep(0.1)
        assert sock.recv(100).startswith(b"HTTP/1.1 200 ")


def test_time_in_which_the_server_does_not_read_is_not_the_clients(serve: Any, transport: dict[str, str]) -> None:
    first = post({"prompt": "a", "max_tokens": 1})
    second = post({"prompt": "a", "max_tokens": 1}, num_spaces=300_000)
    with serve(body_timeout=1, min_body_rate=200_000, **transport) as server, connect(server, transport) as sock:
        server.wait_idle()
        with stand_in(server) as held:
            sock.sendall(first + second[:1000])
            sender = threading.Thread(target=sock.sendall, args=(second[1000:],))
            sender.start()
            time.sleep(3)  # several windows
            held.may_go.set()
        received = b""
        while received.count(b"HTTP/1.1 200 OK") < 2 and b"HTTP/1.1 4" not in received:
            received += sock.recv(65536)
        sender.join(TIMEOUT)
        assert received.count(b"HTTP/1.1 200 OK") == 2


READERS = list(itertools.product((b"", b"connection: close\r\n"), (False, True), (0, 50)))
"""Last header; whether the reply is a stream; bytes that are read at a time: every combination at once."""


def test_clients_that_read_too_little_are_cut(serve: Any, transport: dict[str, str]) -> None:
    with serve(write_timeout=1, min_reply_rate=5000, **transport) as server, contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(connect(server, transport)) for _ in READERS]
        server.wait_idle()
        with stand_in(server) as held:
            for sock, (close, stream, _) in zip(sockets, READERS, strict=True):
                sock.sendall(post({**LONG, "max_tokens": 150, "stream": stream}, close))  # 2 KB a token
            wait_for(lambda: server.engine.num_unfinished == len(READERS))
            held.may_go.set()
            server.wait_idle()
        received = [b""] * len(READERS)
        while num_connections(server):
            for index, (_, _, reads) in enumerate(READERS):
                with contextlib.suppress(ConnectionError, ssl.SSLError):
                    received[index] += sockets[index].recv(reads) if reads else b""
            time.sleep(0.05)
        for sock, begun, reader in zip(sockets, received, READERS, strict=True):
            reply = begun + everything(sock)
            assert reply.startswith(b"HTTP/1.1 200 "), reader
            assert not reply.endswith(b"0\r\n\r\n"), reader
            if not reader[1]:
                head, _, body = reply.partition(b"\r\n\r\n")
                assert len(body) < int(head.partition(b"content-length: ")[2].split()[0]), reader


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_reads_slowly_but_steadily_gets_everything(
    serve: Any, transport: dict[str, str], stream: bool
) -> None:
    with serve(write_timeout=1, min_reply_rate=1000, **transport) as server, connect(server, transport) as sock:
        sock.sendall(post({**LONG, "stream": stream}, b"connection: close\r\n"))
        received = b""
        bytes_per_s = 800_000  # some 2.5 s for the whole, several windows
        while data := sock.recv(16384):  # with TLS, what was sent at once at most
            received += data
            time.sleep(len(data) / bytes_per_s)
        head, _, body = received.partition(b"\r\n\r\n")
    if stream:
        assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    else:
        assert len(body) == int(head.partition(b"content-length: ")[2].split()[0])


def test_a_small_reply_that_nobody_reads_ends_with_its_connection(serve: Any, transport: dict[str, str]) -> None:
    """Less than makes a transport pause: closing must be bounded, too."""
    with serve(write_timeout=1, **transport) as server, connect(server, transport) as sock:
        with contextlib.suppress(OSError):
            for _ in range(200):
                sock.sendall(b"GET /openapi.json HTTP/1.1\r\n" + HOST + b"\r\n")
                time.sleep(0.01)
        wait_for(lambda: num_connections(server) == 0)


def test_a_client_that_is_still_sending_gets_its_refusal(serve: Any, transport: dict[str, str]) -> None:
    with serve(max_body_size=1000, **transport) as server, connect(server, transport) as sock:
        sock.sendall(BODY + b"content-length: 4000000\r\n\r\n")
        for _ in range(40):
            sock.sendall(bytes(100_000))
        assert everything(sock).startswith(b"HTTP/1.1 413 ")
        sock.close()
        wait_for(lambda: num_connections(server) == 0)

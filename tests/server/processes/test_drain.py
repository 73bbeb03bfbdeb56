"""A server that is told to end lets every answer arrive that is under way, to its last byte."""

from __future__ import annotations

import json
import signal
import socket
import ssl
import time
from pathlib import Path
from typing import Any

import httptools
import pytest

from tests.server.conftest import NEEDS_OPENSSL, TIMEOUT
from tests.server.processes.test_processes import Server, served

LARGE = {"prompt": ["a"] * 6, "max_tokens": 900, "ignore_eos": True, "logprobs": 20}
"""More than the kernel takes from the server before the client reads."""


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()


def post(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


def connect(server: Server, certificate: str | None) -> socket.socket:
    sock = socket.socket()
    sock.settimeout(TIMEOUT)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
    if certificate is None:
        return sock
    return ssl.create_default_context(cafile=certificate).wrap_socket(sock, server_hostname="127.0.0.1")


def asked(server: Server, certificate: str | None, path: str) -> bytes:
    with connect(server, certificate) as sock:
        sock.sendall(get(path))
        return sock.recv(65536)


class Reader:
    """Reads one reply to its end."""

    def __init__(self, sock: socket.socket, begun: bytes) -> None:
        self.is_complete = False
        self.body = bytearray()
        parser = httptools.HttpResponseParser(self)
        parser.feed_data(begun)
        while not self.is_complete and (data := sock.recv(1 << 16)):
            parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.is_complete = True


@pytest.mark.parametrize(
    ("num_fronts", "is_tls", "is_stream"),
    [
        (1, False, False),
        pytest.param(2, False, True, marks=pytest.mark.slow),
        pytest.param(1, True, False, marks=[NEEDS_OPENSSL, pytest.mark.slow]),
        pytest.param(2, True, True, marks=[NEEDS_OPENSSL, pytest.mark.slow]),
    ],
)
def test_an_answer_that_is_being_read_arrives_whole_when_the_server_ends(
    tmp_path: Path, request: pytest.FixtureRequest, num_fronts: int, is_tls: bool, is_stream: bool
) -> None:
    flags = ["--api-server-count", str(num_fronts), "--shutdown-timeout", "60"]
    certificate = None
    if is_tls:
        made = request.getfixturevalue("certificate")
        certificate = made["ssl_certfile"]
        flags += ["--ssl-certfile", certificate, "--ssl-keyfile", made["ssl_keyfile"]]
    with served(tmp_path, *flags) as server:
        idle, busy = connect(server, certificate), connect(server, certificate)
        idle.sendall(get("/health"))
        assert idle.recv(65536).startswith(b"HTTP/1.1 200 ")
        busy.sendall(post({**LARGE, "stream": is_stream}))
        begun = busy.recv(100)
        server.process.send_signal(signal.SIGTERM)
        assert idle.recv(100) == b"", "what is idle ends at once"
        time.sleep(3)  # longer than last words have
        assert server.process.poll() is None
        assert asked(server, certificate, "/ready").startswith(b"HTTP/1.1 503 ")
        reply = Reader(busy, begun)
        assert reply.is_complete
        if is_stream:
            assert reply.body.endswith(b"data: [DONE]\n\n")
        else:
            assert len(json.loads(reply.body)["choices"]) == 6
        idle.close()
        busy.close()
        assert server.process.wait(TIMEOUT) == 0


def test_an_answer_that_nobody_reads_is_cut_at_the_deadline_of_the_drain(tmp_path: Path) -> None:
    with served(tmp_path, "--shutdown-timeout", "1") as server, connect(server, None) as sock:
        sock.sendall(post(LARGE))
        begun = sock.recv(100)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIMEOUT) == 0
        assert "cutting 1 answer " in server.log.read_text()
        assert begun.startswith(b"HTTP/1.1 200 ")

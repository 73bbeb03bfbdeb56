"""Listening sockets and the words for what keeps them from listening."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.utils.net import listen_tcp, listen_unix, url_of


def test_a_tcp_socket_accepts_connections() -> None:
    with listen_tcp("127.0.0.1", 0) as sock:
        assert url_of(sock, tls=False) == f"http://127.0.0.1:{sock.getsockname()[1]}"
        assert url_of(sock, tls=True).startswith("https://")
        socket.create_connection(sock.getsockname()).close()


def test_an_address_of_version_six_stands_in_brackets() -> None:
    try:
        sock = listen_tcp("::1", 0)
    except ConfigError:
        pytest.skip("no IPv6 here")
    with sock:
        assert url_of(sock, tls=False) == f"http://[::1]:{sock.getsockname()[1]}"


def test_a_port_in_use_is_named_with_a_remedy() -> None:
    with listen_tcp("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: Address already in use.*--port"):
            listen_tcp("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "300.1.1.1", "a" * 300, "\udc80"])
def test_a_host_that_is_none_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match="--host"):
        listen_tcp(host, 0)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="Cannot assign requested address"):
        listen_tcp("192.0.2.1", 0)


def test_a_unix_socket_that_nobody_listens_on_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listen_unix(str(path)).close()
    with listen_unix(str(path)) as sock:
        assert url_of(sock, tls=False) == f"unix:{path}"
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_unix_socket_in_use_and_a_file_in_the_way_are_left_alone(tmp_path: Path) -> None:
    path, file = tmp_path / "s", tmp_path / "f"
    file.write_text("mine")
    with listen_unix(str(path)), pytest.raises(ConfigError, match="Address already in use"):
        listen_unix(str(path))
    with pytest.raises(ConfigError, match="no socket stands there"):
        listen_unix(str(file))
    assert file.read_text() == "mine"


@pytest.mark.parametrize("path", ["a" * 200, "/no/such/directory/s", "a\0b"])
def test_a_path_that_cannot_be_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="--uds"):
        listen_unix(path)

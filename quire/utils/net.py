"""Listening sockets, bound before anything expensive happens, with errors that say what to do."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from typing import TYPE_CHECKING

from quire.errors import ConfigError

if TYPE_CHECKING:
    import ssl

BACKLOG = 2048
MAX_UNSENT_BYTES = 64 << 10
"""What the kernel takes for a client beyond what is under way. By itself it takes megabytes from a client that reads
nothing, and whoever writes learns of it that much later."""


def listen_tcp(host: str, port: int) -> socket.socket:
    """A listening socket on an address of this machine; port 0 lets the system choose.

    Raises: ConfigError.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host}: no such address ({error}); give one of this machine, or 127.0.0.1") from None
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)  # connections inherit it
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}. Choose another --port or --host, or "
            "stop what listens there."
        ) from None
    return sock


def listen_unix(path: str) -> socket.socket:
    """A listening unix socket that only this user can connect to; one that a dead server left behind is replaced.

    Raises: ConfigError.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        sock.bind(path)
        os.chmod(path, 0o600)
        sock.listen(BACKLOG)
    except (OSError, ValueError) as error:
        sock.close()
        raise ConfigError(f"cannot listen on the unix socket {path}: {error}. Choose another --uds.") from None
    return sock


def _remove_stale(path: str) -> None:
    """Remove a socket file that nobody listens on."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise FileExistsError(17, "a file that is no socket stands there")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)


def tls_context(certfile: str, keyfile: str | None, ca_certs: str | None) -> ssl.SSLContext:
    """TLS as a server speaks it; with `ca_certs`, clients need a certificate of one of them.

    Raises: ConfigError for files that cannot be used. Nobody is asked for the password of a key: a server has nobody.
    """
    import ssl

    def refuse() -> str:
        raise ConfigError(
            f"the private key in {keyfile or certfile} is encrypted, and quire takes no password. Decrypt it: "
            "openssl pkey -in KEY -out DECRYPTED"
        )

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile, password=refuse)
    except (OSError, ValueError) as error:
        key = f" with the key {keyfile}" if keyfile else ", which must hold the private key, too"
        raise ConfigError(f"the certificate {certfile}{key} cannot be used: {_reason(error)}.") from None
    if ca_certs is not None:
        try:
            context.load_verify_locations(ca_certs)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the authorities in {ca_certs} cannot be used: {_reason(error)}.") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _reason(error: Exception) -> str:
    """What OpenSSL or the system says, in words."""
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error).lower().replace("_", " ")


def url_of(sock: socket.socket, *, tls: bool) -> str:
    """Where a listening socket is reached."""
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"unix:{name}"
    host, port = name[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"

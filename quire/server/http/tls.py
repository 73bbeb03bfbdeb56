"""TLS between a socket and a connection, so that the connection is counted before the handshake.

asyncio tells a protocol of a connection only once the handshake is complete. Clients that never complete theirs would
be bounded by nothing. uvloop's own TLS protocol is told of the TCP connection, and passes that on here.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING

from uvloop.loop import SSLProtocol  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from quire.server.http.connection import LimitedConnection

NEVER_S = 86400.0
"""The connection bounds its own end; uvloop's limit must not cut a reply that is still being read."""


class TlsProtocol(SSLProtocol):  # type: ignore[misc]
    """uvloop's TLS, which tells the connection of what happens below TLS."""

    def __init__(self, connection: LimitedConnection, context: ssl.SSLContext) -> None:
        super().__init__(
            connection.loop,
            connection,
            context,
            None,
            server_side=True,
            ssl_handshake_timeout=connection.settings.header_timeout,
            ssl_shutdown_timeout=NEVER_S,
        )
        self._connection = connection

    def connection_made(self, transport: asyncio.Transport) -> None:
        """A client has connected; the handshake begins if there is room for it."""
        if self._connection.accept(transport):
            super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The TCP connection has ended, at whatever stage."""
        super().connection_lost(exc)
        self._connection.forget()

    def pause_writing(self) -> None:
        """The socket takes no more for now."""
        super().pause_writing()
        self._connection.watch_reader()

    def eof_received(self) -> None:
        """The client has closed its side; what is unsent is sent before the connection ends."""
        self._connection.watch_reader()
        super().eof_received()

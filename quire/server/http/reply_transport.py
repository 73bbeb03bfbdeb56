"""The transport of a connection as uvicorn sees it while it sends a reply."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

if TYPE_CHECKING:
    from quire.server.http.connection import LimitedConnection

_CHUNKED = b"transfer-encoding: chunked\r\n"


class ReplyTransport:
    """Writes are counted, and the end of a reply waits for a client that is still sending."""

    def __init__(self, connection: LimitedConnection) -> None:
        self._connection = connection
        self.is_closing = connection.transport.is_closing
        self.close = connection.linger

    def write(self, data: bytes) -> None:
        """Send the head of a reply, or a piece of its body as uvicorn frames it."""
        self._connection.write(data)


class CloseDelimited(ReplyTransport):
    """The same for a client of HTTP/1.0, which knows no chunks: where the length of a body is not known, the end of
    the connection is its end (RFC 9112, 6.3)."""

    def __init__(self, connection: LimitedConnection) -> None:
        super().__init__(connection)
        self._has_head = False
        self._is_chunked = False

    def write(self, data: bytes) -> None:
        """Send the head without the mark of chunks, and each chunk without its frame."""
        if not self._has_head:
            self._has_head = True
            self._is_chunked = _CHUNKED in data
            data = data.replace(_CHUNKED, b"")
        elif self._is_chunked:
            data = _unframed(data)
        if data:
            super().write(data)


def _unframed(data: bytes) -> bytes:
    """What one write of uvicorn's brings: nothing, a chunk, the last chunk and the end behind it, or the end alone."""
    size, _, rest = data.partition(b"\r\n")
    return rest[: int(size or b"0", 16)]


async def write_piece(made_by: ref[RequestResponseCycle], data: bytes) -> None:
    """What uvicorn's `send` does with a piece of a chunked body, without what it does for all other messages.

    The reply owns the scope in which this stands: a strong reference back would leave all of it to the collector.
    """
    reply = made_by()
    if reply is None:
        return
    if reply.flow.write_paused and not reply.disconnected:
        await reply.flow.drain()
    if data and not reply.disconnected:  # a piece of no bytes would be the end
        reply.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

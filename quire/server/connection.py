"""One HTTP connection: uvicorn's, with bounds on everything that a client could make it wait for or remember."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.server.errors import ApiError, error_body
from quire.server.settings import ServerSettings

REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


class _HeadersTooLarge(Exception):
    """Stops the parser; never leaves it."""


class LimitedConnection(HttpToolsProtocol):
    """Cuts clients that send headers too slowly or too many, and those that stop reading.

    A client that closes its sending side counts as gone: nothing else tells, before a reply, that it left.

    uvicorn stops reading a body that nobody takes, and stops the application while the client takes nothing: memory is
    bounded, but not time. The times are bounded here; that of bodies where they are read, in `body`.
    """

    settings: ClassVar[ServerSettings]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._in_headers = True
        self._num_header_bytes = 0
        self._num_waiting_bytes = 0
        """Received since the last complete header block began."""
        if len(self.connections) > self.settings.max_connections:
            transport.abort()
        else:
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._stop(self._header_timer, self._write_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request, or of several."""
        if self.cycle is None or self.cycle.response_complete:
            self._expect_headers()
        super().data_received(data)
        self._num_waiting_bytes = self._num_waiting_bytes + len(data) if self._in_headers else 0
        if self._num_waiting_bytes > self.settings.max_header_size and not self.transport.is_closing():
            self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        """A request begins."""
        self._in_headers = True
        self._num_header_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header is complete."""
        self._count(len(name) + len(value))
        if len(self.headers) >= self.settings.max_header_count:
            raise _HeadersTooLarge
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The headers are complete."""
        self._in_headers = False
        self._stop(self._header_timer)
        self._header_timer = None
        super().on_headers_complete()

    def pause_writing(self) -> None:
        """The client reads more slowly than there is to write."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.settings.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._stop(self._write_timer)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """What could not be parsed: refused by the limits here, or no HTTP."""
        too_many = self.headers is not None and len(self.headers) >= self.settings.max_header_count
        if too_many or self._num_header_bytes > self.settings.max_header_size:
            self._refuse(self._too_large())
        else:
            self._refuse(ApiError(400, "invalid_http", "The request is not valid HTTP/1.1."))

    def _count(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > self.settings.max_header_size:
            raise _HeadersTooLarge

    def _expect_headers(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.settings.header_timeout, self._headers_late)

    def _headers_late(self) -> None:
        self._header_timer = None
        if not self._num_waiting_bytes:
            self.transport.close()  # a connection made in advance, never used
        elif not self.transport.is_closing():
            limit = self.settings.header_timeout
            self._refuse(ApiError(408, "request_timeout", f"The request headers did not arrive within {limit} s."))

    def _too_large(self) -> ApiError:
        settings = self.settings
        return ApiError(
            431,
            "headers_too_large",
            f"Request header fields too large: the limits are {settings.max_header_size} bytes and "
            f"{settings.max_header_count} headers.",
        )

    def _refuse(self, error: ApiError) -> None:
        """Answer without an application, and close."""
        body = msgspec.json.encode(error_body(error, ""))
        head = (
            f"HTTP/1.1 {error.status_code} {REASONS[error.status_code]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _stop(self, *timers: asyncio.TimerHandle | None) -> None:
        for timer in timers:
            if timer is not None:
                timer.cancel()


def limited_connection(given: ServerSettings) -> type[LimitedConnection]:
    """The class of connections that keep these limits."""

    class Connection(LimitedConnection):
        settings = given

    return Connection

"""One HTTP connection: uvicorn's, with bounds on everything that a client could make it wait for or remember."""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate
from functools import lru_cache, partial
from typing import ClassVar

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.server.http.errors import ApiError, ErrorShape
from quire.server.service import EXTENSION
from quire.server.settings import ServerSettings

REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}
MAX_PIPELINED = 32
"""Requests that a client may send while one is being answered."""
LINGER_S = 5
"""For so long a client that has its answer already may go on sending."""
HANDSHAKE = frozenset({b"upgrade", b"connection", b"http2-settings"})


class _Refused(Exception):
    """Stops the parser; never leaves it."""


class LimitedConnection(HttpToolsProtocol):
    """Cuts clients that send headers too slowly or too many, and those that stop reading.

    A client that closes its sending side before the reply counts as gone, since nothing else tells that it left. While
    a reply is sent it may still read: if not, writing tells.

    uvicorn stops reading a body that nobody takes, and stops the application while the client takes nothing: memory is
    bounded, but not time. The times are bounded here; that of bodies where they are read, in `body`.
    """

    settings: ClassVar[ServerSettings]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self.url = b""
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._in_headers = True
        self._num_header_bytes = 0
        self._advanced = False
        """What was received last has completed headers, a message, or some of a body."""
        self._num_waiting_bytes = 0
        """Received since then, and kept in memory."""
        self._answered: RequestResponseCycle | None = None
        """The request that is being answered, or was last; uvicorn's `cycle` is the one that was read last."""
        self._linger_timer: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None
        """Why nothing more is read."""
        if len(self.connections) > self.settings.max_connections:
            transport.abort()
        else:
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._stop(self._header_timer, self._write_timer, self._linger_timer)
        self.pipeline.clear()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends nothing more; whether it may go on reading."""
        reply = self._answered
        if (
            self._linger_timer is not None
            or self.scheme != "http"
            or reply is None
            or not reply.response_started
            or reply.response_complete
        ):
            return False
        reply.keep_alive = False
        return True

    def data_received(self, data: bytes) -> None:
        """Bytes of a request, or of several."""
        if self._refusal is not None or self._linger_timer is not None:
            return
        if self.cycle is None or self.cycle.response_complete:
            self._expect_headers()
        self._unset_keepalive_if_required()
        self._advanced = False
        num_bytes = len(data)
        while data:
            try:
                self.parser.feed_data(data)
                data = b""
            except httptools.HttpParserUpgrade as upgrade:
                data = self._without_upgrade() + data[upgrade.args[0] :]
            except httptools.HttpParserError:
                self._refuse(self._refusal or _invalid("The request is not valid HTTP/1.1."))
                return
        if self._in_headers or not self._advanced:
            self._num_waiting_bytes += num_bytes
            if self._num_waiting_bytes > self.settings.max_header_size:
                self._refuse(self._too_large())
        else:
            self._num_waiting_bytes = 0

    def on_message_begin(self) -> None:
        """A request begins."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise self._refused(_invalid(f"More than {MAX_PIPELINED} requests were sent ahead."))
        self._in_headers = True
        self._num_header_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header is complete, or a trailer."""
        self._count(len(name) + len(value))
        if len(self.headers) >= self.settings.max_header_count:
            raise self._refused(self._too_large())
        if self._in_headers:  # what trails a body is dropped: it must not pass for a header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The headers are complete."""
        self._in_headers = False
        self._advanced = True
        self._stop(self._header_timer)
        self._header_timer = None
        self._check_head()
        if not self._is_upgrade:
            self.server_state.default_headers = _date_header(int(time.time()))
            super().on_headers_complete()
            self.cycle.transport = _ReplyTransport(self)  # type: ignore[assignment]
            self.scope["extensions"] = {EXTENSION: {"write": partial(_write_piece, self.cycle)}}
            if not self.pipeline:
                self._answered = self.cycle

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        self._advanced = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request has been read."""
        self._advanced = True
        if not self._is_upgrade:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """A request has been answered."""
        if self.pipeline:
            self._answered = self.pipeline[-1][0]
            super().on_response_complete()
        else:
            super().on_response_complete()
            if self._refusal is not None:
                self._send_refusal(self._refusal)

    def pause_writing(self) -> None:
        """The client reads more slowly than there is to write."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.settings.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._stop(self._write_timer)
        super().resume_writing()

    def linger(self) -> None:
        """Close, but let a client that is still sending finish: if bytes came to a closed socket, the kernel would
        reset the connection, and the client might lose the answer."""
        is_sending = self._refusal is not None or (self.cycle is not None and self.cycle.more_body)
        if not is_sending or not self.transport.can_write_eof():
            self.transport.close()
        elif self._linger_timer is None and not self.transport.is_closing():
            self._stop(self._header_timer)
            self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)
            self.flow.resume_reading()
            self.transport.write_eof()

    def _count(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > self.settings.max_header_size:
            raise self._refused(self._too_large())

    def _check_head(self) -> None:
        """Refuse what a proxy in front of this server might read differently."""
        version = self.parser.get_http_version()
        hosts = [value for name, value in self.headers if name == b"host"]
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if version not in ("1.0", "1.1"):
            raise self._refused(_invalid("Only HTTP/1.1 and HTTP/1.0 are spoken here."))
        if len(hosts) > 1 or (version == "1.1" and not hosts):
            raise self._refused(_invalid(f"The request has {len(hosts)} Host headers instead of one."))
        if codings not in ([], [b"chunked"]):
            raise self._refused(_invalid("The only Transfer-Encoding that is supported is chunked."))

    @property
    def _is_upgrade(self) -> bool:
        """The client would like to speak another protocol, as Java's does by default (h2c)."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _without_upgrade(self) -> bytes:
        """The head of a request that asked for an upgrade, without asking for one.

        The parser takes what follows such a head for the other protocol; a new one reads it as HTTP.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        headers = [(name, value) for name, value in self.headers if name not in HANDSHAKE]
        lines = [method + b" " + self.url + b" HTTP/" + version, *(name + b": " + value for name, value in headers)]
        self.parser = httptools.HttpRequestParser(self)
        return b"\r\n".join(lines) + b"\r\n\r\n"

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

    def _refused(self, error: ApiError) -> _Refused:
        self._refusal = error
        return _Refused()

    def _refuse(self, error: ApiError) -> None:
        """Read nothing more; answer once the requests before this one are answered, and close."""
        self._refusal = error
        self._stop(self._header_timer)
        if self.cycle is not None and self.cycle.more_body and self.pipeline:
            self.pipeline.popleft()  # the request that cannot be read to its end
        if self._answered is None or self._answered.response_complete or self._answered.more_body:
            self._send_refusal(error)

    def _send_refusal(self, error: ApiError) -> None:
        if self.transport.is_closing():
            return
        reply = self._answered
        if reply is None or reply.response_complete or not reply.response_started:
            body = msgspec.json.encode(self._error_shape().body(error))
            head = (
                f"HTTP/1.1 {error.status_code} {REASONS[error.status_code]}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
            self.app_state["count_refused"]()
        self.linger()

    def _error_shape(self) -> ErrorShape:
        """How the API says its errors that the request seems to be for, as far as it has been read."""
        path = self.url.partition(b"?")[0].decode("latin-1")
        shape: ErrorShape = self.app_state["error_shape"](path.removeprefix(self.root_path))
        return shape

    def _stop(self, *timers: asyncio.TimerHandle | None) -> None:
        for timer in timers:
            if timer is not None:
                timer.cancel()


class _ReplyTransport:
    """The transport as uvicorn sees it while it sends a reply."""

    def __init__(self, connection: LimitedConnection) -> None:
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing
        self.close = connection.linger


async def _write_piece(reply: RequestResponseCycle, data: bytes) -> None:
    """What uvicorn's `send` does with a piece of a chunked body, without what it does for all other messages."""
    if reply.flow.write_paused and not reply.disconnected:
        await reply.flow.drain()
    if data and not reply.disconnected:  # a piece of no bytes would be the end
        reply.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


@lru_cache(maxsize=1)
def _date_header(second: int) -> list[tuple[bytes, bytes]]:
    return [(b"date", formatdate(second, usegmt=True).encode())]


def _invalid(message: str) -> ApiError:
    return ApiError(400, "invalid_http", message)


def limited_connection(given: ServerSettings) -> type[LimitedConnection]:
    """The class of connections that keep these limits."""

    class Connection(LimitedConnection):
        settings = given

    return Connection

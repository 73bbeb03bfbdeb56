"""One HTTP connection: uvicorn's, with bounds on everything that a client could make it wait for or remember."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from email.utils import formatdate
from functools import lru_cache, partial
from typing import Any, ClassVar
from weakref import ref

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.server.http.errors import ApiError, ErrorShape
from quire.server.http.pace import Pace
from quire.server.http.reply_transport import CloseDelimited, ReplyTransport, write_piece
from quire.server.http.tls import TlsProtocol
from quire.server.service import EXTENSION
from quire.server.settings import ServerSettings
from quire.utils.net import tls_context

REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}
MAX_PIPELINED = 32
"""Requests that a client may send while one is being answered."""
LINGER_S = 5
"""For so long a client that has its answer already may go on sending."""
FEW_UNSENT_BYTES = 16384
"""A reply that goes on may have so much unsent at any time, however well the client reads."""
HANDSHAKE = frozenset({b"upgrade", b"connection", b"http2-settings"})


class _Refused(Exception):
    """Stops the parser; never leaves it."""


class LimitedConnection(HttpToolsProtocol):
    """Bounds the time and the memory of everything that a client can make it wait for.

    - A connection counts from `accept` to `forget`, whatever happens on it: TLS handshake, head, body, reply, close.
    - Connecting, the TLS handshake and the first head have one deadline together; each further head has the same.
    - A body and a reply must keep a minimum rate (`Pace`). Time in which this side does not read does not count.

    A client that closes its sending side before the reply counts as gone, since nothing else tells that it left. While
    a reply is sent it may still read: if not, writing tells.
    """

    settings: ClassVar[ServerSettings]

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        settings = self.settings
        self.url = b""
        self._socket: asyncio.Transport | None = None
        """The transport below TLS, or the only one."""
        self._accepted_at = 0.0
        self._is_made = False
        """The TLS handshake, if there is one, is complete."""
        self._header_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._close_timer: asyncio.TimerHandle | None = None
        self._body_pace = Pace(settings.body_timeout, settings.min_body_rate, self._num_received, self._body_late)
        self._read_pace = Pace(settings.write_timeout, settings.min_reply_rate, self._num_taken, self._reader_late)
        self._in_headers = True
        self._in_body = False
        self._num_header_bytes = 0
        self._num_body_bytes = 0
        """Of all bodies so far."""
        self._num_written_bytes = 0
        """Of all replies so far, sent or not."""
        self._advanced = False
        """What was received last has completed headers, a message, or some of a body."""
        self._num_waiting_bytes = 0
        """Received since then, and kept in memory."""
        self._answered: RequestResponseCycle | None = None
        """The request that is being answered, or was last; uvicorn's `cycle` is the one that was read last."""
        self._refusal: ApiError | None = None
        """Why nothing more is read."""

    def accept(self, socket: asyncio.Transport) -> bool:
        """Count a TCP connection; whether there is room for it. It is aborted if not."""
        self._socket = socket
        self._accepted_at = self.loop.time()
        self.connections.add(self)
        if len(self.connections) <= self.settings.max_connections:
            return True
        socket.abort()
        return False

    def forget(self) -> None:
        """Count the connection no more: TCP has ended. Idempotent."""
        self.connections.discard(self)
        if not self._is_made:  # nobody else will break this cycle
            self.parser = None  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected, TLS handshake included."""
        super().connection_made(transport)
        self._is_made = True
        self.flow = _Flow(transport, self._body_pace)
        if self._socket is not None or self.accept(transport):
            self._expect_headers(self.loop.time() - self._accepted_at)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._stop(self._header_timer, self._linger_timer, self._close_timer)
        self._body_pace.stop()
        self._read_pace.stop()
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
            self.watch_reader()
            return False
        reply.keep_alive = False
        return True

    def data_received(self, data: bytes) -> None:
        """Bytes of a request, or of several."""
        if self._refusal is not None or self._linger_timer is not None:
            return
        if not self._in_body and (self.cycle is None or self.cycle.response_complete):
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
        if self._in_body and not self._body_pace.is_running:
            self._body_pace.start()

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
            self._in_body = True
            super().on_headers_complete()
            is_old = self.parser.get_http_version() == "1.0"
            self.cycle.transport = (CloseDelimited if is_old else ReplyTransport)(self)  # type: ignore[assignment]
            self.cycle.waiting_for_100_continue &= not is_old
            self.scope["extensions"] = {EXTENSION: {"write": partial(write_piece, ref(self.cycle))}}
            if not self.pipeline:
                self._answered = self.cycle

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        self._advanced = True
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request has been read."""
        self._advanced = True
        if not self._is_upgrade:
            self._in_body = False
            self._body_pace.stop()
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
        if self._num_unsent:
            self._read_pace.start()

    def pause_writing(self) -> None:
        """The client reads more slowly than there is to write."""
        super().pause_writing()
        self._read_pace.start()

    def watch_reader(self) -> None:
        """See to it that what is unsent is read at the rate that replies must be read at."""
        if self._num_unsent and not self._read_pace.is_running:
            self._read_pace.start()

    def timeout_keep_alive_handler(self) -> None:
        """No request has come since the last one was answered."""
        self._close_idle()

    @property
    def is_answering(self) -> bool:
        """Whether a request that has arrived still waits for a byte of its answer."""
        reply = self._answered
        if self._num_unsent or self.pipeline:
            return True
        if reply is None or reply.response_complete or reply.disconnected:
            return False
        return reply.response_started or not reply.more_body

    def release(self) -> None:
        """The server drains: close at once if all is answered, else after the answer. Idempotent.

        A new connection is left alone: its first request may be on the way, and would be reset instead of refused.
        """
        for reply in (self._answered, self.cycle, *(cycle for cycle, _ in self.pipeline)):
            if reply is not None:
                reply.keep_alive = False
        is_asked = self.is_answering or self._in_body or self._num_waiting_bytes > 0
        if self._answered is not None and not is_asked:
            self._close_idle()

    def shutdown(self) -> None:
        """The server ends: close now, unless an answer is under way."""
        self.release()
        if not self.is_answering:
            self.close()

    def close(self) -> None:
        """Close once everything is sent, in bounded time. Idempotent."""
        if not self._is_made:
            self._abort()
            return
        self.watch_reader()
        self.transport.close()
        if self._is_tls and self._close_timer is None:  # it waits for the client to say that it closes, too
            self._close_timer = self.loop.call_later(LINGER_S, self._close_late)

    def linger(self) -> None:
        """Close, but let a client that is still sending finish: if bytes came to a closed socket, the kernel would
        reset the connection, and the client might lose the answer. TLS does that anyway while it closes."""
        is_sending = self._refusal is not None or (self.cycle is not None and self.cycle.more_body)
        if not is_sending or not self.transport.can_write_eof():
            self.close()
        elif self._linger_timer is None and not self.transport.is_closing():
            self._stop(self._header_timer)
            self._body_pace.stop()
            self.watch_reader()
            self._linger_timer = self.loop.call_later(LINGER_S, self.close)
            self.flow.resume_reading()
            self.transport.write_eof()

    def write(self, data: bytes) -> None:
        """Send some of a reply."""
        self._num_written_bytes += len(data)
        self.transport.write(data)

    def _close_idle(self) -> None:
        """Close at once a connection on which nothing happens."""
        is_sent = not self._num_unsent
        self.close()
        if is_sent and self._socket is not None:
            self._socket.close()  # TLS has said goodbye, and need not wait for an answer

    def _close_late(self) -> None:
        if self._num_unsent:
            self._close_timer = self.loop.call_later(LINGER_S, self._close_late)
        else:
            self._abort()

    def _abort(self) -> None:
        if self._socket is not None:
            self._socket.abort()

    @property
    def _is_tls(self) -> bool:
        return self._socket is not self.transport

    @property
    def _num_unsent(self) -> int:
        """Bytes that the kernel has not taken yet."""
        if self._socket is None or not self._is_made:
            return 0
        num_bytes: int = self._socket.get_write_buffer_size()
        return num_bytes + self.transport.get_write_buffer_size() if self._is_tls else num_bytes

    def _num_received(self) -> int:
        return self._num_body_bytes

    def _num_taken(self) -> int:
        return self._num_written_bytes - self._num_unsent

    def _reader_late(self) -> None:
        """Too little of what waits was taken. While a reply goes on, a little always waits."""
        is_ending = self.transport.is_closing() or self._answered is None or self._answered.response_complete
        if self._num_unsent >= (1 if is_ending else FEW_UNSENT_BYTES):
            self._abort()

    def _body_late(self) -> None:
        settings = self.settings
        if self._refusal is None and not self.transport.is_closing():
            least = settings.min_body_rate * settings.body_timeout
            message = (
                f"The request body came too slowly: it was not complete, and fewer than {least} bytes of it came "
                f"within {settings.body_timeout} s. Send it faster, or in smaller requests."
            )
            self._refuse(ApiError(408, "request_timeout", message))

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
        if codings not in ([], [b"chunked"]) or (codings and version == "1.0"):
            raise self._refused(_invalid("The only Transfer-Encoding is chunked, in HTTP/1.1."))
        if self.parser.get_method() == b"CONNECT":
            raise self._refused(_invalid("CONNECT asks for a tunnel, and this is no proxy."))

    @property
    def _is_upgrade(self) -> bool:
        """The client would like to speak another protocol, as Java's does by default (h2c)."""
        return bool(self.parser.should_upgrade())

    def _without_upgrade(self) -> bytes:
        """The head of a request that asked for an upgrade, without asking for one.

        The parser takes what follows such a head for the other protocol; a new one reads it as HTTP.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        headers = [(name, value) for name, value in self.headers if name not in HANDSHAKE]
        if not self.parser.should_keep_alive():
            headers.append((b"connection", b"close"))
        lines = [method + b" " + self.url + b" HTTP/" + version, *(name + b": " + value for name, value in headers)]
        self.parser = httptools.HttpRequestParser(self)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _expect_headers(self, spent_s: float = 0.0) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.settings.header_timeout - spent_s, self._headers_late)

    def _headers_late(self) -> None:
        self._header_timer = None
        if not self._num_waiting_bytes:
            self._close_idle()  # a connection made in advance, never used
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
        has_own_body = self._in_body and reply is self.cycle
        if reply is None or not reply.response_started or (reply.response_complete and not has_own_body):
            body = msgspec.json.encode(self._error_shape().body(error))
            head = (
                f"HTTP/1.1 {error.status_code} {REASONS[error.status_code]}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.write(head.encode() + body)
            self.app_state["count_refused"]()
        if reply is not None and not reply.response_complete:
            reply.disconnected = True  # nothing that is still made for it can be sent
            reply.message_event.set()
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


class _Flow(FlowControl):
    """Says when this side makes the client wait."""

    def __init__(self, transport: asyncio.Transport, body_pace: Pace) -> None:
        super().__init__(transport)
        self._body_pace = body_pace

    def pause_reading(self) -> None:
        """Read nothing for now."""
        super().pause_reading()
        self._body_pace.pause()

    def resume_reading(self) -> None:
        """Read again."""
        super().resume_reading()
        self._body_pace.resume()


@lru_cache(maxsize=1)
def _date_header(second: int) -> list[tuple[bytes, bytes]]:
    return [(b"date", formatdate(second, usegmt=True).encode())]


def _invalid(message: str) -> ApiError:
    return ApiError(400, "invalid_http", message)


def connection_factory(given: ServerSettings) -> Callable[..., asyncio.BaseProtocol]:
    """Makes connections that keep these limits, as uvicorn calls it."""

    class Connection(LimitedConnection):
        settings = given

    if given.ssl_certfile is None:
        return Connection
    context = tls_context(given.ssl_certfile, given.ssl_keyfile, given.ssl_ca_certs)
    return lambda **state: TlsProtocol(Connection(**state), context)

"""An HTTP/1.1 client for streams of events, thin enough to measure a server with: httptools on asyncio's sockets."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from quire import __version__, envs
from quire.config.json_file import parse_json
from quire.errors import ConfigError, shown

WANTS_KEY = "--api-key gives one, or QUIRE_API_KEY; OPENAI_API_KEY is sent to this machine and to OPENAI_BASE_URL only"
MAX_ERROR = 300
"""Characters of an error reply that is not the error object of OpenAI."""


@dataclass(slots=True)
class Reply:
    """The status of a reply and the part of its body that nobody read as it came."""

    status: int = 0
    reason: str = ""
    body: bytearray = field(default_factory=bytearray)

    def json(self) -> Any:
        """The body.

        Raises: ConnectionError when it is no JSON.
        """
        try:
            return parse_json(bytes(self.body))
        except ValueError as error:
            raise ConnectionError(f"the server's reply is no JSON: {error}") from None

    @property
    def error(self) -> str:
        """Status and message, for people."""
        text = self.body[: 4 * MAX_ERROR].decode(errors="replace")
        with contextlib.suppress(ValueError):
            text = message_of(parse_json(bytes(self.body))) or text
        remedy = f" ({WANTS_KEY})" if self.status == 401 else ""
        return f"{self.status} {self.reason}: {text[:MAX_ERROR] or 'no message'}{remedy}"


def message_of(body: object) -> str:
    """The message in an error object, or nothing."""
    error = body.get("error", body) if isinstance(body, dict) else None
    return str(error["message"]) if isinstance(error, dict) and "message" in error else ""


class EventReader:
    """The data of server-sent events, from pieces of a body that may end anywhere."""

    def __init__(self, on_data: Callable[[bytes], None]) -> None:
        self._on_data = on_data
        self._rest = b""

    def __call__(self, piece: bytes) -> None:
        """Take the next piece."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._on_data(line[5:].strip())


class _Connection(asyncio.Protocol):
    """One connection, one request at a time. httptools calls the methods `on_*`."""

    def __init__(self, peers: set[_Connection]) -> None:
        self._peers = peers
        """Open connections; this one leaves them when it is closed."""
        self.transport: asyncio.Transport | None = None
        self.closed = asyncio.Event()
        self.is_reusable = False
        self.is_answering = False
        """Something of the reply has come."""
        self._reply = Reply()
        self._done: asyncio.Future[Reply] | None = None
        self._on_body: Callable[[bytes], None] | None = None
        self._parser: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self._peers.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        self.closed.set()
        self._peers.discard(self)
        self._fail(ConnectionResetError("the server closed the connection"))

    async def send(self, request: bytes, on_body: Callable[[bytes], None] | None) -> Reply:
        """The reply; with `on_body`, the body of a successful one goes there as it comes.

        Raises: ConnectionError.
        """
        assert self.transport is not None
        self.is_reusable = self.is_answering = False
        self._reply = Reply()
        self._on_body = on_body
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        try:
            return await self._done
        except asyncio.CancelledError:
            self.transport.abort()
            raise

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            self.is_reusable = False
            return
        self.is_answering = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else None
            self._fail(ConnectionError(f"the server's reply cannot be read: {cause or error}"))

    def on_status(self, status: bytes) -> None:
        self._reply.reason += status.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._on_body is not None and self._reply.status == 200:
            self._on_body(body)
        else:
            self._reply.body += body

    def on_message_complete(self) -> None:
        self.is_reusable = self._parser.should_keep_alive()
        assert self._done is not None
        if not self._done.done():
            self._done.set_result(self._reply)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class HttpClient:
    """A server by its URL. Connections are kept and used again. Belongs to one event loop."""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None, insecure: bool = False) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        self._host = parts.hostname or ""
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not self._host or port == 0 or parts.query or parts.fragment:
            raise ConfigError(
                f"{shown(envs.shown_value('url', url))} is no URL of a server; one looks like http://127.0.0.1:8000"
            )
        address = parts.netloc.rpartition("@")[2]
        if address != parts.netloc:
            raise ConfigError(
                f"the URL of {address} holds a user name or password, which quire does not send; use --api-key"
            )
        self.url = f"{parts.scheme}://{address}{parts.path.rstrip('/')}"
        self._path = parts.path.rstrip("/")
        self._ssl = _tls(insecure=insecure) if parts.scheme == "https" else None
        self._port = port or (443 if self._ssl else 80)
        self._head = f"Host: {address}\r\nUser-Agent: quire/{__version__}\r\n"
        for name, value in (headers or {}).items():
            if not f"{name}{value}".isascii() or not f"{name}{value}".isprintable():
                raise ConfigError(f"header {shown(name)} must hold printable ASCII")
            self._head += f"{name}: {value}\r\n"
        self._open: set[_Connection] = set()
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> Reply:
        """Raises: ConnectionError."""
        return await self._request(f"GET {self._path}{path} HTTP/1.1\r\n{self._head}\r\n".encode(), None)

    async def post(self, path: str, body: Any, on_body: Callable[[bytes], None] | None = None) -> Reply:
        """Raises: ConnectionError."""
        return await self.post_encoded(path, msgspec.json.encode(body), on_body)

    async def post_encoded(self, path: str, data: bytes, on_body: Callable[[bytes], None] | None = None) -> Reply:
        """`post`, for a body that is JSON already.

        Raises: ConnectionError.
        """
        head = (
            f"POST {self._path}{path} HTTP/1.1\r\n{self._head}Content-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        return await self._request(head.encode() + data, on_body)

    async def close(self) -> None:
        """Close all connections; harmless when called again."""
        self._idle.clear()
        for connection in list(self._open):
            assert connection.transport is not None
            connection.transport.abort()
            await connection.closed.wait()

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _request(self, request: bytes, on_body: Callable[[bytes], None] | None) -> Reply:
        if (kept := self._take()) is not None:
            try:
                return await self._exchange(kept, request, on_body)
            except ConnectionResetError:
                if kept.is_answering:
                    raise  # else the server closed what was idle, and has not seen the request: send it again
        return await self._exchange(await self._connect(), request, on_body)

    async def _exchange(
        self, connection: _Connection, request: bytes, on_body: Callable[[bytes], None] | None
    ) -> Reply:
        try:
            reply = await connection.send(request, on_body)
        except BaseException:
            if connection.transport is not None:
                connection.transport.abort()
            raise
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            assert connection.transport is not None
            connection.transport.close()
        return reply

    def _take(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            assert connection.transport is not None
            if connection.is_reusable and not connection.transport.is_closing():
                return connection
        return None

    async def _connect(self) -> _Connection:
        try:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(
                lambda: _Connection(self._open), self._host, self._port, ssl=self._ssl
            )
        except OSError as error:
            raise ConnectionError(f"cannot connect to {self.url}: {error.strerror or error}") from None
        return connection


def _tls(*, insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


async def first_model(client: HttpClient) -> str:
    """The first model that a server lists.

    Raises: ConfigError when it cannot be asked.
    """
    try:
        reply = await client.get("/v1/models")
        if reply.status != 200:
            raise ConfigError(f"{client.url}/v1/models answered {reply.error}")
        return str(reply.json()["data"][0]["id"])
    except ConnectionError as error:
        raise ConfigError(f"{error}; is a server running there? `quire serve` starts one") from None
    except (LookupError, TypeError):
        raise ConfigError(f"{client.url}/v1/models lists no model; name one with --model") from None

"""Replies that must notice when nobody reads them any more: event streams, and work that is waited for.

A slow reader is no case here: the engine merges what it has not taken, and `connection` cuts it when it stands still.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.server.http.errors import ApiError, ErrorShape, as_api_error, error_response, shape_in
from quire.server.service import context_of
from quire.server.settings import ServerSettings

T = TypeVar("T")

encode = msgspec.json.Encoder().encode

STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
"""For the OpenAPI document: the reply may be a stream."""
STREAMED_LINES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}}
}
"""The same for a stream of JSON lines."""
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"


def json_reply(value: Any) -> Response:
    """A JSON reply."""
    return Response(encode(value), media_type="application/json")


def event(data: Any, name: str | None = None, write: Callable[[Any], bytes] = encode) -> bytes:
    """One server-sent event."""
    head = b"data: " if name is None else b"event: " + name.encode() + b"\ndata: "
    return head + _on_one_line(write(data)) + b"\n\n"


_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
"""Characters that JSON need not escape, and at which Python's `splitlines` and so some clients end a line."""


def line(data: Any, write: Callable[[Any], bytes] = encode) -> bytes:
    """One line of a stream of JSON objects."""
    return _on_one_line(write(data)) + b"\n"


def _on_one_line(text: bytes) -> bytes:
    for character, escaped in _LINE_ENDS:
        text = text.replace(character, escaped)
    return text


class Chunks:
    """The chunks of one stream as events; what they all begin with is encoded once."""

    def __init__(self, head: dict[str, Any]) -> None:
        self._head = b"data: " + _on_one_line(encode(head))[:-1] + b","

    def event(self, rest: dict[str, Any], write: Callable[[Any], bytes] = encode) -> bytes:
        """A chunk: the head, then this."""
        return self._head + _on_one_line(write(rest))[1:] + b"\n\n"


def error_event(error: ApiError, shape: ErrorShape) -> bytes:
    """An error in a stream that has begun."""
    return event(shape.body(error), shape.event_name)


class EventStream(Response):
    """A stream of events, made as they are sent.

    An error before the first event is an error reply with its status; a later one is an event. When the client leaves,
    the events are closed, wherever they are.
    """

    media_type = "text/event-stream"
    keep_alive = COMMENT
    """Sent while the stream stands still."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        settings: ServerSettings,
        *,
        end: bytes = DONE,
        error: Callable[[ApiError, ErrorShape], bytes] = error_event,
    ) -> None:
        super().__init__(None, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._end = end
        self._error = error
        self._patience = settings.sse_keep_alive_interval or None
        self._time_limit = settings.request_timeout or None
        self._started = False
        self._sending = False
        self._sent_at = 0.0
        self._clock = asyncio.get_running_loop().time

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        loop = asyncio.get_running_loop()
        self._write = context_of(scope).write
        started_at = self._sent_at = loop.time()
        producer = loop.create_task(self._produce(send))
        gone = loop.create_task(_disconnect(receive))
        failure: Exception | None = None
        try:
            while not producer.done() and not gone.done():
                patience = _least(self._patience, self._time_limit and started_at + self._time_limit - loop.time())
                await asyncio.wait({producer, gone}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                if self._time_limit and loop.time() - started_at >= self._time_limit and not producer.done():
                    failure = _timed_out(self._time_limit)
                    break
                idle = 0.0 if self._sending or producer.done() else loop.time() - self._sent_at
                if self._patience and idle >= self._patience:
                    await self._send(send, self.keep_alive)
            if producer.done() and not producer.cancelled():
                failure = _exception(producer)
        finally:
            await _cancelled(producer, gone)
            await self._events.aclose()
        if failure is None:
            return
        if not self._started:
            await error_response(as_api_error(failure), scope)(scope, receive, send)
            return
        await self._send(send, self._error(as_api_error(failure), shape_in(scope)) + self._end)
        await self._finish(send)

    async def _produce(self, send: Send) -> None:
        async for data in self._events:
            await self._send(send, data)
        if self._end:
            await self._send(send, self._end)
        await self._finish(send)

    async def _send(self, send: Send, data: bytes) -> None:
        self._sending = True
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await self._write(data)
        self._sending = False
        self._sent_at = self._clock()

    async def _finish(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class LineStream(EventStream):
    """A stream of JSON objects, each on a line of its own."""

    media_type = "application/x-ndjson"
    keep_alive = b" "
    """JSON allows it before an object, so clients that read line by line need not know of it."""

    def __init__(self, lines: AsyncGenerator[bytes, None], settings: ServerSettings) -> None:
        super().__init__(lines, settings, end=b"", error=_error_line)


def _error_line(error: ApiError, shape: ErrorShape) -> bytes:
    return line(shape.body(error))


async def unless_gone(request: Request, settings: ServerSettings, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, which is cancelled when the client leaves or the time is up.

    Raises: ClientDisconnect; ApiError 504; what the work raises.
    """
    limit = settings.request_timeout or None
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request.receive))
    try:
        await asyncio.wait({task, gone}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientDisconnect
        assert limit is not None
        raise _timed_out(limit)
    finally:
        await _cancelled(task, gone)


async def _disconnect(receive: Receive) -> None:
    """Return when the client has left; the body of the request has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _exception(task: asyncio.Task[None]) -> Exception | None:
    error = task.exception()
    if error is not None and not isinstance(error, Exception):
        raise error
    return error


def _least(*seconds: float | None) -> float | None:
    given = [max(value, 0.0) for value in seconds if value is not None]
    return min(given, default=None)


def _timed_out(limit: float) -> ApiError:
    return ApiError(
        504, "request_timeout", f"The request was not answered within {limit:g} s, the limit of this server."
    )

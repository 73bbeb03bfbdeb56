"""JSON replies that may be large: built and encoded by the work pool, a piece at a time, and sent in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.errors import EngineOverloaded
from quire.server.http.streaming import encode, json_reply
from quire.utils.cancellation import check_cancelled
from quire.utils.work_pool import WorkPool

T = TypeVar("T")
Encode = Callable[[Any], bytes]

SMALL_REPLY = 1024
"""Numbers, tokens or candidates of a reply that the event loop builds by itself."""
RETRY_S = 0.05
"""An answer that is finished waits so long for a place in a full pool, and again."""
SEND_PIECE = 64 << 10
"""Bytes that are sent at once, about."""
_SCALARS_AT_ONCE = 4096
_CONTAINERS_AT_ONCE = 64
_DEPTH = 5
"""Levels that are taken apart: reply, choices, choice, logprobs, positions."""


async def reply_of(work: WorkPool, build: Callable[[], Any], size: int) -> Response:
    """A JSON reply of what `build` returns; `size` says how many numbers it has, about."""
    if size <= SMALL_REPLY:
        return json_reply(build())
    return PiecedReply(await made(work, partial(_encoded, build)))


async def piece_of(work: WorkPool, write: Callable[[Encode], bytes], size: int) -> bytes:
    """A piece of a stream: what `write` returns, to which an encoder of JSON is passed; `size` as in `reply_of`.

    A piece can be as large as a whole reply: what a slow client has not taken is merged into the next one.
    """
    if size <= SMALL_REPLY:
        return write(encode)
    return await made(work, partial(write, encode_in_pieces))


async def made(work: WorkPool, build: Callable[[], T]) -> T:
    """What the pool makes of an answer. A full pool refuses new work; what the engine has computed waits instead."""
    while True:
        try:
            return await work.run(build)
        except EngineOverloaded:
            await asyncio.sleep(RETRY_S)


class PiecedReply(Response):
    """A reply whose body is sent in pieces, as fast as the client takes them."""

    media_type = "application/json"

    def __init__(self, pieces: list[bytes]) -> None:
        super().__init__(None, headers={"content-length": str(sum(map(len, pieces)))})
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the reply."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._pieces.reverse()
        while self._pieces:  # what is sent is not kept
            await send({"type": "http.response.body", "body": self._pieces.pop(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _encoded(build: Callable[[], Any]) -> list[bytes]:
    pieces: list[bytes] = []
    waiting = bytearray()
    for piece in json_pieces(build()):
        waiting += piece
        if len(waiting) >= SEND_PIECE:
            check_cancelled()
            pieces.append(bytes(waiting))
            waiting.clear()
    return [*pieces, bytes(waiting)]


def encode_in_pieces(value: Any) -> bytes:
    """The JSON text of a large value, for a thread of the work pool."""
    return b"".join(_encoded(lambda: value))


def json_pieces(value: Any, depth: int = _DEPTH) -> Iterator[bytes]:
    """The JSON text of a value, none of whose pieces takes long."""
    if depth and isinstance(value, dict):
        yield from _object_pieces(value, depth - 1)
    elif isinstance(value, list):
        yield from _list_pieces(value, depth - 1)
    else:
        yield encode(value)


def _object_pieces(value: dict[str, Any], depth: int) -> Iterator[bytes]:
    mark = b"{"
    for name, item in value.items():
        yield mark + encode(name) + b":"
        yield from json_pieces(item, depth)
        mark = b","
    yield b"}" if value else b"{}"


def _list_pieces(value: list[Any], depth: int) -> Iterator[bytes]:
    has_containers = bool(value) and isinstance(value[-1], (dict, list))  # the first of a list may be null
    at_once = _SCALARS_AT_ONCE if not has_containers else 1 if depth > 0 else _CONTAINERS_AT_ONCE
    mark = b"["
    for begin in range(0, len(value), at_once):
        yield mark
        if at_once == 1:
            yield from json_pieces(value[begin], depth)
        else:
            yield encode(value[begin : begin + at_once])[1:-1]
        mark = b","
    yield b"]" if value else b"[]"

"""Request bodies: read within limits, decoded strictly.

Nothing is guessed: one object, UTF-8, no duplicate keys, no NaN, bounded depth. What two JSON readers could understand
differently is refused.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from quire.errors import shown
from quire.server.http.errors import ApiError
from quire.server.settings import ServerSettings

MAX_DEPTH = 64


class _StrictRequest(Request):
    """A request whose body is read and decoded by the rules of this file."""

    def __init__(self, request: Request, settings: ServerSettings) -> None:
        super().__init__(request.scope, request.receive)
        self._settings = settings
        self._bytes: bytes | None = None

    async def body(self) -> bytes:
        """The body.

        Raises: ApiError 408, 413, 415.
        """
        if self._bytes is None:
            _check_headers(self, self._settings.max_body_size)
            self._bytes = await self._read()
        return self._bytes

    async def json(self) -> Any:
        """The decoded body.

        Raises: ApiError 400.
        """
        return decode_json(await self.body())

    async def _read(self) -> bytes:
        limit, patience = self._settings.max_body_size, self._settings.body_timeout
        chunks: list[bytes] = []
        size = 0
        stream = self.stream()
        while True:
            try:
                async with asyncio.timeout(patience):
                    chunk = await anext(stream, None)
            except TimeoutError:
                raise ApiError(
                    408, "request_timeout", f"No byte of the request body came for {patience} s.", headers=_CLOSE
                ) from None
            if chunk is None:
                return b"".join(chunks)
            size += len(chunk)
            if size > limit:
                raise _too_large(size, limit)
            chunks.append(chunk)


_CLOSE = {"Connection": "close"}


def _check_headers(request: Request, limit: int) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415,
            "unsupported_media_type",
            "Content-Type must be application/json.",
            headers=_CLOSE,
        )
    coding = request.headers.get("content-encoding", "identity").lower()
    if coding != "identity":
        raise ApiError(
            415, "unsupported_media_type", f"Content-Encoding {coding[:32]} is not supported.", headers=_CLOSE
        )
    length = request.headers.get("content-length")
    if length is not None and length.isdecimal() and int(length[:20]) > limit:
        raise _too_large(int(length[:20]), limit)


def _too_large(size: int, limit: int) -> ApiError:
    return ApiError(
        413, "content_too_large", f"The request body has {size} bytes or more; the limit is {limit}.", headers=_CLOSE
    )


def strict_route(settings: ServerSettings) -> type[APIRoute]:
    """The kind of route whose bodies are read by the rules of this file."""

    class StrictRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def strict_handle(request: Request) -> Response:
                try:
                    return await handle(_StrictRequest(request, settings))
                except ClientDisconnect:
                    return Response(status_code=499)  # nobody reads it

            return strict_handle

    return StrictRoute


def decode_json(data: bytes) -> Any:
    """The value of a JSON text.

    Raises: ApiError naming the place.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise _not_json(f"Request body is not valid UTF-8 (byte {error.start}).") from None
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        place = len(text[: error.pos].encode())
        raise _not_json(f"Could not parse JSON: {error.msg} at byte {place}.") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # an integer of thousands of digits
        raise _not_json(f"Could not parse JSON: {str(error).partition(';')[0]}.") from None
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        _check_depth(value, MAX_DEPTH)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = counts.most_common(1)[0][0]
        raise _not_json(f"Duplicate key {shown(twice)}.")
    return value


def _no_constant(name: str) -> float:
    raise _not_json(f"{name} is not JSON; numbers must be finite.")


def _check_depth(value: Any, room: int) -> None:
    if not room:
        raise _too_deep()
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (dict, list)):
            _check_depth(item, room - 1)


def _too_deep() -> ApiError:
    return _not_json(f"JSON is nested too deeply (limit {MAX_DEPTH}).")


def _not_json(message: str) -> ApiError:
    return ApiError(400, "invalid_json", message)

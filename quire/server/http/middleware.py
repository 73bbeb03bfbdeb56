"""What happens to every request before a route sees it: an id, a key, a limit. Deny by default."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from math import ceil
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import counted
from quire.log import get_logger, request_id, trace_of
from quire.server import console
from quire.server.http.errors import ApiError, as_api_error, error_response, overloaded, route_of
from quire.server.processes.shared_counts import expiry
from quire.server.service import EXTENSION, Context, Service

log = get_logger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/version"}) | console.PATHS
"""What needs no key: it tells nothing about anybody's requests."""
UNLIMITED_PATHS = OPEN_PATHS | {"/metrics", "/load", "/v1/stats", "/v1/trace"}
MAX_ID = 64
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


class RequestContext:
    """Gives each request an id, returns it in the reply, and counts the reply.

    Nothing is raised through it: what is raised while a reply is sent would be logged with its text, which may be the
    client's.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_at = time.monotonic()
        context = scope["quire"] = Context(_writer(scope, send), label="")
        given = _header(scope, b"x-request-id")
        context.label = _UNSAFE.sub("", given)[:MAX_ID] or context.id
        context.wants_receipt = _header(scope, b"x-quire-receipt") == "1"
        context.wants_why = _header(scope, b"x-quire-why") == "1"
        if self._service.tracer is not None:
            headers = {name: _header(scope, name.encode()) for name in ("traceparent", "tracestate")}
            context.trace_parent = {name: value for name, value in headers.items() if value}
        request_id.set(context.label)
        label = (b"x-request-id", context.label.encode())
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), label]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            pass  # nobody reads it
        except Exception as error:
            if status:
                log.error("the reply ends before its end: %s", trace_of(error))
            else:
                await error_response(as_api_error(error), scope)(scope, receive, send_with_id)
        finally:
            self._count(scope, status, time.monotonic() - started_at)

    def _count(self, scope: MutableMapping[str, Any], status: int, seconds: float) -> None:
        if not self._service.is_configured:
            return
        metrics = self._service.metrics
        handler = scope["route"].path if "route" in scope else "none"
        method = scope["method"] if scope["method"] in ("GET", "POST", "OPTIONS", "HEAD") else "other"
        metrics.http_requests.labels(handler, method, f"{status // 100}xx" if status else "gone").inc()
        metrics.http_time.labels(handler, method).observe(seconds)


class Authentication:
    """Demands one of the API keys on every route but the open ones, unknown routes included."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in service.settings.api_key]
        self._shares = service.settings.share_prefix_cache

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "http" and self._digests and route_of(scope) not in OPEN_PATHS:
            index = self._match(scope)
            if index is None:
                none = "No API key given. Send one as 'Authorization: Bearer KEY'."
                message = "Incorrect API key provided." if _given_key(scope) else none
                error = ApiError(401, "invalid_api_key", message, headers={"WWW-Authenticate": "Bearer"})
                await error_response(error, scope)(scope, receive, send)
                return
            scope["quire"].key = index
            if not self._shares:
                scope["quire"].tenant = hashlib.sha256(b"tenant" + self._digests[index]).hexdigest()[:32]
        await self._app(scope, receive, send)

    def _match(self, scope: Scope) -> int | None:
        """Which key the request carries. Every digest is compared to its end, whatever matches."""
        digest = hashlib.sha256(_given_key(scope).encode("latin-1")).digest()
        found = None
        for index, known in enumerate(self._digests):
            if hmac.compare_digest(digest, known):
                found = index
        return found


def _given_key(scope: Scope) -> str:
    """The API key of a request, empty where there is none."""
    kind, _, token = _header(scope, b"authorization").partition(" ")
    return token.strip() if kind.lower() == "bearer" else _header(scope, b"x-api-key")


class Limits:
    """Bounds the requests in progress in the whole server, and what a single key may have of them.

    A full server refuses only keys that have their share of the limit already. `generation` bounds sequences, which are
    known only when the body is read.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._counts = service.peers.counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 429."""
        if scope["type"] != "http" or route_of(scope) in UNLIMITED_PATHS:
            await self._app(scope, receive, send)
            return
        key = scope["quire"].key
        try:
            self._check(key)
        except ApiError as error:
            if self._service.is_configured:
                self._service.metrics.refused("connections")
            await error_response(error, scope)(scope, receive, send)
            return
        self._counts.enter(key)
        try:
            await self._app(scope, receive, send)
        finally:
            self._counts.leave(key)

    def _check(self, key: int) -> None:
        settings, counts = self._service.settings, self._counts
        total, own = settings.max_concurrent_requests, settings.max_concurrent_requests_per_key
        if not counts.has_room_for_request(key, total):
            raise overloaded(f"The server has {counted(total, 'request')} in progress, its limit. Try again.")
        if own and counts.in_progress(key) >= own:
            raise overloaded(f"This API key has {counted(own, 'request')} in progress, its limit. Wait for one to end.")
        per_minute = settings.max_requests_per_minute_per_key
        if per_minute:
            self._check_rate(key, per_minute)

    def _check_rate(self, key: int, limit: int) -> None:
        now = time.monotonic()
        started, first = self._counts.started(key, now)
        if started >= limit:
            wait = ceil(expiry(first) - now)
            raise overloaded(f"This API key has started {counted(limit, 'request')} within a minute, its limit.", wait)
        self._counts.start(key, now)


def _writer(scope: Scope, send: Send) -> Callable[[bytes], Awaitable[None]]:
    """The connection's own way to send a piece of a body, or that of every ASGI server."""

    async def write(data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})

    return scope.get("extensions", {}).get(EXTENSION, {}).get("write", write)  # type: ignore[no-any-return]


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")

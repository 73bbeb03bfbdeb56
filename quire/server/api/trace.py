"""`/v1/trace`: what the flight recorder holds, made and sent with bounded memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.observability.chrome_trace import chrome_trace, encoded
from quire.server.http.errors import overloaded
from quire.server.http.replies import PiecedReply
from quire.server.http.streaming import unless_gone
from quire.server.service import Service

MAX_AT_ONCE = 4
"""Traces that a process makes or sends at the same time. Each takes some megabytes."""


class TraceReply(Response):
    """A trace of the last steps, made when it is sent."""

    def __init__(self, request: Request, service: Service, num_steps: int) -> None:
        super().__init__()
        self._request = request
        self._service = service
        self._num_steps = num_steps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the reply.

        Raises: ApiError 429 while others are sent; EngineUnavailable.
        """
        service = self._service
        with _counted(service):
            memory = await service.engine.recording()
            work = service.work.run(_made, memory, time.monotonic(), self._num_steps)
            pieces = await unless_gone(self._request, service.settings, work)
            await PiecedReply(pieces)(scope, receive, send)


@contextmanager
def _counted(service: Service) -> Iterator[None]:
    if service.num_traces >= MAX_AT_ONCE:
        raise overloaded(f"{MAX_AT_ONCE} traces are being sent by this process, its limit. Try again.")
    service.num_traces += 1
    try:
        yield
    finally:
        service.num_traces -= 1


def _made(memory: bytes, now: float, num_steps: int) -> list[bytes]:
    return encoded(chrome_trace(memory, now=now, num_steps=num_steps))

"""The application without a socket before it: for programs that answer requests they have already."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from quire.engine.async_llm_engine import AsyncLLMEngine
from quire.log import get_logger, trace_of
from quire.server.app import create_app
from quire.server.settings import ServerSettings

log = get_logger(__name__)


class Application:
    """What `quire serve` serves: its middleware, validation and routes."""

    def __init__(self, engine: AsyncLLMEngine, settings: ServerSettings) -> None:
        self._app = create_app(engine, settings)

    async def post(self, path: str, body: bytes, request_id: str) -> tuple[int, dict[str, Any]]:
        """(status, body) of the reply to a POST of JSON."""
        headers = {"content-type": "application/json", "x-request-id": request_id, "content-length": str(len(body))}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": None,
            "server": None,
        }
        status = 0
        answer = bytearray()
        request = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if request:
                return request.pop()
            await asyncio.Event().wait()  # nobody leaves
            raise AssertionError

        async def send(message: Any) -> None:
            nonlocal status, answer
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                answer += message.get("body", b"")

        try:
            await self._app(scope, receive, send)
        except Exception as error:
            if not status:
                raise
            log.error("request=%s: a fault of the server, answered with %d: %s", request_id, status, trace_of(error))
        return status, json.loads(answer)

"""Bodies are bounded all together, charged until their requests are answered, and read off the event loop."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response
from starlette.testclient import TestClient

from quire.engine.async_llm_engine import AsyncLLMEngine
from quire.engine.startup import EngineParts
from quire.server.api.errors import error_shape
from quire.server.api.protocol.openai import DetokenizeRequest
from quire.server.http.body import strict_route
from quire.server.http.errors import ErrorShapes
from quire.server.http.middleware import RequestContext
from quire.server.service import Service
from quire.server.settings import ServerSettings
from tests.server.conftest import TIMEOUT, Running, stand_in, wait_for

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
WRITE = {"prompt": "hi", "max_tokens": 2}


def load(server: Running) -> dict[str, int]:
    answer: dict[str, int] = server.client.get("/load").json()
    return answer


def test_a_large_body_is_answered_as_a_small_one(server: Running) -> None:
    small = server.post(TEXT, **WRITE, temperature=0).json()
    large = server.client.post(
        TEXT, content=json.dumps({**WRITE, "temperature": 0}) + " " * 100_000, headers=JSON
    ).json()
    assert large["choices"] == small["choices"]
    wrong = server.post(CHAT, messages=[{"role": "user", "content": "x" * 30_000}, 5])
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "messages[1]"


def test_bodies_of_all_requests_together_are_bounded(serve: Any) -> None:
    with serve(max_total_body_size=100_000) as server:
        reply = server.client.post(TEXT, content=json.dumps({"prompt": "x" * 200_000}), headers=JSON)
        assert reply.status_code == 503
        assert reply.headers["retry-after"] == "1"
        assert reply.headers["connection"] == "close"
        assert server.post(TEXT, **WRITE).status_code == 200
        assert load(server)["body_bytes"] == 0


def test_the_values_of_a_body_are_charged_too(serve: Any) -> None:
    with serve(max_total_body_size=100_000) as server:
        reply = server.client.post(TEXT, content=json.dumps({"prompt": [5] * 5000}), headers=JSON)
        assert reply.status_code == 503
        assert load(server)["body_bytes"] == 0


def test_a_body_is_charged_until_its_stream_ends(server: Running) -> None:
    body = {**WRITE, "stream": True, "user": "u" * 1000}
    with stand_in(server) as executor, ThreadPoolExecutor(1) as client:
        reply = client.submit(httpx.post, server.url + TEXT, json=body, timeout=TIMEOUT)
        wait_for(lambda: server.engine.num_unfinished == 1)
        assert load(server)["body_bytes"] > 1000
        executor.may_go.set()
        assert reply.result().status_code == 200
    wait_for(lambda: load(server)["body_bytes"] == 0)


def test_more_values_than_a_body_may_have_are_refused(serve: Any) -> None:
    with serve(max_body_values=10_000) as server:
        for prompt in ([5] * 20_000, [[5]] * 5000):
            reply = server.post(TEXT, prompt=prompt)
            assert reply.status_code == 413
            assert "--max-body-values" in reply.json()["error"]["message"]


def test_load_tells_the_work_of_the_front(server: Running) -> None:
    assert load(server) == {"server_load": 0, "queued_work": 0, "running_work": 0, "body_bytes": 0}
    assert "quire:front_work_waiting" in server.client.get("/metrics").text


def test_a_fault_is_logged_without_the_text_of_a_client(
    engine_parts: tuple[EngineParts, AsyncLLMEngine], caplog: pytest.LogCaptureFixture
) -> None:
    service = Service(engine_parts[1], ServerSettings())
    router = APIRouter(route_class=strict_route(service))

    @router.post("/faulty")
    async def faulty(body: DetokenizeRequest, request: Request) -> Response:
        try:
            raise KeyError(body.model)
        except KeyError as error:
            raise ValueError(body.model) from error

    app = FastAPI()
    app.include_router(router)
    app.add_middleware(RequestContext, service=service)
    app.add_middleware(ErrorShapes, shape_of=error_shape, may_repeat_root_path=False)
    reply = TestClient(app).post("/faulty", json={"tokens": [], "model": "what a client says"})
    assert reply.status_code == 500
    assert "what a client says" not in reply.text + caplog.text
    assert "ValueError in test_body.py" in caplog.text
    assert "after KeyError" in caplog.text
    service.close()

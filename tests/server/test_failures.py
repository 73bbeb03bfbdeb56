"""What fails while it runs: each API says so in its own way, and tells nothing about the inside."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from quire.server.api.errors import error_shape
from quire.server.http.errors import SCOPE_SHAPE
from quire.server.http.middleware import RequestContext
from tests.server.conftest import MODEL, Running, stand_in

CONVERSATION: Any = [{"role": "user", "content": "hi"}]
SECRET = RuntimeError("cannot open /srv/secret/model at 0x7f00")
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": CONVERSATION},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": CONVERSATION, "max_tokens": 9},
    "/api/generate": {"prompt": "import os", "raw": True, "options": {"temperature": 0, "repeat_penalty": 1}},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_a_failure_before_the_first_token_has_its_status(server: Running, path: str, stream: bool) -> None:
    with stand_in(server) as executor:
        executor.error = SECRET
        executor.may_go.set()
        reply = server.post(path, **ROUTES[path], stream=stream)
    assert reply.status_code == 500
    error = reply.json()["error"]
    assert isinstance(error, str) if path.startswith("/api/") else error["type"] in ("server_error", "api_error")
    assert "secret" not in reply.text
    assert "0x7f" not in reply.text
    server.wait_idle()


@pytest.mark.parametrize("path", ROUTES)
def test_a_failure_in_a_stream_is_its_last_event(server: Running, path: str) -> None:
    body = {**ROUTES[path], "ignore_eos": True, "stream": True}
    if path.startswith("/api/"):
        body["options"] = {**body["options"], "num_predict": 900}
    else:
        body["max_output_tokens" if path.endswith("responses") else "max_tokens"] = 900
    with stand_in(server) as executor:
        executor.may_go.set()
        with server.client.stream("POST", path, json=body) as reply:
            assert reply.status_code == 200
            lines = reply.iter_lines()
            next(lines)
            executor.error = SECRET
            rest = [line for line in lines if line.startswith(("event:", "data:", "{"))]
    assert "secret" not in " ".join(rest)
    if path.startswith("/api/"):
        assert json.loads(rest[-1]) == {"error": "The request failed while it ran. The cause is in the server's log."}
    elif rest[-1] == "data: [DONE]":
        rest.pop()
        assert json.loads(rest[-1][6:])["error"]["code"] == "internal_error"
    else:
        assert rest[-2] == "event: error"
        assert json.loads(rest[-1][6:])["type"] == "error"
    server.wait_idle()


def test_clients_raise_what_a_stream_says(server: Running) -> None:
    with (
        stand_in(server) as executor,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client,
        anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as other,
    ):
        executor.may_go.set()
        more = {"ignore_eos": True}
        chunks = client.completions.create(model=MODEL, prompt="a", max_tokens=900, stream=True, extra_body=more)
        next(iter(chunks))
        executor.error = SECRET
        with pytest.raises(openai.APIError, match="The request failed while it ran"):
            list(chunks)
        executor.error = None
        events = other.messages.create(model=MODEL, messages=CONVERSATION, max_tokens=900, stream=True, extra_body=more)
        next(iter(events))
        executor.error = SECRET
        with pytest.raises(anthropic.APIStatusError, match="The request failed while it ran"):
            list(events)
    server.wait_idle()


def test_the_server_goes_on_after_failures(server: Running) -> None:
    assert server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
    assert server.client.get("/ready").status_code == 200


@pytest.mark.parametrize(
    ("error", "begun", "statuses", "logged"),
    [
        (ClientDisconnect(), False, [], 0),
        (ClientDisconnect(), True, [200], 0),
        (SECRET, False, [500], 1),
        (SECRET, True, [200], 1),
    ],
)
def test_what_is_raised_while_a_reply_is_sent_stays_here(
    error: Exception, begun: bool, statuses: list[int], logged: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the HTTP server logs it with its text and all that it passed through."""
    sent: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise error

    async def receive() -> Any:
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], SCOPE_SHAPE: error_shape("/")}
    service: Any = SimpleNamespace(tracer=None, is_configured=False)
    asyncio.run(RequestContext(app, service)(scope, receive, send))
    assert [message["status"] for message in sent if "status" in message] == statuses
    assert len(caplog.records) == logged
    assert "secret" not in caplog.text
    assert "secret" not in str(sent)

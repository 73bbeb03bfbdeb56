"""What the event loop writes by itself is small: large pieces of streams and large receipts are the work pool's."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from quire.engine.async_llm_engine import AsyncLLMEngine
from quire.engine.startup import EngineParts
from quire.errors import EngineOverloaded
from quire.server.api import chat, completions, ollama
from quire.server.api.protocol.ollama import GenerateRequest
from quire.server.api.protocol.openai import ChatCompletionRequest, CompletionRequest
from quire.server.api.protocol.responses import ResponsesRequest
from quire.server.api.responses.reply import ResponseWriter
from quire.server.api.responses.request import LOGPROBS
from quire.server.api.responses.routes import store_of
from quire.server.http.replies import SMALL_REPLY, piece_of
from quire.server.service import Context, Service
from quire.server.settings import ServerSettings
from quire.utils.work_pool import WorkPool
from tests.server.conftest import TIMEOUT, Running

MESSAGES = [{"role": "user", "content": "hi"}]
LONG = {"ignore_eos": True, "temperature": 0}


class CountingPool(WorkPool):
    """Counts what the event loop asks for."""

    num_jobs = 0

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.num_jobs += 1
        return await super().run(function, *args, **kwargs)


async def no_write(data: bytes) -> None:
    """Of a connection that nobody reads."""


def streamed(service: Service, name: str) -> AsyncIterator[bytes]:
    """The events of 200 tokens with 20 candidates each."""
    context = Context(no_write, label="")
    logprobs = {"logprobs": True, "top_logprobs": 20}
    match name:
        case "completions":
            body = CompletionRequest(prompt="hi", max_tokens=200, logprobs=20, **LONG)
            return completions._Reply(service, context, body, "m").stream()
        case "chat":
            asked = ChatCompletionRequest(messages=MESSAGES, max_tokens=200, **logprobs, **LONG)
            return chat._Reply(service, context, asked, "m").stream()
        case "responses":
            include = {"include": [LOGPROBS], "top_logprobs": 20}
            wanted = ResponsesRequest(input="hi", max_output_tokens=200, **include, **LONG)
            return ResponseWriter(service, store_of(service.settings), context, wanted, "m").stream()
        case _:
            options = {"num_predict": 200, "temperature": 0.0}
            given = GenerateRequest(prompt="import os", raw=True, options=options, **logprobs)
            return ollama._GenerateReply(service, context, given).stream()


def on_loop(loop: asyncio.AbstractEventLoop, work: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(work, loop).result(TIMEOUT)


@pytest.fixture
def service(engine_parts: tuple[EngineParts, AsyncLLMEngine], loop: asyncio.AbstractEventLoop) -> Service:
    async def make() -> Service:
        made = Service(engine_parts[1], ServerSettings())
        made.work = CountingPool()
        return made

    return on_loop(loop, make())


@pytest.mark.parametrize("name", ["completions", "chat", "responses", "ollama"])
def test_what_a_slow_client_has_not_taken_is_written_by_the_pool(
    service: Service, engine_parts: tuple[EngineParts, AsyncLLMEngine], loop: asyncio.AbstractEventLoop, name: str
) -> None:
    core = engine_parts[0].core

    async def main() -> tuple[int, int, bytes]:
        events = streamed(service, name)
        first = await anext(events)
        before = service.work.num_jobs
        while core.has_work():  # nobody takes a token, and all are merged
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        rest = [event async for event in events]
        return before, service.work.num_jobs, b"".join([first, *rest])

    before, after, text = on_loop(loop, main())
    assert after > before, "the event loop wrote thousands of candidates"
    assert len(text) > 200 * 20 * 10


def test_a_full_pool_keeps_no_answer_back() -> None:
    class FullPool(WorkPool):
        refusals = 3

        async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self.refusals:
                self.refusals -= 1
                raise EngineOverloaded("full", retry_after=1)
            return await super().run(function, *args, **kwargs)

    threads: list[int] = []

    def write(encode: Callable[[Any], bytes]) -> bytes:
        threads.append(threading.get_ident())
        return encode({"a": 1})

    async def main() -> None:
        pool = FullPool()
        assert await piece_of(pool, write, SMALL_REPLY) == b'{"a":1}'
        assert await piece_of(pool, write, SMALL_REPLY + 1) == b'{"a":1}'
        pool.close()

    asyncio.run(main())
    assert [ident == threading.get_ident() for ident in threads] == [True, False]


def test_a_receipt_is_no_larger_than_its_request_by_much(server: Running) -> None:
    """It says the parameters once for each prompt."""
    body = {"prompt": [[5]] * 1024, "max_tokens": 1, "allowed_token_ids": list(range(1100))}
    headers = {"x-quire-receipt": "1"}
    refused = server.client.post("/v1/completions", json=body, headers=headers)
    assert refused.status_code == 400, refused.text[:200]
    assert refused.json()["error"]["param"] == "x-quire-receipt"
    taken = server.client.post("/v1/completions", json={**body, "prompt": [[5]] * 8}, headers=headers)
    assert len(taken.json()["receipt"]["requests"]) == 8


@pytest.mark.parametrize("stream", [False, True])
def test_extras_of_many_prompts_are_written_by_the_pool(
    service: Service, loop: asyncio.AbstractEventLoop, stream: bool
) -> None:
    async def main() -> tuple[int, bytes]:
        context = Context(no_write, label="", wants_receipt=True, wants_why=True)
        body = CompletionRequest(prompt=[[5]] * 20, max_tokens=1, allowed_token_ids=list(range(600)))
        reply = completions._Reply(service, context, body, "m")
        if stream:
            return service.work.num_jobs, b"".join([event async for event in reply.stream()])
        return service.work.num_jobs, b"".join((await reply.whole())._pieces)

    before, text = on_loop(loop, main())
    last = json.loads(text.rpartition(b"data: ")[2] if stream else text)
    assert (len(last["why"]), len(last["receipt"]["requests"])) == (20, 20)
    assert service.work.num_jobs - before >= 4  # prompts, why, receipt, and what is sent


def test_receipts_of_every_api_are_whole(server: Running) -> None:
    asked = {"x-quire-receipt": "1", "x-quire-why": "1"}
    bodies = {
        "/v1/messages": {"messages": MESSAGES, "max_tokens": 2, "allowed_token_ids": list(range(2000))},
        "/v1/responses": {"input": "hi", "max_output_tokens": 2, "allowed_token_ids": list(range(2000))},
        "/api/chat": {"messages": MESSAGES, "options": {"num_predict": 2}},
    }
    for path, body in bodies.items():
        for stream in (False, True):
            reply = server.client.post(path, json={**body, "stream": stream}, headers=asked)
            assert reply.status_code == 200, reply.text
            assert reply.text.count('"receipt":') == 1
            assert reply.text.count('"why":') == 1

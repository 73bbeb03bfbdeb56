"""More than the server takes is refused at once, and everything is given back."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from quire.config.flags.args import EngineArgs
from quire.engine.async_llm_engine import AsyncLLMEngine
from quire.engine.front.admission import AdmissionLimits
from quire.engine.startup import start
from quire.server.settings import ServerSettings
from tests.server.conftest import NEEDS_OPENSSL, NUM_BLOCKS, Running, stand_in, wait_for

SHORT = {"prompt": "a", "max_tokens": 1}


@pytest.fixture
def narrow(loop: asyncio.AbstractEventLoop) -> Iterator[Running]:
    """A server whose engine lets two requests wait."""
    parts = start(EngineArgs(num_gpu_blocks_override=NUM_BLOCKS, block_size=16, use_tqdm_on_load=False))
    with AsyncLLMEngine(parts, AdmissionLimits(max_queued_requests=2)) as engine:
        running = Running(parts, engine, ServerSettings(), loop)
        try:
            yield running
        finally:
            running.close()


def test_a_full_queue_is_said_at_once_and_a_draining_server_says_so(narrow: Running) -> None:
    with ThreadPoolExecutor(2) as pool, stand_in(narrow):
        waiting = [pool.submit(narrow.post, "/v1/completions", **SHORT) for _ in range(2)]
        wait_for(lambda: narrow.engine.num_queued == 2)
        for path in ("/v1/completions", "/v1/chat/completions"):
            for stream in (False, True):
                body = {**SHORT, "messages": [{"role": "user", "content": "a"}], "stream": stream}
                reply = narrow.post(path, **body)
                assert reply.status_code == 429
                assert int(reply.headers["retry-after"]) >= 1
                assert reply.json()["error"]["code"] == "rate_limit_exceeded"
                assert reply.json()["error"]["type"] == "rate_limit_error"
        narrow.engine.drain()
        reply = narrow.post("/v1/completions", **SHORT)
        assert reply.status_code == 503
        assert (reply.headers["retry-after"], reply.headers["connection"]) == ("1", "close")
        assert reply.json()["error"]["code"] == "engine_unavailable"
        assert narrow.client.get("/ready").status_code == 503
        assert narrow.client.get("/health").status_code == 200
    assert [reply.result().status_code for reply in waiting] == [200, 200]
    assert 'reason="queue"} 4.0' in narrow.client.get("/metrics").text


def test_many_kinds_of_requests_leave_no_task_and_no_descriptor(
    server: Running, loop: asyncio.AbstractEventLoop
) -> None:
    def count() -> tuple[int, int, int]:
        async def tasks() -> int:
            return len(asyncio.all_tasks())

        async def fill_the_pool() -> None:
            await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.05) for _ in range(40)))

        asyncio.run_coroutine_threadsafe(fill_the_pool(), loop).result()  # its threads come as they are needed
        num_tasks = asyncio.run_coroutine_threadsafe(tasks(), loop).result()
        threads = [thread for thread in threading.enumerate() if thread.name != "quire-work"]  # those have a bound
        return num_tasks, len(os.listdir("/proc/self/fd")), len(threads)

    def ask(index: int) -> int:
        kinds: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "stream": True}),
            ("/v1/completions", {"prompt": "a", "max_tokens": 3, "logprobs": 3, "echo": True}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "stream": True}),
            ("/v1/responses", {"input": "a", "max_output_tokens": 3, "stream": True}),
            ("/api/generate", {"prompt": "a", "options": {"num_predict": 3}}),
            ("/tokenize", {"prompt": "a b c"}),
            ("/v1/completions", {"prompt": "a", "temperature": 9}),
            ("/nope", {}),
        ]
        path, body = kinds[index % len(kinds)]
        with httpx.Client(base_url=server.url, timeout=60) as client:
            return client.post(path, json=body).status_code

    with ThreadPoolExecutor(8) as pool:
        codes = set(pool.map(ask, range(16)))
        assert codes == {200, 400, 404}
        server.wait_idle()
        time.sleep(0.1)
        before = count()
        list(pool.map(ask, range(64)))
        server.wait_idle()
        wait_for(lambda: all(now <= then for now, then in zip(count(), before, strict=True)))


def test_a_million_wrong_items_are_one_short_answer(server: Running) -> None:
    for count, status in ((1_000_000, 413), (50_000, 400)):
        wrong = json.dumps({"prompt": "a", "stop_token_ids": ["a"] * count, "allowed_token_ids": [[]] * (count // 10)})
        reply = server.client.post("/v1/completions", content=wrong, headers={"content-type": "application/json"})
        assert reply.status_code == status
        assert len(reply.content) < 1024
    assert reply.json()["error"]["param"] == "stop_token_ids[0]"
    assert len(reply.content) < 500


@NEEDS_OPENSSL
def test_the_server_speaks_tls(serve: Any, certificate: dict[str, str]) -> None:
    with serve(**certificate) as secure:
        url = secure.url.replace("http:", "https:")
        with httpx.Client(
            base_url=url, verify=ssl.create_default_context(cafile=certificate["ssl_certfile"])
        ) as client:
            assert client.post("/v1/completions", json=SHORT).status_code == 200


def test_what_one_request_may_ask_for_is_bounded_and_said(serve: Any) -> None:
    with serve(max_sequences_per_request=8, max_tokens_per_request=600) as small:
        reply = small.post("/v1/completions", prompt=[[1], [2], [3]], n=3, max_tokens=1)
        assert reply.status_code == 400
        assert "9 sequences (3 prompts, n=3); the limit is 8" in reply.json()["error"]["message"]
        reply = small.post("/v1/completions", prompt=[[1, 2], [3, 4]], n=2, max_tokens=150)
        assert reply.status_code == 400
        assert "604 tokens (prompts of 4," in reply.json()["error"]["message"]
        body = {"messages": [{"role": "user", "content": "a"}], "n": 9, "max_tokens": 1}
        assert small.post("/v1/chat/completions", **body).json()["error"]["param"] == "n"
        assert small.post("/v1/completions", prompt=[[1], [2]], n=4, max_tokens=2).status_code == 200
        assert small.client.get("/v1/stats").json()["num_sequences"] == 0


def test_a_key_that_asks_for_all_sequences_is_refused_more_and_another_is_not(serve: Any) -> None:
    keys = ("greedy", "modest")
    with serve(api_key=keys, max_concurrent_sequences=8) as shared, ThreadPoolExecutor(1) as pool:

        def ask(key: str, n: int) -> httpx.Response:
            return shared.client.post(
                "/v1/completions",
                json={"prompt": [[1], [2]], "n": n, "max_tokens": 2},
                headers={"authorization": f"Bearer {key}"},
            )

        def num_sequences() -> int:
            reply = shared.client.get("/v1/stats", headers={"authorization": "Bearer modest"})
            return int(reply.json()["num_sequences"])

        with stand_in(shared) as held:
            waiting = pool.submit(ask, "greedy", 4)
            wait_for(lambda: num_sequences() == 8)
            refused = ask("greedy", 1)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert "8 sequences in progress; its limit is 8" in refused.json()["error"]["message"]
            with ThreadPoolExecutor(1) as other:
                served = other.submit(ask, "modest", 2)
                wait_for(lambda: num_sequences() == 12)
                held.may_go.set()
                assert served.result().status_code == 200
        assert waiting.result().status_code == 200
        assert num_sequences() == 0


def test_sequences_per_key_are_bounded(serve: Any) -> None:
    with serve(api_key=("one", "two"), max_concurrent_sequences_per_key=4) as limited, ThreadPoolExecutor(1) as pool:

        def ask(key: str, n: int) -> int:
            body = {"prompt": "a", "n": n, "max_tokens": 1}
            headers = {"authorization": f"Bearer {key}"}
            return limited.client.post("/v1/completions", json=body, headers=headers).status_code

        assert ask("one", 5) == 400, "it could never run"
        with stand_in(limited) as held:
            waiting = pool.submit(ask, "one", 4)
            wait_for(lambda: limited.engine.num_queued == 1)
            assert ask("one", 1) == 429
            held.may_go.set()
            assert ask("two", 4) == 200
        assert waiting.result() == 200

"""The field `priority` on every route: it reaches the core, or is refused where it would have no effect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from quire.config.flags.args import EngineArgs
from quire.engine.async_llm_engine import AsyncLLMEngine
from quire.engine.startup import start
from quire.executor.base import Executor
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.server.settings import ServerSettings
from tests.server.conftest import NUM_BLOCKS, Running

QUESTION = [{"role": "user", "content": "hi"}]
ASKS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 2},
    "/v1/chat/completions": {"messages": QUESTION, "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 2},
}
NO_EFFECT = "has no effect: this engine serves requests in order of arrival. Start it with --scheduling-policy priority"


class Hearing:
    """An executor that notes the priorities of the requests which the worker is told of."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.priorities: list[int] = []

    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        self.priorities += [request.priority for request in plan.new_requests]
        return self.inner.execute(plan)

    def capture_graph(self) -> bool:
        return False

    def close(self) -> None:
        self.inner.close()


@pytest.fixture(scope="module")
def by_priority(loop: asyncio.AbstractEventLoop) -> Iterator[tuple[Running, Hearing]]:
    """A server whose engine serves by priority."""
    args = EngineArgs(num_gpu_blocks_override=NUM_BLOCKS, scheduling_policy="priority", priority_ageing=5)
    parts = start(args)
    hearing = parts.core.executor = Hearing(parts.core.executor)  # type: ignore[assignment]
    server = Running(parts, AsyncLLMEngine(parts), ServerSettings(), loop)
    yield server, hearing
    server.close()
    server.engine.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKS)
def test_priorities_reach_the_core(by_priority: tuple[Running, Hearing], path: str, stream: bool) -> None:
    server, hearing = by_priority
    for value in (-(2**31), -3, 0, None, 2**31 - 1):
        hearing.priorities.clear()
        reply = server.post(path, **ASKS[path], priority=value, stream=stream)
        assert reply.status_code == 200, reply.text
        assert "warnings" not in reply.text
        assert hearing.priorities == [value or 0] * len(ASKS[path].get("prompt", "1"))


@pytest.mark.parametrize("path", ASKS)
def test_what_is_no_priority_is_refused(by_priority: tuple[Running, Hearing], path: str) -> None:
    server, _ = by_priority
    for value in (2**31, -(2**31) - 1, 2**80, True, 1.0, "1", [], {}):
        reply = server.post(path, **ASKS[path], priority=value)
        assert reply.status_code == 400, value
        assert "priority must be" in reply.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKS)
def test_a_priority_without_effect_is_refused(server: Running, path: str, stream: bool) -> None:
    assert server.post(path, **ASKS[path], priority=0, stream=stream).status_code == 200
    reply = server.post(path, **ASKS[path], priority=7, stream=stream)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["message"].startswith(f"priority=7 {NO_EFFECT}")
    if "param" in error:
        assert (error["param"], error["code"]) == ("priority", "invalid_value")


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_field_that_an_api_does_not_have_is_unknown_there(by_priority: tuple[Running, Hearing], path: str) -> None:
    server, hearing = by_priority
    hearing.priorities.clear()
    reply = server.post(path, messages=QUESTION, prompt="hi", priority=7, stream=False)
    assert "unknown parameter 'priority' has no effect" in json.loads(reply.text)["warnings"]
    assert hearing.priorities == [0]

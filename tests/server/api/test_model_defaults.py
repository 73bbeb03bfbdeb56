"""What generation_config.json says holds, in every API, for requests that say nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from quire.config.flags.args import EngineArgs
from quire.engine.async_llm_engine import AsyncLLMEngine
from quire.engine.startup import start
from quire.server.settings import ServerSettings
from tests.server.conftest import NUM_BLOCKS, Running

MOST, LEAST, STOP = 24, 9, "e"
DEFAULTS = {"temperature": 0, "max_new_tokens": MOST, "min_new_tokens": LEAST, "stop_strings": [STOP]}
MESSAGES = [{"role": "user", "content": "import os"}]
FREELY = {"ignore_eos": True, "stop": []}


@pytest.fixture(scope="module")
def server(loop: asyncio.AbstractEventLoop) -> Iterator[Running]:
    options: dict[str, Any] = {"num_gpu_blocks_override": NUM_BLOCKS, "block_size": 16, "use_tqdm_on_load": False}
    parts = start(EngineArgs(**options, override_generation_config=DEFAULTS))
    with AsyncLLMEngine(parts) as engine:
        running = Running(parts, engine, ServerSettings(), loop)
        yield running
        running.close()


def complete(server: Running, **body: Any) -> tuple[str, int]:
    """The text, and its length in tokens."""
    reply = server.post("/v1/completions", prompt="import os", **body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"], reply.json()["usage"]["completion_tokens"]


def test_stop_strings_end_answers_after_the_least_length(server: Running) -> None:
    whole, _ = complete(server, max_tokens=60, **FREELY)
    text, count = complete(server, max_tokens=60, ignore_eos=True)
    assert LEAST <= count < 60
    assert whole.startswith(text)
    assert whole[len(text)] == STOP
    text, _ = complete(server, max_tokens=60, ignore_eos=True, stop=["o"], min_tokens=0)
    assert text == whole.partition("o")[0]


def test_an_answer_may_be_asked_to_be_shorter_than_the_least_length(server: Running) -> None:
    assert complete(server, max_tokens=3)[1] == 3
    reply = server.post("/v1/completions", prompt="import os", max_tokens=3, min_tokens=LEAST)
    assert (reply.status_code, "min_tokens (9) must not exceed" in reply.text) == (400, True)


@pytest.mark.parametrize(
    ("path", "body", "counted"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, **FREELY}, ("usage", "completion_tokens")),
        ("/v1/completions", {"prompt": "import os", "max_tokens": None, **FREELY}, ("usage", "completion_tokens")),
        ("/v1/responses", {"input": "import os", **FREELY}, ("usage", "output_tokens")),
    ],
)
def test_the_largest_length_holds_where_a_request_has_none(
    server: Running, path: str, body: dict[str, Any], counted: tuple[str, str]
) -> None:
    reply = server.post(path, **body)
    assert reply.status_code == 200, reply.text
    assert reply.json()[counted[0]][counted[1]] == MOST


def test_ollama_shows_a_line_for_each(server: Running) -> None:
    lines = server.post("/api/show", model="quire-tiny").json()["parameters"].splitlines()
    assert {'stop "e"', "min_tokens 9", "max_tokens 24"} <= set(lines)

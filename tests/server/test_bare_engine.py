"""Engines that lack something: a tokenizer, a chat template."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.config.flags.args import EngineArgs
from quire.engine.async_llm_engine import AsyncLLMEngine
from quire.engine.startup import start
from quire.server.settings import ServerSettings
from tests.server.conftest import Running

QUESTION = [{"role": "user", "content": "hi"}]


@pytest.fixture
def bare(loop: asyncio.AbstractEventLoop) -> Iterator[Callable[..., Running]]:
    """options -> a server over an engine of its own."""
    running: list[Running] = []

    def run(**options: Any) -> Running:
        parts = start(EngineArgs(num_gpu_blocks_override=64, use_tqdm_on_load=False, **options))
        running.append(Running(parts, AsyncLLMEngine(parts), ServerSettings(), loop))
        return running[-1]

    yield run
    for server in running:
        server.close()
        server.engine.close()


def test_token_ids_are_served_without_a_tokenizer(bare: Callable[..., Running]) -> None:
    server = bare(skip_tokenizer_init=True)
    ask = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    choice = server.post("/v1/completions", **ask, logprobs=1, echo=True).json()["choices"][0]
    assert choice["text"] == ""
    assert len(choice["token_ids"]) == 4
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in [5, 6, 7, *choice["token_ids"]]]
    lines = server.post("/v1/completions", **ask, stream=True).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    streamed = [token_id for chunk in chunks for part in chunk["choices"] for token_id in part["token_ids"]]
    assert streamed == choice["token_ids"], "in as many chunks as there was time for"
    refused = [
        server.post("/v1/completions", prompt="text"),
        server.post("/v1/chat/completions", messages=QUESTION),
        server.post("/v1/messages", messages=QUESTION, max_tokens=1),
        server.post("/api/chat", messages=QUESTION),
        server.post("/api/generate", prompt="text"),
        server.post("/tokenize", prompt="text"),
        server.post("/detokenize", tokens=[5]),
        server.post("/v1/completions", prompt=[5], stop=["x"]),
    ]
    assert [reply.status_code for reply in refused] == [400] * 8
    assert all("tokeni" in reply.text for reply in refused)
    assert server.client.get("/v1/capabilities").json()["chat"] is False
    assert server.post("/api/show", model="quire-tiny").json()["template"] == "{{ .Prompt }}"


def test_a_model_without_a_chat_template_completes(bare: Callable[..., Running], tmp_path: Path) -> None:
    for file in (Path(quire.__file__).parent / "tiny").iterdir():
        if file.is_file() and "template" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    server = bare(model=str(tmp_path))
    assert server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
    reply = server.post("/v1/chat/completions", messages=QUESTION)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("This model has no chat template.")
    (card,) = server.client.get("/v1/models").json()["data"]
    assert card["id"] == tmp_path.name
    assert str(tmp_path) not in server.client.get("/metrics").text
    assert server.post("/v1/completions", model=str(tmp_path), prompt="a", max_tokens=1).status_code == 200
    ask = {"prompt": "a", "options": {"num_predict": 4, "temperature": 0}, "stream": False}
    plain, raw = (server.post("/api/generate", **ask, raw=raw).json() for raw in (False, True))
    assert plain["response"] == raw["response"]
    assert plain["prompt_eval_count"] == raw["prompt_eval_count"]
    with_system = server.post("/api/generate", **ask, system="b")
    assert with_system.json()["error"].startswith("This model has no chat template.")


def test_thinking_is_turned_off_where_the_template_reads_it(bare: Callable[..., Running]) -> None:
    plainly = "{% if enable_thinking is defined and not enable_thinking %} plainly{% endif %}"
    server = bare(chat_template="{{ messages[0].content }}" + plainly)
    ask = {"messages": QUESTION, "options": {"num_predict": 1}, "stream": False}
    replies = [server.post("/api/chat", **ask, **more).json() for more in ({}, {"think": False})]
    counts = [server.post("/tokenize", prompt=text).json()["count"] for text in ("hi", "hi plainly")]
    assert [reply["prompt_eval_count"] for reply in replies] == counts


def test_every_api_tells_the_template_how_much_to_think(bare: Callable[..., Running]) -> None:
    server = bare(chat_template="{{ messages[0].content }}{% if reasoning_effort %} {{ reasoning_effort }}{% endif %}")
    ask: dict[str, Any] = {"messages": QUESTION, "max_tokens": 1}
    config = {"output_config": {"effort": "low"}}
    chat = server.post("/v1/chat/completions", **ask, reasoning_effort="low").json()
    responses = server.post("/v1/responses", input="hi", reasoning={"effort": "low"}, max_output_tokens=1).json()
    messages = server.post("/v1/messages", **ask, **config).json()
    counted = server.post("/v1/messages/count_tokens", messages=QUESTION, **config).json()
    counts = [
        chat["usage"]["prompt_tokens"],
        responses["usage"]["input_tokens"],
        messages["usage"]["input_tokens"],
        counted["input_tokens"],
    ]
    assert counts == [server.post("/tokenize", prompt="hi low").json()["count"]] * 4
    assert not any("warnings" in reply for reply in (chat, responses, messages, counted))
    refused = server.post("/v1/messages/count_tokens", messages=QUESTION, output_config={"format": {"type": "x"}})
    assert refused.status_code == 400
    assert "output_config.format must be" in refused.text


def test_a_reply_names_what_the_chat_template_leaves_out(bare: Callable[..., Running]) -> None:
    server = bare(chat_template="{{ messages[-1].content }}")
    messages = [{"role": "system", "content": "Be brief."}, *QUESTION]
    warnings = server.post("/v1/chat/completions", messages=messages, max_tokens=1).json()["warnings"]
    assert warnings == ["messages: this model's chat template leaves out system messages, so the model never sees them"]
    assert "warnings" not in server.post("/v1/chat/completions", messages=QUESTION, max_tokens=1).json()


def test_a_reply_names_thoughts_that_the_chat_template_leaves_out(bare: Callable[..., Running]) -> None:
    source = "{% for m in messages %}{{ m.content }}{% if loop.last %}{{ m.thinking }}{% endif %}{% endfor %}"
    server = bare(chat_template=source)
    answer = {"role": "assistant", "content": "b", "reasoning_content": "c"}
    expected = [
        "messages: this model's chat template leaves out thoughts of earlier answers, so the model never sees them"
    ]
    asked = {"messages": [*QUESTION, answer, *QUESTION], "max_tokens": 1}
    assert server.post("/v1/chat/completions", **asked).json()["warnings"] == expected
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "c"}]}
    items = [*QUESTION, thought, {"role": "assistant", "content": "b"}, *QUESTION]
    assert server.post("/v1/responses", input=items, max_output_tokens=16).json()["warnings"] == expected
    asked["messages"] = [*QUESTION, {**answer, "reasoning_content": ""}, *QUESTION]
    assert "warnings" not in server.post("/v1/chat/completions", **asked).json()

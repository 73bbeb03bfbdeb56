"""Libraries that speak OpenAI's API, and the demo, unmodified over a real socket."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quire.server.demo import create_demo
from tests.server.conftest import MODEL, Running

ANSWER = "The KV cache stores the keys and"
QUESTION = "What is a KV cache?"


@pytest.fixture
def careless() -> Iterator[None]:
    """For libraries that leave sockets and event loops behind: collected here, where warnings are not errors."""
    gc.freeze()  # what stands already: looking at it would take a second
    yield
    asyncio.set_event_loop(None)
    gc.collect()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("careless")
def test_langchain_asks_and_streams(server: Running) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="any", model=MODEL, temperature=0, max_tokens=8, stream_usage=True
    )
    reply = model.invoke(QUESTION)
    assert reply.content == ANSWER
    assert reply.usage_metadata["output_tokens"] == 8
    pieces = list(model.stream(QUESTION))
    assert "".join(piece.content for piece in pieces) == ANSWER
    assert sum((piece.usage_metadata or {}).get("output_tokens", 0) for piece in pieces) == 8
    completer = langchain_openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", model=MODEL, n=1, max_tokens=4)
    assert len(completer.generate(["import os", "def"]).generations) == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("careless")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("goes_on", [False, True])
def test_langchain_calls_tools_by_responses(server: Running, stream: bool, goes_on: bool) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    messages = pytest.importorskip("langchain_core.messages")
    model = langchain_openai.ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key="any",
        model=MODEL,
        temperature=0,
        use_responses_api=True,
        use_previous_response_id=goes_on,
    )
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}

    def say(text: str, history: list[Any]) -> Any:
        bound = model.bind_tools([tool]).bind(extra_body={"structured_outputs": {"choice": [text]}})
        if not stream:
            return bound.invoke(history)
        first, *pieces = bound.stream(history)
        return sum(pieces, first)

    history = [messages.HumanMessage("What is the weather in Oslo?")]
    called = say('<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>', history)
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Oslo"})
    history += [called, messages.ToolMessage("Rain.", tool_call_id=call["id"])]
    said = say("It rains.", history)
    assert said.text == "It rains."
    assert say("Yes.", [*history, said, messages.HumanMessage("Sure?")]).text == "Yes."


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("careless")
def test_litellm_asks_and_maps_errors(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no look-up in the network
    litellm = pytest.importorskip("litellm")
    given: dict[str, Any] = {
        "model": f"openai/{MODEL}",
        "api_base": f"{server.url}/v1",
        "api_key": "any",
        "messages": [{"role": "user", "content": QUESTION}],
    }
    reply = litellm.completion(**given, temperature=0, max_tokens=8)
    assert reply.choices[0].message.content == ANSWER
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**given, max_tokens=4, stream=True)]
    assert "".join(pieces)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**given, "messages": [{"role": "user", "content": "word " * 2000}]})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**given, "model": "openai/nope"})


def test_the_demo_streams_text(server: Running, loop: asyncio.AbstractEventLoop) -> None:
    async def ask(body: dict[str, Any]) -> httpx.Response:
        transport = httpx.ASGITransport(create_demo(server.engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://demo") as client:
            return await client.post("/generate", json=body)

    def run(body: dict[str, Any]) -> httpx.Response:
        return asyncio.run_coroutine_threadsafe(ask(body), loop).result(60)

    whole = server.post("/v1/completions", prompt="import os", max_tokens=12, temperature=0).json()
    assert run({"prompt": "import os", "max_tokens": 12, "temperature": 0}).text == whole["choices"][0]["text"]
    refused = run({"prompt": "import os", "temperature": 9})
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("temperature must be in [0, 2]")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("careless")
@pytest.mark.parametrize("provider", ["ollama", "ollama_chat"])
def test_litellm_asks_as_it_asks_ollama(server: Running, monkeypatch: pytest.MonkeyPatch, provider: str) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    given: dict[str, Any] = {"model": f"{provider}/{MODEL}", "api_base": server.url, "temperature": 0}
    given["messages"] = [{"role": "user", "content": QUESTION}]
    reply = litellm.completion(**given, max_tokens=8)
    assert reply.choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**given, max_tokens=8, stream=True)]
    assert "".join(pieces) == reply.choices[0].message.content

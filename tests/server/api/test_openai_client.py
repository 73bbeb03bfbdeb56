"""The official OpenAI client, unmodified, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.server.conftest import MODEL, Running

QUESTION: Any = [{"role": "user", "content": "What is a KV cache?"}]


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60) as made:
        yield made


def test_models_are_listed_with_their_context(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert (card.id, card.object, card.owned_by) == (MODEL, "model", "quire")
    assert client.models.retrieve(MODEL).id == MODEL
    assert card.model_dump()["max_model_len"] == 1024


def test_chat_completion_has_every_field_clients_read(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=QUESTION, max_completion_tokens=8, temperature=0)
    (choice,) = reply.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "The KV cache stores the keys and"
    assert (choice.finish_reason, reply.object, reply.model) == ("length", "chat.completion", MODEL)
    assert reply.id.startswith("chatcmpl-")
    assert isinstance(reply.created, int)
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 8
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 8
    assert reply.usage.prompt_tokens_details is not None


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0},
        {"temperature": 1.5, "seed": 7},
        {"n": 3, "seed": 3},
        {"temperature": 0, "stop": ["keys"]},
        {"temperature": 0, "stop": "keys", "extra_body": {"include_stop_str_in_output": True}},
        {"seed": 5, "temperature": 2.0, "max_tokens": 40},
    ],
)
def test_concatenated_chat_stream_is_the_whole_answer(client: openai.OpenAI, more: dict[str, Any]) -> None:
    given: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, **more}
    whole = client.chat.completions.create(**given)
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    roles: dict[int, int] = {}
    for chunk in client.chat.completions.create(**given, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            roles[choice.index] = roles.get(choice.index, 0) + (choice.delta.role is not None)
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert set(roles.values()) == {1}


def test_stream_tells_usage_when_asked(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=6, stream=True, stream_options={"include_usage": True}
        )
    )
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6


def test_stream_tells_usage_continuously_when_asked(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.completions.create(model=MODEL, prompt="import", max_tokens=6, stream=True, stream_options=options)
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert counts[-1] == 6


def test_chat_logprobs_have_tokens_bytes_and_ranks(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=6, temperature=0, logprobs=True, top_logprobs=4
    )
    choice = reply.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 6
    for entry in choice.logprobs.content:
        assert bytes(entry.bytes or ()).decode() == entry.token
        assert len(entry.top_logprobs) == 4
        assert entry.top_logprobs[0].logprob == entry.logprob  # greedy: the best is the one
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content


def test_streamed_logprobs_are_those_of_the_whole(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 9, "seed": 1, "logprobs": True}
    whole = client.chat.completions.create(**given, top_logprobs=2).choices[0].logprobs
    streamed = [
        entry
        for chunk in client.chat.completions.create(**given, top_logprobs=2, stream=True)
        for choice in chunk.choices
        for entry in (choice.logprobs.content or () if choice.logprobs else ())
    ]
    assert whole is not None
    assert streamed == whole.content


def test_prompt_batch_is_answered_in_order(client: openai.OpenAI) -> None:
    prompts = ["import os", "def f(", "The"]
    given: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    reply = client.completions.create(prompt=prompts, n=2, **given)
    assert [choice.index for choice in reply.choices] == list(range(6))
    alone = [client.completions.create(prompt=prompt, **given).choices[0].text for prompt in prompts]
    assert [choice.text for choice in reply.choices] == [text for text in alone for _ in range(2)]
    streamed = [""] * 6
    for chunk in client.completions.create(prompt=prompts, n=2, stream=True, **given):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in reply.choices]


def test_token_arrays_echo_and_logprobs_score_a_prompt(server: Running, client: openai.OpenAI) -> None:
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    text = "import os\nimport sys"
    ids = tokenizer.encode(text)
    reply = client.completions.create(
        model=MODEL, prompt=[ids, ids[:3]], max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234
    )
    first, second = reply.choices
    assert first.text.startswith(text)
    assert first.logprobs is not None
    logprobs: Any = first.logprobs
    assert len(logprobs.tokens) == len(ids) + 1
    assert logprobs.token_logprobs[0] is None  # nothing predicts the first token
    assert all(
        top[token] == value
        for token, value, top in zip(
            logprobs.tokens[1:], logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True
        )
    )
    ends = [*logprobs.text_offset[1:], len(first.text)]
    assert [first.text[a:b] for a, b in zip(logprobs.text_offset, ends, strict=True)] == logprobs.tokens
    assert second.logprobs is not None
    assert (second.logprobs.token_logprobs or [])[:3] == logprobs.token_logprobs[:3]


def test_scoring_alone_generates_nothing(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt="import os", max_tokens=0, logprobs=1, echo=True)
    assert reply.choices[0].text == "import os"
    assert reply.choices[0].logprobs is not None
    assert len(reply.choices[0].logprobs.tokens or ()) == 2
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 0


def test_async_clients_run_side_by_side(server: Running) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        text = ""
        stream = await client.completions.create(model=MODEL, prompt="def", max_tokens=16, seed=seed, stream=True)
        async for chunk in stream:
            text += chunk.choices[0].text
        return text

    async def run() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
            together = await asyncio.gather(*(ask(client, seed) for seed in range(8)))
            alone = [await ask(client, seed) for seed in range(8)]
        return list(together), alone

    together, alone = asyncio.run(run())
    assert together == alone


@pytest.mark.parametrize(
    ("given", "kind", "code", "param"),
    [
        ({"temperature": 3}, openai.BadRequestError, "invalid_value", "temperature"),
        ({"model": "nope"}, openai.NotFoundError, "model_not_found", "model"),
        ({"max_tokens": 0}, openai.BadRequestError, "invalid_value", "max_tokens"),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, "invalid_value", "tools[0].function"),
    ],
)
def test_errors_become_the_clients_exceptions(
    client: openai.OpenAI, given: dict[str, Any], kind: type[openai.APIStatusError], code: str, param: str
) -> None:
    for stream in (False, True):
        with pytest.raises(kind) as caught:
            client.chat.completions.create(**{"model": MODEL, "messages": QUESTION, "stream": stream, **given})
        assert (caught.value.code, caught.value.param) == (code, param)
        assert caught.value.request_id


def test_a_client_that_times_out_leaves_nothing_behind(server: Running) -> None:
    hasty = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=0.05)
    with hasty, pytest.raises(openai.APITimeoutError):
        hasty.completions.create(model=MODEL, prompt="import", max_tokens=900, extra_body={"ignore_eos": True})
    server.wait_idle()


def test_a_client_that_is_told_to_come_back_does(serve: Any) -> None:
    with (
        serve(max_concurrent_requests=1) as limited,
        openai.OpenAI(base_url=f"{limited.url}/v1", api_key="any", max_retries=9) as patient,
        openai.OpenAI(base_url=f"{limited.url}/v1", api_key="any", max_retries=0) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        busy = other.completions.create(
            model=MODEL, prompt=["import"] * 8, max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(busy))
        with pytest.raises(openai.RateLimitError) as caught:
            other.completions.create(model=MODEL, prompt="a", max_tokens=1)
        assert caught.value.response.headers["retry-after"] == "1"
        assert caught.value.code == "rate_limit_exceeded"
        reply = pool.submit(patient.completions.create, model=MODEL, prompt="a", max_tokens=1)
        busy.close()
        assert reply.result(60).choices[0].finish_reason == "length"


def test_a_key_that_starts_too_many_requests_is_told_when_to_come_back(serve: Any) -> None:
    with serve(max_requests_per_minute_per_key=1, api_key=("one", "two")) as limited:
        keys = {key: {"Authorization": f"Bearer {key}"} for key in ("one", "two")}
        body = {"prompt": "a", "max_tokens": 1}
        replies = [limited.client.post("/v1/completions", json=body, headers=keys[k]) for k in ("one", "one", "two")]
        assert [reply.status_code for reply in replies] == [200, 429, 200]
        assert 1 <= int(replies[1].headers["retry-after"]) <= 61

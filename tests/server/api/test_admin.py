"""What the server tells about itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire import __version__
from quire.engine.async_llm_engine import AsyncLLMEngine, EngineState
from tests.server.conftest import MODEL, Running


def series(text: str, name: str) -> float:
    """The sum of a metric over its labels."""
    lines = [line for line in text.splitlines() if line.partition("{")[0] == name]
    assert lines, name
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_health_follows_the_engine(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {
        EngineState.STARTING: (200, 503),
        EngineState.READY: (200, 200),
        EngineState.RESTARTING: (200, 503),
        EngineState.DRAINING: (200, 503),
        EngineState.DEAD: (503, 503),
    }
    assert set(expected) == set(EngineState)
    for state, codes in expected.items():
        monkeypatch.setattr(AsyncLLMEngine, "state", state)
        replies = [server.client.get(path) for path in ("/health", "/ready")]
        assert tuple(reply.status_code for reply in replies) == codes
        assert server.client.post("/ping").status_code == codes[0]
        assert server.post("/api/generate", prompt="").status_code == codes[1], "Ollama's way to load a model"


def test_version_and_load(server: Running) -> None:
    assert server.client.get("/version").json() == {"version": __version__}
    assert server.client.get("/load").json() == {
        "server_load": 0,
        "queued_work": 0,
        "running_work": 0,
        "body_bytes": 0,
    }


def test_models_are_known_under_the_names_the_operator_gives(serve: Any) -> None:
    with serve(served_model_name=("one", "two")) as named:
        cards = named.client.get("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == ["one", "two"]
        for name, code in (("one", 200), ("two", 200), (MODEL, 200), ("three", 404)):
            assert named.post("/v1/completions", model=name, prompt="a", max_tokens=1).status_code == code
        assert named.post("/v1/completions", prompt="a", max_tokens=1).json()["model"] == "one"


def test_tokens_and_text_are_each_others_reverse(server: Running) -> None:
    text = "def f(x):\n    return 'päck' * 2  # 試"
    tokens = server.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 1024
    assert server.post("/detokenize", tokens=tokens["tokens"]).json() == {"prompt": text}


def test_a_conversation_is_tokenized_as_it_is_answered(server: Running) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokens = server.post("/tokenize", messages=messages).json()["tokens"]
    reply = server.post("/v1/chat/completions", messages=messages, max_tokens=1, return_token_ids=True).json()
    assert reply["prompt_token_ids"] == tokens


def test_requests_are_counted_once_under_both_names(server: Running) -> None:
    before = server.client.get("/metrics").text
    server.post("/v1/completions", prompt=["a", "b"], max_tokens=5, ignore_eos=True)
    server.post("/v1/completions", prompt="a", max_tokens=3, ignore_eos=True, stream=True)
    server.post("/v1/completions", prompt="a", max_tokens=3, temperature=9)
    after = server.client.get("/metrics").text
    for prefix in ("quire", "vllm"):
        for name, grown in {
            "request_success_total": 3,
            "generation_tokens_total": 13,
            "time_to_first_token_seconds_count": 3,
            "e2e_request_latency_seconds_count": 3,
            "request_generation_tokens_sum": 13,
            "request_prompt_tokens_count": 3,
        }.items():
            assert series(after, f"{prefix}:{name}") - series(before, f"{prefix}:{name}") == grown, name
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total"):
        assert series(after, f"vllm:{name}") >= 0
    assert series(after, "http_requests_total") - series(before, "http_requests_total") >= 3
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="4xx"}' in after


def test_each_request_has_one_line_in_the_log(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="quire")
    with serve(enable_log_requests=True) as talkative:
        headers = {"x-request-id": "mine"}
        talkative.client.post("/v1/completions", json={"prompt": ["secret"] * 2, "max_tokens": 3}, headers=headers)
    lines = [record.getMessage() for record in caplog.records if record.name == "quire.server.api.generation"]
    assert len(lines) == 2
    assert all("request=mine" in line and "end=length" in line and "output_tokens=3" in line for line in lines)
    assert "secret" not in caplog.text


def test_names_that_clients_make_up_make_no_series(server: Running) -> None:
    for index in range(20):
        server.client.get(f"/made-up-{index}")
        server.post("/v1/completions", model=f"made-up-{index}", prompt="a")
        server.client.request(f"MADEUP{index}", "/v1/models")
    assert "made-up" not in server.client.get("/metrics").text
    assert "MADEUP" not in server.client.get("/metrics").text


def test_extra_fields_of_the_field_do_what_they_say(server: Running) -> None:
    ask = {"prompt": "import os", "max_tokens": 6, "temperature": 0}
    plain = server.post("/v1/completions", **ask).json()["choices"][0]
    ids = server.post("/v1/completions", **ask, return_token_ids=True).json()["choices"][0]
    assert (len(ids["token_ids"]), len(ids["prompt_token_ids"])) == (6, 2)
    named = server.post("/v1/completions", **ask, logprobs=0, return_tokens_as_token_ids=True).json()["choices"][0]
    assert named["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in ids["token_ids"]]
    scored = server.post("/v1/completions", **ask, prompt_logprobs=2).json()["choices"][0]
    assert scored["prompt_logprobs"][0] is None
    assert str(ids["prompt_token_ids"][1]) in scored["prompt_logprobs"][1]
    cut = server.post("/v1/completions", **{**ask, "prompt": [5] * 5000}, truncate_prompt_tokens=9).json()
    assert cut["usage"]["prompt_tokens"] == 9
    biased = server.post("/v1/completions", **ask, logit_bias={"5": 100}, return_token_ids=True).json()["choices"][0]
    assert biased["token_ids"] == [5] * 6
    allowed = server.post("/v1/completions", **ask, allowed_token_ids=[7], return_token_ids=True).json()["choices"][0]
    assert allowed["token_ids"] == [7] * 6
    assert server.post("/v1/completions", **ask, bad_words=["path"]).json()["choices"][0] != plain
    echoed = server.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "What is a KV cache?"}, {"role": "assistant", "content": "The KV"}],
        continue_final_message=True, echo=True, max_tokens=2, temperature=0,
    ).json()  # fmt: skip
    assert echoed["choices"][0]["message"]["content"].startswith("The KV cache")


def test_the_longest_completion_of_a_request_is_counted(server: Running) -> None:
    name = "vllm:request_max_num_generation_tokens_sum"
    before = series(server.client.get("/metrics").text, name)
    server.post("/v1/completions", prompt="a", max_tokens=7, n=3, ignore_eos=True)
    server.post("/v1/completions", prompt="a", max_tokens=5, n=2, ignore_eos=True, stream=True)
    server.post("/v1/completions", prompt="a", max_tokens=4, ignore_eos=True)
    assert series(server.client.get("/metrics").text, name) - before == 7 + 5 + 4


def test_a_server_may_give_usage_and_token_ids_to_all(serve: Any) -> None:
    with serve(enable_force_include_usage=True, return_tokens_as_token_ids=True) as generous:
        for path, ask in (
            ("/v1/completions", {"prompt": "import os", "logprobs": 0}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}),
        ):
            ask |= {"max_tokens": 3, "temperature": 0}
            events = generous.post(path, **ask, stream=True).text.split("\n\n")
            assert json.loads(events[-3].removeprefix("data: "))["usage"]["completion_tokens"] == 3
            assert events[-2] == "data: [DONE]"
            assert "token_id:" in generous.post(path, **ask).text
            assert "token_id:" not in generous.post(path, **ask, return_tokens_as_token_ids=False).text

"""Receipts over HTTP: what was answered under load is answered again, offline."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.cli.main import main
from quire.engine.receipt import Receipt, Transcript, first_difference
from tests.server.conftest import Running, Serve

ASK = {"x-quire-receipt": "1"}
CHAT = {
    "messages": [{"role": "user", "content": "What is a KV cache?"}],
    "n": 2,
    "temperature": 0.9,
    "max_tokens": 16,
}


def events(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def replayed(receipt: Any, directory: Path, capsys: pytest.CaptureFixture[str]) -> str:
    (directory / "receipt.json").write_text(json.dumps(receipt))
    assert main(["replay", str(directory / "receipt.json"), "--num-gpu-blocks-override", "128"]) == 0
    return capsys.readouterr().out


def test_a_conversation_beside_others_is_replayed(
    server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def other(number: int) -> int:
        body = {"prompt": f"def f{number}", "temperature": 1.0, "max_tokens": 40, "ignore_eos": True}
        return server.client.post("/v1/completions", json=body).status_code

    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(other, number) for number in range(5)]
        reply = server.client.post("/v1/chat/completions", json=CHAT, headers=ASK).json()
        assert [future.result() for future in others] == [200] * 5
    requests = reply["receipt"]["requests"]
    assert len(requests[0]["completions"]) == 2
    assert requests[0]["sampling_params"]["seed"] is not None
    assert "identical (2 completions" in replayed(reply, tmp_path, capsys)


def test_streams_carry_the_receipt_of_all_prompts_in_the_last_chunk(
    server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"prompt": ["import os", "The scheduler"], "n": 2, "stream": True, "max_tokens": 12, "temperature": 0.7}
    chunks = events(server.client.post("/v1/completions", json=body, headers=ASK).text)
    assert [chunk for chunk in chunks if "receipt" in chunk] == [chunks[-1]]
    assert replayed(chunks[-1], tmp_path, capsys).count("identical (2 completions") == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 4}),
        ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 4}),
        ("/api/chat", {"messages": CHAT["messages"], "options": {"num_predict": 4}}),
        ("/api/generate", {"prompt": "import os", "raw": True, "options": {"num_predict": 4}}),
    ],
)
def test_every_api_gives_a_receipt_when_asked_and_only_then(
    server: Running, path: str, body: dict[str, Any], stream: bool
) -> None:
    asked = server.client.post(path, json={**body, "stream": stream}, headers=ASK).text
    assert asked.count('"receipt":') == 1
    assert "/" not in json.loads(asked[asked.index('"identity":') + 11 :].partition(',"requests"')[0])["model"]
    assert '"receipt":' not in server.client.post(path, json={**body, "stream": stream}).text


@pytest.mark.parametrize(
    ("parser", "path", "body"),
    [
        ("olmo3", "/v1/completions", {"prompt": "Why? <think>", "max_tokens": 20}),
        ("openai_gptoss", "/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}),
    ],
)
def test_a_budget_of_thinking_counts_in_an_engine_that_knows_no_thinking(
    serve: Serve, tiny_llm: LLM, parser: str, path: str, body: dict[str, Any]
) -> None:
    with serve(reasoning_parser=parser) as server:
        reply = server.client.post(path, json={**body, "thinking_token_budget": 5, "seed": 4}, headers=ASK).json()
    (request,) = Receipt.from_json(json.dumps(reply).encode()).requests
    transcript = Transcript(request.params())
    transcript.add(tiny_llm.generate({"prompt_token_ids": request.prompt_token_ids}, request.params())[0])
    assert first_difference(request, transcript.receipt()) is None


def test_a_receipt_has_the_name_that_clients_know(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(served_model_name=("assistant", "other")) as server:
        reply = server.client.post("/v1/chat/completions", json=CHAT, headers=ASK).json()
    assert reply["receipt"]["identity"]["model"] == "assistant"
    (tmp_path / "receipt.json").write_text(json.dumps(reply))
    assert main(["replay", str(tmp_path / "receipt.json")]) == 2
    assert "'assistant'" in capsys.readouterr().err
    replay = ["replay", str(tmp_path / "receipt.json"), "--model", "quire-tiny", "--num-gpu-blocks-override", "128"]
    assert main(replay) == 0
    assert "identical (2 completions" in capsys.readouterr().out

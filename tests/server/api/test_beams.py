"""Beam search and best_of over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Running

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BEAMS_OF_3 = {"use_beam_search": True, "n": 3}


def asked(path: str, **more: Any) -> dict[str, Any]:
    prompt = {"prompt": "import os"} if path == TEXT else {"messages": [{"role": "user", "content": "import os"}]}
    return {**prompt, "max_tokens": 12, **more}


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_beams_are_searched(server: Running, path: str) -> None:
    body = asked(path, use_beam_search=True, return_token_ids=True)
    by_n = server.post(path, **body, n=4).json()
    by_width = server.post(path, **body, n=2, beam_width=4).json()
    assert [choice["index"] for choice in by_n["choices"]] == [0, 1, 2, 3]
    assert by_width["choices"] == by_n["choices"][:2]
    assert by_width["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in by_width["choices"])
    assert len({tuple(choice["token_ids"]) for choice in by_n["choices"]}) == 4
    server.wait_idle()


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_logprobs_are_those_of_the_same_tokens_without_beams(server: Running, path: str) -> None:
    more = {"logprobs": 3} if path == TEXT else {"logprobs": True, "top_logprobs": 3}
    body = asked(path, use_beam_search=True, n=3, return_token_ids=True, ignore_eos=True)
    without = server.post(path, **body).json()["choices"]
    found = server.post(path, **body, **more).json()["choices"]
    assert [_strip(choice) for choice in found] == [_strip(choice) for choice in without]
    assert all(choice["logprobs"] is None for choice in without)
    sums = [sum(_logprobs(choice)) for choice in found]
    assert sums == sorted(sums, reverse=True)
    greedy = server.post(path, **asked(path, temperature=0, ignore_eos=True, max_tokens=1), **more).json()
    for choice in found:
        assert len(_logprobs(choice)) == len(choice["token_ids"]) == 12
        assert choice["logprobs"].keys() == greedy["choices"][0]["logprobs"].keys()
    if path == TEXT:
        (prompt,) = {tuple(choice["prompt_token_ids"]) for choice in found}
        for choice in found:
            assert _of_prompt(server, [*prompt, *choice["token_ids"]])[len(prompt) :] == _scores(choice)


def _strip(choice: dict[str, Any]) -> dict[str, Any]:
    return {**choice, "logprobs": None}


def _scores(choice: dict[str, Any]) -> list[Any]:
    logprobs = choice["logprobs"]
    return list(zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))


def _of_prompt(server: Running, token_ids: list[int]) -> list[Any]:
    """The scores of tokens that stand in a prompt, where no search has been."""
    reply = server.post(TEXT, prompt=token_ids, max_tokens=0, echo=True, logprobs=3).json()
    return _scores(reply["choices"][0])


def test_a_prompt_is_scored_beside_a_search(server: Running) -> None:
    body = {"prompt": "import os", "max_tokens": 4, "echo": True, "logprobs": 2}
    scored = [_scores(server.post(TEXT, **body, **more).json()["choices"][0]) for more in ({"n": 1}, BEAMS_OF_3)]
    num_prompt_tokens = len(scored[0]) - 4
    assert scored[0][:num_prompt_tokens] == scored[1][:num_prompt_tokens]
    assert len(scored[1]) == num_prompt_tokens + 4


def test_penalty_and_stopping_reach_the_search(server: Running) -> None:
    body = asked(TEXT, use_beam_search=True, n=4, return_token_ids=True, max_tokens=24, stop_token_ids=[13, 14, 15])
    lengths = {}
    for penalty in (-4, 4):
        reply = server.post(TEXT, **body, length_penalty=penalty, early_stopping="never").json()
        lengths[penalty] = sum(len(choice["token_ids"]) for choice in reply["choices"])
    assert lengths[-4] <= lengths[4]
    assert server.post(TEXT, **body, early_stopping=True).status_code == 200


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_the_best_of_several(server: Running, path: str) -> None:
    body = asked(path, seed=3, temperature=1.2)
    logprobs = {"logprobs": 0} if path == TEXT else {"logprobs": True}
    best = server.post(path, **body, n=2, best_of=5).json()["choices"]
    every = server.post(path, **body, n=5, **logprobs).json()["choices"]
    every.sort(key=lambda choice: -sum(_logprobs(choice)))
    shown = "text" if path == TEXT else "message"
    assert [choice[shown] for choice in best] == [choice[shown] for choice in every[:2]]
    assert [choice["index"] for choice in best] == [0, 1]
    assert all(choice["logprobs"] is None for choice in best)


def _logprobs(choice: dict[str, Any]) -> list[float]:
    found = choice["logprobs"]
    return found.get("token_logprobs") or [entry["logprob"] for entry in found["content"]]


def test_several_prompts(server: Running) -> None:
    together = server.post(TEXT, prompt=["import os", "class A"], max_tokens=6, use_beam_search=True, n=3).json()
    alone = server.post(TEXT, prompt="class A", max_tokens=6, use_beam_search=True, n=3).json()
    assert [choice["index"] for choice in together["choices"]] == list(range(6))
    assert [choice["text"] for choice in together["choices"][3:]] == [choice["text"] for choice in alone["choices"]]


@pytest.mark.parametrize("fields", [{"best_of": 9}, {"use_beam_search": True, "beam_width": 9}])
def test_sequences_are_counted_by_those_that_run(serve: Any, fields: dict[str, Any]) -> None:
    with serve(max_sequences_per_request=8) as server:
        reply = server.post(TEXT, **asked(TEXT), **fields)
        assert reply.status_code == 400
        (name,) = fields.keys() - {"use_beam_search"}
        assert reply.json()["error"]["param"] == name
        assert "asks for 9 sequences" in reply.json()["error"]["message"]


def test_a_receipt_of_a_search_is_that_of_any_request(server: Running) -> None:
    reply = server.client.post(TEXT, json=asked(TEXT, use_beam_search=True, n=3), headers={"x-quire-receipt": "1"})
    (request,) = reply.json()["receipt"]["requests"]
    assert request["sampling_params"]["use_beam_search"] is True
    assert len(request["completions"]) == 3

"""Budgets of thinking whose markers are plain text: kept on every API, also where the prompt has begun the thinking."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import Running, Serve

BUDGET = 7
FREE = {"max_tokens": 60, "temperature": 1, "seed": 4, "min_tokens": 40}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}


@pytest.fixture(scope="module")
def thinking(serve: Serve) -> Iterator[Running]:
    """A server that takes what is between <think> and </think> for thinking; to its tokenizer both are plain text."""
    with serve(reasoning_parser="olmo3") as running:
        yield running


def count(server: Running, text: str) -> int:
    reply = server.post("/tokenize", prompt=text, add_special_tokens=False).json()
    return int(reply["count"])


@pytest.mark.parametrize("prompt", ["Why? <think>", "Why? <think>\n", "<think>a</think>b<think>\nOkay, so"])
@pytest.mark.parametrize("form", [None, FORM])
def test_a_prompt_that_has_begun_the_thinking_has_a_budget(
    thinking: Running, prompt: str, form: dict[str, Any] | None
) -> None:
    more = {} if form is None else {"response_format": form, "min_tokens": 0}
    asked = {"prompt": prompt, **FREE, "thinking_token_budget": BUDGET, "return_token_ids": True, **more}
    choice = thinking.post("/v1/completions", **asked).json()["choices"][0]
    end = thinking.post("/tokenize", prompt="</think>", add_special_tokens=False).json()["tokens"]
    if "</think>" not in thinking.post("/detokenize", tokens=choice["token_ids"][:BUDGET]).json()["prompt"]:
        assert choice["token_ids"][BUDGET : BUDGET + len(end)] == end
    if form is not None:
        assert choice["text"].partition("</think>")[2].strip() in ('"yes"', '"no"')


@pytest.mark.parametrize("prompt", ["Why?", "<think>a</think>\n"])
def test_a_prompt_that_has_not_begun_it_is_answered_as_ever(thinking: Running, prompt: str) -> None:
    asked = {"prompt": prompt, **FREE}
    free = thinking.post("/v1/completions", **asked).json()["choices"][0]["text"]
    limited = thinking.post("/v1/completions", **asked, thinking_token_budget=BUDGET).json()["choices"][0]["text"]
    assert free == limited


@pytest.mark.parametrize("budget", [None, BUDGET])
def test_a_form_without_thinking_says_so(thinking: Running, budget: int | None) -> None:
    """The form holds from the first token on, so a marker in plain text cannot come."""
    question = [{"role": "user", "content": "Why?"}]
    asked = {"messages": question, "max_tokens": 20, "response_format": FORM, "thinking_token_budget": budget}
    reply = thinking.post("/v1/chat/completions", **asked).json()
    message = reply["choices"][0]["message"]
    assert message["content"] in ('"yes"', '"no"')
    assert not message["reasoning"]
    (warning,) = reply["warnings"]
    assert warning.startswith("the model does not think before it answers")
    assert "'<think>'" in warning


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/messages", {"max_tokens": 4, "thinking": {"type": "disabled"}}),
        ("/api/chat", {"options": {"num_predict": 4}, "stream": False, "think": False}),
    ],
)
def test_thinking_that_no_template_can_turn_off_is_warned_of(
    thinking: Running, path: str, asked: dict[str, Any]
) -> None:
    reply = thinking.post(path, messages=[{"role": "user", "content": "Why?"}], **asked).json()
    assert any("cannot turn it off" in warning for warning in reply["warnings"])


def test_a_form_behind_thinking_that_the_client_has_begun_has_a_budget(thinking: Running) -> None:
    begun = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "<think>"}]
    asked = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 60}
    asked |= {"response_format": FORM, "thinking_token_budget": BUDGET, "seed": 4, "temperature": 1}
    reply = thinking.post("/v1/chat/completions", **asked).json()
    message = reply["choices"][0]["message"]
    assert message["content"] in ('"yes"', '"no"')
    assert 0 < reply["usage"]["completion_tokens_details"]["reasoning_tokens"] <= BUDGET + count(thinking, "</think>")
    assert "warnings" not in reply

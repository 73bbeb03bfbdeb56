"""Prompts and conversations that cannot be run: each is refused by name, and nothing of it stays behind."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import (
    EngineDeadError,
    InvalidParameter,
    InvalidUnicode,
    PromptTooLong,
    QuireError,
    UnsupportedFeature,
)
from tests.expert_checkpoints import VOCAB_SIZE
from tests.wrong_use.conftest import MAX_MODEL_LEN
from tests.wrong_use.refusal import refused

PARAMS = SamplingParams(temperature=0.0, max_tokens=2)
LAST = f"0 to {VOCAB_SIZE - 1}"
TOO_LONG = f"maximum context length is {MAX_MODEL_LEN} tokens"
USER = {"role": "user", "content": "hi"}

PROMPTS: dict[str, tuple[Any, type[QuireError], list[str]]] = {
    "empty text": ("", InvalidParameter, ["prompt is empty", "at least one token"]),
    "empty item": (["a", ""], InvalidParameter, ["prompt 1:", "empty"]),
    "empty ids": ([[]], InvalidParameter, ["empty"]),
    "empty ids in a mapping": ({"prompt_token_ids": []}, InvalidParameter, ["empty"]),
    "None": (None, InvalidParameter, ["prompts must be", "None"]),
    "None as an item": (["a", None], InvalidParameter, ["prompt 1:", "NoneType"]),
    "a number": (5, InvalidParameter, ["prompts must be", "int"]),
    "bytes": (b"abc", InvalidParameter, ["prompts must be", "bytes"]),
    "bytes as an item": ([b"abc"], InvalidParameter, ["prompt must be text", "bytes"]),
    "a set": ({"a"}, InvalidParameter, ["prompts must be", "set"]),
    "a generator": ((text for text in "ab"), InvalidParameter, ["prompts must be", "generator"]),
    "an array": (np.array([1, 2]), InvalidParameter, ["prompts must be", "ndarray"]),
    "a tensor": (torch.tensor([1, 2]), InvalidParameter, ["prompts must be", "Tensor"]),
    "ids and text mixed": ([1, "a"], InvalidParameter, ["prompt 0:", "int"]),
    "text among ids": ([[1, "a"]], InvalidParameter, ["prompt_token_ids", "'a' (str)"]),
    "a fraction among ids": ([[1, 1.5]], InvalidParameter, ["prompt_token_ids", "1.5 (float)"]),
    "a bool among ids": ([[1, True]], InvalidParameter, ["prompt_token_ids", "True (bool)"]),
    "bools alone": ([True, False], InvalidParameter, ["prompt_token_ids", "True (bool)"]),
    "None among ids": ([[1, None]], InvalidParameter, ["prompt_token_ids", "None"]),
    "ids in ids": ([[[1]]], InvalidParameter, ["prompt_token_ids", "[1] (list)"]),
    "ids as an array": ({"prompt_token_ids": np.array([1])}, InvalidParameter, ["ndarray", "tolist()"]),
    "ids as text": ({"prompt_token_ids": "12"}, InvalidParameter, ["prompt_token_ids", "str"]),
    "id -1": ([[1, -1]], InvalidParameter, ["prompt_token_ids", "holds -1", LAST]),
    "id of the vocabulary's size": ([[VOCAB_SIZE]], InvalidParameter, [f"holds {VOCAB_SIZE}", LAST]),
    "id 2**31": ([[2**31]], InvalidParameter, ["holds 2147483648", LAST]),
    "id 2**63": ([[2**63]], InvalidParameter, ["holds 9223372036854775808", LAST]),
    "id of 5000 digits": ([[10**5000]], InvalidParameter, ["too large to print", LAST]),
    "numpy's id out of range": ([[np.int64(VOCAB_SIZE)]], InvalidParameter, [f"holds {VOCAB_SIZE}", LAST]),
    "as long as the context": ([[1] * MAX_MODEL_LEN], PromptTooLong, [TOO_LONG, "has 64", "63 tokens or fewer"]),
    "longer than the context": ([[1] * (MAX_MODEL_LEN + 1)], PromptTooLong, [TOO_LONG, "has 65", "max_model_len"]),
    "long text": ("word " * 500, PromptTooLong, [TOO_LONG, "Shorten"]),
    "a million characters": ("a" * 1_000_000, PromptTooLong, [TOO_LONG, "1000000 characters"]),
    "too long as an item": (["a", "word " * 500], PromptTooLong, ["prompt 1:", TOO_LONG]),
    "half a surrogate pair": ("a\ud800", InvalidUnicode, ["prompt", "U+D800", "character 1"]),
    "the other half": ({"prompt": "\udc00"}, InvalidUnicode, ["prompt", "U+DC00"]),
    "half a pair to echo": ({"prompt": "\udc00", "prompt_token_ids": [1]}, InvalidUnicode, ["prompt", "U+DC00"]),
    "empty mapping": ({}, InvalidParameter, ["needs the key prompt or prompt_token_ids"]),
    "mapping of None": ({"prompt": None}, InvalidParameter, ["needs the key prompt or prompt_token_ids"]),
    "text that is a number": ({"prompt": 5}, InvalidParameter, ["prompt must be text", "int"]),
    "misspelt key": ({"promt": "a"}, UnsupportedFeature, ["'promt'", "did you mean 'prompt'?"]),
    "key that is a number": ({5: "a"}, UnsupportedFeature, ["no key 5", "prompt_token_ids"]),
    "an image": ({"prompt": "a", "multi_modal_data": {}}, UnsupportedFeature, ["'multi_modal_data'", "known are"]),
    "embeddings": ({"prompt_embeds": [0.5]}, UnsupportedFeature, ["'prompt_embeds'", "known are"]),
    "cache_salt empty": ({"prompt": "a", "cache_salt": ""}, InvalidParameter, ["cache_salt", "1 to 128", "''"]),
    "cache_salt long": ({"prompt": "a", "cache_salt": "s" * 129}, InvalidParameter, ["cache_salt", "1 to 128"]),
    "cache_salt a number": ({"prompt": "a", "cache_salt": 7}, InvalidParameter, ["cache_salt", "got 7"]),
    "cache_salt half a pair": ({"prompt": "a", "cache_salt": "\ud800"}, InvalidUnicode, ["cache_salt", "U+D800"]),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_wrong_prompt_is_refused(llm: LLM, name: str) -> None:
    prompts, cls, parts = PROMPTS[name]
    with refused(cls, *parts):
        llm.generate(prompts, PARAMS)


def test_nothing_runs_when_one_of_many_prompts_is_wrong(llm: LLM) -> None:
    before = llm.engine.parts.core.scheduler.num_preemptions, llm.engine.last_stats
    with refused(InvalidParameter, "prompt 2:", f"holds {VOCAB_SIZE}", parameter="prompt_token_ids"):
        llm.generate([[1], [2], [VOCAB_SIZE], [3]], PARAMS)
    assert (llm.engine.parts.core.scheduler.num_preemptions, llm.engine.last_stats) == before


WRONG_CALLS: dict[str, tuple[Any, str, list[str]]] = {
    "token ids by vLLM's old name": (
        lambda llm: llm.generate(prompt_token_ids=[[1, 2]]),
        "prompt_token_ids",
        ["generate() has no argument 'prompt_token_ids'", "generate([[1, 2, 3]])"],
    ),
    "and beside prompts": (lambda llm: llm.generate("a", prompt_token_ids=[1]), "prompt_token_ids", ["are prompts"]),
    "no prompts": (lambda llm: llm.generate(), "generate", ["missing a required argument: 'prompts'"]),
    "a sampling parameter": (
        lambda llm: llm.generate("a", max_tokens=4),
        "max_tokens",
        ["sampling_params=SamplingParams(max_tokens=...)"],
    ),
    "a typo": (lambda llm: llm.generate(promts="a"), "promts", ["did you mean 'prompts'?"]),
    "too many": (lambda llm: llm.generate("a", None, True, [1]), "generate", ["too many positional arguments"]),
    "in a chat": (lambda llm: llm.chat([], temperature=1), "temperature", ["chat() has no argument 'temperature'"]),
    "in a beam search": (
        lambda llm: llm.beam_search("a", beam_width=2, max_tokens=3),
        "beam_width",
        ["params=BeamSearchParams(beam_width=...)"],
    ),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_arguments_that_a_method_does_not_have_are_refused(llm: LLM, name: str) -> None:
    call, parameter, parts = WRONG_CALLS[name]
    with refused(InvalidParameter, *parts, parameter=parameter):
        call(llm)


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], PARAMS) == []


def test_prompt_one_below_the_context_runs(llm: LLM) -> None:
    (output,) = llm.generate([[1] * (MAX_MODEL_LEN - 1)], PARAMS)
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"
    assert "the answer can have 1 token, not 2" in output.warnings[0]


def test_numpy_integers_are_token_ids(llm: LLM) -> None:
    ids = [np.int64(5), np.int32(6), np.uint8(7)]
    for prompt in (ids, [ids], {"prompt_token_ids": ids}):
        (output,) = llm.generate(prompt, PARAMS)  # type: ignore[arg-type]
        assert output.prompt_token_ids == [5, 6, 7]
        assert all(type(token_id) is int for token_id in output.prompt_token_ids)


@pytest.mark.parametrize("value", ["no", 1, None])
def test_use_tqdm_is_a_bool(llm: LLM, value: Any) -> None:
    with refused(InvalidParameter, "use_tqdm", repr(value), parameter="use_tqdm"):
        llm.generate("a", PARAMS, use_tqdm=value)


# Requests


@pytest.mark.parametrize("request_id", ["", None, 5, [1]])
def test_request_id_is_text(llm: LLM, request_id: Any) -> None:
    with refused(InvalidParameter, "request_id", "non-empty string", parameter="request_id"):
        llm.engine.add_request(request_id, "a", PARAMS)


def test_request_id_in_use_is_refused_and_the_first_goes_on(llm: LLM) -> None:
    llm.engine.add_request("twin", "a", PARAMS)
    with refused(InvalidParameter, "request_id 'twin' is in use", "unique", parameter="request_id"):
        llm.engine.add_request("twin", "b", PARAMS)
    outputs = []
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
    assert outputs[-1].finished
    assert outputs[-1].prompt == "a"


def test_aborting_an_unknown_request_is_harmless(llm: LLM) -> None:
    assert llm.engine.abort_request("nobody") == []


@pytest.mark.parametrize("request_ids", [None, 5, [5], [[]]])
def test_aborting_what_is_no_request_id_is_refused(llm: LLM, request_ids: Any) -> None:
    with refused(InvalidParameter, "request_ids", "strings", parameter="request_ids"):
        llm.engine.abort_request(request_ids)


def test_closed_engine_says_so(checkpoint: Any) -> None:
    llm = LLM(str(checkpoint("llama")), max_num_seqs=2, max_model_len=32)
    llm.close()
    llm.close()
    with refused(EngineDeadError, "closed"):
        llm.generate("a", PARAMS)


# Conversations

CHATS: dict[str, tuple[Any, type[QuireError], list[str]]] = {
    "None": (None, InvalidParameter, ["messages must be a list such as"]),
    "text": ("hi", InvalidParameter, ["messages must be a list such as"]),
    "no messages": ([], InvalidParameter, ["messages must be a list such as"]),
    "an empty conversation": ([[]], InvalidParameter, ["messages must contain at least 1 item"]),
    "one of two conversations empty": ([[USER], []], InvalidParameter, ["conversation 1:", "at least 1 item"]),
    "a mapping for messages": (USER, InvalidParameter, ["messages must be a list such as"]),
    "message a string": (["hi"], InvalidParameter, ["messages[0]", "object"]),
    "message None": ([None], InvalidParameter, ["messages[0]", "object"]),
    "message without role": ([{"content": "hi"}], InvalidParameter, ["messages[0].role", "system, developer, user"]),
    "role unknown": ([{"role": "wizard", "content": "hi"}], InvalidParameter, ["messages[0].role", "'wizard'"]),
    "role a number": ([{"role": 5, "content": "hi"}], InvalidParameter, ["messages[0].role", "5"]),
    "no content": ([{"role": "user"}], InvalidParameter, ["messages[0].content"]),
    "content None": ([{"role": "user", "content": None}], InvalidParameter, ["messages[0].content"]),
    "content a number": ([USER, {"role": "user", "content": 5}], InvalidParameter, ["messages[1].content", "int"]),
    "content an object": ([{"role": "user", "content": {}}], InvalidParameter, ["messages[0].content", "dict"]),
    "content bytes": ([{"role": "user", "content": b"hi"}], InvalidParameter, ["messages[0].content", "bytes"]),
    "part without type": ([{"role": "user", "content": [{}]}], InvalidParameter, ["messages[0].content[0]", "type"]),
    "part without text": (
        [{"role": "user", "content": [{"type": "text"}]}],
        InvalidParameter,
        ["messages[0].content[0].text"],
    ),
    "an image": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
        UnsupportedFeature,
        ["'image_url'", "text only"],
    ),
    "half a surrogate pair": ([{"role": "user", "content": "\ud800"}], InvalidUnicode, ["messages[0].content"]),
    "key that is a number": ([{**USER, 5: "x"}], InvalidParameter, ["messages[0]", "not a string"]),
    "tool calls a string": (
        [{"role": "assistant", "content": "x", "tool_calls": "now"}],
        InvalidParameter,
        ["messages[0].tool_calls", "list"],
    ),
    "too long": ([{"role": "user", "content": "word " * 500}], PromptTooLong, [TOO_LONG]),
}
CHAT_OPTIONS: dict[str, tuple[dict[str, Any], type[QuireError], list[str]]] = {
    "template that does not compile": ({"chat_template": "{% for %}"}, InvalidParameter, ["chat template", "line 1"]),
    "template that is no file": ({"chat_template": "/no/file"}, InvalidParameter, ["chat_template '/no/file'"]),
    "template a number": ({"chat_template": 5}, InvalidParameter, ["chat_template", "got 5"]),
    "template a list": ({"chat_template": []}, InvalidParameter, ["chat_template", "got []"]),
    "template empty": ({"chat_template": ""}, InvalidParameter, ["chat_template", "non-empty"]),
    "template that fails": ({"chat_template": "{{ 1 // 0 }}"}, InvalidParameter, ["ZeroDivisionError"]),
    "template that renders nothing": ({"chat_template": "{# #}"}, InvalidParameter, ["prompt is empty"]),
    "template without end": (
        {"chat_template": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"},
        InvalidParameter,
        ["chat template"],
    ),
    "start and continue": ({"continue_final_message": True}, InvalidParameter, ["Cannot set both"]),
    "add_generation_prompt text": (
        {"add_generation_prompt": "no"},
        InvalidParameter,
        ["add_generation_prompt", "'no'"],
    ),
    "tools text": ({"tools": "now"}, InvalidParameter, ["tools must be a list"]),
    "tool text": ({"tools": ["now"]}, InvalidParameter, ["tools[0]", "object"]),
    "kwargs a list": ({"chat_template_kwargs": ["x"]}, InvalidParameter, ["chat_template_kwargs", "['x']"]),
    "kwargs with numbers as keys": ({"chat_template_kwargs": {5: 1}}, InvalidParameter, ["chat_template_kwargs"]),
    "kwargs of reserved names": (
        {"chat_template_kwargs": {"messages": [], "tokenize": True}},
        InvalidParameter,
        ["may not set: messages, tokenize"],
    ),
    "kwargs of our own names": (
        {"chat_template_kwargs": {"protect": [], "self": 1, "tools": None, "add_generation_prompt": True}},
        InvalidParameter,
        ["may not set: protect, self, tools, add_generation_prompt"],
    ),
    "kwargs that are no JSON": ({"chat_template_kwargs": {"x": object()}}, InvalidParameter, ["kwargs.x", "JSON"]),
}


@pytest.mark.parametrize("name", CHATS)
def test_wrong_conversation_is_refused(llm: LLM, name: str) -> None:
    messages, cls, parts = CHATS[name]
    with refused(cls, *parts):
        llm.chat(messages, PARAMS)


@pytest.mark.parametrize("name", CHAT_OPTIONS)
def test_wrong_chat_option_is_refused(llm: LLM, name: str) -> None:
    options, cls, parts = CHAT_OPTIONS[name]
    with refused(cls, *parts):
        llm.chat([USER], PARAMS, **options)  # type: ignore[list-item]


def test_chat_template_that_is_a_pipe_is_not_waited_for(llm: LLM, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with refused(InvalidParameter, "chat_template", "no regular file"):
        llm.chat([USER], PARAMS, chat_template=str(tmp_path / "pipe"))  # type: ignore[list-item]


def test_what_a_chat_template_leaves_out_is_said_once(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    template = "{% for one in messages %}{% if one.role == 'user' %}{{ one.content }}{% endif %}{% endfor %}"
    conversation: Any = [{"role": "system", "content": "Be brief."}, {**USER, "weight": 1}]
    with caplog.at_level(logging.WARNING):
        llm.chat([conversation, conversation], PARAMS, chat_template=template)
    for said in ("'messages[1].weight' has no effect", "leaves out system messages"):
        assert caplog.text.count(said) == 1

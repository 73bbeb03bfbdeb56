"""JSON of any kind in any field of any route is the client's mistake or none: never a fault of the server's."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from quire.server.api.params import LABELS, REFUSED
from quire.server.api.protocol.anthropic import CountTokensRequest, MessagesRequest
from quire.server.api.protocol.ollama import ChatRequest, GenerateRequest, Options, ShowRequest
from quire.server.api.protocol.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from quire.server.api.protocol.responses import ResponsesRequest
from tests.server.conftest import Running

CANARY = "canary7f"
"""In every text that is sent: it must not come back in the log."""
CONVERSATION = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "hi", "max_tokens": 2}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": CONVERSATION, "max_tokens": 2}),
    "/v1/responses": (ResponsesRequest, {"input": "hi", "max_output_tokens": 2}),
    "/v1/messages": (MessagesRequest, {"messages": CONVERSATION, "max_tokens": 2}),
    "/v1/messages/count_tokens": (CountTokensRequest, {"messages": CONVERSATION}),
    "/api/chat": (ChatRequest, {"messages": CONVERSATION, "options": {"num_predict": 2}}),
    "/api/generate": (GenerateRequest, {"prompt": "hi", "options": {"num_predict": 2}}),
    "/api/show": (ShowRequest, {}),
    "/tokenize": (TokenizeRequest, {"prompt": "hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
}
COSTLY = {"max_tokens", "max_completion_tokens", "max_output_tokens", "n"}
"""Fields in which a valid number may take long."""

TEXTS = st.sampled_from(
    ["", CANARY, f"{CANARY}\x00", f"\U0001f600{CANARY}", f"{{{{ {CANARY} }}}}", "text", "auto", "user"]
)
NUMBERS = st.sampled_from([0, 1, -1, 2, 5, 4095, 4096, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e-300, 1e300])
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
KEYS = st.sampled_from(
    [
        "type",
        "role",
        "content",
        "text",
        "format",
        "effort",
        "name",
        "tool_calls",
        "function",
        "arguments",
        "1",
        CANARY,
        "",
    ]
)
JUNK = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8
)


def fields_of(model: type[BaseModel]) -> list[str]:
    return sorted({*model.model_fields, *REFUSED, *LABELS, CANARY})


@pytest.mark.parametrize("path", ROUTES)
def test_junk_in_a_field_is_no_fault_of_the_server(
    server: Running, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, body = ROUTES[path]

    @given(field=st.sampled_from(fields_of(model)), junk=JUNK, stream=st.booleans())
    @settings(
        max_examples=60,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def hold(field: str, junk: Any, stream: bool) -> None:
        if field in COSTLY and type(junk) is int and junk > 2:
            return
        sent = {**body, **({"stream": True} if stream and "stream" in model.model_fields else {}), field: junk}
        reply = server.client.post(path, json=sent)
        assert reply.status_code < 500, (sent, reply.text)
        assert "internal_error" not in reply.text, sent

    with caplog.at_level(logging.DEBUG, "quire"):
        hold()
    assert CANARY not in caplog.text
    server.wait_idle()


ODD = {"effort": 5, "format": CANARY, "type": 5, "role": [], "content": {}, "text": 5, "1": CANARY}
WRONG: tuple[Any, ...] = (5, -1e300, CANARY, [5, CANARY], ODD, [ODD, ODD])


@pytest.mark.parametrize("path", ROUTES)
def test_every_field_may_hold_anything(server: Running, path: str, caplog: pytest.LogCaptureFixture) -> None:
    model, body = ROUTES[path]
    with caplog.at_level(logging.DEBUG, "quire"):
        for field in fields_of(model):
            for value in WRONG:
                reply = server.client.post(path, json={**body, field: value})
                assert reply.status_code < 500, (field, value, reply.text)
    assert CANARY not in caplog.text


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_every_option_may_hold_anything(server: Running, path: str) -> None:
    _, body = ROUTES[path]
    for option in [*Options.model_fields, "mirostat", "typical_p", "num_gpu", *REFUSED]:
        for value in (*WRONG, None, 0, -1, 2**63, -(2**63) - 1, True, ""):
            reply = server.client.post(path, json={**body, "options": {"num_predict": 2, option: value}})
            assert reply.status_code < 500, (option, value, reply.text)
            assert reply.status_code == 200 or set(reply.json()) == {"error"}
    server.wait_idle()


@pytest.mark.parametrize(
    "more",
    [
        {"reasoning": {"effort": 5}},
        {"reasoning": []},
        {"reasoning": {"effort": {"a": 1}}},
        {"text": {"format": "x"}},
        {"text": {"format": {"type": 5}}},
        {"text": []},
        {"metadata": {"a": "b" * 513}},
        {"metadata": {str(key): "" for key in range(17)}},
        {"include": ["x"] * 65},
    ],
)
def test_odd_values_of_responses_are_refused(server: Running, more: dict[str, Any]) -> None:
    reply = server.client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 2, **more})
    assert reply.status_code == 400, reply.text
    (name,) = more
    assert reply.json()["error"]["param"].startswith(name)


def test_an_error_is_small_however_large_the_value_that_is_wrong(server: Running) -> None:
    large = {
        "n": ["x" * 100] * 10_000,
        "stop": {str(key): "y" * 100 for key in range(4000)},
        "messages": "z" * 1_000_000,
        "k" * 1024: 1,
    }
    for name, value in large.items():
        body = {"messages": CONVERSATION, "max_tokens": 2, name: value}
        reply = server.client.post(
            "/v1/chat/completions", content=json.dumps(body), headers={"content-type": "application/json"}
        )
        assert len(reply.content) < 2048, name


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x " * 30_000, "truncate_prompt_tokens": 5, "echo": True, "n": 128}),
        ("/v1/completions", {"prompt": [[5] * 1000] * 40, "max_tokens": 1, "prompt_logprobs": 20, "n": 2}),
        ("/v1/completions", {"prompt": [5] * 1000, "max_tokens": 1, "echo": True, "logprobs": 20, "n": 64}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "assistant", "content": "y" * 60_000}],
                "echo": True,
                "n": 128,
                "truncate_prompt_tokens": 5,
            },
        ),
    ],
)
def test_a_reply_that_would_mostly_repeat_the_request_is_refused(server: Running, path: str, body: Any) -> None:
    reply = server.client.post(path, json=body)
    if reply.status_code == 200:
        assert len(reply.content) < 1 << 20
    else:
        assert "The reply would repeat" in reply.json()["error"]["message"]

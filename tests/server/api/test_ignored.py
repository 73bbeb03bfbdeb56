"""Nothing that a request says is passed over in silence: it has its effect, or is refused, or a warning names it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Running, Serve

MESSAGES = [{"role": "user", "content": "hi"}]
COMPLETION = {"prompt": "hi", "max_tokens": 1}
CHAT = {"messages": MESSAGES, "max_tokens": 1}
STRICT = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
ONE_CALL = {"tools": [STRICT], "parallel_tool_calls": False}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": {"enum": [1]}, "end": "</a>"}],
    "triggers": ["<a>"],
}


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/completions", {**COMPLETION, "truncation_side": "up"}, "truncation_side"),
        ("/v1/completions", {**COMPLETION, "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ("/v1/messages", {**CHAT, "stop": ["a"], "stop_sequences": ["b"]}, "stop and stop_sequences"),
        (
            "/v1/messages",
            {**CHAT, "messages": [{"role": "system", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
            "messages[0].role must be user",
        ),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        (
            "/v1/chat/completions",
            {**CHAT, **ONE_CALL, "tool_choice": "required", "structured_outputs": {"json_object": True}},
            "structured_outputs for another form",
        ),
    ],
)
def test_what_can_have_no_effect_is_refused(server: Running, path: str, body: dict[str, Any], named: str) -> None:
    reply = server.client.post(path, json=body)
    assert reply.status_code == 400
    assert named in reply.text


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 2}, "max_tokens has no effect"),
        ("/tokenize", {"prompt": "hi", "add_generation_prompt": True}, "add_generation_prompt has no effect"),
        ("/tokenize", {"prompt": "hi", "documents": []}, "documents has no effect"),
        ("/v1/chat/completions", {**CHAT, "documents": [{"text": "a"}]}, "documents has no effect"),
        ("/v1/chat/completions", {**CHAT, "echo": True}, "echo has no effect"),
        ("/v1/chat/completions", {**CHAT, **ONE_CALL, "structured_outputs": {"choice": ["a"]}}, "strict has no effect"),
        (
            "/v1/chat/completions",
            {**CHAT, **ONE_CALL, "response_format": TAG},
            "parallel_tool_calls has no effect: calls are only read here, since the answer follows a structural_tag",
        ),
        (
            "/v1/messages",
            {**CHAT, "thinking": {"type": "disabled", "budget_tokens": 5}},
            "thinking.budget_tokens has no effect",
        ),
        (
            "/api/generate",
            {"prompt": "hi", "raw": True, "think": False, "stream": False, "options": {"num_predict": 1}},
            "think has no effect",
        ),
        ("/api/show", {"model": "quire-tiny", "verbose": True}, "verbose has no effect"),
        (
            "/v1/chat/completions",
            {**CHAT, **ONE_CALL, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format has no effect: tool_choice asks for calls",
        ),
        (
            "/v1/responses",
            {
                "input": "hi",
                "max_output_tokens": 1,
                "tools": [{"type": "function", "name": "f"}],
                "tool_choice": {"type": "function", "name": "f"},
                "text": {"format": {"type": "json_object"}},
            },
            "text.format has no effect",
        ),
        (
            "/v1/messages",
            {
                **CHAT,
                "tools": [{"name": "f", "input_schema": {"type": "object"}}],
                "tool_choice": {"type": "any"},
                "output_config": {"format": {"type": "json_schema", "schema": {"enum": [1]}}},
            },
            "output_config.format.schema has no effect",
        ),
    ],
)
def test_what_another_field_overrules_is_named(server: Running, path: str, body: dict[str, Any], named: str) -> None:
    reply = server.client.post(path, json=body)
    assert reply.status_code == 200
    assert any(named in warning for warning in reply.json()["warnings"])


def test_an_id_of_the_clients_is_shown_by_every_api(server: Running) -> None:
    bodies = {
        "/v1/completions": COMPLETION,
        "/v1/chat/completions": CHAT,
        "/v1/messages": CHAT,
        "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    }
    for path, body in bodies.items():
        assert server.client.post(path, json={**body, "request_id": "mine"}).json()["id"].endswith("mine")


def test_items_of_responses_are_messages_like_any_other(server: Running) -> None:
    item = {"type": "message", "id": "msg_1", "status": "completed", "role": "user", "content": "hi"}
    for more, status in (({}, 200), ({"tool_calls": 5}, 400)):
        as_item = server.post("/v1/responses", input=[{**item, **more}], max_output_tokens=1)
        as_message = server.post("/v1/chat/completions", messages=[{**MESSAGES[0], **more}], max_tokens=1)
        assert (as_item.status_code, as_message.status_code) == (status, status)


@pytest.mark.parametrize("query", ["activty=true", "activity=true&activity=false"])
def test_parameters_of_a_query_are_those_of_the_route(server: Running, query: str) -> None:
    assert server.client.get(f"/v1/stats?{query}").status_code == 400
    assert server.client.get("/v1/stats?activity=true").status_code == 200


GET_ROUTES = ["/v1/models", "/v1/models/quire-tiny", "/v1/capabilities", "/version", "/load", "/metrics"]
POST_ROUTES = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/api/generate": {"prompt": "hi", "stream": False, "options": {"num_predict": 1}},
    "/tokenize": {"prompt": "hi"},
}


@pytest.mark.parametrize("path", [*GET_ROUTES, *POST_ROUTES])
def test_every_route_refuses_a_query_that_it_does_not_read(server: Running, path: str) -> None:
    body = POST_ROUTES.get(path)

    def ask(query: str) -> Any:
        return server.client.request("GET" if body is None else "POST", f"{path}?{query}", json=body)

    for query in ("temperature=0", "stream", "name[]=x", "%00=1", "beta=false", "beta=true&beta=true", "x" * 3000):
        reply = ask(query)
        assert reply.status_code == 400, (query, reply.text)
        assert len(reply.text) < 500
    assert "temperature" in ask("temperature=0").text
    for query in ("beta=true", "api-version=2024-10-21", "client_version=1.0", ""):
        assert ask(query).status_code == 200


def test_models_are_listed_up_to_a_limit(serve: Serve) -> None:
    with serve(served_model_name=("a", "b", "c")) as server:
        for query, expected in (("", "abc"), ("?limit=2", "ab"), ("?limit=1000&beta=true", "abc")):
            found = server.client.get(f"/v1/models{query}").json()["data"]
            assert [model["id"] for model in found] == list(expected)
        for query in ("limit=0", "limit=x", "limit=1001", "limit=1&limit=2", "after_id=a"):
            assert server.client.get(f"/v1/models?{query}").status_code == 400


def test_probes_may_ask_with_any_query(server: Running) -> None:
    for path in ("/health", "/ready", "/ping", "/"):
        assert server.client.get(f"{path}?probe=1").status_code == 200


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=UTF-8", 200),
        ('application/json; charset="utf-8"', 200),
        ("application/json; charset=us-ascii; x=y", 200),
        ("application/json; charset=utf-16", 415),
        ("application/json; charset=latin-1", 415),
        ("application/jsonp", 415),
    ],
)
def test_a_body_says_that_it_is_json_in_utf_8(server: Running, kind: str, status: int) -> None:
    reply = server.client.post(
        "/v1/completions", content=b'{"prompt": "hi", "max_tokens": 1}', headers={"content-type": kind}
    )
    assert reply.status_code == status


def test_the_document_of_all_routes_is_made_by_the_pool(server: Running) -> None:
    """And an unknown route, which tells the nearest one, needs none."""
    app = server.app
    app.openapi_schema = None
    assert "Did you mean /v1/completions?" in server.client.get("/v1/completion").text
    assert "Did you mean" not in server.client.get("/" + "v1/completions" * 99).text
    assert app.openapi_schema is None
    assert "/v1/completions" in server.client.get("/openapi.json").json()["paths"]

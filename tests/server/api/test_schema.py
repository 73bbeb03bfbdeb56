"""The OpenAPI document, held against the server with data that fits it and data that does not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Config, GenerationMode, openapi
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from tests.server.conftest import Running

OPERATIONS = [
    ("delete", "/v1/responses/{response_id}"),
    ("get", "/api/ps"),
    ("get", "/api/tags"),
    ("get", "/api/version"),
    ("get", "/health"),
    ("get", "/load"),
    ("get", "/metrics"),
    ("get", "/ready"),
    ("get", "/v1/capabilities"),
    ("get", "/v1/models"),
    ("get", "/v1/models/{model}"),
    ("get", "/v1/responses/{response_id}"),
    ("get", "/v1/responses/{response_id}/input_items"),
    ("get", "/v1/stats"),
    ("get", "/v1/trace"),
    ("get", "/version"),
    ("post", "/api/chat"),
    ("post", "/api/generate"),
    ("post", "/api/show"),
    ("post", "/detokenize"),
    ("post", "/tokenize"),
    ("post", "/v1/chat/completions"),
    ("post", "/v1/completions"),
    ("post", "/v1/messages"),
    ("post", "/v1/messages/count_tokens"),
    ("post", "/v1/responses"),
]
CHECKS: Any = (
    not_a_server_error,
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
REFUSALS = Config.from_dict({"checks": {"negative_data_rejection": {"expected-statuses": [400, 404, 405, 413, 422]}}})
"""413: a list that is longer than the document allows may be of more values than the server reads."""
SMALL = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2, "n": 2}


def costs_much(count: Any) -> bool:
    """Whether a number of tokens is valid, and may be far more than two."""
    return count is None or (type(count) is int and (count < 0 or 2 < count < 200))


def made_cheap(body: Any) -> Any:
    """A body as it is, but for counts that are valid and would take long."""
    if not isinstance(body, dict):
        return body
    options = body.get("options")
    if isinstance(options, dict):
        body = {
            **body,
            "options": {**options, **({"num_predict": 2} if costs_much(options.get("num_predict")) else {})},
        }
    small = {name: most for name, most in SMALL.items() if type(body.get(name)) is int and body[name] > most}
    return {
        "max_tokens": 2,
        "max_output_tokens": 2,
        **body,
        **{name: v for name, v in small.items() if body[name] < 200},
    }


def test_the_document_lists_these_operations(server: Running) -> None:
    paths = server.client.get("/openapi.json").json()["paths"]
    assert sorted((method, path) for path, methods in paths.items() for method in methods) == OPERATIONS


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_replies_are_what_the_document_says(server: Running, method: str, path: str, mode: GenerationMode) -> None:
    operation = openapi.from_url(f"{server.url}/openapi.json", config=REFUSALS)[path][method]
    if mode is GenerationMode.NEGATIVE and method != "post":
        pytest.skip("nothing to get wrong")

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=20,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def hold(case: Any) -> None:
        case.body = made_cheap(case.body)
        case.call_and_validate(checks=CHECKS, timeout=60)

    hold()
    server.wait_idle()

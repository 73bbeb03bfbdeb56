"""How each API says an error, and which API a route belongs to."""

from __future__ import annotations

from typing import Any

from quire.server.http.errors import ApiError, ErrorShape, shown_message

ANTHROPIC_PREFIX = "/v1/messages"
OLLAMA_PREFIX = "/api"

_OPENAI_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _openai(error: ApiError) -> dict[str, Any]:
    default = "invalid_request_error" if error.status_code < 500 else "server_error"
    kind = _OPENAI_TYPES.get(error.status_code, default)
    return {"error": {"message": shown_message(error), "type": kind, "param": error.param, "code": error.code}}


def _anthropic(error: ApiError) -> dict[str, Any]:
    default = "invalid_request_error" if error.status_code < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(error.status_code, default)
    return {"type": "error", "error": {"type": kind, "message": shown_message(error)}}


def _ollama(error: ApiError) -> dict[str, Any]:
    return {"error": shown_message(error)}


OPENAI_ERRORS = ErrorShape(_openai)
ANTHROPIC_ERRORS = ErrorShape(_anthropic, event_name="error")
OLLAMA_ERRORS = ErrorShape(_ollama)


def error_shape(route: str) -> ErrorShape:
    """How errors of a route are said, whether the route exists or not. The path is below the root path."""
    shapes = {ANTHROPIC_PREFIX: ANTHROPIC_ERRORS, OLLAMA_PREFIX: OLLAMA_ERRORS}
    found = (shape for prefix, shape in shapes.items() if route == prefix or route.startswith(f"{prefix}/"))
    return next(found, OPENAI_ERRORS)

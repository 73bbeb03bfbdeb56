"""How each API says an error, and which API a route belongs to."""

from __future__ import annotations

from typing import Any

from quire.server.http.errors import ApiError, ErrorShape, shown_message

ANTHROPIC_PREFIX = "/v1/messages"

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


OPENAI_ERRORS = ErrorShape(_openai)
ANTHROPIC_ERRORS = ErrorShape(_anthropic, event_name="error")


def error_shape(route: str) -> ErrorShape:
    """How errors of a route are said, whether the route exists or not. The path is below the root path."""
    is_anthropic = route == ANTHROPIC_PREFIX or route.startswith(f"{ANTHROPIC_PREFIX}/")
    return ANTHROPIC_ERRORS if is_anthropic else OPENAI_ERRORS

"""Every failure as a status and a message. How an API says it is the API's own: its `ErrorShape`.

Message texts are part of the interface: client libraries match substrings such as "maximum context length is".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import (
    EngineDeadError,
    EngineError,
    PromptTooLong,
    QuireError,
    RequestError,
    UnsupportedFeature,
    shown,
)
from quire.log import get_logger, trace_of

log = get_logger(__name__)

MAX_MESSAGE = 2000
SCOPE_SHAPE = "quire.errors"
"""Where a scope says how the API that was asked shows its errors; `ErrorShapes` writes it."""
JSON = "application/json"

_CODES = {404: "not_found", 405: "method_not_allowed"}
_FIELDS = {"prompt_token_ids": "prompt"}
"""What the engine calls a field -> what a client calls it."""


class ApiError(HTTPException):
    """A request that is answered with an error. The message says what happened, the numbers, and what to do."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.code = code
        self.message = message
        self.param = param


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """A field that is refused."""
    return ApiError(400, code, message, param=param)


def renamed(error: QuireError, path: str, place: str) -> ApiError:
    """An error about a field under the name that the client has sent."""
    found = as_api_error(error)
    is_name = "[" in path or found.message.startswith(f"{path} ")  # and no word of a sentence
    message = found.message.replace(path, place, 1) if is_name else found.message
    return ApiError(found.status_code, found.code, message, param=place[:200])


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about fields name those that the client has sent: `names` has ours -> the client's."""
    try:
        yield
    except RequestError as error:
        fields = dict(error.fields)
        if "parameter" in fields:
            fields["parameter"] = names.get(fields["parameter"], fields["parameter"])
        raise type(error)(_with_names(error.message, names), **fields) from error
    except ApiError as error:
        message, param = _with_names(error.message, names), names.get(str(error.param), error.param)
        raise ApiError(error.status_code, error.code, message, param=param, headers=error.headers) from error


def _with_names(message: str, names: Mapping[str, str]) -> str:
    for name, sent in names.items():
        begins = "" if "_" in name else "^"  # a word of a sentence is no field
        message = re.sub(rf"{begins}\b{name}\b", sent, message)
    return message


def overloaded(message: str, retry_after: int = 1) -> ApiError:
    """A request that is refused for load, and when to try again, in seconds."""
    return ApiError(429, "rate_limit_exceeded", message, headers={"Retry-After": str(retry_after)})


def as_api_error(error: Exception) -> ApiError:
    """Any exception as what the client is told; what only concerns the operator is logged instead."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _of_validation(error.errors())
    if isinstance(error, QuireError):
        return _of_engine(error)
    if isinstance(error, StarletteHTTPException):
        return ApiError(
            error.status_code, _CODES.get(error.status_code, "invalid_value"), str(error.detail), headers=error.headers
        )
    log.error("request failed: %s", trace_of(error))
    return ApiError(500, "internal_error", "The server failed on this request. The cause is in its log.")


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How an API says an error."""

    body: Callable[[ApiError], dict[str, Any]]
    """Makes the JSON object of a reply, or of an event in a stream that has begun."""
    event_name: str | None = None
    """The name of that event."""


class ErrorShapes:
    """Finds out once for each request how its errors are said: before it is routed, while it is answered, in a stream.

    A proxy that serves this server under a root path may take it off the path or leave it on: here both become the
    same. The root path is left alone where routes of the application begin with it.
    """

    def __init__(self, app: ASGIApp, shape_of: Callable[[str], ErrorShape], may_repeat_root_path: bool) -> None:
        self._app = app
        self._shape_of = shape_of
        self._may_repeat = may_repeat_root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http":
            if self._may_repeat:
                _take_root_path_once(scope)
            scope[SCOPE_SHAPE] = self._shape_of(route_of(scope))
        await self._app(scope, receive, send)


def _take_root_path_once(scope: Scope) -> None:
    """The connection puts the root path before what the client sent, which may begin with it already."""
    root = scope.get("root_path", "")
    if root and route_of(scope).startswith(f"{root}/"):
        scope["path"] = scope["path"].removeprefix(root)
        scope["raw_path"] = scope["raw_path"].removeprefix(root.encode())


def shown_message(error: ApiError) -> str:
    """The message, short enough and encodable."""
    return error.message[:MAX_MESSAGE].encode("utf-8", "backslashreplace").decode()


def shape_in(scope: MutableMapping[str, Any]) -> ErrorShape:
    """How errors of this request are said."""
    shape = scope[SCOPE_SHAPE]
    assert isinstance(shape, ErrorShape)
    return shape


def route_of(scope: MutableMapping[str, Any]) -> str:
    """The path as routes see it, whatever a proxy puts before it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def error_response(error: ApiError, scope: MutableMapping[str, Any]) -> Response:
    """The reply that carries an error, in the form of the API that was asked."""
    body = msgspec.json.encode(shape_in(scope).body(error))
    return Response(body, error.status_code, error.headers, JSON)


def _of_engine(error: QuireError) -> ApiError:
    if isinstance(error, EngineError):
        return _of_engine_fault(error)
    param = error.fields.get("parameter")
    if isinstance(error, PromptTooLong):
        param = "prompt"
    param = _FIELDS.get(str(param), param)
    message = error.message.replace("prompt_token_ids", "prompt")
    of_content = isinstance(error, UnsupportedFeature) and str(param).startswith("messages[")
    return ApiError(error.status, "unsupported_content" if of_content else error.code, message, param=param)


def _of_engine_fault(error: EngineError) -> ApiError:
    """What happened to the engine is for its operator; what it refuses on purpose is for the client."""
    message = error.message
    if isinstance(error, EngineDeadError) or type(error) is EngineError:
        log.error("engine: %s", error.message)
        message = "The engine failed. The cause is in the server's log."
    retry_after = error.fields.get("retry_after", 1)
    headers = {"Retry-After": str(retry_after)} if error.status in (429, 503) else {}
    if error.status == 503:
        headers["Connection"] = "close"  # a server that drains must not be asked again over this connection
    code = "rate_limit_exceeded" if error.status == 429 else error.code
    return ApiError(error.status, code, message, headers=headers)


_KINDS = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "string_unicode": "text without unpaired surrogates",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def _of_validation(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first problem in a sentence; the others only counted, so that a reply stays small."""
    first = problems[0]
    param = _path(first["loc"])
    what = f"{param} " if param else "The request body "
    if first["type"] == "missing" and param:
        code, message = "missing_required_parameter", f"Missing required parameter: '{param}'."
    elif first["type"] == "missing":
        code, message = "invalid_json", "The request has no body; send a JSON object."
    elif first["type"] == "kind":
        code, message = "invalid_type", f"{what}{first['msg']}; got {shown(first['input'])}."
    elif first["type"] in _KINDS:
        code, message = "invalid_type", f"{what}must be {_KINDS[first['type']]}; got {shown(first['input'])}."
    else:
        reason = str(first["msg"])
        code = "invalid_value"
        message = f"{what}is refused: {reason[:1].lower()}{reason[1:]}; got {shown(first['input'])}."
    if len(problems) > 1:
        message += f" ({len(problems) - 1} more like it.)"
    return ApiError(400, code, message, param=param or None)


def _path(loc: Sequence[str | int]) -> str:
    """messages[0].role from ("body", "messages", 0, "role")."""
    text = ""
    for part in loc[1:]:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text[:200]

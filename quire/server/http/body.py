"""Request bodies: read within limits, decoded strictly, validated, and none of it for long on the event loop."""

from __future__ import annotations

import asyncio
import re
import typing
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from quire.errors import QuireError
from quire.server.http.body_budget import BodyBudget
from quire.server.http.errors import ApiError, as_api_error, error_response
from quire.server.http.query import check_query
from quire.server.http.streaming import unless_gone
from quire.server.http.strict_json import SMALL, read_json
from quire.server.service import Service, context_of
from quire.server.settings import ServerSettings
from quire.utils import work_pool
from quire.utils.cancellation import check_cancelled

BYTES_PER_VALUE = 64
"""What a value of a body takes in memory, about, beside its text."""


CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii")
"""That a body may say it has: JSON is UTF-8, and ASCII is a part of it."""
HEAVY = 256 << 10
"""Bytes of a body whose work must leave a thread to others."""


@dataclass(frozen=True, slots=True)
class BodyReader:
    """From the bytes of a request to its model."""

    service: Service
    model: type[BaseModel]
    takes_any_type: bool = False
    """The API's own server looks at no Content-Type, so its clients send none, or another. Web pages must still send
    JSON's, for which a browser asks first."""

    async def read(self, request: Request) -> BaseModel:
        """The validated body; a larger one is read by the work pool.

        Raises: ApiError 400, 408, 413, 415, 429, 503; RequestValidationError; ClientDisconnect.
        """
        service, settings = self.service, self.service.settings
        _check_type(request, takes_any=self.takes_any_type)
        _check_size(request, settings.max_body_size)
        data = await _received(request, settings, service.body_budget)
        if not data:
            raise ApiError(400, "invalid_json", "The request has no body; send a JSON object.")
        work_pool.owner.set(context_of(request.scope).key)
        work_pool.is_heavy.set(len(data) > HEAVY)
        if len(data) <= SMALL:
            body, num_values = self._model_of(data)
        else:
            body, num_values = await unless_gone(request, settings, service.work.run(self._model_of, data))
        service.body_budget.charge(request.scope, BYTES_PER_VALUE * num_values)
        return body

    def _model_of(self, data: bytearray) -> tuple[BaseModel, int]:
        value, num_values = read_json(data, self.service.settings.max_body_values)
        check_cancelled()
        body = _validated(self.model, value)
        if isinstance(body, list):
            raise RequestValidationError(body)
        return body, num_values


def _validated(model: type[BaseModel], value: Any) -> BaseModel | list[dict[str, Any]]:
    """The model of a value, or what is wrong with it. Not as an exception: pydantic's would keep the value alive."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        return [{**problem, "loc": ("body", *problem["loc"])} for problem in problems]


def strict_route(service: Service, *, takes_any_type: bool = False) -> type[APIRoute]:
    """The kind of route whose bodies are read by the rules of this file. Its endpoints take `body` and `request`.

    `takes_any_type`: see `BodyReader`.
    """

    class StrictRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            model = typing.get_type_hints(self.endpoint).get("body")
            plain = super().get_route_handler()
            answer = plain if model is None else _answer(self.endpoint, BodyReader(service, model, takes_any_type))
            names = [parameter.alias for parameter in self.dependant.query_params]

            async def strict_handle(request: Request) -> Response:
                try:
                    if request.scope["query_string"]:
                        check_query(request, self.path, names)
                    return await answer(request)
                except ClientDisconnect:
                    return Response(status_code=499)  # nobody reads it
                except (HTTPException, RequestValidationError, QuireError):
                    raise
                except Exception as error:  # logged here without its text, which may be the client's
                    return error_response(as_api_error(error), request.scope)

            return strict_handle

        async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
            """Answer; what the body was charged is given back when the last byte of the reply is sent."""
            try:
                await super().handle(scope, receive, send)
            finally:
                service.body_budget.release(scope)

    return StrictRoute


def _answer(
    endpoint: Callable[..., Coroutine[Any, Any, Response]], reader: BodyReader
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def answer(request: Request) -> Response:
        return await endpoint(body=await reader.read(request), request=request)

    return answer


_CLOSE = {"Connection": "close"}


async def _received(request: Request, settings: ServerSettings, budget: BodyBudget) -> bytearray:
    """All bytes of a body, charged as they come. No `bytes`: 16 MiB more would be copied on the loop."""
    limit, patience = settings.max_body_size, settings.body_timeout
    received = bytearray()
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(patience):
                chunk = await anext(stream, None)
        except TimeoutError:
            raise ApiError(
                408, "request_timeout", f"No byte of the request body came for {patience} s.", headers=_CLOSE
            ) from None
        if chunk is None:
            return received
        if len(received) + len(chunk) > limit:
            raise _too_large(len(received) + len(chunk), limit)
        budget.charge(request.scope, len(chunk))
        received += chunk


def _check_type(request: Request, *, takes_any: bool) -> None:
    kind, _, parameters = request.headers.get("content-type", "").lower().partition(";")
    charset = re.search(r"charset=[\"' ]*([^\"' ;]*)", parameters)
    is_wanted = kind.strip() == "application/json" or (takes_any and not _is_of_web_page(request))
    if not is_wanted or (charset is not None and charset[1] not in CHARSETS):
        raise ApiError(
            415,
            "unsupported_media_type",
            "Content-Type must be application/json, in UTF-8; with curl: -H 'Content-Type: application/json'.",
            headers=_CLOSE,
        )


def _is_of_web_page(request: Request) -> bool:
    """Whether a browser has sent it for a page: with a body it always says from where."""
    return any(name in request.headers for name in ("origin", "sec-fetch-site"))


def _check_size(request: Request, limit: int) -> None:
    coding = request.headers.get("content-encoding", "identity").lower()
    if coding != "identity":
        raise ApiError(
            415, "unsupported_media_type", f"Content-Encoding {coding[:32]} is not supported.", headers=_CLOSE
        )
    length = request.headers.get("content-length")
    if length is not None and length.isdecimal() and int(length[:20]) > limit:
        raise _too_large(int(length[:20]), limit)


def _too_large(size: int, limit: int) -> ApiError:
    return ApiError(
        413, "content_too_large", f"The request body has {size} bytes or more; the limit is {limit}.", headers=_CLOSE
    )

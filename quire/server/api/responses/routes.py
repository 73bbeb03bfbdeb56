"""The routes of /v1/responses: create, and what was stored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from quire.errors import shown
from quire.server.api.protocol.responses import DeletedResponse, InputItems, ResponseReply, ResponsesRequest
from quire.server.api.responses.input_items import listed
from quire.server.api.responses.reply import ResponseWriter
from quire.server.api.responses.store import ResponseStore, StoredResponse
from quire.server.http.body import strict_route
from quire.server.http.errors import ApiError, invalid
from quire.server.http.replies import SEND_PIECE, PiecedReply, reply_of
from quire.server.http.streaming import STREAMED, EventStream, json_reply, unless_gone
from quire.server.service import Service, context_of
from quire.server.settings import ServerSettings

BYTES_PER_NUMBER = 64
"""Of stored items, to decode as many as take as long as a number of a reply."""


def routes(service: Service) -> APIRouter:
    """The routes, with a store of their own."""
    router = APIRouter(route_class=strict_route(service))
    store = store_of(service.settings)

    @router.post("/v1/responses", response_model=ResponseReply, responses=STREAMED)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Answer an input."""
        model = service.check_model(body.model, is_given="model" in body.model_fields_set)
        reply = ResponseWriter(service, store, context_of(request.scope), body, model)
        service.body_budget.charge(request.scope, reply.num_stored_bytes)
        if body.stream:
            return EventStream(reply.stream(), service.settings, end=b"", error=reply.error_event)
        return await unless_gone(request, service.settings, reply.whole())

    @router.get("/v1/responses/{response_id}", response_model=ResponseReply)
    async def get_response(response_id: str, request: Request) -> Response:
        """A stored response, as it was answered."""
        reply = _found(store, request, response_id).reply
        return PiecedReply([reply[begin : begin + SEND_PIECE] for begin in range(0, len(reply), SEND_PIECE)])

    @router.delete("/v1/responses/{response_id}", response_model=DeletedResponse)
    async def delete_response(response_id: str, request: Request) -> Response:
        """Forget a stored response."""
        if not store.delete(context_of(request.scope).key, response_id):
            raise _not_found(store, response_id)
        return json_reply({"id": response_id, "object": "response", "deleted": True})

    @router.get("/v1/responses/{response_id}/input_items", response_model=InputItems)
    async def list_input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """The input of a stored response, a page at a time."""
        found = _found(store, request, response_id)
        size = found.turn.num_bytes // BYTES_PER_NUMBER
        return await reply_of(service.work, lambda: _page(found, limit, order, after), size)

    return router


def store_of(settings: ServerSettings) -> ResponseStore:
    """The store of a server."""
    why_off = ""
    if settings.api_server_count > 1:
        why_off = (
            "this server has several processes for HTTP (--api-server-count), which share no responses, and the next "
            "request may reach another one"
        )
    elif not settings.response_store_size:
        why_off = "this server stores no responses (--response-store-size 0)"
    return ResponseStore(settings.response_store_size, settings.max_stored_responses, why_off)


def _found(store: ResponseStore, request: Request, response_id: str) -> StoredResponse:
    found = store.get(context_of(request.scope).key, response_id)
    if found is None:
        raise _not_found(store, response_id)
    return found


def _not_found(store: ResponseStore, response_id: str) -> ApiError:
    why = "" if store.is_on else f" {store.why_off[0].upper()}{store.why_off[1:]}."
    return ApiError(404, "not_found", f"Response with id {shown(response_id)} not found.{why}")


def _page(found: StoredResponse, limit: int, order: str, after: str | None) -> dict[str, Any]:
    """A page of input items. All of them are decoded, since an item may have an id of its own."""
    inputs = found.turn.items[: found.turn.num_inputs]
    numbered = [(f"item_{found.id.removeprefix('resp_')}_{index}", item) for index, item in enumerate(inputs)]
    items = [listed(msgspec.json.decode(item), item_id) for item_id, item in numbered]
    if order == "desc":
        items.reverse()
    begin = 0
    if after is not None:
        places = [index for index, item in enumerate(items) if item["id"] == after]
        if not places:
            raise invalid("after", f"after: there is no input item with id {shown(after)}.")
        begin = places[-1] + 1
    page = items[begin : begin + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + limit < len(items),
    }

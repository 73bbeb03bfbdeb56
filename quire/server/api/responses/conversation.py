"""What a request says to the model, with what is stored of the conversation before it; and how a turn is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.errors import shown
from quire.server.api.protocol.responses import ResponsesRequest
from quire.server.api.responses.input_items import InputReader, kind_of
from quire.server.api.responses.request import own_items
from quire.server.api.responses.store import ResponseStore, StoredResponse, Turn
from quire.server.http.errors import ApiError, invalid
from quire.server.http.replies import Encode, encode_in_pieces

_decode = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class Input:
    """The turns before a request, and its own items."""

    previous: Turn | None
    own: Sequence[dict[str, Any] | bytes]
    """In the request's order; an item as JSON is a stored one to which it refers."""
    num_stored_bytes: int
    """Of what is stored, and has not come with the request."""

    def read(self, instructions: str | None) -> InputReader:
        """The conversation as messages.

        Raises: ApiError naming the item.
        """
        reader = InputReader(instructions)
        for turn in () if self.previous is None else self.previous.history():
            for item in turn.items:
                reader.read(_decode(item), "previous_response_id")
        for index, own in enumerate(self.own):
            reader.read(_decode(own) if isinstance(own, bytes) else own, f"input[{index}]")
        reader.finish()
        return reader

    def encoded(self) -> list[bytes]:
        """The own items as JSON."""
        return [own if isinstance(own, bytes) else encode_in_pieces(own) for own in self.own]


def stored(response: dict[str, Any], inputs: Sequence[bytes], previous: Turn | None, write: Encode) -> StoredResponse:
    """A finished response to some items, to be stored."""
    outputs = [write(_without_logprobs(item)) for item in response["output"]]
    turn = Turn([*inputs, *outputs], len(inputs), previous)
    return StoredResponse(response["id"], write(response), turn, [item["id"] for item in response["output"]])


def find_input(body: ResponsesRequest, store: ResponseStore, owner: int, max_bytes: int) -> Input:
    """The input of a request. What it takes from the store may have `max_bytes`, like a body.

    Raises: ApiError for what is not stored, or too much.
    """
    previous = None if body.previous_response_id is None else _previous(body.previous_response_id, store, owner)
    own: list[dict[str, Any] | bytes] = []
    for index, item in enumerate(own_items(body)):
        own.append(_referred(item, f"input[{index}]", store, owner) if kind_of(item) == "item_reference" else item)
    turns = [] if previous is None else previous.history()
    size = sum(turn.num_bytes for turn in turns) + sum(len(item) for item in own if isinstance(item, bytes))
    if size > max_bytes:
        field = "input" if previous is None else "previous_response_id"
        raise invalid(
            field,
            f"{field} adds {size} stored bytes to the conversation; the limit is {max_bytes} (--max-body-size). Begin "
            "a new conversation.",
        )
    return Input(previous, own, size)


def _previous(response_id: str, store: ResponseStore, owner: int) -> Turn:
    if not store.is_on:
        raise ApiError(
            400,
            "unsupported_parameter",
            f"previous_response_id is not supported: {store.why_off}. Send the whole conversation as input.",
            param="previous_response_id",
        )
    found = store.get(owner, response_id)
    if found is None:
        raise invalid(
            "previous_response_id",
            f"Previous response with id {shown(response_id)} not found. It was not stored, was deleted, or had to make "
            "room for newer ones (--response-store-size). Send the whole conversation as input.",
            "previous_response_not_found",
        )
    return found.turn


def _referred(item: dict[str, Any], place: str, store: ResponseStore, owner: int) -> bytes:
    item_id = item.get("id")
    if not isinstance(item_id, str):
        raise invalid(f"{place}.id", f"{place}.id must be the id of an item; got {shown(item_id)}.")
    found = store.item(owner, item_id)
    if found is None:
        why = f": {store.why_off}" if not store.is_on else ""
        raise invalid(
            f"{place}.id",
            f"{place}.id: item with id {shown(item_id)} not found among the outputs of stored responses{why}. Send the "
            "item itself.",
        )
    return found


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    """An output item as it is sent back to the model."""
    if item["type"] != "message":
        return item
    content = [{name: value for name, value in part.items() if name != "logprobs"} for part in item["content"]]
    return {**item, "content": content}

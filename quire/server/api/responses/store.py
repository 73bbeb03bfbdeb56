"""`ResponseStore`: responses that clients may ask for again, and continue from. In memory, bounded, by API key."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

BYTES_PER_RESPONSE = 2048
BYTES_PER_ITEM = 256
"""What they take in memory, about, beside their text."""


@dataclass(slots=True, eq=False)
class Turn:
    """What a request and its answer add to a conversation. Turns that build on each other share their beginning."""

    items: Sequence[bytes]
    """The input, then the output, each item as JSON."""
    num_inputs: int
    previous: Turn | None
    num_users: int = field(default=0, init=False)
    """Stored responses and turns that need it. Without any it is counted no more."""

    @property
    def num_bytes(self) -> int:
        """What it takes in memory, about."""
        return sum(map(len, self.items)) + BYTES_PER_ITEM * len(self.items)

    def history(self) -> list[Turn]:
        """The turns of the conversation up to this one, oldest first."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.previous
        return turns[::-1]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it was answered."""

    id: str
    reply: bytes
    turn: Turn
    output_ids: Sequence[str]

    @property
    def num_bytes(self) -> int:
        """What it takes in memory beside its turn, about."""
        return len(self.reply) + BYTES_PER_RESPONSE + BYTES_PER_ITEM * len(self.output_ids)


@dataclass(slots=True)
class _Owner:
    """What one API key has stored."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    """By id, oldest first."""
    items: dict[str, bytes] = field(default_factory=dict)
    """Items of their outputs, by id."""
    num_bytes: int = 0


class ResponseStore:
    """Responses by owner and id. A full store drops the oldest one of the owner who has most: no owner loses what is
    within an equal share. May be used by several threads.
    """

    def __init__(self, max_bytes: int, max_responses: int, why_off: str = "") -> None:
        """`why_off` says why nothing is stored, if nothing is."""
        self.why_off = why_off
        self.max_bytes = max_bytes
        self.max_responses = max_responses
        self._owners: dict[int, _Owner] = {}
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        """Whether responses are stored."""
        return not self.why_off

    @property
    def num_bytes(self) -> int:
        """What all responses take, about."""
        return sum(owner.num_bytes for owner in self._owners.values())

    @property
    def num_responses(self) -> int:
        """How many there are."""
        return sum(len(owner.responses) for owner in self._owners.values())

    def put(self, owner_id: int, response: StoredResponse) -> bool:
        """Store a response, in place of one with the same id. Whether it can be: it may be too large."""
        with self._lock:
            if response.num_bytes + sum(turn.num_bytes for turn in response.turn.history()) > self.max_bytes:
                return False
            owner = self._owners.setdefault(owner_id, _Owner())
            self._drop(owner, response.id)
            owner.responses[response.id] = response
            outputs = response.turn.items[response.turn.num_inputs :]
            owner.items.update(zip(response.output_ids, outputs, strict=True))
            owner.num_bytes += response.num_bytes
            _use(owner, response.turn)
            self._make_room()
            return response.id in owner.responses

    def get(self, owner_id: int, response_id: str) -> StoredResponse | None:
        """An owner's response."""
        with self._lock:
            owner = self._owners.get(owner_id)
            return None if owner is None else owner.responses.get(response_id)

    def item(self, owner_id: int, item_id: str) -> bytes | None:
        """An item of the output of one of an owner's responses, as JSON."""
        with self._lock:
            owner = self._owners.get(owner_id)
            return None if owner is None else owner.items.get(item_id)

    def delete(self, owner_id: int, response_id: str) -> bool:
        """Forget an owner's response; whether it was there. What others build on stays in their conversation."""
        with self._lock:
            owner = self._owners.get(owner_id)
            return owner is not None and self._drop(owner, response_id)

    def _make_room(self) -> None:
        while self.num_bytes > self.max_bytes:
            self._drop_oldest(max(self._owners.values(), key=lambda owner: owner.num_bytes))
        while self.num_responses > self.max_responses:
            self._drop_oldest(max(self._owners.values(), key=lambda owner: len(owner.responses)))

    def _drop_oldest(self, owner: _Owner) -> None:
        self._drop(owner, next(iter(owner.responses)))

    def _drop(self, owner: _Owner, response_id: str) -> bool:
        response = owner.responses.pop(response_id, None)
        if response is None:
            return False
        for item_id in response.output_ids:
            del owner.items[item_id]
        owner.num_bytes -= response.num_bytes
        _leave(owner, response.turn)
        return True


def _use(owner: _Owner, last: Turn) -> None:
    """Count one more user of a turn. The first one makes it count, and be a user of the turn before it."""
    turn: Turn | None = last
    while turn is not None:
        turn.num_users += 1
        if turn.num_users > 1:
            return
        owner.num_bytes += turn.num_bytes
        turn = turn.previous


def _leave(owner: _Owner, last: Turn) -> None:
    """Take back what `_use` did."""
    turn: Turn | None = last
    while turn is not None:
        turn.num_users -= 1
        if turn.num_users:
            return
        owner.num_bytes -= turn.num_bytes
        turn = turn.previous

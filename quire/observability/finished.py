"""`FinishedRequests`: when the last requests of a core came and how long they were, for whoever records the traffic.

The core writes, fronts read what it looks like as bytes. Holds times and counts: no id, no token and no text.
"""

from __future__ import annotations

import os
import re
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from quire.observability.flight_recorder import Outcome

CAPACITY = 4096
"""Requests that are kept: as many may finish between two looks without one being missed."""
_HEADER = struct.Struct("<QdQ")
"""The core's number, the time, requests since the core's start."""
_RECORD = struct.Struct("<d4IB3x")
_MAX_U32 = (1 << 32) - 1
_CURSOR = re.compile(r"([0-9a-f]{16})-([0-9]{1,18})", re.ASCII)


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One request that is no longer here."""

    arrived_at: float
    """When it went to the core."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Of the prompt, found in the prefix cache."""
    num_output_tokens: int
    """Of all branches."""
    num_branches: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class FinishedPage:
    """Requests that have finished since a cursor, in the order in which they did."""

    cursor: str
    """Where the next page begins."""
    now: float
    """By the clock of `arrived_at`."""
    num_missed: int | None
    """Requests between the last page and this one that are kept no more; None: another core has come, and nobody knows
    how many were with the last one."""
    requests: list[FinishedRequest]


class FinishedRequests:
    """Keeps the last ones."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._core = int.from_bytes(os.urandom(8), "little")
        self._num_requests = 0
        self._records: deque[bytes] = deque(maxlen=CAPACITY)

    def add(
        self,
        arrived_at: float,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        num_output_tokens: int,
        num_branches: int,
        outcome: Outcome,
    ) -> None:
        """Take down one that has finished; in the core's clock."""
        counts = (num_prompt_tokens, max(0, num_cached_tokens), num_output_tokens, num_branches)
        self._records.append(_RECORD.pack(arrived_at, *(min(count, _MAX_U32) for count in counts), outcome))
        self._num_requests += 1

    def snapshot(self) -> bytes:
        """All that is kept, for `finished_since`."""
        return _HEADER.pack(self._core, self._clock(), self._num_requests) + b"".join(self._records)


def finished_since(memory: bytes, cursor: str, most: int) -> FinishedPage:
    """The page that begins at a cursor, of at most `most` requests. The empty cursor means now: a page without any.

    Raises: ValueError for what is no cursor.
    """
    core, now, num_requests = _HEADER.unpack_from(memory)
    oldest = num_requests - (len(memory) - _HEADER.size) // _RECORD.size
    first, num_missed = num_requests, 0 if cursor == "" else None
    if cursor:
        begin = _position(cursor, core)
        if begin is not None and begin > num_requests:
            raise ValueError(f"{cursor} lies ahead of the {num_requests} requests that have finished")
        first = oldest if begin is None else max(begin, oldest)
        num_missed = None if begin is None else first - begin
    last = min(first + most, num_requests)
    requests = [_request(memory, index - oldest) for index in range(first, last)]
    return FinishedPage(f"{core:016x}-{last}", now, num_missed, requests)


def _position(cursor: str, core: int) -> int | None:
    """Where a cursor stands; None when it is another core's."""
    match = _CURSOR.fullmatch(cursor)
    if match is None:
        raise ValueError("it is no cursor; take one from a reply")
    return int(match[2]) if int(match[1], 16) == core else None


def _request(memory: bytes, index: int) -> FinishedRequest:
    values = _RECORD.unpack_from(memory, _HEADER.size + index * _RECORD.size)
    fields = [*values[:-1], Outcome(values[-1])]
    return FinishedRequest(*fields)

"""Requests and sequences in progress and requests started, by API key, over all fronts of a server.

Memory that fronts share and that has no name: each writes its own row, all read all. Every number has one writer, so
nothing is locked; fronts that look at the same moment may exceed a limit by one request each.
"""

from __future__ import annotations

import mmap
import os
import tempfile

from quire.utils.math import keeps_share

WINDOW_S = 60
_SECONDS = 64
"""Starts are kept for so many seconds, each as its second and how many there were in it."""
_REQUESTS, _SEQUENCES, _STARTS = range(3)
"""Columns: two counts, then the starts."""
_COLUMNS = _STARTS + 2 * _SECONDS
_WIDTH = 8


class SharedCounts:
    """The counts of `num_fronts` fronts, of which this process is the one with number `front`."""

    def __init__(self, num_fronts: int = 1, num_keys: int = 0, *, front: int = 0, descriptor: int = -1) -> None:
        self._num_fronts = num_fronts
        self._num_keys = max(1, num_keys)
        self._front = front
        self._memory = mmap.mmap(descriptor, num_fronts * self._num_keys * _COLUMNS * _WIDTH)
        self._counts = memoryview(self._memory).cast("q")

    def enter(self, key: int) -> None:
        """A request begins; key is the number of its API key, -1 without keys."""
        self._counts[self._place(self._front, key) + _REQUESTS] += 1

    def leave(self, key: int) -> None:
        """A request has ended."""
        self._counts[self._place(self._front, key) + _REQUESTS] -= 1

    def in_progress(self, key: int | None = None) -> int:
        """Requests in progress, of one key or of all."""
        return self._sum(_REQUESTS, key)

    def enter_sequences(self, key: int, count: int) -> None:
        """A prompt of a request begins, with so many sequences."""
        self._counts[self._place(self._front, key) + _SEQUENCES] += count

    def leave_sequences(self, key: int, count: int) -> None:
        """All sequences of a prompt have ended."""
        self._counts[self._place(self._front, key) + _SEQUENCES] -= count

    def num_sequences(self, key: int | None = None) -> int:
        """Sequences in progress, of one key or of all."""
        return self._sum(_SEQUENCES, key)

    def has_room_for_request(self, key: int, limit: int) -> bool:
        """Whether one more request of the key keeps the limit in all, or the key's share of it."""
        return self._has_room(_REQUESTS, key, 1, limit)

    def has_room_for_sequences(self, key: int, count: int, limit: int) -> bool:
        """Whether so many sequences more of the key keep the limit in all, or the key's share of it."""
        return self._has_room(_SEQUENCES, key, count, limit)

    def start(self, key: int, now: float) -> None:
        """Remember that a request was started."""
        second = int(now)
        place = self._place(self._front, key) + _STARTS + 2 * (second % _SECONDS)
        if self._counts[place] != second:
            self._counts[place + 1] = 0
            self._counts[place] = second
        self._counts[place + 1] += 1

    def started(self, key: int, now: float) -> tuple[int, int]:
        """(requests that one key started within a minute, the first second in which it did)."""
        count, oldest = 0, int(now)
        for front in range(self._num_fronts):
            first = self._place(front, key) + _STARTS
            for place in range(first, first + 2 * _SECONDS, 2):
                second = self._counts[place]
                if self._counts[place + 1] and now < expiry(second):
                    count += self._counts[place + 1]
                    oldest = min(oldest, second)
        return count, oldest

    def forget(self, front: int) -> None:
        """A front has ended, and its requests with it; what it started counts on."""
        for key in range(self._num_keys):
            for column in (_REQUESTS, _SEQUENCES):
                self._counts[self._place(front, key) + column] = 0

    def _has_room(self, column: int, key: int, count: int, limit: int) -> bool:
        total = self._sum(column, None) + count
        if total <= limit:
            return True
        held = [self._sum(column, each) for each in range(self._num_keys)]
        own = held[max(key, 0)]
        num_active = sum(each > 0 for each in held) + (own == 0)
        return keeps_share(limit, own=own + count, total=total, num_active=num_active)

    def _sum(self, column: int, key: int | None) -> int:
        if key is None:
            return sum(self._counts[column::_COLUMNS])
        return sum(self._counts[self._place(front, key) + column] for front in range(self._num_fronts))

    def _place(self, front: int, key: int) -> int:
        return (front * self._num_keys + max(key, 0)) * _COLUMNS


def expiry(second: int) -> int:
    """When what was started in a second does not count any more: a minute after the second's end."""
    return second + 1 + WINDOW_S


def new_memory(num_fronts: int, num_keys: int) -> int:
    """The descriptor of memory for `SharedCounts`, all zero; it ends with the last process that has it."""
    descriptor = _new_file()
    os.ftruncate(descriptor, num_fronts * max(1, num_keys) * _COLUMNS * _WIDTH)
    return descriptor


def _new_file() -> int:
    """The descriptor of a file that no folder shows."""
    try:
        return os.memfd_create("quire-counts")
    except AttributeError:  # not Linux
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())

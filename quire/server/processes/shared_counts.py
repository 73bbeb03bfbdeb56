"""Requests in progress and requests started, by API key, over all fronts of a server.

Memory that fronts share and that has no name: each writes its own row, all read all. Every number has one writer, so
nothing is locked; fronts that look at the same moment may exceed a limit by one request each.
"""

from __future__ import annotations

import mmap
import os

WINDOW_S = 60
_SECONDS = 64
"""Starts are kept for so many seconds, each as its second and how many there were in it."""
_COLUMNS = 1 + 2 * _SECONDS
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
        self._counts[self._place(self._front, key)] += 1

    def leave(self, key: int) -> None:
        """A request has ended."""
        self._counts[self._place(self._front, key)] -= 1

    def in_progress(self, key: int | None = None) -> int:
        """Requests in progress, of one key or of all."""
        keys = range(self._num_keys) if key is None else (key,)
        return sum(self._counts[self._place(front, key)] for front in range(self._num_fronts) for key in keys)

    def start(self, key: int, now: float) -> None:
        """Remember that a request was started."""
        second = int(now)
        place = self._place(self._front, key) + 1 + 2 * (second % _SECONDS)
        if self._counts[place] != second:
            self._counts[place + 1] = 0
            self._counts[place] = second
        self._counts[place + 1] += 1

    def started(self, key: int, now: float) -> tuple[int, int]:
        """(requests that one key started within a minute, the first second in which it did)."""
        count, oldest = 0, int(now)
        for front in range(self._num_fronts):
            first = self._place(front, key) + 1
            for place in range(first, first + 2 * _SECONDS, 2):
                second = self._counts[place]
                if self._counts[place + 1] and now < expiry(second):
                    count += self._counts[place + 1]
                    oldest = min(oldest, second)
        return count, oldest

    def forget(self, front: int) -> None:
        """A front has ended, and its requests with it; what it started counts on."""
        for key in range(self._num_keys):
            self._counts[self._place(front, key)] = 0

    def _place(self, front: int, key: int) -> int:
        return (front * self._num_keys + max(key, 0)) * _COLUMNS


def expiry(second: int) -> int:
    """When what was started in a second does not count any more: a minute after the second's end."""
    return second + 1 + WINDOW_S


def new_memory(num_fronts: int, num_keys: int) -> int:
    """The descriptor of memory for `SharedCounts`, all zero; it ends with the last process that has it."""
    descriptor = os.memfd_create("quire-counts")
    os.ftruncate(descriptor, num_fronts * max(1, num_keys) * _COLUMNS * _WIDTH)
    return descriptor

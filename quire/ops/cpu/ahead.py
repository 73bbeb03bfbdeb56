"""Memory for weights that the system gets ready while nobody needs it yet. Imports no torch.

Addresses get memory when they are first written. On a virtual machine whose host has to find that memory first, 1.2 GB
take a core up to 2.8 s (benchmarks/cpu.md), which a core that waits for Python's imports has to spare.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress

from quire.ops.cpu.library import address_of, available, touch
from quire.utils.math import round_up

HUGE_PAGE = 1 << 21
PIECE = 32 << 20
"""Bytes that a thread gets ready at a time; what has begun is not stopped."""
ALIGNMENT = 64


class MemoryAhead:
    """Zeros for weights that end together. Those below `num_bytes` are got ready by a pool's threads until `take`."""

    def __init__(self, num_bytes: int, pool: Executor) -> None:
        self._map = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._num_bytes = num_bytes
        self._start = -address_of(self._map) % HUGE_PAGE
        self._end, self._limit = self._start, self._start + num_bytes
        whole_pages = num_bytes // HUGE_PAGE * HUGE_PAGE
        if whole_pages:
            with suppress(OSError):  # a kernel built without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE, self._start, whole_pages)
        begins = range(self._start, self._limit, PIECE)
        self._work: list[Future[None]] = [
            pool.submit(touch, self._map, begin, min(PIECE, self._limit - begin)) for begin in begins
        ]
        self._ready_bytes: int | None = None

    @property
    def ready_bytes(self) -> int:
        """Bytes that had been got ready when the first were taken, or are now."""
        if self._ready_bytes is not None:
            return self._ready_bytes
        num_pieces = sum(future.done() and not future.cancelled() for future in self._work)
        return min(num_pieces * PIECE, self._num_bytes)

    def take(self, num_bytes: int) -> memoryview | None:
        """Zeros, 64-byte aligned; None where there are not so many left."""
        self._stop()  # whoever fills the weights has more threads for it
        begin = round_up(self._end, ALIGNMENT)
        if begin + num_bytes > self._limit:
            return None
        self._end = begin + num_bytes
        return memoryview(self._map)[begin : self._end]

    def take_back(self, address: int, num_bytes: int) -> bool:
        """Whether these bytes, zeros again, were what was taken last. They can then be taken once more."""
        if address + num_bytes != address_of(self._map) + self._end:
            return False
        self._end -= num_bytes
        return True

    def close(self) -> None:
        """Give the system back what nobody took. Idempotent."""
        self._stop()
        for future in self._work:
            if not future.cancelled():
                future.exception()
        self._limit = self._end
        rest = round_up(self._end, mmap.PAGESIZE)
        if rest < len(self._map):
            self._map.madvise(mmap.MADV_DONTNEED, rest, len(self._map) - rest)

    def _stop(self) -> None:
        self._ready_bytes = self.ready_bytes
        for future in self._work:
            future.cancel()


class _Use(threading.local):
    memory: MemoryAhead | None = None


_use = _Use()


@contextmanager
def weights_ahead(num_bytes: int, pool: Executor) -> Iterator[None]:
    """Have a pool get memory ready, until this thread takes the first of it by `take` within the block."""
    if num_bytes < HUGE_PAGE or not available():
        yield
        return
    before, _use.memory = _use.memory, MemoryAhead(num_bytes, pool)
    try:
        yield
    finally:
        _use.memory.close()
        _use.memory = before


def take(num_bytes: int) -> memoryview | None:
    """Zeros that were got ready on this thread's behalf; None where there are none."""
    return None if _use.memory is None else _use.memory.take(num_bytes)


def ready_bytes() -> int:
    """See `MemoryAhead.ready_bytes`; of the memory that is got ready on this thread's behalf."""
    return 0 if _use.memory is None else _use.memory.ready_bytes


def take_back(address: int, num_bytes: int) -> bool:
    """See `MemoryAhead.take_back`."""
    return _use.memory is not None and _use.memory.take_back(address, num_bytes)

"""Memory for what is streamed, and for what ops return."""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.ops.cpu.library import interleave
from quire.utils.math import round_up

HUGE_PAGE = 1 << 21
TILE_ROWS = 32
REGION = 1 << 30
"""Addresses that an arena takes at a time, at least. They cost memory only where its pieces are."""

SHELF = 64 << 20
"""Addresses of a region that weights share, at least."""

LARGE = 4 << 20
"""Outputs of ops from this size on go back to the system when they end. In the heap a freed block of 16 MB is often not
found again for the next one of the same size, and the process grows by several."""


def zeros(num_bytes: int) -> Tensor:
    """uint8 zeros, committed when first touched; 64-byte aligned, 2 MiB when large, in huge pages if there are any.

    Huge pages raise the read bandwidth of a streamed weight by a fifth (a page walk per 4 KiB is what they save). They
    must be asked for: `madvise` is the usual system setting. The rest, which does not fill one, is in small pages, so
    that no more memory is taken than was asked for.
    """
    region = _Region(num_bytes)
    region.commit_in_huge_pages(num_bytes)
    return region.bytes


class _Region:
    """Addresses of its own, without memory behind them yet."""

    def __init__(self, num_bytes: int) -> None:
        padding = HUGE_PAGE if num_bytes >= HUGE_PAGE else 0
        self._map = mmap.mmap(-1, max(1, num_bytes) + padding, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        interleave(whole.data_ptr(), len(whole))
        self._start = -whole.data_ptr() % padding if padding else 0
        self._huge_end = 0
        self.bytes = whole[self._start : self._start + num_bytes]

    def commit_in_huge_pages(self, end: int) -> None:
        """Ask for huge pages behind the bytes below `end`, as far as they fill them."""
        begin, self._huge_end = self._huge_end, max(self._huge_end, end // HUGE_PAGE * HUGE_PAGE)
        if self._huge_end > begin:
            with suppress(OSError):  # a kernel built without them
                self._map.madvise(mmap.MADV_HUGEPAGE, self._start + begin, self._huge_end - begin)


class Shelf:
    """Zeros for many weights that end together: they lie one behind the other in a few regions.

    A process has room for `vm.max_map_count` regions, 65,530 by default, and a large weight with one of its own takes
    two: a model of 60 layers with 384 experts would not fit.
    """

    def __init__(self) -> None:
        self._region: _Region | None = None
        self._end = 0

    def zeros(self, num_bytes: int) -> Tensor:
        """See `zeros`."""
        begin = round_up(self._end, 64)
        if self._region is None or begin + num_bytes > len(self._region.bytes):
            self._region, begin = _Region(max(SHELF, num_bytes)), 0
        self._end = begin + num_bytes
        self._region.commit_in_huge_pages(self._end)
        return self._region.bytes[begin : self._end]

    def give_back(self, last: Tensor) -> None:
        """What `zeros` gave last is not needed."""
        last.view(torch.uint8).zero_()
        self._end -= last.nbytes


class Arena:
    """Memory for the outputs of recorded ops: a tensor's bytes are free again once nothing refers to it any more.

    Unlike malloc's they then still belong to the arena, whose recordings write them again whenever they are replayed.
    """

    def __init__(self) -> None:
        self._regions: list[Tensor] = []
        self._taken: dict[tuple[int, int], tuple[int, weakref.ref[memoryview]]] = {}
        """(region, begin) -> end, and what tells that it is free."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor of at least one element, 64-byte aligned, with room for whole tiles of rows."""
        rows, *rest = shape
        padded = round_up(rows, TILE_ROWS) if rows > TILE_ROWS else rows
        piece = self._take(math.prod((padded, *rest)) * dtype.itemsize)
        return torch.frombuffer(piece, dtype=dtype, count=math.prod(shape)).view(shape)

    def holder(self, address: int) -> weakref.ref[memoryview] | None:
        """What is dead once nothing refers any more to the tensor that begins there; None if there is none."""
        for index, region in enumerate(self._regions):
            taken = self._taken.get((index, address - region.data_ptr()))
            if taken is not None:
                return taken[1]
        return None

    def untracked(self, tensor: Tensor) -> Tensor:
        """The same memory as a tensor that does not keep it taken."""
        for region in self._regions:
            begin = tensor.data_ptr() - region.data_ptr()
            if 0 <= begin < len(region):
                return region[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return tensor

    def _take(self, num_bytes: int) -> memoryview:
        """The first gap that is large enough."""
        size = round_up(num_bytes, 64)
        for index, region in enumerate(self._regions):
            begin = 0
            for (_, start), (end, _) in sorted(item for item in self._taken.items() if item[0][0] == index):
                if start - begin >= size:
                    break
                begin = end
            else:
                if len(region) - begin < size:
                    continue
            piece = memoryview(region.numpy().data)[begin : begin + num_bytes]
            self._taken[index, begin] = begin + size, weakref.ref(piece, partial(_forget, self._taken, (index, begin)))
            return piece
        self._regions.append(zeros(max(REGION, size)))
        return self._take(num_bytes)


def _forget(taken: dict[tuple[int, int], Any], key: tuple[int, int], _: object) -> None:
    del taken[key]


class _Use(threading.local):
    arena: Arena | None = None
    shelf: Shelf | None = None


_use = _Use()


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for an op's output: the arena's while this thread records, the system's if large, else torch's."""
    if _use.arena is not None:
        return _use.arena.empty(shape, dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes >= LARGE:
        return zeros(num_bytes).view(dtype).view(shape)
    return torch.empty(shape, dtype=dtype)


def untracked(tensor: Tensor) -> Tensor:
    """While this thread records: the same memory as a tensor that does not keep it taken."""
    return tensor if _use.arena is None else _use.arena.untracked(tensor)


@contextmanager
def from_arena(arena: Arena) -> Iterator[None]:
    """Let this thread's `empty` take from `arena`."""
    _use.arena = arena
    try:
        yield
    finally:
        _use.arena = None


def weight_zeros(num_bytes: int) -> Tensor:
    """`zeros` for what lives as long as its model; within `weights_together` beside others."""
    return zeros(num_bytes) if _use.shelf is None else _use.shelf.zeros(num_bytes)


def give_back(last: Tensor) -> None:
    """What `weight_zeros` gave last is not needed; nothing refers to it any more."""
    if _use.shelf is not None:
        _use.shelf.give_back(last)


@contextmanager
def weights_together() -> Iterator[None]:
    """See `Ops.weights_together`."""
    before, _use.shelf = _use.shelf, Shelf()
    try:
        yield
    finally:
        _use.shelf = before

"""`PageStore`: the bytes of pages outside the pool, in memory and in a file, verified by digest when they are read.

Knows no blocks: `cache_engine` says what is copied from and to a page. Digests are XXH3 (xxhash.com): they find what a
fault of memory, disk or bookkeeping has changed. They are no protection from somebody who can write to the file.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from quire.messages.kv_tiers import PageContent

Page = NDArray[np.uint8]


def digest_of(page: Page) -> bytes:
    """16 bytes that tell whether a page is what it was."""
    return xxhash.xxh3_128_digest(page.data)


class Pages(Protocol):
    """The slots of one tier."""

    num_slots: int

    def content(self, slot: int) -> PageContent | None:
        """What the page in a slot is said to hold; None where there is none."""

    def read(self, slot: int) -> Page:
        """The bytes of a page, valid until the slot is written. Shape [page_bytes]."""

    def digest(self, slot: int) -> bytes:
        """What the digest of these bytes was when they were written."""

    def begin(self, slot: int) -> Page:
        """Room for the bytes of a page. From now on there is none in the slot."""

    def commit(self, slot: int, content: PageContent, digest: bytes) -> None:
        """The bytes are there."""

    def forget(self, slot: int) -> None:
        """There is no page in the slot."""

    def close(self) -> None:
        """Give the memory back. Idempotent."""


class MemoryPages:
    """Slots in memory of this process, which the system gives when it is first written."""

    def __init__(self, num_slots: int, page_bytes: int) -> None:
        self.num_slots = num_slots
        memory = mmap.mmap(-1, num_slots * page_bytes)
        with suppress(AttributeError, OSError):  # not Linux, or a kernel without: small pages then
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._pages: NDArray[np.uint8] = np.frombuffer(memory, np.uint8).reshape(num_slots, page_bytes)
        self._held: dict[int, tuple[PageContent, bytes]] = {}

    def content(self, slot: int) -> PageContent | None:
        """See `Pages`."""
        held = self._held.get(slot)
        return None if held is None else held[0]

    def read(self, slot: int) -> Page:
        """See `Pages`."""
        page: Page = self._pages[slot]
        return page

    def digest(self, slot: int) -> bytes:
        """See `Pages`."""
        return self._held[slot][1]

    def begin(self, slot: int) -> Page:
        """See `Pages`."""
        self.forget(slot)
        page: Page = self._pages[slot]
        return page

    def commit(self, slot: int, content: PageContent, digest: bytes) -> None:
        """See `Pages`."""
        self._held[slot] = content, digest

    def forget(self, slot: int) -> None:
        """See `Pages`."""
        self._held.pop(slot, None)

    def close(self) -> None:
        """See `Pages`."""
        self._held.clear()
        self._pages = np.empty((0, 0), np.uint8)


class PageStore:
    """All tiers, their slots numbered one after the other."""

    def __init__(self, tiers: Sequence[Pages]) -> None:
        self._tiers = tiers

    def found(self) -> list[tuple[int, PageContent]]:
        """(slot, content) of every page, not verified yet."""
        slots = range(sum(tier.num_slots for tier in self._tiers))
        pages = ((slot, self._at(slot)) for slot in slots)
        return [(slot, content) for slot, (tier, index) in pages if (content := tier.content(index)) is not None]

    def room_for(self, slot: int, content: PageContent) -> Page | None:
        """Where the bytes of a page go; None if the slot has that page already, so that a step can be run again."""
        tier, index = self._at(slot)
        return None if tier.content(index) == content else tier.begin(index)

    def commit(self, slot: int, content: PageContent, digest: bytes) -> None:
        """The bytes of a page are in the slot."""
        tier, index = self._at(slot)
        tier.commit(index, content, digest)

    def verified(self, slot: int, content: PageContent) -> Page | None:
        """The bytes of a page; None if the slot does not hold it as it was. Then it holds nothing."""
        tier, index = self._at(slot)
        if tier.content(index) == content:
            page = tier.read(index)
            if digest_of(page) == tier.digest(index):
                return page
        tier.forget(index)
        return None

    def move(self, source: int, destination: int, content: PageContent) -> None:
        """Copy a page with its digest. Without the page in the source nothing happens: no load will find it."""
        tier, index = self._at(source)
        if tier.content(index) == content:
            page = self.room_for(destination, content)
            if page is not None:
                page[:] = tier.read(index)
                self.commit(destination, content, tier.digest(index))

    def clear(self) -> None:
        """Forget all pages."""
        for tier in self._tiers:
            for index in range(tier.num_slots):
                tier.forget(index)

    def close(self) -> None:
        """Give memory and file back. Idempotent."""
        for tier in self._tiers:
            tier.close()

    def _at(self, slot: int) -> tuple[Pages, int]:
        for tier in self._tiers:
            if slot < tier.num_slots:
                return tier, slot
            slot -= tier.num_slots
        raise IndexError("no such slot")

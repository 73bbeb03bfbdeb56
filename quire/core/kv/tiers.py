"""`KVTiers`: which pages are in the tiers below the pool, memory and file, and which are moved in a step.

Knows no bytes: the worker moves them. A page that the pool evicts goes to the first tier; what that has no room for
goes on to the next, the least recently used page first. A page stays where it is when it is loaded.

Within a step the worker first moves pages from tier to tier, then saves evicted ones, then loads. So a slot takes part
in one step as the source of a move or as one that is written or read, and keeps its page until the step has ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import chain

from quire.core.kv.block_table import NULL_BLOCK
from quire.messages.kv_tiers import PageContent, PageMove
from quire.messages.step import SchedulerOutputs


def as_entry(slot: int) -> int:
    """How a matched prefix names a slot, where it names a block of the pool by its number."""
    return NULL_BLOCK - 1 - slot


def slot_of(entry: int) -> int:
    """The inverse of `as_entry`."""
    return NULL_BLOCK - 1 - entry


def is_slot(entry: int) -> bool:
    """Whether an entry of a matched prefix is a slot."""
    return entry < NULL_BLOCK


@dataclass(slots=True)
class _Tier:
    """The slots of one tier. Those that a step in flight uses are in neither list."""

    slots: range
    free: list[int]
    used: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """The least recently used first."""


class KVTiers:
    """Slots, what is in them, and the moves of the step that is being decided or is in flight."""

    def __init__(self, sizes: Many[int], *, min_load_tokens: int) -> None:
        """Slots of each tier, the fastest first. Prefixes that spare fewer tokens than `min_load_tokens` are not
        loaded."""
        self.min_load_tokens = min_load_tokens
        self._tiers: list[_Tier] = []
        for size in sizes:
            first = self.num_slots
            slots = range(first, first + size)
            self._tiers.append(_Tier(slots, list(reversed(slots))))
        self._slots: dict[tuple[int, bytes], int] = {}
        """By KV group and hash."""
        self._contents: dict[int, PageContent] = {}
        self._busy: set[int] = set()
        self._written: set[int] = set()
        self._moves: list[PageMove] = []
        self._saves: list[PageMove] = []
        self._loads: list[PageMove] = []
        self._loading: dict[int, int] = {}
        """Block -> slot, of loads that have not ended."""
        self.num_saves = 0
        """Since the start, as everything below."""
        self.num_loads = 0
        self.num_failures = 0
        """Loads of pages that were not what they should be."""
        self.num_hit_tokens = 0

    @property
    def num_slots(self) -> int:
        """All slots."""
        return sum(len(tier.slots) for tier in self._tiers)

    @property
    def num_pages(self) -> int:
        """Slots that hold a page."""
        return len(self._contents)

    @property
    def is_in_flight(self) -> bool:
        """Whether a step uses slots, and has not ended."""
        return bool(self._busy)

    def found(self, slot: int, content: PageContent) -> None:
        """Take note of a page that is in a slot from the start."""
        tier, key = self._tier_of(slot), content[:2]
        if key not in self._slots and slot not in self._contents:
            tier.free.remove(slot)
            tier.used[slot] = None
            self._slots[key], self._contents[slot] = slot, content

    def find(self, content: PageContent) -> int | None:
        """The slot with this page. Tokens and parent are compared too: a colliding hash is a miss."""
        slot = self._slots.get(content[:2])
        return slot if slot is not None and self._contents[slot] == content else None

    def save(self, block_id: int, content: PageContent) -> None:
        """Keep the page of a block that is about to be used for another one, unless it is in a slot already."""
        slot = self._slots.get(content[:2])
        if slot is not None:
            self._touch(slot)
            return
        slots = (self._take_slot(index) for index in range(len(self._tiers)))
        slot = next((slot for slot in slots if slot is not None), None)
        if slot is not None:
            self._put(slot, content)
            self._saves.append((block_id, slot, content))
            self.num_saves += 1

    def hold(self, slots: Iterable[int]) -> None:
        """Keep pages that are to be loaded in this step: blocks for them are found by saving others."""
        for slot in slots:
            self._use(slot)

    def load(self, slot: int, block_id: int) -> PageContent:
        """Bring a held page into a block. Gives what it holds."""
        content = self._contents[slot]
        self._loads.append((slot, block_id, content))
        self._loading[block_id] = slot
        self.num_loads += 1
        return content

    def is_loading(self, block_ids: Iterable[int]) -> bool:
        """Whether any of these blocks is still to be loaded."""
        return bool(self._loading) and any(block_id in self._loading for block_id in block_ids)

    def flush(self, pages: Iterator[tuple[int, PageContent]], kept: set[int], most: int) -> int:
        """Bring at most `most` pages to the last tier in this step; how many there were, 0 when all is done.

        `pages` are those of `pages_to_flush`, and `kept` are the slots that have one of them. A page there that is none
        of them gives way. Mutates: pages, kept.
        """
        last, count = self._tiers[-1], 0
        while count < most and (page := next(pages, None)) is not None:
            block_id, content = page
            slot = self._slots.get(content[:2])
            if slot is not None and slot in last.slots:
                self._touch(slot)
                kept.add(slot)
                continue
            lower = self._take_unless_in(kept)
            if lower is None:
                break
            if slot is None:
                self._put(lower, content)
                self._saves.append((block_id, lower, content))
            else:
                self._move(slot, lower)
            kept.add(lower)
            count += 1
        return count

    def pages_to_flush(self, blocks: Iterable[tuple[int, PageContent]]) -> Iterator[tuple[int, PageContent]]:
        """(block, content) of all pages above the last tier, those used last first; the block matters where the page is
        in no slot. `blocks` are those of the pool, which were used after what the tiers have. So those of them that the
        last tier has are now the last to give way there."""
        blocks = list(blocks)
        for _, content in reversed(blocks):
            if (slot := self._slots.get(content[:2])) is not None:
                self._touch(slot)
        above = [slot for tier in self._tiers[:-1] for slot in reversed(tier.used)]
        return chain(blocks, [(NULL_BLOCK, self._contents[slot]) for slot in above])

    def write(self, plan: SchedulerOutputs) -> None:
        """Say in the instruction for a step what is to be moved."""
        if self._busy:
            plan.pages_to_move, self._moves = self._moves, []
            plan.blocks_to_swap_out, self._saves = self._saves, []
            plan.blocks_to_swap_in, self._loads = self._loads, []

    def ended(self, failed_loads: Iterable[int]) -> None:
        """The step has moved everything but the pages for these blocks, which were not what they should be."""
        for block_id in failed_loads:
            self._forget(self._loading[block_id])
            self.num_failures += 1
        for slot in self._busy:
            tier = self._tier_of(slot)
            if slot in self._contents:
                tier.used[slot] = None
            else:
                tier.free.append(slot)
        self._busy.clear()
        self._written.clear()
        self._loading.clear()

    def interrupted(self) -> list[int]:
        """Nobody knows what the step has moved: forget what it wrote. Gives the blocks that it should have loaded."""
        self._moves, self._saves, self._loads = [], [], []
        block_ids = list(self._loading)
        for slot in self._written:
            self._forget(slot)
        self.ended(())
        return block_ids

    def clear(self) -> None:
        """Forget all pages. Slots that a step uses (it was interrupted) are free when that has been cleared up."""
        for tier in self._tiers:
            tier.used.clear()
            tier.free = [slot for slot in reversed(tier.slots) if slot not in self._busy]
        self._slots.clear()
        self._contents.clear()

    def check(self) -> None:
        """Verify every invariant.

        Raises: AssertionError.
        """
        assert self._slots == {content[:2]: slot for slot, content in self._contents.items()}
        for tier in self._tiers:
            free, used, busy = set(tier.free), set(tier.used), self._busy & set(tier.slots)
            assert len(free) == len(tier.free)
            assert free | used | busy == set(tier.slots), "slots leaked"
            assert len(free) + len(used) + len(busy) == len(tier.slots), "slots have two states"
            assert not free & self._contents.keys()
            assert used <= self._contents.keys()
        assert self._busy or not (self._moves or self._saves or self._loads or self._loading or self._written)

    def _take_slot(self, index: int) -> int | None:
        """A slot of a tier to write to; its page goes on to the next tier. None while this step uses all of them."""
        tier = self._tiers[index]
        if tier.free:
            return tier.free.pop()
        if not tier.used:
            return None
        slot = next(iter(tier.used))
        lower = self._take_slot(index + 1) if index + 1 < len(self._tiers) else None
        if lower is None:
            del tier.used[slot]
            self._forget(slot)
        else:
            self._move(slot, lower)
        return slot

    def _take_unless_in(self, kept: set[int]) -> int | None:
        """A slot of the last tier to write to, for a page that is newer than any that is not in `kept`; kept ones were
        used after all others."""
        tier = self._tiers[-1]
        if tier.free:
            return tier.free.pop()
        slot = next(iter(tier.used), None)
        if slot is None or slot in kept:
            return None
        del tier.used[slot]
        self._forget(slot)
        return slot

    def _move(self, slot: int, lower: int) -> None:
        content = self._contents[slot]
        self._forget(slot)
        self._use(slot)
        self._put(lower, content)
        self._moves.append((slot, lower, content))

    def _put(self, slot: int, content: PageContent) -> None:
        self._slots[content[:2]] = slot
        self._contents[slot] = content
        self._busy.add(slot)
        self._written.add(slot)

    def _use(self, slot: int) -> None:
        self._busy.add(slot)
        self._tier_of(slot).used.pop(slot, None)

    def _touch(self, slot: int) -> None:
        used = self._tier_of(slot).used
        if slot in used:
            used.move_to_end(slot)

    def _forget(self, slot: int) -> None:
        content = self._contents.pop(slot, None)
        if content is not None:
            del self._slots[content[:2]]

    def _tier_of(self, slot: int) -> _Tier:
        return next(tier for tier in self._tiers if slot in tier.slots)

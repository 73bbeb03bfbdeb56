"""`CacheEngine`: owns the bytes of the KV cache."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

import torch
from torch import Tensor

from quire.messages.kv import KVLayout, PageSpec, StatePage
from quire.messages.kv_tiers import PageMove
from quire.messages.step import SchedulerOutputs
from quire.ops.contracts.ops import Ops
from quire.sampling.torch_mode import torch_mode
from quire.utils.threads import start_essential
from quire.worker.kv_store import Page, PageStore, digest_of

BLOCKS_AT_ONCE = 16
"""Touched by one call for each part: some 2 MiB."""


def allocate_parts(ops: Ops, layout: KVLayout, num_blocks: int) -> list[Tensor]:
    """The parts of all pages."""
    page = layout.page
    if layout.part_bytes is not None or layout.is_mixed or isinstance(page, StatePage) or page.rate is not None:
        num_bytes = layout.block_bytes // layout.num_parts
        return [ops.allocate_states(num_blocks=num_blocks, num_bytes=num_bytes) for _ in range(layout.num_parts)]
    return [
        ops.allocate_kv_cache(
            num_blocks=num_blocks,
            block_size=page.block_size,
            num_kv_heads=page.num_kv_heads,
            head_size=page.head_size,
            dtype=_cache_dtype(page),
        )
        for _ in range(layout.num_parts)
    ]


def _cache_dtype(page: PageSpec) -> torch.dtype:
    return torch.float8_e4m3fn if page.dtype == "fp8" else cast("torch.dtype", getattr(torch, page.dtype))


def caches_of(layout: KVLayout, parts: Sequence[Tensor]) -> list[Tensor]:
    """The blocks of each layer; those of a recurrent one as the states that lie there."""
    caches = []
    for layer, place in sorted(layout.place_of_layer.items()):
        page, cache = _page_of(layout, layer), parts[place.part]
        if isinstance(page, StatePage):
            cache = cache.view(torch.uint8).view(2, cache.shape[1], -1).view(torch.float32)
        elif layout.is_mixed or page.rate is not None:
            cache = _blocks_within(cache, page, place.first_byte)
        caches.append(cache)
    return caches


def _page_of(layout: KVLayout, layer: int) -> PageSpec | StatePage:
    """A block of a layer, or of the one that it reads."""
    kept = dict(layout.reads).get(layer, layer)
    return layout.groups[layout.group_of_layer[kept]].page_of(kept)


def _blocks_within(pages: Tensor, page: PageSpec, first_byte: int) -> Tensor:
    """The blocks that begin at a byte of each half of the pages. Shapes: -> [2, B, K, S, X], its blocks apart."""
    halves = pages.view(torch.uint8).view(2, pages.shape[1], -1)
    own = halves[..., first_byte : first_byte + page.num_bytes // 2].view(_cache_dtype(page))
    if page.rate is not None:
        own = own[..., : page.num_slots * page.head_size]
    return own.view(2, pages.shape[1], page.num_kv_heads, page.num_slots, -1)


class CacheEngine:
    """A pool of `num_blocks` pages. A page is one block of each part; each layer of a group has a place in one of them.

    The operating system gives memory when it is first written, which costs a prompt up to half of its time on a virtual
    machine. So the next `num_ahead` blocks beyond the highest one used are touched before, by a thread that runs when
    nothing else does; all of them at once would take memory that may never be used.
    """

    def __init__(self, ops: Ops, layout: KVLayout, num_blocks: int, *, num_ahead: int) -> None:
        self._ops = ops
        self.layout = layout
        self.parts = allocate_parts(ops, layout, num_blocks)
        """Dimension 1 is the page."""
        num_bytes = sum(part.nbytes for part in self.parts)
        assert num_bytes == num_blocks * layout.block_bytes, "the memory plan counts what is allocated"
        self.caches = caches_of(layout, self.parts)
        """The part of each layer."""
        self._halves = [part.view(torch.uint8).view(2, num_blocks, -1) for part in self.parts]
        """The bytes of the parts: keys and values of a block are in two places. Shape [2, B, bytes] of each part."""
        self.store: PageStore | None = None
        """Pages that left the pool."""
        self._loader: ThreadPoolExecutor | None = None
        self._loads: Future[list[int]] | None = None
        self._num_blocks = num_blocks
        self._num_ahead = num_ahead
        self._touched = self._wanted = 0
        self._thread = threading.Thread()
        self._touch_ahead(-1)

    def apply(self, plan: SchedulerOutputs) -> None:
        """Save, begin to load, and copy pages, in order; and get ready for what follows the new ones."""
        if self._loads is not None:  # of a step that was interrupted: its blocks may be others' now
            self.end_loads()
        if plan.blocks_to_swap_out or plan.pages_to_move:
            self.swap_out(plan.blocks_to_swap_out, plan.pages_to_move)
        if plan.blocks_to_swap_in:
            self._begin_loads(plan.blocks_to_swap_in)
        if plan.blocks_to_copy:
            self.copy(plan.blocks_to_copy)
        for changes in (*plan.new_block_ids.values(), *(new.block_ids for new in plan.new_sequences)):
            self._touch_ahead(max((block_id for _, block_ids in changes for block_id in block_ids), default=-1))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (source, destination) pages within the pool, in order."""
        with torch_mode():
            self._ops.copy_blocks(self.parts, pairs)

    def swap_out(self, saves: Sequence[PageMove], moves: Sequence[PageMove] = ()) -> None:
        """Make room in the first tier by moving pages to the next, then save (block, slot) pages there."""
        assert self.store is not None
        for source, destination, content in moves:
            self.store.move(source, destination, content)
        for block_id, slot, content in saves:
            page = self.store.room_for(slot, content)
            if page is not None:
                self._read(block_id, page)
                self.store.commit(slot, content, digest_of(page))

    def swap_in(self, loads: Sequence[PageMove]) -> list[int]:
        """Load (slot, block) pages. Gives the blocks whose page is not what it should be; these are left alone."""
        assert self.store is not None
        failed = []
        for slot, block_id, content in loads:
            page = self.store.verified(slot, content)
            if page is None:
                failed.append(block_id)
            else:
                self._write(block_id, page)
        return failed

    def end_loads(self) -> list[int]:
        """Wait for the pages that `apply` began to load. Gives the blocks for which there were none."""
        if self._loads is None:
            return []
        failed = self._loads.result()
        self._loads = None
        return failed

    def close(self) -> None:
        """End the threads, and close what one of them reads. Idempotent.

        A thread that is in torch when the interpreter ends would end the process with an error.
        """
        self._wanted = 0
        if self._thread.is_alive():
            self._thread.join()
        if self._loader is not None:
            self._loader.shutdown()
        if self.store is not None:
            self.store.close()

    def _begin_loads(self, loads: Sequence[PageMove]) -> None:
        """Load in a thread, while the model runs: no sequence of the step uses these blocks."""
        if self._loader is None:
            self._loader = ThreadPoolExecutor(1, thread_name_prefix="kv-load")
        self._loads = self._loader.submit(self.swap_in, loads)

    def _read(self, block_id: int, page: Page) -> None:
        for part, place in zip(self._halves, page.reshape(len(self._halves), 2, -1), strict=True):
            torch.from_numpy(place).copy_(part[:, block_id])

    def _write(self, block_id: int, page: Page) -> None:
        for part, place in zip(self._halves, page.reshape(len(self._halves), 2, -1), strict=True):
            part[:, block_id] = torch.from_numpy(place)

    def _touch_ahead(self, last_block: int) -> None:
        wanted = min(self._num_blocks, last_block + 1 + self._num_ahead)
        few = wanted - self._wanted < self._num_ahead // 4 and wanted < self._num_blocks
        if few or wanted <= self._wanted:
            return
        self._wanted = wanted
        if not self._thread.is_alive():
            self._thread = start_essential("kv-ahead", self._touch)

    def _touch(self) -> None:
        self._ops.give_way()
        while self._touched < self._wanted:
            begin, end = self._touched, min(self._touched + BLOCKS_AT_ONCE, self._wanted)
            for part in self.parts:
                self._ops.touch_blocks(part, begin, end)
            self._touched = end

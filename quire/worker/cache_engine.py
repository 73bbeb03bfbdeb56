"""`CacheEngine`: owns the bytes of the KV cache."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

import torch

from quire.messages.kv import KVLayout
from quire.messages.step import SchedulerOutputs
from quire.ops import functional as ops
from quire.sampling.torch_mode import torch_mode
from quire.utils.threads import start_essential

BLOCKS_AT_ONCE = 16
"""Touched by one call for each part: some 2 MiB."""


class CacheEngine:
    """A pool of `num_blocks` pages. A page is one block of each part; each layer of a group has one of the parts.

    The operating system gives memory when it is first written, which costs a prompt up to half of its time on a virtual
    machine. So the next `num_ahead` blocks beyond the highest one used are touched before, by a thread that runs when
    nothing else does; all of them at once would take memory that may never be used.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, *, num_ahead: int) -> None:
        self.layout = layout
        page = layout.page
        self.parts = [
            ops.allocate_kv_cache(
                num_blocks=num_blocks,
                block_size=page.block_size,
                num_kv_heads=page.num_kv_heads,
                head_size=page.head_size,
                dtype=getattr(torch, page.dtype),
            )
            for _ in range(layout.layers_per_page)
        ]
        """Dimension 1 is the page."""
        num_bytes = sum(part.nbytes for part in self.parts)
        assert num_bytes == num_blocks * layout.block_bytes, "the memory plan counts what is allocated"
        self.caches = [self.parts[part] for _, part in sorted(layout.part_of_layer.items())]
        """The part of each attention layer."""
        self._num_blocks = num_blocks
        self._num_ahead = num_ahead
        self._touched = self._wanted = 0
        self._thread = threading.Thread()
        self._touch_ahead(-1)

    def apply(self, plan: SchedulerOutputs) -> None:
        """Copy (source, destination) pages, in order; and get ready for what follows the new ones."""
        if plan.blocks_to_copy:
            with torch_mode():
                ops.copy_blocks(self.parts, plan.blocks_to_copy)
        for changes in (*plan.new_block_ids.values(), *(new.block_ids for new in plan.new_sequences)):
            self._touch_ahead(max((block_id for _, block_ids in changes for block_id in block_ids), default=-1))

    def _touch_ahead(self, last_block: int) -> None:
        wanted = min(self._num_blocks, last_block + 1 + self._num_ahead)
        few = wanted - self._wanted < self._num_ahead // 4 and wanted < self._num_blocks
        if few or wanted <= self._wanted:
            return
        self._wanted = wanted
        if not self._thread.is_alive():
            self._thread = start_essential("kv-ahead", self._touch)

    def _touch(self) -> None:
        with suppress(AttributeError, OSError):  # not Linux, or not allowed: at the priority of the others then
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread
        while self._touched < self._wanted:
            begin, end = self._touched, min(self._touched + BLOCKS_AT_ONCE, self._wanted)
            for part in self.parts:
                ops.touch_blocks(part, begin, end)
            self._touched = end

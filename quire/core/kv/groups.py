"""Managers of KV groups: which blocks a sequence needs in one group, and when it can give them back.

A group of another kind (latent, cross attention) is another class with these methods.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ClassVar, Protocol

from quire.core.kv.block_pool import BlockPool
from quire.core.kv.block_table import NULL_BLOCK, BlockTable
from quire.messages.kv import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec, StateSpec
from quire.utils.math import cdiv

Find = Callable[[int], int | None]
"""The cached block of the group that holds block i of a sequence, or the slot of a tier (`kv_tiers`), or None."""


class GroupManager(Protocol):
    """The blocks of sequences in one group. It holds no state but the pool: a sequence's is in its `BlockTable`."""

    trims: ClassVar[bool]
    """Whether `trim` ever gives blocks back."""

    def match(self, find: Find, limit: int) -> list[int]:
        """The blocks of the longest cached prefix that the group can go on from, at most `limit` of them."""

    def begin(self, matched: list[int]) -> BlockTable:
        """The table of a sequence that goes on from a matched prefix."""

    def cacheable(self, table: BlockTable, index: int, num_computed: int) -> int | None:
        """The block that others may find by the hash of block `index`, which is full; None where there is none."""

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens holds at most."""

    def needed(self, table: BlockTable, num_computed: int, num_tokens: int) -> int:
        """Blocks to take from the pool before tokens [num_computed, num_tokens) can be computed."""

    def append(self, table: BlockTable, num_computed: int, num_tokens: int) -> list[tuple[int, int]]:
        """Take them. Gives the (source, destination) of copies that must run first."""

    def num_writable(self, table: BlockTable) -> int:
        """Tokens of a sequence, all told, that can be computed with its table as it is, unless a fork shares it."""

    def trim(self, table: BlockTable, num_computed: int) -> None:
        """Give back what nobody reads once so many tokens are computed, in a step that has ended."""

    def trims_at(self, table: BlockTable) -> int:
        """How many tokens must be computed before `trim` gives something back."""

    def free(self, table: BlockTable) -> None:
        """Give all back, the last ones to be evicted first."""


class FullAttention:
    """Every token is read as long as the sequence lives."""

    trims: ClassVar[bool] = False

    def __init__(self, spec: KVCacheSpec, pool: BlockPool, *, max_chunk_tokens: int, state_stride: int = 0) -> None:
        """`max_chunk_tokens`: most tokens of a sequence in one step. `state_stride`: see `RecurrentState`."""
        self._spec = spec
        self._pool = pool
        self._block_size = spec.page.block_size
        self._max_chunk_tokens = max_chunk_tokens
        self._state_stride = state_stride

    def match(self, find: Find, limit: int) -> list[int]:
        """See `GroupManager.match`: all blocks of the prefix must be there."""
        matched: list[int] = []
        for index in range(limit):
            block_id = find(index)
            if block_id is None:
                break
            matched.append(block_id)
        return matched

    def begin(self, matched: list[int]) -> BlockTable:
        """See `GroupManager.begin`."""
        return BlockTable(matched, num_trimmed=matched.count(NULL_BLOCK))

    def cacheable(self, table: BlockTable, index: int, num_computed: int) -> int | None:
        """See `GroupManager.cacheable`: every block."""
        return table.block_ids[index]

    def most_blocks(self, num_tokens: int) -> int:
        """See `GroupManager.most_blocks`."""
        return self._spec.most_blocks(num_tokens, self._max_chunk_tokens)

    def needed(self, table: BlockTable, num_computed: int, num_tokens: int) -> int:
        """See `GroupManager.needed`."""
        missing = max(0, cdiv(num_tokens, self._block_size) - len(table.block_ids))
        return missing + len(self._shared(table, num_computed))

    def append(self, table: BlockTable, num_computed: int, num_tokens: int) -> list[tuple[int, int]]:
        """See `GroupManager.append`: a block that is to be written and that others have, too, is copied."""
        copies = []
        for index in self._shared(table, num_computed):
            source, destination = table.block_ids[index], self._pool.allocate()
            table.replace(index, destination)
            self._pool.release(source)
            copies.append((source, destination))
        for _ in range(cdiv(num_tokens, self._block_size) - len(table.block_ids)):
            table.block_ids.append(self._pool.allocate())
        return copies

    def num_writable(self, table: BlockTable) -> int:
        """See `GroupManager.num_writable`."""
        return self._block_size * len(table.block_ids)

    def trim(self, table: BlockTable, num_computed: int) -> None:
        """See `GroupManager.trim`: everything is read."""

    def trims_at(self, table: BlockTable) -> int:
        """See `GroupManager.trims_at`: never."""
        return sys.maxsize

    def free(self, table: BlockTable) -> None:
        """See `GroupManager.free`."""
        for block_id in reversed(table.held):
            self._pool.release(block_id)

    def _shared(self, table: BlockTable, num_computed: int) -> list[int]:
        """Entries that are about to be written and that a fork has, too."""
        written = range(num_computed // self._block_size, len(table.block_ids))
        return [index for index in written if self._pool.blocks[table.block_ids[index]].ref_count > 1]


class SlidingWindow(FullAttention):
    """Only the last tokens are read: blocks go back as the window leaves them behind."""

    trims: ClassVar[bool] = True
    _spec: SlidingWindowSpec

    def match(self, find: Find, limit: int) -> list[int]:
        """See `GroupManager.match`: the blocks must be there that the window of the next token reaches."""
        length, matched = limit, list[int]()
        while length > 0:
            first = self._spec.num_unread_blocks(length * self._block_size)
            index = length - len(matched) - 1
            if index < first:
                return [NULL_BLOCK] * first + matched[::-1]
            block_id = find(index)
            if block_id is None:
                length, matched = index, []
            else:
                matched.append(block_id)
        return []

    def trim(self, table: BlockTable, num_computed: int) -> None:
        """See `GroupManager.trim`."""
        num_unread = self._spec.num_unread_blocks(num_computed)
        if num_unread > table.num_trimmed:
            for block_id in table.trim(num_unread):
                self._pool.release(block_id)

    def trims_at(self, table: BlockTable) -> int:
        """See `GroupManager.trims_at`."""
        return self._spec.num_computed_without(table.num_trimmed + 1)


class RecurrentState(FullAttention):
    """One page per sequence: the state after the tokens computed so far.

    A step reads it and writes the next state to a page of its own, which takes its place when the step has ended. So
    forks share a page without a copy, and a step that failed finds what it read. During a step a table holds the page
    to read, `NULL_BLOCK` for a sequence's first step, and the page to write. When the next step is decided while that
    one is in flight, the page to write becomes the page to read, and `read_before` keeps the other until it has ended.

    The state after each `state_stride` tokens can be found by others (a checkpoint), under the hash of the block that
    ends there. Nobody writes to its page: the sequence that wrote it reads it in its next step, as others do.
    """

    trims: ClassVar[bool] = True

    def match(self, find: Find, limit: int) -> list[int]:
        """See `GroupManager.match`: the state at the end of the prefix is all that is needed of it."""
        stride = self._state_stride // self._block_size
        for length in range(limit - limit % stride, 0, -stride) if stride else ():
            block_id = find(length - 1)
            if block_id is not None:
                return [NULL_BLOCK] * (length - 1) + [block_id]
        return []

    def begin(self, matched: list[int]) -> BlockTable:
        """See `GroupManager.begin`: with the page to read."""
        return BlockTable(matched[-1:])

    def cacheable(self, table: BlockTable, index: int, num_computed: int) -> int | None:
        """See `GroupManager.cacheable`: what the first step in flight wrote, if it ends where the block does."""
        end = (index + 1) * self._block_size
        is_checkpoint = self._state_stride and end == num_computed and end % self._state_stride == 0
        return [*table.read_before, *table.block_ids][1] if is_checkpoint else None

    def needed(self, table: BlockTable, num_computed: int, num_tokens: int) -> int:
        """See `GroupManager.needed`: a page to write, unless the table has it."""
        return int(num_tokens > table.num_tokens)

    def append(self, table: BlockTable, num_computed: int, num_tokens: int) -> list[tuple[int, int]]:
        """See `GroupManager.append`: nothing is ever copied."""
        if not table.block_ids:
            table.block_ids.append(NULL_BLOCK)
            table.num_trimmed = 1
        if len(table.block_ids) == 2:
            table.read_before += table.shift() or [NULL_BLOCK]
        table.block_ids.append(self._pool.allocate())
        table.num_tokens = num_tokens
        return []

    def num_writable(self, table: BlockTable) -> int:
        """See `GroupManager.num_writable`: every step takes a page."""
        return 0

    def trim(self, table: BlockTable, num_computed: int) -> None:
        """See `GroupManager.trim`: the state before the step is read no more."""
        if table.read_before:
            read = [table.read_before.pop(0)]
        elif len(table.block_ids) == 2:
            read = table.shift()
        else:
            return
        if read and read[0] != NULL_BLOCK:
            self._pool.release(read[0])

    def trims_at(self, table: BlockTable) -> int:
        """See `GroupManager.trims_at`: after every step."""
        return 0


MANAGERS: dict[type[KVCacheSpec], type[FullAttention]] = {
    FullAttentionSpec: FullAttention,
    SlidingWindowSpec: SlidingWindow,
    StateSpec: RecurrentState,
}

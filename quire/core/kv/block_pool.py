"""Free KV blocks, their reference counts, and the index from content hash to block.

Knows no requests: `block_manager` maps sequences to blocks. A block is always in one of three states: referenced
(`ref_count > 0`), cached (unreferenced, but its content is in the index and can be found again) or empty. The last two
are free: emptied ones are taken first, then those never used, then cached ones, least recently used first. Of the
cached ones, those that `evict_early` has named go before all others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quire.messages.kv_tiers import PageContent


@dataclass(slots=True)
class Block:
    """One block of KV memory."""

    block_id: int
    ref_count: int = 0
    group: int = 0
    """The KV group whose keys and values it holds, while it is in that group's index."""
    content: tuple[bytes, bytes, tuple[int, ...]] | None = None
    """(hash, parent's hash, tokens) while it is in the index."""


class BlockPool:
    """A fixed number of blocks, any of which any KV group can use."""

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        self.num_blocks = num_blocks
        """All blocks, those that were never used included."""
        self.blocks: list[Block] = []
        """Those that have been used: a large pool of which little is used costs little."""
        self._free: OrderedDict[int, None] = OrderedDict()
        """Emptied blocks, then cached ones."""
        self._early: OrderedDict[int, None] = OrderedDict()
        """Cached blocks that are evicted before those in `_free`."""
        self._indexes: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        """By group: equal tokens have other keys and values in other layers."""
        self.spill: Callable[[int, PageContent], None] | None = None
        """Told of a cached block and its content before the block is used for something else; not of early ones."""
        self.num_shared = 0
        """Blocks with more than one reference."""
        self.num_evictable = 0
        """Free blocks whose content can be found by hash."""

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: empty or cached."""
        return self.num_blocks - len(self.blocks) + len(self._free) + len(self._early)

    @property
    def num_cached(self) -> int:
        """Blocks whose content can be found by hash, referenced or not."""
        return sum(map(len, self._indexes))

    def allocate(self) -> int:
        """Take the least recently used free block and forget its content; the caller holds one reference.

        Raises: IndexError when none is free (callers ask `num_free` first).
        """
        if not self.num_free:
            raise IndexError("no free block")
        if not self._has_emptied() and len(self.blocks) < self.num_blocks:
            return self._first_use()
        is_early = bool(self._early) and not self._has_emptied()
        block_id, _ = (self._early if is_early else self._free).popitem(last=False)
        block = self.blocks[block_id]
        if block.content is not None and self.spill is not None and not is_early:
            self.spill(block_id, (block.group, *block.content))
        self._forget(block)
        block.ref_count = 1
        return block_id

    def evict_early(self, block_id: int) -> None:
        """Let a cached block be evicted before all others, and not be saved then; no effect on one that is referenced.

        Whoever references it after that makes it like any other block again.
        """
        if block_id in self._free and self.blocks[block_id].content is not None:
            del self._free[block_id]
            self._early[block_id] = None

    def is_free(self, block_id: int) -> bool:
        """Whether nobody references the block."""
        return self.blocks[block_id].ref_count == 0

    def share(self, block_id: int) -> None:
        """Take one more reference; a cached block leaves the free list."""
        block = self.blocks[block_id]
        if block.ref_count == 0:
            del (self._early if block_id in self._early else self._free)[block_id]
            self.num_evictable -= block.content is not None
        block.ref_count += 1
        self.num_shared += block.ref_count == 2

    def release(self, block_id: int) -> None:
        """Give one reference back; at zero the block becomes free, the most recently used of all if it is cached."""
        block = self.blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} released more often than shared"
        block.ref_count -= 1
        self.num_shared -= block.ref_count == 1
        if block.ref_count == 0:
            self._free[block_id] = None
            if block.content is None:
                self._free.move_to_end(block_id, last=False)
            else:
                self.num_evictable += 1

    def find(self, group: int, content_hash: bytes, parent_hash: bytes, token_ids: tuple[int, ...]) -> int | None:
        """The group's block with this content. Tokens and parent are compared too: a colliding hash is a miss."""
        block_id = self._indexes[group].get(content_hash)
        if block_id is None or self.blocks[block_id].content != (content_hash, parent_hash, token_ids):
            return None
        return block_id

    def remember(
        self, block_id: int, group: int, content_hash: bytes, parent_hash: bytes, token_ids: tuple[int, ...]
    ) -> None:
        """Put a full block into its group's index, unless a block with this hash is there already."""
        block, index = self.blocks[block_id], self._indexes[group]
        assert block.ref_count > 0, f"block {block_id} is free and cannot be indexed"
        if content_hash not in index and block.content is None:
            index[content_hash] = block_id
            block.group, block.content = group, (content_hash, parent_hash, token_ids)

    def forget_all(self) -> None:
        """Empty all indexes: nothing cached can be found any more.

        Blocks that become empty are taken again before those never used, whose memory may not even be there yet.
        """
        for block_id in self._cached():
            self.forget(block_id)

    def forget(self, block_id: int) -> None:
        """Take a block out of its index: it does not hold what was said."""
        self._forget(self.blocks[block_id])
        if self.is_free(block_id):
            self._early.pop(block_id, None)
            self._free[block_id] = None
            self._free.move_to_end(block_id, last=False)

    def cached_contents(self) -> Iterator[tuple[int, PageContent]]:
        """Blocks whose content can be found by hash, and what it is: those that would be evicted last come first."""
        referenced = [block.block_id for block in self.blocks if block.ref_count]
        for block_id in (*referenced, *reversed(self._free), *reversed(self._early)):
            block = self.blocks[block_id]
            if block.content is not None:
                yield block_id, (block.group, *block.content)

    def check(self, holders: dict[int, int] | None = None) -> None:
        """Verify every invariant; with `holders` (block -> references its users hold) the counts as well.

        Raises: AssertionError.
        """
        for block in self.blocks:
            assert block.ref_count >= 0, block
            assert (block.ref_count == 0) == (block.block_id in self._free or block.block_id in self._early), block
            if block.content is not None:
                assert self._indexes[block.group].get(block.content[0]) == block.block_id, block
            if holders is not None:
                assert block.ref_count == holders.get(block.block_id, 0), (block, holders.get(block.block_id, 0))
        assert not self._free.keys() & self._early.keys()
        assert all(self.blocks[i].content is not None for i in self._early)
        cached = self._cached()
        assert all(self.blocks[i].content is not None for i in cached)
        assert len(set(cached)) == len(cached)
        assert self.num_shared == sum(block.ref_count > 1 for block in self.blocks)
        assert self.num_evictable == sum(self.blocks[i].ref_count == 0 for i in cached)

    def _first_use(self) -> int:
        """A block that was never used; the caller holds one reference."""
        block = Block(len(self.blocks), ref_count=1)
        self.blocks.append(block)
        return block.block_id

    def _has_emptied(self) -> bool:
        first = next(iter(self._free), None)
        return first is not None and self.blocks[first].content is None

    def _cached(self) -> list[int]:
        return [block_id for index in self._indexes for block_id in index.values()]

    def _forget(self, block: Block) -> None:
        if block.content is not None:
            del self._indexes[block.group][block.content[0]]
            block.content = None
            self.num_evictable -= block.ref_count == 0

"""Which blocks hold which sequence: match a prefix, allocate, append, fork, copy on write, trim, free.

Pairs as everywhere: `can_x` is pure; `x` does it or raises. A sequence has a block table in each KV group; what a group
needs and when it gives blocks back is known to its manager (`kv_groups`). All groups take their blocks from one pool.
Full blocks of different sequences are shared by reference; a partly filled block is shared only between forks, until
one of them writes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from itertools import chain, cycle

from quire.core.kv.block_pool import BlockPool
from quire.core.kv.block_table import NULL_BLOCK, BlockTable
from quire.core.kv.groups import MANAGERS, Find, GroupManager
from quire.core.kv.tiers import KVTiers, as_entry, is_slot, slot_of
from quire.core.sequence import Sequence
from quire.messages.kv import KVCacheSpec, StateSpec
from quire.messages.step import SchedulerOutputs
from quire.utils.hashing import block_hashes, root_hash

BLOCKS_AT_ONCE = 64
"""Blocks of a sequence that are hashed when one of them is looked up: one by one, a prompt takes half as long again."""
LATEST_STATES = 4
"""Checkpoints of a sequence, the latest, that are evicted like other cached blocks. Earlier ones go before anything
else does, so that a long prompt takes the place of its own states and not of what others have cached."""


class BlockManager:
    """Block tables of all sequences over one pool."""

    def __init__(
        self,
        num_blocks: int,
        specs: Many[KVCacheSpec],
        *,
        max_chunk_tokens: int,
        enable_prefix_caching: bool,
        engine_digest: bytes = b"",
        tiers: KVTiers | None = None,
        state_stride: int = 0,
    ) -> None:
        """One spec for each KV group. `max_chunk_tokens` is the most that a sequence computes in one step.

        `state_stride`: tokens between two states of recurrent layers that are cached, a multiple of the block size.
        0 where there are no such layers, or nothing is cached.

        `engine_digest` goes into every hash: blocks of engines that compute otherwise have other hashes. `tiers` keep
        what the pool evicts.
        """
        self._state_groups = [index for index, spec in enumerate(specs) if isinstance(spec, StateSpec)]
        assert bool(state_stride) == (enable_prefix_caching and bool(self._state_groups)), (state_stride, specs)
        assert state_stride % specs[0].page.block_size == 0, (state_stride, specs)
        self.state_stride = state_stride
        self.pool = BlockPool(num_blocks, len(specs))
        self.groups: list[GroupManager] = [
            MANAGERS[type(spec)](spec, self.pool, max_chunk_tokens=max_chunk_tokens, state_stride=state_stride)
            for spec in specs
        ]
        self._trimming = [index for index, group in enumerate(self.groups) if group.trims]
        self.tiers = tiers
        if tiers is not None:
            self.pool.spill = tiers.save
        self.engine_digest = engine_digest
        self.block_size = specs[0].page.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def match_prefix(self, seq: Sequence) -> list[list[int]]:
        """By group, the cached blocks of the longest prefix that all groups accept, its last token never included.

        What is in a tier is named by `kv_tiers.as_entry`, and found only where loading it is worth the time.
        """
        if self.tiers is None:
            return self._match(seq, self._finder)
        matched = self._match(seq, self._tier_finder)
        if any(is_slot(entry) for entries in matched for entry in entries):
            in_pool = self._match(seq, self._finder)
            if (len(matched[0]) - len(in_pool[0])) * self.block_size < self.tiers.min_load_tokens:
                return in_pool
        return matched

    def _match(self, seq: Sequence, finder: Callable[[Sequence, int], Find]) -> list[list[int]]:
        matched: list[list[int]] = [[] for _ in self.groups]
        length = min((seq.num_tokens - 1) // self.block_size, self._num_readable_blocks(seq))
        num_agreeing = 0
        for index in cycle(range(len(self.groups))):
            if length == 0 or num_agreeing == len(self.groups):
                break
            matched[index] = self.groups[index].match(finder(seq, index), length)
            num_agreeing = num_agreeing + 1 if len(matched[index]) == length else 1
            length = len(matched[index])
        return [block_ids[:length] for block_ids in matched]

    def can_allocate(self, seq: Sequence, matched: list[list[int]]) -> bool:
        """Whether all tokens the sequence has now would fit, its matched prefix taken from the cache."""
        return self.num_new_blocks(seq, matched) <= self.pool.num_free

    def num_new_blocks(self, seq: Sequence, matched: list[list[int]]) -> int:
        """Free blocks that all tokens a sequence has now take, its matched prefix taken from the cache."""
        held = [block_id for block_ids in matched for block_id in block_ids if block_id > NULL_BLOCK]
        from_free = sum(self.pool.is_free(block_id) for block_id in held)
        return self.most_blocks(seq) - len(held) + from_free

    def num_freed(self, seqs: Iterable[Sequence], matched: list[list[int]]) -> int:
        """Blocks that would become free without these sequences, those of a matched prefix not counted."""
        held = Counter(block_id for seq in seqs for table in seq.tables for block_id in table.held)
        kept = {block_id for block_ids in matched for block_id in block_ids}
        blocks = self.pool.blocks
        return sum(blocks[block_id].ref_count == count for block_id, count in held.items() if block_id not in kept)

    def still_needed(self, seq: Sequence) -> int:
        """Free blocks that a running sequence takes at most until all tokens it has now are computed."""
        if seq.num_left == 0:
            return 0
        if seq.num_left == 1:
            return 0 if seq.num_computed_tokens < seq.num_writable_tokens else self.num_needed(seq, 1)
        return max(0, self.most_blocks(seq) - seq.num_blocks)

    def most_blocks(self, seq: Sequence) -> int:
        """Blocks that the sequence holds at most while the tokens it has now are computed."""
        return sum(group.most_blocks(seq.num_tokens) for group in self.groups)

    def allocate_prefix(self, seq: Sequence, matched: list[list[int]]) -> None:
        """Start a sequence that has no blocks on its matched prefix."""
        assert not seq.tables, seq
        seq.tables = [self._shared_table(*of_group) for of_group in zip(self.groups, matched, strict=True)]
        if self.tiers is not None:
            self._load(seq, self.tiers, len(matched[0]))
        seq.num_hashed_blocks = seq.num_found_blocks = len(matched[0])
        seq.num_computed_tokens = seq.num_committed_tokens = len(matched[0]) * self.block_size
        if self.reads_cache(seq):
            self.num_queried_tokens += seq.num_tokens
            self.num_hit_tokens += seq.num_computed_tokens

    def up_to_checkpoint(self, seq: Sequence, num_new_tokens: int) -> int:
        """How many of the next tokens a step may compute: it ends where a state is to be cached."""
        if not self.state_stride:
            return num_new_tokens
        return min(num_new_tokens, self.state_stride - seq.num_computed_tokens % self.state_stride)

    def num_needed(self, seq: Sequence, num_new_tokens: int) -> int:
        """Blocks to allocate before the next `num_new_tokens` of the sequence can be computed."""
        computed = seq.num_computed_tokens
        tables = zip(self.groups, seq.tables, strict=True)
        return sum(group.needed(table, computed, computed + num_new_tokens) for group, table in tables)

    def can_append(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Whether `append` would succeed."""
        if seq.num_computed_tokens + num_new_tokens <= seq.num_writable_tokens:
            return True
        return self.num_needed(seq, num_new_tokens) <= self.pool.num_free

    def append(self, seq: Sequence, num_new_tokens: int) -> list[tuple[int, int]] | None:
        """Make room for the next tokens. Gives the (source, destination) of copies that must run first.

        None if the tables stay as they are.
        """
        num_tokens = seq.num_computed_tokens + num_new_tokens
        if num_tokens <= seq.num_writable_tokens:
            return None
        copies: list[tuple[int, int]] = []
        for group, table in zip(self.groups, seq.tables, strict=True):
            copies += group.append(table, seq.num_computed_tokens, num_tokens)
        tables = zip(self.groups, seq.tables, strict=True)
        seq.num_writable_tokens = min(group.num_writable(table) for group, table in tables)
        return copies

    def share_blocks(self, parent: Sequence, child: Sequence) -> None:
        """Give a forked child its references; whoever writes first to a shared partial block copies it."""
        for table in child.tables:
            for block_id in table.held:
                self.pool.share(block_id)
        parent.num_writable_tokens = child.num_writable_tokens = 0

    def retire(self, seq: Sequence) -> None:
        """Tokens of the sequence were computed: index the blocks that are full now, free those that are read no more.

        The step that computed them must have ended: it reads what is freed here.
        """
        if seq.num_committed_tokens < seq.retires_at:
            return
        if self.enable_prefix_caching:
            self._index(seq)
            self._evict_early(seq)
        for group in self._trimming:
            self.groups[group].trim(seq.tables[group], seq.num_committed_tokens)
        seq.retires_at = self._retires_at(seq)

    def free(self, seq: Sequence) -> None:
        """Give all blocks of the sequence back."""
        seq.num_blocks_before = max(seq.num_blocks_before, seq.num_hashed_blocks)
        for group, table in zip(self.groups, seq.tables, strict=False):  # it has no tables while it waits
            group.free(table)
        seq.tables = []
        seq.num_hashed_blocks = seq.num_found_blocks = 0
        seq.num_writable_tokens = seq.retires_at = 0
        seq.num_computed_tokens = seq.num_committed_tokens = seq.num_pending = 0

    def is_loading(self, seq: Sequence) -> bool:
        """Whether the sequence has blocks that the step in flight loads."""
        return self.tiers is not None and self.tiers.is_loading(chain(*(table.held for table in seq.tables)))

    @property
    def is_moving(self) -> bool:
        """Whether a step in flight moves pages between tiers."""
        return self.tiers is not None and self.tiers.is_in_flight

    def write_moves(self, plan: SchedulerOutputs) -> None:
        """Say in the instruction for a step which pages are to be moved."""
        if self.tiers is not None:
            self.tiers.write(plan)

    def moves_ended(self, failed_loads: Many[int]) -> None:
        """The step in flight has moved its pages; into these blocks it could not load what it should."""
        if self.tiers is not None:
            self.tiers.ended(failed_loads)
            for block_id in failed_loads:
                self.pool.forget(block_id)

    def moves_interrupted(self) -> None:
        """Nobody knows which pages the step in flight has moved: what it should have written is found no more."""
        if self.tiers is not None:
            for block_id in self.tiers.interrupted():
                self.pool.forget(block_id)

    def forget_cached(self) -> None:
        """Forget all cached prefixes; sequences keep what they use."""
        self.pool.forget_all()
        if self.tiers is not None:
            self.tiers.clear()

    def reads_cache(self, seq: Sequence) -> bool:
        """Whether what others have computed may serve this sequence."""
        return self.enable_prefix_caching and seq.group.request.sampling_params.reads_prefix_cache

    def check(self, holders: dict[int, int]) -> None:
        """Verify every invariant; `holders`: block -> references that sequences hold.

        Raises: AssertionError.
        """
        self.pool.check(holders)
        if self.tiers is not None:
            self.tiers.check()

    def _shared_table(self, group: GroupManager, matched: list[int]) -> BlockTable:
        """A table of cached blocks, with a reference to each."""
        table = group.begin(matched)
        held = [block_id for block_id in table.held if not is_slot(block_id)]
        num_used = sum(not self.pool.is_free(block_id) for block_id in held)
        for block_id in held:
            self.pool.share(block_id)
        table.num_shared = table.num_trimmed + num_used
        return table

    def _load(self, seq: Sequence, tiers: KVTiers, num_matched: int) -> None:
        """Give the sequence blocks for what is in slots. All other blocks have their references already.

        Tokens behind the first loaded page would have to be computed without it; of a state, those before it.
        """
        wanted = [
            (group, table, index)
            for group, table in enumerate(seq.tables)
            for index in range(table.num_trimmed, len(table.block_ids))
            if is_slot(table.block_ids[index])
        ]
        tiers.hold(slot_of(table.block_ids[index]) for _, table, index in wanted)
        for group, table, index in wanted:
            block_id = self.pool.allocate()
            content = tiers.load(slot_of(table.block_ids[index]), block_id)
            self.pool.remember(block_id, group, *content[1:])
            table.block_ids[index] = block_id
        first = min((index for _, _, index in wanted), default=num_matched)
        tiers.num_hit_tokens += self.block_size * (num_matched - first)

    def _index(self, seq: Sequence) -> None:
        """Let others find the full blocks of the sequence."""
        for index in range(seq.num_hashed_blocks, seq.num_committed_tokens // self.block_size):
            content = self._content(seq, index)
            for group, table in enumerate(seq.tables):
                block_id = self.groups[group].cacheable(table, index, seq.num_committed_tokens)
                if block_id is not None:
                    self.pool.remember(block_id, group, *content)
            seq.num_hashed_blocks = index + 1

    def _evict_early(self, seq: Sequence) -> None:
        """Let the checkpoint go early that is the latest no more, unless the sequence found it, as others may."""
        stride = self.state_stride
        if not stride or seq.num_committed_tokens % stride:
            return
        index = (seq.num_committed_tokens - LATEST_STATES * stride) // self.block_size - 1
        if index < seq.num_found_blocks:
            return
        for group in self._state_groups:
            block_id = self._finder(seq, group)(index)
            if block_id is not None:
                self.pool.evict_early(block_id)

    def _retires_at(self, seq: Sequence) -> int:
        """The number of computed tokens at which the next block is full, or one is read no more."""
        full_at = (seq.num_hashed_blocks + 1) * self.block_size if self.enable_prefix_caching else sys.maxsize
        return min([full_at, *(self.groups[group].trims_at(seq.tables[group]) for group in self._trimming)])

    def _num_readable_blocks(self, seq: Sequence) -> int:
        """Leading blocks that may come from the cache; a sequence that does not read it finds what it had itself."""
        return seq.num_tokens if self.reads_cache(seq) else seq.num_blocks_before

    def _finder(self, seq: Sequence, group: int) -> Find:
        return lambda index: self.pool.find(group, *self._content(seq, index))

    def _tier_finder(self, seq: Sequence, group: int) -> Find:
        def find(index: int) -> int | None:
            content = self._content(seq, index)
            block_id = self.pool.find(group, *content)
            if block_id is not None or self.tiers is None:
                return block_id
            slot = self.tiers.find((group, *content))
            return None if slot is None else as_entry(slot)

        return find

    def _content(self, seq: Sequence, index: int) -> tuple[bytes, bytes, tuple[int, ...]]:
        """(hash, parent's hash, tokens) of a full block of the sequence, the same in every group."""
        size, hashes = self.block_size, seq.block_hashes
        if index >= len(hashes):
            self._hash(seq, max(index + 1, len(hashes) + BLOCKS_AT_ONCE))
        return hashes[index], self._parent(seq, index), tuple(seq.token_ids[index * size : (index + 1) * size])

    def _hash(self, seq: Sequence, num_blocks: int) -> None:
        """Hash the leading blocks of the sequence, at most so many."""
        size, hashes = self.block_size, seq.block_hashes
        new = seq.token_ids[len(hashes) * size : num_blocks * size]
        hashes += block_hashes(self._parent(seq, len(hashes)), new, size)

    def _parent(self, seq: Sequence, index: int) -> bytes:
        """The hash of the block before."""
        return seq.block_hashes[index - 1] if index else root_hash(self.engine_digest, seq.group.request.cache_salt)

"""Which blocks hold which sequence: match a prefix, allocate, append, fork, copy on write, free.

Pairs as everywhere: `can_x` is pure; `x` does it or raises. Full blocks of different sequences are shared by reference;
a partly filled block is shared only between forks, until one of them writes.
"""

from __future__ import annotations

from quire.core.block_pool import BlockPool
from quire.core.sequence import Sequence
from quire.utils.hashing import block_hash, root_hash
from quire.utils.math import cdiv


class BlockManager:
    """Block tables of all sequences over one pool."""

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool, engine_digest: bytes = b""
    ) -> None:
        """`engine_digest` goes into every hash: blocks of engines that compute otherwise have other hashes."""
        self.pool = BlockPool(num_blocks)
        self.engine_digest = engine_digest
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def match_prefix(self, seq: Sequence) -> list[int]:
        """The cached blocks that hold the longest prefix of the sequence, its last token never included."""
        if not self.reads_cache(seq):
            return []
        matched: list[int] = []
        for index in range((seq.num_tokens - 1) // self.block_size):
            block_id = self.pool.find(*self._content(seq, index))
            if block_id is None:
                break
            matched.append(block_id)
        return matched

    def can_allocate(self, seq: Sequence, matched: list[int]) -> bool:
        """Whether all tokens the sequence has now would fit, its matched prefix taken from the cache."""
        from_free = sum(self.pool.is_free(block_id) for block_id in matched)
        return cdiv(seq.num_tokens, self.block_size) - len(matched) + from_free <= self.pool.num_free

    def allocate_prefix(self, seq: Sequence, matched: list[int]) -> None:
        """Start a sequence that has no blocks on its matched prefix."""
        assert not seq.block_ids, seq
        seq.num_shared_blocks = sum(not self.pool.is_free(block_id) for block_id in matched)
        for block_id in matched:
            self.pool.share(block_id)
        seq.block_ids = list(matched)
        seq.num_hashed_blocks = len(matched)
        seq.num_computed_tokens = len(matched) * self.block_size
        if self.reads_cache(seq):
            self.num_queried_tokens += seq.num_tokens
            self.num_hit_tokens += seq.num_computed_tokens

    def num_needed(self, seq: Sequence, num_new_tokens: int) -> int:
        """Blocks to allocate before the next `num_new_tokens` of the sequence can be computed."""
        needed = cdiv(seq.num_computed_tokens + num_new_tokens, self.block_size) - len(seq.block_ids)
        return needed + 1 if seq.last_block_shared and self._must_copy(seq) else needed

    def can_append(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Whether `append` would succeed."""
        return self.num_needed(seq, num_new_tokens) <= self.pool.num_free

    def append(self, seq: Sequence, num_new_tokens: int) -> tuple[int, int] | None:
        """Make room for the next tokens. Gives the (source, destination) of a copy that must run first, if any."""
        copy = None
        if self._must_copy(seq):
            source, destination = seq.block_ids[-1], self.pool.allocate()
            seq.block_ids[-1] = destination
            self.pool.release(source)
            copy = (source, destination)
        seq.last_block_shared = False
        for _ in range(cdiv(seq.num_computed_tokens + num_new_tokens, self.block_size) - len(seq.block_ids)):
            seq.block_ids.append(self.pool.allocate())
        return copy

    def share_blocks(self, parent: Sequence, child: Sequence) -> None:
        """Give a forked child its references; whoever writes first to a shared partial block copies it."""
        for block_id in child.block_ids:
            self.pool.share(block_id)
        if parent.num_computed_tokens % self.block_size:
            parent.last_block_shared = child.last_block_shared = True

    def remember_full_blocks(self, seq: Sequence) -> None:
        """Index the blocks of the sequence that have become full."""
        if not self.enable_prefix_caching:
            return
        for index in range(seq.num_hashed_blocks, seq.num_computed_tokens // self.block_size):
            self.pool.remember(seq.block_ids[index], *self._content(seq, index))
            seq.num_hashed_blocks = index + 1

    def free(self, seq: Sequence) -> None:
        """Give all blocks of the sequence back, its last ones to be evicted first."""
        for block_id in reversed(seq.block_ids):
            self.pool.release(block_id)
        seq.block_ids = []
        seq.num_hashed_blocks = 0
        seq.num_shared_blocks = 0
        seq.num_computed_tokens = 0
        seq.last_block_shared = False

    def reads_cache(self, seq: Sequence) -> bool:
        """Whether what others have computed may serve this sequence."""
        return self.enable_prefix_caching and seq.group.request.sampling_params.reads_prefix_cache

    def _must_copy(self, seq: Sequence) -> bool:
        return seq.last_block_shared and self.pool.blocks[seq.block_ids[-1]].ref_count > 1

    def _content(self, seq: Sequence, index: int) -> tuple[bytes, bytes, tuple[int, ...]]:
        """(hash, parent's hash, tokens) of a full block of the sequence."""
        size = self.block_size
        tokens = tuple(seq.token_ids[index * size : (index + 1) * size])
        salt = seq.group.request.cache_salt
        parent = seq.block_hashes[index - 1] if index else root_hash(self.engine_digest, salt)
        if index == len(seq.block_hashes):
            seq.block_hashes.append(block_hash(parent, tokens))
        return seq.block_hashes[index], parent, tokens

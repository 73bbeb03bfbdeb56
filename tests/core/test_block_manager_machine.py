"""Block tables of sequences in several KV groups, whatever is done in whatever order, against a naive memory."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.core.kv.block_manager import BlockManager
from quire.core.kv.block_table import NULL_BLOCK, BlockTable
from quire.core.order.queue import Tenant
from quire.core.sequence import Sequence, SequenceGroup
from quire.messages.request import EngineCoreRequest
from quire.sampling_params import SamplingParams
from quire.utils.math import cdiv
from tests.fakes import STATE, WINDOWS, specs_of

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=24)
"""Few different tokens, so that prefixes coincide."""
Written = tuple[int, str, tuple[int, ...]]
"""(group, salt, all tokens up to there): what keys and values of a position depend on."""


class BlockManagerMachine(RuleBasedStateMachine):
    """Start, compute, fork and free sequences in any order. The memory is a dict from (block, slot) to who wrote it."""

    max_chunk: ClassVar[int] = 6

    @initialize(
        windows=st.sampled_from(WINDOWS),
        block_size=st.integers(1, 4),
        extra=st.integers(0, 12),
        blocks_per_state=st.integers(0, 3),
    )
    def build(self, windows: tuple[int | None, ...], block_size: int, extra: int, blocks_per_state: int) -> None:
        self.windows, self.size = windows, block_size
        specs = specs_of(block_size, windows)
        self.max_len = 30
        num_blocks = sum(spec.most_blocks(self.max_len, self.max_chunk) for spec in specs) + extra
        self.is_caching = blocks_per_state > 0
        self.stride = block_size * blocks_per_state if STATE in windows else 0
        self.blocks = BlockManager(
            num_blocks,
            specs,
            max_chunk_tokens=self.max_chunk,
            enable_prefix_caching=self.is_caching,
            state_stride=self.stride,
        )
        self.live: list[Sequence] = []
        self.memory: dict[tuple[int, int], Written] = {}
        self.cached: dict[Written, int] = {}
        """What can be found, by the tokens up to its last one."""
        self.states: dict[int, Written] = {}
        """By page: who wrote the state there."""
        self.num_started = 0

    @rule(token_ids=TOKENS, salt=st.sampled_from(["", "pepper"]))
    def start(self, token_ids: list[int], salt: str) -> None:
        request = EngineCoreRequest(
            request_id=str(self.num_started),
            prompt_token_ids=token_ids,
            sampling_params=SamplingParams(),
            seed=0,
            max_tokens=9,
            cache_salt=salt,
        )
        seq = Sequence(
            self.num_started, SequenceGroup(request, Tenant(""), (0.0, self.num_started)), 0, list(token_ids)
        )
        self.num_started += 1
        matched = self.blocks.match_prefix(seq)
        expected = self._longest_cached(seq)
        assert [len(block_ids) for block_ids in matched] == [expected] * len(self.windows)
        if not self.blocks.can_allocate(seq, matched):
            assert self.live, "a sequence that is alone fits"
            return
        self.blocks.allocate_prefix(seq, matched)
        assert seq.num_computed_tokens == expected * self.size
        self.live.append(seq)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), wanted=st.integers(1, 6), next_token=st.integers(0, 1))
    def compute(self, which: int, wanted: int, next_token: int) -> None:
        seq = self.live[which % len(self.live)]
        count = self.blocks.up_to_checkpoint(seq, min(wanted, seq.num_tokens - seq.num_computed_tokens))
        if self.stride:
            assert (seq.num_computed_tokens + count - 1) // self.stride == seq.num_computed_tokens // self.stride
        if not self.blocks.can_append(seq, count):
            assert len(self.live) > 1, "a sequence that is alone always gets on"
            return
        before = [table.held for table in seq.tables]
        copies = self.blocks.append(seq, count)
        fresh = [new for table, old in zip(seq.tables, before, strict=True) for new in table.held if new not in old]
        for source, destination in copies or ():
            for slot in range(self.size):
                self.memory[destination, slot] = self.memory.get((source, slot), (-1, "", ()))
        self.cached = {written: block for written, block in self.cached.items() if block not in fresh}
        self._write_and_read(seq, count)
        seq.num_computed_tokens = seq.num_committed_tokens = seq.num_computed_tokens + count
        if self.is_caching:
            self._remember(seq, count)
        self.blocks.retire(seq)
        if seq.num_computed_tokens == seq.num_tokens:
            if seq.num_tokens < self.max_len:
                seq.token_ids.append(next_token)
            else:
                self.free(which)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        parent = self.live[which % len(self.live)]
        child = parent.fork(self.num_started, parent.branch + 1)
        self.num_started += 1
        self.blocks.share_blocks(parent, child)
        self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9))
    def free(self, which: int) -> None:
        self.blocks.free(self.live.pop(which % len(self.live)))

    @rule()
    def forget_all(self) -> None:
        self.blocks.pool.forget_all()
        self.cached.clear()

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        holders: dict[int, int] = {}
        for seq in self.live:
            for table, window in zip(seq.tables, self.windows, strict=True):
                for block_id in table.held:
                    holders[block_id] = holders.get(block_id, 0) + 1
                if window == STATE:
                    assert len(table.held) == len(table.block_ids) == min(1, seq.num_computed_tokens)
                    continue
                first = 0 if window is None else max(0, seq.num_computed_tokens - window + 1) // self.size
                assert table.block_ids[:first] == [NULL_BLOCK] * first, "blocks that nobody reads are given back"
                assert table.held == table.block_ids[first : cdiv(seq.num_computed_tokens, self.size)]
        pool = self.blocks.pool
        pool.check(holders)
        assert pool.num_free + len(holders) == pool.num_blocks
        assert pool.num_cached == len(self.cached)

    def _write_and_read(self, seq: Sequence, count: int) -> None:
        computed, end = seq.num_computed_tokens, seq.num_computed_tokens + count
        for group, table in self._states(seq):
            read, write = table.block_ids
            assert (read == NULL_BLOCK) == (computed == 0)
            assert computed == 0 or self.states[read] == self._written(seq, group, computed - 1)
            assert self.blocks.pool.blocks[write].ref_count == 1, "nobody else reads what is written"
            self.states[write] = self._written(seq, group, end - 1)
        for group, table in self._keeping_blocks(seq):
            for position in range(computed, end):
                block_id = table.block_ids[position // self.size]
                assert self.blocks.pool.blocks[block_id].ref_count == 1, "nobody else reads what is written"
                self.memory[block_id, position % self.size] = self._written(seq, group, position)
        for group, table in self._keeping_blocks(seq):
            window = self.windows[group]
            for position in range(0 if window is None else max(0, computed - window + 1), end):
                found = self.memory[table.block_ids[position // self.size], position % self.size]
                assert found == self._written(seq, group, position)

    def _states(self, seq: Sequence) -> list[tuple[int, BlockTable]]:
        return [(group, table) for group, table in enumerate(seq.tables) if self.windows[group] == STATE]

    def _keeping_blocks(self, seq: Sequence) -> list[tuple[int, BlockTable]]:
        return [(group, table) for group, table in enumerate(seq.tables) if self.windows[group] != STATE]

    def _remember(self, seq: Sequence, count: int) -> None:
        indexed = set(self.cached.values())
        for group, table in enumerate(seq.tables):
            for index in range(seq.num_hashed_blocks, seq.num_computed_tokens // self.size):
                end = (index + 1) * self.size
                if self.windows[group] == STATE:
                    if end % self.stride:
                        continue
                    assert end == seq.num_computed_tokens, "a state is cached in the step that computes it"
                block_id = table.block_ids[-1 if self.windows[group] == STATE else index]
                if block_id not in indexed:
                    self.cached.setdefault(self._written(seq, group, end - 1), block_id)

    def _longest_cached(self, seq: Sequence) -> int:
        if not self.is_caching:
            return 0
        return max(
            length
            for length in range((seq.num_tokens - 1) // self.size + 1)
            if all(
                self._written(seq, group, (index + 1) * self.size - 1) in self.cached
                for group, window in enumerate(self.windows)
                for index in range(length)
                if window is None or self._is_read(window, index, length)
            )
        )

    def _is_read(self, window: int, index: int, length: int) -> bool:
        """Whether a sequence that goes on behind so many blocks needs this one of a group that needs few of them."""
        if window == STATE:
            return index == length - 1
        return (index + 1) * self.size > length * self.size - window + 1

    @staticmethod
    def _written(seq: Sequence, group: int, position: int) -> Written:
        return group, seq.group.request.cache_salt or "", tuple(seq.token_ids[: position + 1])


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)

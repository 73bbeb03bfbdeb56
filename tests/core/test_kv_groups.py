"""Block tables of sequences in several KV groups, against a naive memory; and faults that must not go unseen."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.core.block_manager import BlockManager
from quire.core.block_pool import Block, BlockPool
from quire.core.block_table import NULL_BLOCK, BlockTable
from quire.core.kv_groups import FullAttention, SlidingWindow
from quire.core.queue import Tenant
from quire.core.sequence import Sequence, SequenceGroup
from quire.messages.kv import SlidingWindowSpec, kv_layout
from quire.messages.request import EngineCoreRequest
from quire.sampling_params import SamplingParams
from quire.utils.math import cdiv
from tests.fakes import FakeCore, expected_tokens, specs_of

WINDOWS: list[tuple[int | None, ...]] = [(None,), (5,), (None, 6), (None, 1, 9), (3, 8), (None, None, 4)]
"""One group, several of one kind, several kinds."""
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=24)
"""Few different tokens, so that prefixes coincide."""
Written = tuple[int, str, tuple[int, ...]]
"""(group, salt, all tokens up to there): what keys and values of a position depend on."""


class BlockManagerMachine(RuleBasedStateMachine):
    """Start, compute, fork and free sequences in any order. The memory is a dict from (block, slot) to who wrote it."""

    max_chunk: ClassVar[int] = 6

    @initialize(windows=st.sampled_from(WINDOWS), block_size=st.integers(1, 4), extra=st.integers(0, 12))
    def build(self, windows: tuple[int | None, ...], block_size: int, extra: int) -> None:
        self.windows, self.size = windows, block_size
        specs = specs_of(block_size, windows)
        self.max_len = 30
        num_blocks = sum(spec.most_blocks(self.max_len, self.max_chunk) for spec in specs) + extra
        self.blocks = BlockManager(num_blocks, specs, max_chunk_tokens=self.max_chunk, enable_prefix_caching=True)
        self.live: list[Sequence] = []
        self.memory: dict[tuple[int, int], Written] = {}
        self.cached: dict[Written, int] = {}
        """What can be found, by the tokens up to its last one."""
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
        count = min(wanted, seq.num_tokens - seq.num_computed_tokens)
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
        seq.num_computed_tokens += count
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
                first = 0 if window is None else max(0, seq.num_computed_tokens - window + 1) // self.size
                assert table.block_ids[:first] == [NULL_BLOCK] * first, "blocks that nobody reads are given back"
                assert table.held == table.block_ids[first : cdiv(seq.num_computed_tokens, self.size)]
                for block_id in table.held:
                    holders[block_id] = holders.get(block_id, 0) + 1
        pool = self.blocks.pool
        pool.check(holders)
        assert pool.num_free + len(holders) == pool.num_blocks
        assert pool.num_cached == len(self.cached)

    def _write_and_read(self, seq: Sequence, count: int) -> None:
        computed, end = seq.num_computed_tokens, seq.num_computed_tokens + count
        for group, table in enumerate(seq.tables):
            for position in range(computed, end):
                block_id = table.block_ids[position // self.size]
                assert self.blocks.pool.blocks[block_id].ref_count == 1, "nobody else reads what is written"
                self.memory[block_id, position % self.size] = self._written(seq, group, position)
        for group, (table, window) in enumerate(zip(seq.tables, self.windows, strict=True)):
            for position in range(0 if window is None else max(0, computed - window + 1), end):
                found = self.memory[table.block_ids[position // self.size], position % self.size]
                assert found == self._written(seq, group, position)

    def _remember(self, seq: Sequence, count: int) -> None:
        indexed = set(self.cached.values())
        for group, table in enumerate(seq.tables):
            for index in range(seq.num_hashed_blocks, seq.num_computed_tokens // self.size):
                written = self._written(seq, group, (index + 1) * self.size - 1)
                if table.block_ids[index] not in indexed:
                    self.cached.setdefault(written, table.block_ids[index])

    def _longest_cached(self, seq: Sequence) -> int:
        return max(
            length
            for length in range((seq.num_tokens - 1) // self.size + 1)
            if all(
                self._written(seq, group, (index + 1) * self.size - 1) in self.cached
                for group, window in enumerate(self.windows)
                for index in range(length)
                if window is None or (index + 1) * self.size > length * self.size - window + 1
            )
        )

    @staticmethod
    def _written(seq: Sequence, group: int, position: int) -> Written:
        return group, seq.group.request.cache_salt or "", tuple(seq.token_ids[: position + 1])


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def long_run(core: FakeCore) -> None:
    """Forks, prompts in chunks, prefix hits and preemptions: whatever a fault in the memory may hurt."""
    for i in range(4):
        core.submit(f"warm{i}", [i % 2] * 21, max_tokens=12)
    core.submit("forks", list(range(30)), max_tokens=14, params={"n": 3})
    for i in range(4):
        core.submit(f"again{i}", [*[i % 2] * 21, i, i], max_tokens=12)
    core.run()


def core_with(windows: tuple[int | None, ...] = (None, 6), **options: Any) -> FakeCore:
    return FakeCore(num_blocks=28, windows=windows, max_model_len=50, max_chunk_tokens=9, **options)


@pytest.mark.parametrize("windows", WINDOWS)
def test_sequences_find_their_past_in_every_group(windows: tuple[int | None, ...]) -> None:
    core = core_with(windows)
    long_run(core)
    assert core.tokens["forks", 2] == expected_tokens(list(range(30)), 2, 14)


class EarlyTrim(SlidingWindow):
    """Gives a block back while the next token still reads some of it."""

    def trim(self, table: BlockTable, num_computed: int) -> None:
        super().trim(table, num_computed + 3)


class SkippedCopy(FullAttention):
    """Writes to a new block without what stood in the old one."""

    def append(self, table: BlockTable, num_computed: int, num_tokens: int) -> list[tuple[int, int]]:
        super().append(table, num_computed, num_tokens)
        return []


class WriteToShared(FullAttention):
    """Writes to a block that a fork reads."""

    def _shared(self, table: BlockTable, num_computed: int) -> list[int]:
        return []


class StalePages(BlockPool):
    """Finds a block by what it held before it was given away."""

    def _forget(self, block: Block) -> None:
        if block.content is not None and block.ref_count == 0:
            self.num_evictable -= 1


@pytest.mark.parametrize("fault", [EarlyTrim, SkippedCopy, WriteToShared])
def test_a_faulty_manager_is_noticed(fault: type[FullAttention]) -> None:
    core = core_with(enable_prefix_caching=False)  # blocks that are not cached are used again at once
    index = int(issubclass(fault, SlidingWindow))
    spec = specs_of(4, (None, 6))[index]
    core.blocks.groups[index] = fault(spec, core.blocks.pool, max_chunk_tokens=9)
    with pytest.raises(AssertionError):
        long_run(core)


def test_a_stale_page_is_noticed() -> None:
    core = core_with()
    core.blocks.pool.__class__ = StalePages
    with pytest.raises(AssertionError):
        long_run(core)


@pytest.mark.parametrize(("window", "max_chunk", "most"), [(64, 1, 5), (64, 16, 6), (64, 256, 21), (64, 320, 25)])
def test_a_window_bounds_what_a_sequence_holds(window: int, max_chunk: int, most: int) -> None:
    """A prompt of 1,900 tokens and 60 more: 123 blocks of 16 tokens without a window."""
    core = FakeCore(
        num_blocks=most,
        block_size=16,
        windows=[window],
        max_model_len=2000,
        max_chunk_tokens=max_chunk,
        max_num_batched_tokens=512,
    )
    prompt = [i * i % 50 for i in range(1900)]
    core.submit("a", prompt, max_tokens=60)
    pool, held = core.blocks.pool, 0
    while core.lives.has_work():
        core.step()
        held = max(held, pool.num_blocks - pool.num_free)
    assert core.tokens["a", 0] == expected_tokens(prompt, 0, 60)
    assert core.scheduler.num_preemptions == 0
    assert held <= 5, "between two steps: the window, which may begin and end in the middle of a block"


def test_a_window_group_needs_only_the_tail_of_a_prefix() -> None:
    core = FakeCore(num_blocks=64, windows=[6])
    prompt = list(range(40))
    core.submit("a", prompt, max_tokens=1)
    core.run()
    pool = core.blocks.pool
    for block in pool.blocks:
        if block.content is not None and block.content[2][0] < 28:  # forget all but tokens 28 .. 39
            pool._forget(block)
            pool.check()
    core.submit("b", [*prompt, 41], max_tokens=3)
    core.run()
    assert core.finished["b", 0].num_cached_tokens == 40
    assert core.tokens["b", 0] == expected_tokens([*prompt, 41], 0, 3)


def test_a_prefix_is_as_long_as_all_groups_accept() -> None:
    core = FakeCore(num_blocks=64, windows=[None, 6])
    prompt = list(range(40))
    core.submit("a", prompt, max_tokens=1)
    core.run()
    pool = core.blocks.pool
    (block,) = [block for block in pool.blocks if block.group == 1 and block.content and block.content[2][0] == 28]
    pool._forget(block)
    core.submit("b", prompt, max_tokens=1)
    core.run()
    assert core.finished["b", 0].num_cached_tokens == 28, "the window of token 32 and 36 needs the block of 28"


def test_layers_of_groups_share_parts_of_a_page() -> None:
    layout = kv_layout(specs_of(4, [6, None, 6, None]))
    assert [group.layers for group in layout.groups] == [(1, 3), (0, 2)]
    assert isinstance(layout.groups[1].spec, SlidingWindowSpec)
    assert layout.layers_per_page == 2
    assert layout.block_bytes == 2 * layout.page.num_bytes

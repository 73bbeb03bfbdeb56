"""Block tables of sequences in several KV groups, against a naive memory; and faults that must not go unseen."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.kv.block_pool import Block, BlockPool
from quire.core.kv.block_table import BlockTable
from quire.core.kv.groups import FullAttention, RecurrentState, SlidingWindow
from quire.messages.kv import SlidingWindowSpec, kv_layout
from tests.fakes import STATE, WINDOWS, FakeCore, expected_tokens, specs_of


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


class UpdateInPlace(RecurrentState):
    """Writes the new state over the one that it is computed from."""

    def append(self, table: BlockTable, num_computed: int, num_tokens: int) -> list[tuple[int, int]]:
        super().append(table, num_computed, num_tokens)
        if table.num_trimmed == 0:
            read, write = table.block_ids
            self._pool.release(write)
            self._pool.share(read)
            table.block_ids[1] = read
        return []


def test_a_state_that_is_updated_in_place_is_noticed() -> None:
    core = core_with((STATE,))
    (spec,) = specs_of(4, (STATE,))
    core.blocks.groups[0] = UpdateInPlace(spec, core.blocks.pool, max_chunk_tokens=9)
    with pytest.raises(AssertionError):
        long_run(core)


def test_a_state_takes_two_pages_in_a_step_and_one_between_steps() -> None:
    core = FakeCore(num_blocks=2, windows=[STATE], max_model_len=200, max_chunk_tokens=9)
    prompt = list(range(40))
    core.submit("a", prompt, max_tokens=20)
    pool = core.blocks.pool
    while core.lives.has_work():
        core.step()
        assert pool.num_blocks - pool.num_free <= 1
    assert core.tokens["a", 0] == expected_tokens(prompt, 0, 20)
    assert core.scheduler.num_preemptions == 0


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


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("windows", WINDOWS)
def test_blocks_are_retired_in_the_step_that_fills_them_or_reads_them_last(
    windows: tuple[int | None, ...], enable_prefix_caching: bool
) -> None:
    core = core_with(windows, enable_prefix_caching=enable_prefix_caching)
    for i in range(6):
        core.submit(str(i), list(range(i, 3 * i + 20)), max_tokens=14, params={"n": 1 + i % 2})
    pool = core.blocks.pool
    while core.lives.has_work():
        core.step()
        for seq in core.scheduler.running:
            before = pool.num_free, pool.num_cached, seq.num_hashed_blocks
            seq.retires_at = 0
            core.blocks.retire(seq)
            assert (pool.num_free, pool.num_cached, seq.num_hashed_blocks) == before


@given(window=st.integers(1, 50), block_size=st.integers(1, 20), num_blocks=st.integers(1, 9))
def test_a_window_says_from_when_on_a_block_is_read_no_more(window: int, block_size: int, num_blocks: int) -> None:
    (spec,) = specs_of(block_size, (window,))
    assert isinstance(spec, SlidingWindowSpec)
    num_tokens = spec.num_computed_without(num_blocks)
    assert spec.num_unread_blocks(num_tokens - 1) == num_blocks - 1
    assert spec.num_unread_blocks(num_tokens) == num_blocks


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
    assert layout.num_parts == 2
    assert layout.block_bytes == 2 * layout.page.num_bytes

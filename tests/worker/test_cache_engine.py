"""What `CacheEngine` touches ahead of its use, and pages that leave and come back."""

from __future__ import annotations

import time
from threading import Event, Thread

import pytest
import torch
from torch import Tensor

from quire.messages.kv import FullAttentionSpec, PageSpec, SlidingWindowSpec, kv_layout
from quire.messages.kv_tiers import PageContent
from quire.messages.step import SchedulerOutputs
from quire.ops.backends import implementation_of
from quire.ops.contracts.ops import Ops
from quire.worker.cache_engine import BLOCKS_AT_ONCE, CacheEngine
from quire.worker.kv_store import MemoryPages, PageStore
from tests.fakes import specs_of
from tests.worker import plans

NUM_LAYERS, NUM_BLOCKS, NUM_AHEAD = 2, 100, 40


@pytest.fixture
def touched() -> list[tuple[int, int]]:
    """The ranges of blocks that `cache` touches."""
    return []


@pytest.fixture
def cache(touched: list[tuple[int, int]]) -> CacheEngine:
    def touch_blocks(part: Tensor, begin: int, end: int) -> None:
        assert part.shape[1] == NUM_BLOCKS
        touched.append((begin, end))

    ops = Ops("reference", {**implementation_of("reference"), "touch_blocks": touch_blocks})
    return CacheEngine(ops, kv_layout(specs_of(4) * NUM_LAYERS), NUM_BLOCKS, num_ahead=NUM_AHEAD)


def touched_blocks(cache: CacheEngine, ranges: list[tuple[int, int]]) -> list[int]:
    cache._thread.join(10)
    assert not cache._thread.is_alive()
    blocks = [block for begin, end in ranges for block in range(begin, end)]
    assert all(blocks.count(block) == NUM_LAYERS for block in blocks), "each block once in each layer"
    return sorted(set(blocks))


def test_the_first_blocks_are_touched_at_once(touched: list[tuple[int, int]], cache: CacheEngine) -> None:
    assert touched_blocks(cache, touched) == list(range(NUM_AHEAD))


def test_blocks_are_touched_as_others_before_them_are_used(touched: list[tuple[int, int]], cache: CacheEngine) -> None:
    cache.apply(SchedulerOutputs(**plans.introducing(plans.new_sequence(0, [1] * 80, list(range(20))))))
    assert touched_blocks(cache, touched) == list(range(20 + NUM_AHEAD))
    cache.apply(SchedulerOutputs(new_block_ids={0: [(20, [20, 21])]}))
    assert touched_blocks(cache, touched) == list(range(20 + NUM_AHEAD)), "a few are not worth a thread"
    cache.apply(SchedulerOutputs(new_block_ids={0: [(20, [90, 3])], 1: [(0, [])]}))
    assert touched_blocks(cache, touched) == list(range(NUM_BLOCKS)), "and never more than there are"
    cache.apply(SchedulerOutputs(new_block_ids={0: [(20, [99])]}))
    assert touched_blocks(cache, touched) == list(range(NUM_BLOCKS))


def test_closing_waits_for_what_is_being_touched_and_no_more() -> None:
    begun, may_go, ranges = Event(), Event(), []

    def touch_blocks(part: Tensor, begin: int, end: int) -> None:
        begun.set()
        assert may_go.wait(10)
        ranges.append((begin, end))

    ops = Ops("reference", {**implementation_of("reference"), "touch_blocks": touch_blocks})
    cache = CacheEngine(ops, kv_layout(specs_of(4) * NUM_LAYERS), NUM_BLOCKS, num_ahead=NUM_AHEAD)
    assert begun.wait(10)
    closing = Thread(target=cache.close)
    closing.start()
    deadline = time.monotonic() + 10
    while cache._wanted and time.monotonic() < deadline:
        time.sleep(0.001)
    assert closing.is_alive()
    may_go.set()
    closing.join(10)
    assert not closing.is_alive()
    assert touched_blocks(cache, ranges) == list(range(BLOCKS_AT_ONCE))
    cache.close()


def contents(count: int) -> list[PageContent]:
    return [(0, bytes([number]), b"", (number,)) for number in range(count)]


def test_pages_come_back_into_other_blocks_as_they_were(cache: CacheEngine) -> None:
    for number, part in enumerate(cache.parts):
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(number)))
    before = [part.clone() for part in cache.parts]
    cache.store = PageStore([MemoryPages(3, cache.layout.block_bytes)])
    cache.apply(SchedulerOutputs(blocks_to_swap_out=[(7 + i, i, content) for i, content in enumerate(contents(3))]))
    for part in cache.parts:
        part[:, 7:10] = 0
    wrong = (0, b"?", b"", (9,))
    loads = [(0, 20, contents(3)[0]), (1, 21, wrong), (2, 9, contents(3)[2])]
    cache.apply(SchedulerOutputs(blocks_to_swap_in=loads))
    assert cache.end_loads() == [21]
    assert cache.end_loads() == []
    for part, old in zip(cache.parts, before, strict=True):
        assert torch.equal(part[:, 20], old[:, 7])
        assert torch.equal(part[:, 9], old[:, 9])
        assert torch.equal(part[:, 21], old[:, 21]), "left alone"
    cache.close()
    cache.close()


def test_loads_of_an_interrupted_step_end_before_the_next_one_begins(cache: CacheEngine) -> None:
    cache.store = PageStore([MemoryPages(3, cache.layout.block_bytes)])
    content = contents(1)[0]
    cache.parts[0][:, 7] = 3.0
    cache.apply(SchedulerOutputs(blocks_to_swap_out=[(7, 0, content)]))
    cache.apply(SchedulerOutputs(blocks_to_swap_in=[(0, 8, content)]))
    cache.apply(SchedulerOutputs(blocks_to_copy=[(8, 9)]))
    assert bool((cache.parts[0][:, 9] == 3.0).all())
    assert cache.end_loads() == []
    cache.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8"])
def test_layers_of_different_heads_have_blocks_of_their_own_in_each_page(dtype: str) -> None:
    pages = [
        PageSpec(num_kv_heads=heads, head_size=size, dtype=dtype, block_size=4) for heads, size in ((1, 8), (3, 16))
    ]
    specs = [SlidingWindowSpec(page=pages[0], window=5)] * 5 + [FullAttentionSpec(page=pages[1])]
    layout = kv_layout(specs)
    cache = CacheEngine(Ops("reference", implementation_of("reference")), layout, 3, num_ahead=0)
    (pool,) = cache.parts
    assert layout.is_mixed
    for layer, blocks in enumerate(cache.caches):
        page = specs[layer].page
        assert blocks.shape[:4] == (2, 3, page.num_kv_heads, page.block_size)
        group = layout.groups[layout.group_of_layer[layer]]
        pool.view(torch.uint8).zero_()
        blocks[:, 1].view(torch.uint8).fill_(1)
        assert pool.view(torch.uint8).sum() == page.num_bytes
        others = [cache.caches[other] for other in group.layers if other != layer]
        assert not any(other.view(torch.uint8).any() for other in others), "layers of a group share no byte"

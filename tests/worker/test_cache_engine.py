"""What `CacheEngine` touches ahead of its use."""

from __future__ import annotations

import pytest
from torch import Tensor

from quire.messages.kv import kv_layout
from quire.messages.step import SchedulerOutputs
from quire.ops import table
from quire.worker import cache_engine
from quire.worker.cache_engine import CacheEngine
from tests.fakes import specs_of
from tests.worker import plans

NUM_LAYERS, NUM_BLOCKS, NUM_AHEAD = 2, 100, 40


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []

    def touch_blocks(cache: Tensor, begin: int, end: int) -> None:
        assert cache.shape[1] == NUM_BLOCKS
        ranges.append((begin, end))

    monkeypatch.setattr(cache_engine.ops, "touch_blocks", touch_blocks)
    return ranges


@pytest.fixture
def cache() -> CacheEngine:
    table.use("reference")
    return CacheEngine(kv_layout(specs_of(4) * NUM_LAYERS), NUM_BLOCKS, num_ahead=NUM_AHEAD)


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

"""Reference counts, eviction order, the index."""

from __future__ import annotations

import pytest

from quire.core.kv.block_pool import BlockPool


def remembered(pool: BlockPool, name: bytes) -> int:
    block_id = pool.allocate()
    pool.remember(block_id, 0, name, b"parent", (1, 2))
    return block_id


def test_blocks_are_evicted_least_recently_used_first_and_empty_ones_before_all() -> None:
    pool = BlockPool(3)
    a, b, c = remembered(pool, b"a"), remembered(pool, b"b"), pool.allocate()
    for block_id in (b, a, c):
        pool.release(block_id)
    assert [pool.allocate() for _ in range(3)] == [c, b, a]
    pool.check({a: 1, b: 1, c: 1})


def test_a_cached_block_can_be_found_and_shared_until_it_is_evicted() -> None:
    pool = BlockPool(1)
    block_id = remembered(pool, b"a")
    pool.release(block_id)
    assert pool.find(0, b"a", b"parent", (1, 2)) == block_id
    pool.share(block_id)
    assert pool.num_free == 0
    pool.release(block_id)
    pool.allocate()
    assert pool.find(0, b"a", b"parent", (1, 2)) is None


def test_emptied_blocks_are_taken_again_before_those_never_used() -> None:
    pool = BlockPool(4)
    used = {remembered(pool, b"a"), remembered(pool, b"b")}
    for block_id in used:
        pool.release(block_id)
    pool.forget_all()
    assert {pool.allocate(), pool.allocate()} == used
    pool.check(dict.fromkeys(used, 1))


def test_equal_hash_with_other_tokens_or_other_parent_is_not_found() -> None:
    pool = BlockPool(1)
    remembered(pool, b"a")
    assert pool.find(0, b"a", b"parent", (1, 3)) is None
    assert pool.find(0, b"a", b"other", (1, 2)) is None


def test_the_second_block_with_the_same_content_is_not_indexed() -> None:
    pool = BlockPool(2)
    first, second = remembered(pool, b"a"), remembered(pool, b"a")
    assert pool.find(0, b"a", b"parent", (1, 2)) == first
    pool.release(second)
    pool.check({first: 1})


def test_allocating_from_an_empty_pool_raises() -> None:
    pool = BlockPool(1)
    pool.allocate()
    with pytest.raises(IndexError):
        pool.allocate()


def test_releasing_twice_is_caught() -> None:
    pool = BlockPool(1)
    block_id = pool.allocate()
    pool.release(block_id)
    with pytest.raises(AssertionError):
        pool.release(block_id)


def test_blocks_are_counted_by_state() -> None:
    pool = BlockPool(3)
    block_id = remembered(pool, b"a")
    pool.share(block_id)
    assert (pool.num_free, pool.num_shared, pool.num_evictable) == (2, 1, 0)
    pool.release(block_id)
    assert (pool.num_free, pool.num_shared, pool.num_evictable) == (2, 0, 0)
    pool.release(block_id)
    assert (pool.num_free, pool.num_shared, pool.num_evictable) == (3, 0, 1)
    pool.share(block_id)
    assert pool.num_evictable == 0
    pool.release(block_id)
    pool.forget_all()
    assert pool.num_evictable == 0
    pool.check()


def test_forgetting_all_leaves_references_alone() -> None:
    pool = BlockPool(2)
    block_id = remembered(pool, b"a")
    pool.forget_all()
    assert pool.num_cached == 0
    pool.check({block_id: 1})

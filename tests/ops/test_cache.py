"""allocate_kv_cache and copy_blocks."""

import ctypes
import mmap

import pytest
import torch

from tests.ops.implementations import implementations_of, ops, rand
from tests.ops.pages import Pages

each_implementation = pytest.mark.parametrize("implementation", implementations_of("allocate_kv_cache", "copy_blocks"))


@each_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cache_has_blocks_in_dimension_one_and_the_bytes_of_its_spec(implementation: str, dtype: torch.dtype) -> None:
    cache = ops(implementation)["allocate_kv_cache"](
        num_blocks=6, block_size=16, num_kv_heads=2, head_size=24, dtype=dtype
    )
    assert cache.shape[1] == 6
    assert cache.dtype == dtype
    assert cache.nbytes == 6 * 2 * 16 * 2 * 24 * dtype.itemsize


@each_implementation
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_cache_of_8_bits_has_a_scale_for_each_token_and_kv_head(implementation: str, dtype: torch.dtype) -> None:
    cache = ops(implementation)["allocate_kv_cache"](
        num_blocks=6, block_size=16, num_kv_heads=2, head_size=24, dtype=dtype
    )
    assert cache.shape[1] == 6
    assert cache.nbytes == 6 * 2 * 16 * 2 * (24 + 4)


@each_implementation
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
def test_copied_blocks_serve_as_the_originals(implementation: str, cache_dtype: torch.dtype) -> None:
    pages = Pages.of(implementation, [32], cache_dtype=cache_dtype)
    pages.attend([(0, 0, 31)])
    expected = pages.attend([(0, 31, 32)])[0]
    copied = torch.tensor([[block for block in range(5) if block not in pages.tables[0].tolist()][:2]]).int()
    pairs = list(zip(pages.tables[0].tolist(), copied[0].tolist(), strict=True))
    ops(implementation)["copy_blocks"]([pages.cache], pairs)
    pages.tables = copied
    assert torch.equal(pages.attend([(0, 31, 32)])[0], expected)


@each_implementation
def test_pairs_are_copied_in_order_in_every_layer(implementation: str) -> None:
    table = ops(implementation)
    caches = [
        table["allocate_kv_cache"](num_blocks=4, block_size=2, num_kv_heads=1, head_size=8, dtype=torch.float32)
        for _ in range(2)
    ]
    for index, cache in enumerate(caches):
        cache.copy_(rand(*cache.shape, seed=index))
    before = [cache.clone() for cache in caches]
    table["copy_blocks"](caches, [(0, 1), (1, 2)])
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[:, 2], old[:, 0])
        assert torch.equal(cache[:, 3], old[:, 3])


@each_implementation
def test_touching_blocks_leaves_what_they_hold(implementation: str) -> None:
    cache = ops(implementation)["allocate_kv_cache"](
        num_blocks=40, block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16
    )
    cache.copy_(rand(*cache.shape))
    expected = cache.clone()
    for begin, end in ((0, 40), (3, 4), (7, 7)):
        ops(implementation)["touch_blocks"](cache, begin, end)
    assert torch.equal(cache, expected)


def test_touched_blocks_have_memory_and_the_others_have_not() -> None:
    if "cpu" not in implementations_of("allocate_kv_cache"):
        pytest.skip("needs the native library")

    cache = ops("cpu")["allocate_kv_cache"](
        num_blocks=1024, block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
    )
    ops("cpu")["touch_blocks"](cache, 256, 768)
    page = mmap.PAGESIZE
    resident = (ctypes.c_ubyte * (cache.nbytes // page))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(cache.data_ptr()), ctypes.c_size_t(cache.nbytes), resident) == 0
    num_bytes = page * sum(state & 1 for state in resident)
    huge_pages_at_the_ends = 4 * (2 << 20)
    assert cache.nbytes / 2 <= num_bytes <= cache.nbytes / 2 + huge_pages_at_the_ends

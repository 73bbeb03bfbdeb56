"""allocate_kv_cache, copy_blocks and touch_blocks of the Triton implementation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.errors import ConfigError
from tests.ops.triton.device import DEVICE, randoms

from quire.ops.triton import cache  # isort: skip  (see device)


def allocated(dtype: torch.dtype = torch.float32, size: int = 24) -> Tensor:
    with DEVICE:
        return cache.allocate_kv_cache(num_blocks=6, block_size=16, num_kv_heads=2, head_size=size, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn])
def test_cache_has_blocks_in_dimension_one_and_the_bytes_of_its_spec(dtype: torch.dtype) -> None:
    made = allocated(dtype)
    assert made.shape[1] == 6
    assert made.dtype == dtype
    assert made.device.type == DEVICE.type
    assert made.is_contiguous()
    assert made.nbytes == 6 * 2 * 16 * 2 * (24 * dtype.itemsize + 4 * (dtype.itemsize == 1))


@pytest.mark.parametrize(
    ("size", "dtype"), [(1025, torch.bfloat16), (2048, torch.bfloat16), (18, torch.int8), (18, torch.float8_e4m3fn)]
)
def test_head_sizes_that_the_kernels_do_not_take_are_refused(size: int, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=str(size)):
        allocated(dtype, size)


def test_only_an_int8_cache_has_scales() -> None:
    assert cache.scales_of(allocated(torch.bfloat16)) is None
    integers = allocated(torch.int8)
    scales = cache.scales_of(integers)
    assert scales is not None
    assert scales.dtype == torch.float32
    assert scales.data_ptr() == integers.data_ptr()


@pytest.mark.parametrize(
    "pairs",
    [
        [],
        [(0, 1)],
        [(0, 1), (1, 2)],
        [(1, 2), (0, 1)],
        [(0, 3), (1, 0), (3, 1)],
        [(0, 1), (2, 1), (1, 4)],
        [(5, 5)],
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_pairs_are_copied_in_order_in_every_layer(pairs: list[tuple[int, int]], dtype: torch.dtype) -> None:
    caches = [allocated(dtype), allocated(dtype)]
    for index, layer in enumerate(caches):
        layer.copy_(randoms(*layer.shape, seed=index) * 50)
    expected = [layer.clone() for layer in caches]
    for layer in expected:
        for source, destination in pairs:
            layer[:, destination] = layer[:, source]
    cache.copy_blocks(caches, pairs)
    for layer, wanted in zip(caches, expected, strict=True):
        assert torch.equal(layer, wanted)


def test_copying_in_no_layer_does_nothing() -> None:
    cache.copy_blocks([], [(0, 1)])


def test_touching_blocks_leaves_what_they_hold() -> None:
    made = allocated()
    made.copy_(randoms(*made.shape))
    before = made.clone()
    cache.touch_blocks(made, 0, 6)
    assert torch.equal(made, before)

"""Pages of keys and values; `csrc/cpu/attention/cache.cpp`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.ops.cpu.library import check, load, pointers
from quire.ops.cpu.runtime.dtypes import CACHE_DTYPES, SCALED_DTYPES
from quire.ops.cpu.runtime.memory import zeros

lib = load()
SLACK = 128
"""Bytes past the last page that kernels may read: whole vectors and tiles."""


def allocate_kv_cache(
    *, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype
) -> Tensor:
    """See `Ops.allocate_kv_cache`. Shape [2, B, K, S, X]; a page of S * X holds tiles (`kernels/cache.h`).

    X is the head size (of 8 bits: and 4 bytes of scale), or more where slots are padded to a multiple of 16.

    Pages are not touched here: a pool may be most of the memory, and one that is never used up should not take it.
    """
    if dtype in SCALED_DTYPES and head_size % 4:
        raise ConfigError(
            f"a KV cache of 8 bits needs a head size that is a multiple of 4, not {head_size}; "
            "use --kv-cache-dtype bfloat16"
        )
    page = lib.qr_cache_page(CACHE_DTYPES[dtype], block_size, head_size)
    if page < 0:
        raise ConfigError(
            f"the native kernels keep no {str(dtype).removeprefix('torch.')} KV cache of head size {head_size} and "
            f"block_size {block_size}: the head size must be even and at most 1152. Use ops='reference'."
        )
    shape = (2, num_blocks, num_kv_heads, block_size, page // block_size)
    num_bytes = 2 * num_blocks * num_kv_heads * page * dtype.itemsize
    return zeros(num_bytes + SLACK)[:num_bytes].view(dtype).view(shape)


def copy_blocks(kv_caches: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """See `Ops.copy_blocks`. All caches are of one shape."""
    if not pairs or not kv_caches:
        return
    first = kv_caches[0]
    flat = torch.tensor(pairs, dtype=torch.int64)
    check(
        lib.qr_copy_blocks(
            pointers(cache.data_ptr() for cache in kv_caches),
            len(kv_caches),
            first.shape[1],
            first.stride(1) * first.element_size(),
            flat.data_ptr(),
            len(pairs),
        )
    )


def touch_blocks(kv_cache: Tensor, begin: int, end: int) -> None:
    """See `Ops.touch_blocks`. 2 MiB of new memory take 0.1 ms to zero, on a virtual machine up to 2 ms."""
    size = kv_cache.element_size()
    for half in range(2):
        first = kv_cache.data_ptr() + (half * kv_cache.stride(0) + begin * kv_cache.stride(1)) * size
        check(lib.qr_touch(first, (end - begin) * kv_cache.stride(1) * size))

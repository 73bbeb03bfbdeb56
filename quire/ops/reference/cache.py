"""Pages of keys and values: allocation and copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def allocate_kv_cache(
    *, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype
) -> Tensor:
    """See `functional.allocate_kv_cache`. Layout: [2, B, K, S, D]."""
    return torch.empty(2, num_blocks, num_kv_heads, block_size, head_size, dtype=dtype)


def copy_blocks(kv_caches: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """See `functional.copy_blocks`."""
    for cache in kv_caches:
        for source, destination in pairs:
            cache[:, destination] = cache[:, source]

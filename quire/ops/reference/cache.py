"""Pages of keys and values: allocation and copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SCALE_BYTES = 4
"""A float32 for each token and kv head."""


def allocate_kv_cache(
    *, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype
) -> Tensor:
    """See `Ops.allocate_kv_cache`. Layout: [2, B, K, S, D], int8 with the bytes of a float32 scale behind D."""
    width = head_size + SCALE_BYTES * (dtype == torch.int8)
    return torch.empty(2, num_blocks, num_kv_heads, block_size, width, dtype=dtype)


def quantize(x: Tensor) -> Tensor:
    """What an int8 cache keeps of keys or values. Shapes: x [..., D] float32 -> [..., D + 4] int8."""
    largest = x.abs().amax(-1, keepdim=True)
    per_scale = torch.full_like(largest, 127) / largest  # rounded once, which 127 / largest is not
    integers = torch.where(largest > 0, x * per_scale, 0).round_().to(torch.int8)
    return torch.cat((integers, (largest / 127).view(torch.int8)), dim=-1)


def dequantize(slots: Tensor) -> Tensor:
    """The inverse of `quantize`, but for its rounding. Shapes: slots [..., D + 4] int8 -> [..., D] float32."""
    return slots[..., :-SCALE_BYTES].float() * slots[..., -SCALE_BYTES:].contiguous().view(torch.float32)


def copy_blocks(kv_caches: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """See `Ops.copy_blocks`."""
    for cache in kv_caches:
        for source, destination in pairs:
            cache[:, destination] = cache[:, source]


def touch_blocks(kv_cache: Tensor, begin: int, end: int) -> None:
    """See `Ops.touch_blocks`. The reference waits for memory when it writes."""

"""Pages of keys and values: allocation and copies."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

SCALE_BYTES = 4
"""A float32 for each token and kv head."""
TOPS = MappingProxyType({torch.int8: 127.0, torch.float8_e4m3fn: 448.0})
"""Types of 8 bits -> what the largest magnitude of a head becomes."""


def allocate_kv_cache(
    *, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype
) -> Tensor:
    """See `Ops.allocate_kv_cache`. Layout: [2, B, K, S, D], of 8 bits with the bytes of a float32 scale behind D."""
    width = head_size + SCALE_BYTES * (dtype in TOPS)
    return torch.empty(2, num_blocks, num_kv_heads, block_size, width, dtype=dtype)


def quantize(x: Tensor, dtype: torch.dtype, scales: Tensor | None = None) -> Tensor:
    """What a cache of 8 bits keeps of keys or values; `scales` as in `Ops.rope_and_cache`.

    Shapes: x [..., K, D] float32, scales [K] -> [..., K, D + 4] of dtype.
    """
    top = TOPS[dtype]
    broken = (x * 0).sum(-1, keepdim=True)  # NaN where a number is none
    if scales is None:
        largest = x.abs().amax(-1, keepdim=True)
        kept, per_scale = largest / top, torch.full_like(largest, top) / largest  # rounded once, unlike top / largest
    else:
        kept = scales.view(-1, 1).expand_as(broken)
        per_scale = torch.ones_like(kept) / kept
    least = -128.0 if dtype == torch.int8 else -top
    numbers = torch.where(kept + broken > 0, x * per_scale, 0).clamp_(least, top)
    codes = (numbers.round_() if dtype == torch.int8 else numbers).to(dtype).view(torch.int8)
    return torch.cat((codes, (kept + broken).view(torch.int8)), dim=-1).view(dtype)


def dequantize(slots: Tensor) -> Tensor:
    """The inverse of `quantize`, but for its rounding. Shapes: slots [..., D + 4] of 8 bits -> [..., D] float32."""
    return slots[..., :-SCALE_BYTES].float() * slots[..., -SCALE_BYTES:].contiguous().view(torch.float32)


def copy_blocks(kv_caches: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """See `Ops.copy_blocks`."""
    for cache in kv_caches:
        for source, destination in pairs:
            cache[:, destination] = cache[:, source]


def touch_blocks(kv_cache: Tensor, begin: int, end: int) -> None:
    """See `Ops.touch_blocks`. The reference waits for memory when it writes."""

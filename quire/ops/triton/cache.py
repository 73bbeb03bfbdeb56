"""Pages of keys and values on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.errors import ConfigError

SCALE_BYTES = 4
"""A float32 for each token and kv head of a cache of 8 bits."""
SCALED_DTYPES = (torch.int8, torch.float8_e4m3fn)
MAX_HEAD_SIZE = 1024


def allocate_kv_cache(
    *, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype
) -> Tensor:
    """See `Ops.allocate_kv_cache`. Shape [2, B, K, S, X], on torch's default device.

    A page, S * X, holds its S tokens of D numbers one after the other. X is D; of 8 bits D + 4: the float32 scales of
    all S tokens follow their numbers, so that both are read in whole vectors.
    Raises: ConfigError for a head size that the kernels do not take.
    """
    if head_size > MAX_HEAD_SIZE:
        raise ConfigError(f"the Triton kernels take head sizes of at most {MAX_HEAD_SIZE}, not {head_size}")
    if dtype in SCALED_DTYPES and head_size % SCALE_BYTES:
        raise ConfigError(
            f"a KV cache of 8 bits needs a head size that is a multiple of 4, not {head_size}; "
            "use --kv-cache-dtype bfloat16"
        )
    width = head_size + SCALE_BYTES * (dtype in SCALED_DTYPES)
    return torch.empty(2, num_blocks, num_kv_heads, block_size, width, dtype=dtype)


def scales_of(kv_cache: Tensor) -> Tensor | None:
    """The memory of a cache of 8 bits as float32, None of another one."""
    return kv_cache.view(torch.float32) if kv_cache.dtype in SCALED_DTYPES else None


def codes_of(kv_cache: Tensor) -> Tensor:
    """The memory of a cache as kernels take it: 8-bit floats as bytes, which not every GPU has as a type."""
    return kv_cache.view(torch.uint8) if kv_cache.dtype == torch.float8_e4m3fn else kv_cache


def copy_blocks(kv_caches: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """See `Ops.copy_blocks`. Reads every source before it writes: copies of copies are traced back first."""
    if not pairs or not kv_caches:
        return
    origin: dict[int, int] = {}
    for source, destination in pairs:
        origin[destination] = origin.get(source, source)
    indices = torch.tensor([list(origin.values()), list(origin)]).to(kv_caches[0].device, non_blocking=True)
    for cache in map(codes_of, kv_caches):
        cache.index_copy_(1, indices[1], cache.index_select(1, indices[0]))


def touch_blocks(kv_cache: Tensor, begin: int, end: int) -> None:
    """See `Ops.touch_blocks`. Memory of a GPU is in place once it is allocated."""

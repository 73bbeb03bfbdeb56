"""From the QKV projection to query and cache; `csrc/cpu/attention/rotary.cpp`."""

from __future__ import annotations

from torch import Tensor

from quire.ops.contracts.operands import RopeAndCacheSpec
from quire.ops.cpu.library import check, load
from quire.ops.cpu.runtime.dtypes import CACHE_DTYPES, DTYPES
from quire.ops.cpu.runtime.memory import empty

lib = load()


def rope_and_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    spec: RopeAndCacheSpec,
    scales: Tensor | None = None,
) -> Tensor:
    """See `Ops.rope_and_cache`. Norm and rotation are rounded once, after both."""
    tokens = qkv.shape[0]
    query = empty((tokens, spec.num_heads, spec.head_size), qkv.dtype)
    _, num_blocks, _, block_size, width = kv_cache.shape
    check(
        lib.qr_rope_and_cache(
            query.data_ptr(),
            qkv.data_ptr(),
            DTYPES[qkv.dtype],
            positions.data_ptr(),
            None if cos_sin is None else cos_sin.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            kv_cache.data_ptr(),
            CACHE_DTYPES[kv_cache.dtype],
            num_blocks,
            block_size,
            block_size * width,
            kv_cache.stride(1),
            slot_mapping.data_ptr(),
            tokens,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_size,
            spec.rotary_dim,
            spec.interleaved,
            spec.norm_eps,
            None if scales is None else scales[0].data_ptr(),
            None if scales is None else scales[1].data_ptr(),
        )
    )
    return query

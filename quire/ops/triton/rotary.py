"""From the QKV projection to query and cache, in one kernel: head norms, rotation, and the write to the pages.

Row invariance: a program always takes TOKENS tokens of one head, masked, so a sum over a head is always added up in the
same order.
"""

from __future__ import annotations

import triton
from torch import Tensor

from quire.ops.contracts.operands import RopeAndCacheSpec
from quire.ops.triton.cache import codes_of, scales_of
from quire.ops.triton.kernels.rotary import rope_and_cache_kernel
from quire.ops.triton.launch import Launch
from quire.utils.math import cdiv

TOKENS = 4
"""Of one head, by one program."""


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
    """See `Ops.rope_and_cache`. A token whose slot is negative writes no key and no value."""
    query = qkv.new_empty(qkv.shape[0], spec.num_heads, spec.head_size)
    if qkv.shape[0]:
        launch(query, qkv, positions, cos_sin, q_norm, k_norm, kv_cache, slot_mapping, spec, scales).run()
    return query


def launch(
    query: Tensor,
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    spec: RopeAndCacheSpec,
    scales: Tensor | None = None,
) -> Launch:
    """What fills `query` and writes the cache."""
    num_tokens = qkv.shape[0]
    _, _, _, slots, width = kv_cache.shape
    half = 0 if cos_sin is None else spec.rotary_dim // 2
    rest = spec.head_size - 2 * half
    return Launch(
        kernel=rope_and_cache_kernel,
        grid=(cdiv(num_tokens, TOKENS), spec.num_heads + 2 * spec.num_kv_heads),
        arguments={
            "query": query,
            "qkv": qkv,
            "positions": positions,
            "cos_sin": cos_sin,
            "q_norm": q_norm,
            "k_norm": k_norm,
            "kv_cache": codes_of(kv_cache),
            "scales": scales_of(kv_cache),
            "given": scales,
            "half_stride": kv_cache.stride(0),
            "slot_mapping": slot_mapping,
            "num_tokens": num_tokens,
            "eps": spec.norm_eps,
        },
        constants={
            "TOKENS": TOKENS,
            "HEADS": spec.num_heads,
            "KV_HEADS": spec.num_kv_heads,
            "SIZE": spec.head_size,
            "HALF": half,
            "INTERLEAVED": spec.interleaved,
            "SLOTS": slots,
            "PAGE": slots * width,
            "BLOCK": kv_cache.stride(1),
            "PADDED_HALF": triton.next_power_of_2(max(half, 1)),
            "PADDED_REST": triton.next_power_of_2(max(rest, 1)),
        },
        num_warps=1 if spec.head_size <= 128 else 2,
        num_stages=1,
    )

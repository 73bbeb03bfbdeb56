"""From the QKV projection to query and cache: head norms, rotation, and the write to the pages."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.contracts.operands import RopeAndCacheSpec
from quire.ops.reference.cache import TOPS, quantize
from quire.ops.reference.norm import rms_norm


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
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    qkv = qkv.view(-1, heads + 2 * kv_heads, spec.head_size)
    query, key, value = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    if q_norm is not None:
        query = rms_norm(query.float(), q_norm, spec.norm_eps)
    if k_norm is not None:
        key = rms_norm(key.float(), k_norm, spec.norm_eps)
    if cos_sin is not None:
        rows = cos_sin.index_select(0, positions).unsqueeze(1)
        query, key = _rotate(query, rows, spec), _rotate(key, rows, spec)
    if kv_heads:
        _write(kv_cache, key, value, slot_mapping, scales)
    return query.to(qkv.dtype).contiguous()


def _write(kv_cache: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor, scales: Tensor | None) -> None:
    block_size = kv_cache.shape[3]
    blocks, slots = slot_mapping // block_size, slot_mapping % block_size
    for half, rows in enumerate((key, value)):
        given = None if scales is None else scales[half]
        is_scaled = kv_cache.dtype in TOPS
        kept = quantize(rows.float(), kv_cache.dtype, given) if is_scaled else rows.to(kv_cache.dtype)
        kv_cache[half, blocks, :, slots] = kept


def _rotate(x: Tensor, cos_sin: Tensor, spec: RopeAndCacheSpec) -> Tensor:
    """Rotate pairs of the first rotary_dim elements. Shapes: x [T, H, D], cos_sin [T, 1, rotary_dim] -> [T, H, D]."""
    half = spec.rotary_dim // 2
    rotated, rest = x[..., : spec.rotary_dim].float(), x[..., spec.rotary_dim :]
    cos, sin = cos_sin[..., :half], cos_sin[..., half:]
    if spec.interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = rotated[..., :half], rotated[..., half:]
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned

"""Elementwise ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.config.layers.experts import ClampedGate
from quire.ops.shared.elementwise import (
    biased_size,
    fill_biased_keys,
    fill_differences,
    fill_gated_activation,
    fill_pairs,
)


def scale_add(x: Tensor, scale: float, residual: Tensor | None = None) -> Tensor:
    """See `Ops.scale_add`."""
    value = x.float() * scale
    return (value if residual is None else value + residual.float()).to(x.dtype)


def gated_activation(both: Tensor, activation: str | ClampedGate) -> Tensor:
    """See `Ops.gated_activation`."""
    out = both.new_empty(both.shape[0], both.shape[1] // 2)
    fill_gated_activation(out, both, activation)
    return out


def join_columns(parts: Sequence[Tensor]) -> Tensor:
    """See `Ops.join_columns`."""
    return torch.cat(list(parts), dim=1)


def pair_values(qkv: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """See `Ops.pair_values`."""
    out = qkv.new_empty(qkv.shape[0], 2 * qkv.shape[1])
    fill_pairs(out, qkv, num_heads, num_kv_heads)
    return out


def bias_keys(query: Tensor, key: Tensor, value: Tensor, times: Tensor, decay: Tensor, scale: float) -> Tensor:
    """See `Ops.bias_keys`."""
    out = query.new_empty(query.shape[0], biased_size(query, key, times))
    fill_biased_keys(out, query, key, value, times, decay, scale)
    return out


def subtract_heads(x: Tensor, factor: float) -> Tensor:
    """See `Ops.subtract_heads`."""
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    fill_differences(out, x, factor)
    return out


def soft_cap(logits: Tensor, cap: float) -> None:
    """See `Ops.soft_cap`."""
    for row in logits.div_(cap):  # row by row: torch's bits may depend on where a row lies among others
        row.tanh_()
    logits.mul_(cap)

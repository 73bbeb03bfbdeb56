"""Norms. Each row's sums run over that row alone, in float32, on one thread."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.threads import one_thread


@one_thread()
def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> Tensor:
    """See `Ops.rms_norm`."""
    wide = x.float()
    out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
    if residual is not None:
        out.add_(residual)
    return out.to(x.dtype)


def rms_norm_columns(x: Tensor, weight: Tensor, eps: float, *, first: int) -> None:
    """See `Ops.rms_norm_columns`."""
    columns = x[:, first : first + weight.shape[0]]
    columns.copy_(rms_norm(columns, weight, eps))


@one_thread()
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See `Ops.layer_norm`."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    out = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight
    if bias is not None:
        out.add_(bias)
    return out.to(x.dtype)


def layer_norm_heads(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, first: int, num_heads: int) -> None:
    """See `Ops.layer_norm_heads`."""
    size = weight.shape[1]
    heads = x[:, first : first + num_heads * size].view(-1, num_heads, size)
    heads.copy_(layer_norm(heads, weight, bias, eps))

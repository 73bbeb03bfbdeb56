"""Norms; their weights stay in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.context import LayerContext
from quire.ops import functional


class RMSNorm:
    """x / rms(x) * weight. Gemma stores weight - 1: `offset` adds the one, once, at load."""

    def __init__(self, ctx: LayerContext, size: int, eps: float, *, offset: float = 0.0) -> None:
        self.weight = ctx.tensor("weight", (size,), dtype=torch.float32, offset=offset)
        self.eps = eps

    def __call__(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: x, residual [T, E] -> [T, E]; the residual is added after the norm."""
        return functional.rms_norm(x, self.weight, self.eps, residual=residual)


class LayerNorm:
    """(x - mean) / std * weight + bias; without `affine` the checkpoint holds neither weight nor bias."""

    def __init__(self, ctx: LayerContext, size: int, eps: float, *, affine: bool = True) -> None:
        self.weight = ctx.tensor("weight", (size,), dtype=torch.float32) if affine else torch.ones(size)
        self.bias = ctx.tensor("bias", (size,), dtype=torch.float32) if affine else None
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        return functional.layer_norm(x, self.weight, self.bias, self.eps)

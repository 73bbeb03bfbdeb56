"""Norms; their weights stay in float32."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from quire.config.arch import ModelArch
from quire.config.family_spec import NormKind
from quire.layers.context import LayerContext
from quire.layers.linear import Linear


class RMSNorm:
    """x / rms(x) * weight. Gemma stores weight - 1: `offset` adds the one, once, at load."""

    def __init__(
        self,
        ctx: LayerContext,
        size: int,
        eps: float,
        *,
        has_weight: bool = True,
        offset: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        self.ops = ctx.ops
        self.weight = torch.full((size,), scale, device=ctx.ops.device)
        if has_weight:
            self.weight = ctx.tensor("weight", (size,), dtype=torch.float32, offset=offset, scale=scale)
        self.eps = eps

    def __call__(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: x, residual [T, E] -> [T, E]; the residual is added after the norm."""
        return self.ops.rms_norm(x, self.weight, self.eps, residual=residual)


class LayerNorm:
    """(x - mean) / std * weight + bias; the checkpoint may hold neither weight nor bias."""

    def __init__(
        self,
        ctx: LayerContext,
        size: int,
        eps: float,
        *,
        has_weight: bool = True,
        has_bias: bool = True,
        offset: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        """Weight and bias are multiplied by `scale`."""
        self.ops = ctx.ops
        self.weight = torch.full((size,), scale, device=ctx.ops.device)
        if has_weight:
            self.weight = ctx.tensor("weight", (size,), dtype=torch.float32, offset=offset, scale=scale)
        self.bias = ctx.tensor("bias", (size,), dtype=torch.float32, scale=scale) if has_bias else None
        self.eps = eps

    def __call__(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: x, residual [T, E] -> [T, E]; the residual is added after the norm."""
        normed = self.ops.layer_norm(x, self.weight, self.bias, self.eps)
        return normed if residual is None else self.ops.scale_add(normed, 1.0, residual)


class StreamNorm:
    """x / rms(x) * weight of each of several hidden states of a token, whose weights are their own."""

    def __init__(self, ctx: LayerContext, count: int, size: int, eps: float, *, offset: float = 0.0) -> None:
        self.ops, self.eps = ctx.ops, eps
        self.shape = (-1, count, size)
        stored = ctx.tensor("weight", (count * size,), dtype=torch.float32, offset=offset)
        self.weight = stored.view(count, size)
        self.ones = _ones(size, ctx.ops.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: x [T, S * E] -> [T, S * E]."""
        normed = self.ops.rms_norm(x.view(-1, self.shape[2]), self.ones, self.eps).view(self.shape)
        self.ops.scale_heads(normed, self.weight)
        return normed.view(x.shape)


@lru_cache(maxsize=4)
def _ones(size: int, device: str) -> Tensor:
    """The same for all norms."""
    return torch.ones(size, device=device)


class GatedNorm:
    """n * sigmoid(up(silu(down(n)))), n being what an RMS norm gives."""

    def __init__(self, ctx: LayerContext, size: int, eps: float, rank: int) -> None:
        self.ops = ctx.ops
        self.norm = RMSNorm(ctx.child("norm"), size, eps)
        self.down, self.up = Linear(ctx.child("W_down"), size, rank), Linear(ctx.child("W_up"), rank, size)

    def __call__(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: x, residual [T, E] -> [T, E]; the residual is added behind the gate."""
        normed = self.norm(x)
        self.ops.gate(normed, self.up(self.down(normed, activation="silu")))
        return normed if residual is None else self.ops.scale_add(normed, 1.0, residual)


Norm = RMSNorm | LayerNorm | GatedNorm


def model_norm(arch: ModelArch, ctx: LayerContext, name: str, *, scale: float = 1.0, num_parts: int = 1) -> Norm:
    """The norm over hidden states that the checkpoint calls `name`, times `scale`.

    It reads sums of `num_parts` parts, which are averages in some families (`Scales.averages`).
    """
    norms, child = arch.norms, ctx.child(name)
    eps = arch.norm_eps if norms.inner_eps is None or name == norms.final else norms.inner_eps
    eps *= num_parts if arch.scales.averages else 1
    if norms.kind is NormKind.RMS:
        return RMSNorm(child, arch.hidden_size, eps, has_weight=norms.has_weight, offset=norms.offset, scale=scale)
    return LayerNorm(
        child,
        arch.hidden_size,
        eps,
        has_weight=norms.has_weight,
        has_bias=norms.has_bias,
        offset=norms.offset,
        scale=scale,
    )

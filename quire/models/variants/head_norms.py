"""Norms of queries and keys, head by head or over all heads of a token, as `HeadNorms` names them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.config.arch import ModelArch
from quire.config.family_spec import HeadNorms
from quire.config.layers.layer_kinds import Heads
from quire.config.layers.mixers import AttentionSpec
from quire.layers.context import LayerContext


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedNorms:
    """Weights of the RMS norms of heads that are computed with the rotation. Shapes: [D] float32."""

    query: Tensor | None = None
    key: Tensor | None = None
    rotated_query: Tensor | None = None
    """Multiplies queries behind the rotation."""


NO_NORMS = FusedNorms()


def fused_norms(arch: ModelArch, ctx: LayerContext, index: int) -> FusedNorms:
    """Those of `HeadNorms.EACH`, `ROTATED` and `UNIT_ROTATED`, of a layer.

    A rotation changes no head's length, so a norm behind it is one before it whose weight comes later. Scores are
    products of query and key, so the query carries the weights of both.
    """
    norms, names, mixer = arch.norms, arch.family.names, arch.mixers[index]
    is_unit = norms.heads is HeadNorms.UNIT_ROTATED
    if norms.heads not in (HeadNorms.EACH, HeadNorms.ROTATED, HeadNorms.UNIT_ROTATED):
        return NO_NORMS
    assert isinstance(mixer, AttentionSpec)
    size = mixer.heads.head_size
    if is_unit and mixer.rope is None:
        return NO_NORMS
    if is_unit or not norms.has_weight:
        return FusedNorms(query=_ones(ctx, size), key=_ones(ctx, size))
    query = _weight(arch, ctx.child(names.q_norm), size)
    if mixer.reads is not None:
        return FusedNorms(query=query)
    key = _weight(arch, ctx.child(names.k_norm), size)
    if norms.heads is HeadNorms.EACH:
        return FusedNorms(query=query, key=key)
    ones = _ones(ctx, size)
    return FusedNorms(query=ones, key=ones, rotated_query=query if query.is_meta else query.mul_(key))


def _ones(ctx: LayerContext, size: int) -> Tensor:
    return torch.ones(size, device=ctx.ops.device)


def separate_norms(arch: ModelArch, ctx: LayerContext, index: int) -> WholeNorms | LayerNorms | ValueNorms | None:
    """Those that are ops of their own."""
    kind, mixer = arch.norms.heads, arch.mixers[index]
    if arch.norms.of_values:
        if isinstance(mixer, AttentionSpec) and mixer.reads is None:
            return ValueNorms(arch, ctx, mixer.heads)
        return None
    if kind is HeadNorms.WHOLE:
        return WholeNorms(arch, ctx)
    return LayerNorms(arch, ctx) if kind in (HeadNorms.LAYER, HeadNorms.LAYER_OWN) else None


class WholeNorms:
    """An RMS norm over all query heads of a token, and one over all its key heads."""

    def __init__(self, arch: ModelArch, ctx: LayerContext) -> None:
        self.ops = ctx.ops
        names, size = arch.family.names, arch.head_size
        self.query = _weight(arch, ctx.child(names.q_norm), arch.num_heads * size)
        self.key = _weight(arch, ctx.child(names.k_norm), arch.num_kv_heads * size)
        self.eps = arch.norm_eps

    def apply(self, qkv: Tensor) -> None:
        """Shapes: qkv [T, (H + 2K) * D]. Mutates: qkv."""
        self.ops.rms_norm_columns(qkv, self.query, self.eps, first=0)
        self.ops.rms_norm_columns(qkv, self.key, self.eps, first=self.query.shape[0])


class ValueNorms:
    """An RMS norm of each value head, without a weight."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, heads: Heads) -> None:
        self.ops, self.eps = ctx.ops, arch.norm_eps
        self.ones = _ones(ctx, heads.head_size)
        first = heads.query_size + heads.kv_size
        self.columns = range(first, first + heads.kv_size, heads.head_size)

    def apply(self, qkv: Tensor) -> None:
        """Shapes: qkv [T, (H + 2K) * D]. Mutates: qkv."""
        for first in self.columns:
            self.ops.rms_norm_columns(qkv, self.ones, self.eps, first=first)


class LayerNorms:
    """A layer norm of each query head, and one of each key head."""

    def __init__(self, arch: ModelArch, ctx: LayerContext) -> None:
        self.ops = ctx.ops
        names = arch.family.names
        self.num_heads, self.num_kv_heads = arch.num_heads, arch.num_kv_heads
        self.query, self.query_bias = _layer_norm(arch, ctx.child(names.q_norm), arch.num_heads)
        self.key, self.key_bias = _layer_norm(arch, ctx.child(names.k_norm), arch.num_kv_heads)
        self.eps = arch.norm_eps

    def apply(self, qkv: Tensor) -> None:
        """Shapes: qkv [T, (H + 2K) * D]. Mutates: qkv."""
        self.ops.layer_norm_heads(qkv, self.query, self.query_bias, self.eps, first=0, num_heads=self.num_heads)
        first = self.num_heads * self.query.shape[1]
        self.ops.layer_norm_heads(qkv, self.key, self.key_bias, self.eps, first=first, num_heads=self.num_kv_heads)


def _weight(arch: ModelArch, ctx: LayerContext, size: int) -> Tensor:
    """The float32 weight of an RMS norm on heads. Shapes: -> [size]."""
    return ctx.tensor("weight", (size,), dtype=torch.float32, offset=arch.norms.offset)


def _layer_norm(arch: ModelArch, ctx: LayerContext, num_heads: int) -> tuple[Tensor, Tensor | None]:
    """Weight and bias, for all heads or for each. Shapes: -> [1 or num_heads, D], as the weight."""
    size = arch.head_size
    if arch.norms.heads is HeadNorms.LAYER:
        weight, bias = (ctx.tensor(name, (size,), dtype=torch.float32) for name in ("weight", "bias"))
        return weight.unsqueeze(0), bias.unsqueeze(0)
    if not ctx.has("norms.0.weight"):
        return ctx.tensor("weight", (num_heads, size), dtype=torch.float32), None
    own = [ctx.tensor(f"norms.{index}.weight", (size,), dtype=torch.float32) for index in range(num_heads)]
    return own[0].unsqueeze(0) if own[0].is_meta else torch.stack(own), None

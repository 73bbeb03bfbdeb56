"""The parts of a decoder's layer, as its `ModelArch` describes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.config.family_spec import HeadNorms, MlpKind, MlpSpec
from quire.config.mixers import AttentionSpec, Mamba2Spec, MambaSpec, MixerSpec, ShortConvSpec
from quire.layers.activation import activation_of
from quire.layers.attention import Attention
from quire.layers.context import LayerContext
from quire.layers.experts import MixtureOfExperts
from quire.layers.linear import GatedLinear, Linear
from quire.layers.recurrent import Mamba2Mixer, MambaMixer, ShortConv
from quire.layers.rotary import rotary_table
from quire.layers.weights import HeadOrder
from quire.ops import functional
from quire.ops.functional import RopeAndCacheSpec


class Mixer(Protocol):
    """What lets a layer's tokens learn of those before them."""

    def __call__(self, hidden: Tensor, ctx: ForwardContext, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: hidden, residual [T, E] -> [T, E]. Mutates: this layer's cache."""


class SelfAttention:
    """QKV projection, attention, output projection."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        heads, kv_heads, size = arch.num_heads, arch.num_kv_heads, arch.head_size
        names = arch.family.names
        self.qkv_proj = Linear(
            ctx.child("qkv_proj"),
            arch.hidden_size,
            heads * size,
            kv_heads * size,
            kv_heads * size,
            bias=arch.attention_bias,
            order=HeadOrder(num_heads=heads, num_kv_heads=kv_heads, head_size=size) if names.qkv_by_head else None,
        )
        output = ctx.child(names.output)
        self.o_proj = Linear(output, heads * size, arch.hidden_size, bias=arch.output_bias, shard_dim=1)
        self.norms = WholeNorms(arch, ctx) if arch.norms.heads is HeadNorms.WHOLE else None
        has_norms = arch.norms.heads is HeadNorms.EACH
        self.attention = attention_of(
            arch,
            ctx,
            index,
            q_norm=_head_norm(arch, ctx.child(names.q_norm), size) if has_norms else None,
            k_norm=_head_norm(arch, ctx.child(names.k_norm), size) if has_norms else None,
        )

    def __call__(self, hidden: Tensor, ctx: ForwardContext, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: hidden, residual [T, E] -> [T, E]."""
        return self.o_proj(self.attention(self._qkv(hidden), ctx), residual=residual)

    def _qkv(self, hidden: Tensor) -> Tensor:
        qkv = self.qkv_proj(hidden)
        if self.norms is not None:
            self.norms.apply(qkv)
        return qkv


class WholeNorms:
    """An RMS norm over all query heads of a token, and one over all its key heads."""

    def __init__(self, arch: ModelArch, ctx: LayerContext) -> None:
        names, size = arch.family.names, arch.head_size
        self.query = _head_norm(arch, ctx.child(names.q_norm), arch.num_heads * size)
        self.key = _head_norm(arch, ctx.child(names.k_norm), arch.num_kv_heads * size)
        self.eps = arch.norm_eps

    def apply(self, qkv: Tensor) -> None:
        """Shapes: qkv [T, (H + 2K) * D]. Mutates: qkv."""
        functional.rms_norm_columns(qkv, self.query, self.eps, first=0)
        functional.rms_norm_columns(qkv, self.key, self.eps, first=self.query.shape[0])


def attention_of(
    arch: ModelArch, ctx: LayerContext, index: int, *, q_norm: Tensor | None = None, k_norm: Tensor | None = None
) -> Attention:
    """A layer's attention, without its projections."""
    mixer = arch.layers[index].mixer
    assert isinstance(mixer, AttentionSpec)
    spec = RopeAndCacheSpec(
        num_heads=arch.num_heads,
        num_kv_heads=arch.num_kv_heads,
        head_size=arch.head_size,
        rotary_dim=mixer.rope.rotary_dim if mixer.rope else 0,
        interleaved=arch.family.rotates_pairs,
        norm_eps=arch.norm_eps,
    )
    return Attention(
        index,
        spec,
        scale=mixer.query_scale,
        cos_sin=rotary_table(mixer.rope, ctx.max_model_len) if mixer.rope else None,
        q_norm=q_norm,
        k_norm=k_norm,
        sliding_window=mixer.window,
        soft_cap=arch.attn_soft_cap,
    )


def mixer_of(arch: ModelArch, ctx: LayerContext, index: int) -> Mixer:
    """The mixer of a layer, whose context is given."""
    spec, names = arch.layers[index].mixer, arch.family.names
    name = names.attention if isinstance(spec, AttentionSpec) else names.recurrent
    return MIXERS[type(spec)](arch, ctx.child(name), index)


def _head_norm(arch: ModelArch, ctx: LayerContext, size: int) -> Tensor:
    """The float32 weight of a norm on heads. Shapes: -> [size]."""
    return ctx.tensor("weight", (size,), dtype=torch.float32, offset=arch.norms.offset)


class Mlp(Protocol):
    """The MLP of a layer."""

    def __call__(self, hidden: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: hidden, residual [T, E] -> [T, E]."""


class GatedMLP:
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, arch: ModelArch, spec: MlpSpec, ctx: LayerContext) -> None:
        size, inner, bias = arch.hidden_size, spec.intermediate_size, spec.has_bias
        gate_up = ctx.child("gate_up_proj")
        self.gate_up_proj = GatedLinear(gate_up, size, inner, activation=activation_of(arch), bias=bias)
        self.down_proj = Linear(ctx.child(arch.family.names.down), inner, size, bias=bias, shard_dim=1)

    def __call__(self, hidden: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """See `Mlp`."""
        return self.down_proj(self.gate_up_proj.gate(hidden), residual=residual)


class PlainMLP:
    """down(activation(up(x)))."""

    def __init__(self, arch: ModelArch, spec: MlpSpec, ctx: LayerContext) -> None:
        size, inner, names = arch.hidden_size, spec.intermediate_size, arch.family.names
        self.up_proj = Linear(ctx.child(names.up), size, inner, bias=spec.has_bias)
        self.down_proj = Linear(ctx.child(names.down), inner, size, bias=spec.has_bias, shard_dim=1)
        self.activation = activation_of(arch)

    def __call__(self, hidden: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """See `Mlp`."""
        return self.down_proj(self.up_proj(hidden, activation=self.activation), residual=residual)


MLPS: Mapping[MlpKind, Callable[[ModelArch, MlpSpec, LayerContext], Mlp]] = MappingProxyType(
    {MlpKind.GATED: GatedMLP, MlpKind.PLAIN: PlainMLP, MlpKind.EXPERTS: MixtureOfExperts}
)

MIXERS: Mapping[type[MixerSpec], Callable[[ModelArch, LayerContext, int], Mixer]] = MappingProxyType(
    {AttentionSpec: SelfAttention, MambaSpec: MambaMixer, Mamba2Spec: Mamba2Mixer, ShortConvSpec: ShortConv}
)

"""The parts that decoder families share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.layers.activation import activation_of
from quire.layers.attention import Attention
from quire.layers.context import LayerContext
from quire.layers.experts import MixtureOfExperts
from quire.layers.linear import GatedLinear, Linear
from quire.layers.rotary import rotary_table
from quire.ops.functional import RopeAndCacheSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """How a pre-norm decoder with gated MLPs differs from Llama. A difference in data flow is a subclass instead."""

    qk_norm: bool = False
    """An RMS norm on each query and key head."""
    norm_offset: float = 0.0
    """Added to every norm weight; 1 where the checkpoint stores weight - 1."""
    embedding_scale: float = 1.0
    """Multiplies token embeddings."""
    interleaved_rope: bool = False
    """Rotates pairs (2i, 2i + 1)."""


class SelfAttention:
    """QKV projection, attention, output projection."""

    def __init__(self, arch: ModelArch, spec: DecoderSpec, ctx: LayerContext, index: int) -> None:
        heads, kv_heads, size = arch.num_heads, arch.num_kv_heads, arch.head_size
        rope, window = arch.layers[index].rope, arch.layers[index].window
        self.qkv_proj = Linear(
            ctx.child("qkv_proj"),
            arch.hidden_size,
            heads * size,
            kv_heads * size,
            kv_heads * size,
            bias=arch.attention_bias,
        )
        self.o_proj = Linear(ctx.child("o_proj"), heads * size, arch.hidden_size, bias=arch.output_bias, shard_dim=1)
        self.attention = Attention(
            index,
            RopeAndCacheSpec(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_size=size,
                rotary_dim=rope.rotary_dim if rope else 0,
                interleaved=spec.interleaved_rope,
                norm_eps=arch.norm_eps,
            ),
            scale=arch.query_scale,
            cos_sin=rotary_table(rope, ctx.max_model_len) if rope else None,
            q_norm=head_norm(ctx.child("q_norm"), size, spec) if spec.qk_norm else None,
            k_norm=head_norm(ctx.child("k_norm"), size, spec) if spec.qk_norm else None,
            sliding_window=window,
            soft_cap=arch.attn_soft_cap,
        )

    def __call__(self, hidden: Tensor, ctx: ForwardContext, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: hidden, residual [T, E] -> [T, E]."""
        return self.o_proj(self.attention(self.qkv_proj(hidden), ctx), residual=residual)


class GatedMLP:
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, arch: ModelArch, ctx: LayerContext) -> None:
        self.gate_up_proj = GatedLinear(
            ctx.child("gate_up_proj"),
            arch.hidden_size,
            arch.intermediate_size,
            activation=activation_of(arch),
            bias=arch.mlp_bias,
        )
        self.down_proj = Linear(
            ctx.child("down_proj"), arch.intermediate_size, arch.hidden_size, bias=arch.mlp_bias, shard_dim=1
        )

    def __call__(self, hidden: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: hidden, residual [T, E] -> [T, E]."""
        return self.down_proj(self.gate_up_proj.gate(hidden), residual=residual)


def mlp_of(arch: ModelArch, ctx: LayerContext, index: int) -> GatedMLP | MixtureOfExperts:
    """What follows the attention of a decoder layer, whose context is given."""
    experts = arch.layers[index].experts
    return GatedMLP(arch, ctx.child("mlp")) if experts is None else MixtureOfExperts(arch, experts, ctx)


def head_norm(ctx: LayerContext, head_size: int, spec: DecoderSpec) -> Tensor:
    """The float32 weight of a norm on each head. Shapes: -> [D]."""
    return ctx.tensor("weight", (head_size,), dtype=torch.float32, offset=spec.norm_offset)


def plain_attention(arch: ModelArch, index: int, *, scale: float | None = None) -> Attention:
    """Attention without rotation, head norms or windows, for models with learned positions."""
    spec = RopeAndCacheSpec(
        num_heads=arch.num_heads, num_kv_heads=arch.num_kv_heads, head_size=arch.head_size, rotary_dim=0
    )
    return Attention(index, spec, scale=arch.query_scale if scale is None else scale)

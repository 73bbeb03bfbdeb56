"""Queries, keys and values of which tokens before a token have a part (compressed convolutional attention)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.config.layers.recurrent_mixers import ConvolvedQkvSpec
from quire.errors import ConfigError
from quire.layers.context import LayerContext
from quire.layers.linear import Linear
from quire.layers.quantization.schemes import plain
from quire.layers.recurrent.scanned import conv_weights, refuse_split
from quire.ops.contracts.operands import ConvolvedQkvWeights, LinearWeight

PRODUCTS = ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")


class ConvolvedQkv:
    """See `Ops.convolved_qkv`."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        """`ctx` is that of the layer's attention. Raises: ConfigError where the ops lack it, or it would be split."""
        spec = arch.mixers[index]
        assert isinstance(spec, ConvolvedQkvSpec)
        refuse_split(arch, ctx)
        if ctx.ops.name == "triton":
            raise ConfigError(
                f"{arch.source}: convolved queries and keys are what the triton ops do not have yet; give device='cpu'"
            )
        self.ops, self.index = ctx.ops, index
        own = ctx.child("qkv_proj")
        names, sizes = [f"{name}.weight" for name in PRODUCTS], spec.in_parts
        rows = [own.read(name, (size, arch.hidden_size)) for name, size in zip(names, sizes, strict=True)]
        weight = own.packed(names, rows)
        self.in_proj = Linear.of(ctx.ops, weight, _product_bias(spec, own) if spec.has_bias else None)
        self.weights = ConvolvedQkvWeights(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            single=conv_weights(own.child("conv_qk_depthwise"), spec.conv_channels, spec.single_width, has_bias=True),
            joint=_joint(spec, own.child("conv_qk_grouped")),
            joint_bias=own.child("conv_qk_grouped")
            .tensor("bias", (spec.conv_channels,), dtype=torch.float32)
            .view(-1, spec.head_size),
            temperatures=ctx.child("qk_norm").tensor("temp", (spec.num_kv_heads,), dtype=torch.float32),
            product_bias=self.in_proj.bias,
        )

    def __call__(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Shapes: hidden [T, E] -> [T, (H + 2K) * D]. Mutates: this layer's states."""
        states, metadata = ctx.kv_caches[self.index], ctx.state_of(self.index)
        return self.ops.convolved_qkv(self.in_proj(hidden), self.weights, states, metadata)


def _product_bias(spec: ConvolvedQkvSpec, ctx: LayerContext) -> Tensor:
    """Of all products, one behind the other."""
    parts = [
        ctx.tensor(f"{name}.bias", (size,), dtype=torch.float32)
        for name, size in zip(PRODUCTS, spec.in_parts, strict=True)
    ]
    return parts[0] if parts[0].is_meta else torch.cat(parts)


def _joint(spec: ConvolvedQkvSpec, ctx: LayerContext) -> tuple[LinearWeight, ...]:
    """Of each head, stored [out, in, token]; token after token, as the op takes them."""
    size = spec.head_size
    stored = plain(ctx.read("weight", (spec.conv_channels, size, spec.joint_width)))
    if stored.is_meta:
        return (ctx.packed([], [stored.view(-1, size * spec.joint_width)]),)
    heads = stored.transpose(1, 2).reshape(-1, size, size * spec.joint_width)
    with ctx.ops.weights_together():
        packed = tuple(ctx.packed([], [head]) for head in heads)
    ctx.release(["weight"])
    return packed

"""Recurrent layers: projection in, convolution, a scan of states, projection out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.config.layers.mixers import Factors
from quire.config.layers.recurrent_mixers import GateNorm, Mamba2Spec, MambaSpec, ShortConvSpec, StepNorms
from quire.errors import ConfigError
from quire.layers.context import LayerContext
from quire.layers.linear import Linear
from quire.ops.operands import ConvWeights, Mamba2Weights, MambaWeights

PlainSpec = MambaSpec | Mamba2Spec | ShortConvSpec
"""Mixers between one product in and one out."""
DERIVED_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


class MambaMixer:
    """See `Ops.mamba`."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        spec = arch.mixers[index]
        assert isinstance(spec, MambaSpec)
        self.ops, self.index = ctx.ops, index
        self.in_proj, self.out_proj = _projections(arch, spec, ctx)
        derived = spec.time_rank + 2 * spec.state_size
        widen = ctx.child("dt_proj")
        self.weights = MambaWeights(
            conv=_conv(spec, ctx.child("conv1d")),
            derive=Linear(ctx.child("x_proj"), spec.inner_size, derived).weight,
            widen=Linear(widen, spec.time_rank, spec.inner_size).weight,
            time_bias=widen.tensor("bias", (spec.inner_size,), dtype=torch.float32),
            decay=decay_of(ctx, (spec.inner_size, spec.state_size)),
            skip=ctx.tensor("D", (spec.inner_size,), dtype=torch.float32),
            norms=_norms(spec, ctx),
            norm_eps=spec.norm_eps,
        )

    def __call__(self, hidden: Tensor, ctx: ForwardContext, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: hidden, residual [T, E] -> [T, E]. Mutates: this layer's states."""
        states, metadata = ctx.kv_caches[self.index], ctx.state_of(self.index)
        scanned = self.ops.mamba(self.in_proj(hidden), self.weights, states, metadata)
        return self.out_proj(scanned, residual=residual)


class Mamba2Mixer:
    """See `Ops.mamba2`."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        spec = arch.mixers[index]
        assert isinstance(spec, Mamba2Spec)
        self.ops, self.index = ctx.ops, index
        self.in_proj, self.out_proj = _projections(arch, spec, ctx, spec.in_parts, spec.factors)
        heads = (spec.num_heads,)
        self.weights = Mamba2Weights(
            conv=_conv(spec, ctx.child("conv1d")),
            num_groups=spec.num_groups,
            state_size=spec.state_size,
            time_bias=ctx.tensor("dt_bias", heads, dtype=torch.float32),
            decay=decay_of(ctx, heads),
            skip=ctx.tensor("D", heads, dtype=torch.float32),
            norm=_gate_norm(spec, ctx.child("norm")),
            norm_eps=spec.norm_eps,
            norms_before_gate=spec.norm is GateNorm.BEFORE,
        )

    def __call__(self, hidden: Tensor, ctx: ForwardContext, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: hidden, residual [T, E] -> [T, E]. Mutates: this layer's states."""
        states, metadata = ctx.kv_caches[self.index], ctx.state_of(self.index)
        scanned = self.ops.mamba2(self.in_proj(hidden), self.weights, states, metadata)
        return self.out_proj(scanned, residual=residual)


class ShortConv:
    """See `Ops.short_conv`."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        spec = arch.mixers[index]
        assert isinstance(spec, ShortConvSpec)
        self.ops, self.index = ctx.ops, index
        self.in_proj, self.out_proj = _projections(arch, spec, ctx)
        self.weights = _conv(spec, ctx.child("conv"))

    def __call__(self, hidden: Tensor, ctx: ForwardContext, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: hidden, residual [T, E] -> [T, E]. Mutates: this layer's states."""
        states, metadata = ctx.kv_caches[self.index], ctx.state_of(self.index)
        return self.out_proj(
            self.ops.short_conv(self.in_proj(hidden), self.weights, states, metadata), residual=residual
        )


def refuse_split(arch: ModelArch, ctx: LayerContext) -> None:
    """Raises: ConfigError where a recurrent layer would be split."""
    if ctx.parallel.tp.size > 1:
        raise ConfigError(f"{arch.source}: recurrent layers cannot be split between processes yet. Use one process.")


def _projections(
    arch: ModelArch,
    spec: PlainSpec,
    ctx: LayerContext,
    parts: Sequence[int] = (),
    factors: Factors = Factors(),  # noqa: B008
) -> tuple[Linear, Linear]:
    """Into the layer, which gives these parts of one tensor, and out of it.

    Raises: ConfigError where the layer would be split.
    """
    refuse_split(arch, ctx)
    size, bias = arch.hidden_size, spec.has_bias
    out = Linear(ctx.child("out_proj"), spec.inner_size, size, bias=bias, shard_dim=1, factors=(factors.output,))
    into = parts or (spec.in_features,)
    child = ctx.child("in_proj")
    return Linear(child, size, *into, bias=bias, input_factor=factors.input, factors=factors.inner), out


def _gate_norm(spec: Mamba2Spec, ctx: LayerContext) -> Tensor | None:
    """Shapes: -> [HD] float32."""
    return None if spec.norm is GateNorm.NONE else ctx.tensor("weight", (spec.inner_size,), dtype=torch.float32)


def _conv(spec: PlainSpec, ctx: LayerContext) -> ConvWeights:
    return conv_weights(ctx, spec.conv_channels, spec.conv_width, has_bias=spec.has_conv_bias)


def conv_weights(ctx: LayerContext, channels: int, width: int, *, has_bias: bool) -> ConvWeights:
    """A convolution of each channel by itself."""
    return ConvWeights(
        weight=ctx.tensor("weight", (channels, 1, width), dtype=torch.float32).view(channels, width),
        bias=ctx.tensor("bias", (channels,), dtype=torch.float32) if has_bias else None,
    )


def decay_of(ctx: LayerContext, shape: tuple[int, ...]) -> Tensor:
    """What a state decays by, stored as the logarithm of its negative."""
    stored = ctx.tensor("A_log", shape, dtype=torch.float32)
    return stored if stored.is_meta else stored.exp_().neg_()


def _norms(spec: MambaSpec, ctx: LayerContext) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
    if spec.norms is StepNorms.NONE:
        return None
    if spec.norms is StepNorms.PLAIN:
        return None, None, None
    sizes = spec.time_rank, spec.state_size, spec.state_size
    time, write, read = (
        ctx.child(name).tensor("weight", (size,), dtype=torch.float32)
        for name, size in zip(DERIVED_NORMS, sizes, strict=True)
    )
    return time, write, read

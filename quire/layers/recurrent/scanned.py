"""Recurrent layers: projection in, convolution, a scan of states, projection out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.config.layers.mixers import Factors
from quire.config.layers.recurrent_mixers import GateNorm, Mamba2Spec, MambaSpec, ShortConvSpec, StepNorms
from quire.errors import ConfigError
from quire.layers.context import LayerContext
from quire.layers.linear import Linear
from quire.layers.weights import ShardSpec
from quire.ops.contracts.operands import ConvWeights, LinearWeight, Mamba2Weights, MambaWeights

PlainSpec = MambaSpec | Mamba2Spec | ShortConvSpec
"""Mixers between one product in and one out."""
DERIVED_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


class MambaMixer:
    """See `Ops.mamba`."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        spec = arch.mixers[index]
        assert isinstance(spec, MambaSpec)
        self.ops, self.index = ctx.ops, arch.caches_of(index)[0]
        self.in_proj, self.out_proj = self._read_projections(arch, spec, ctx)
        self.weights = self._read_weights(spec, ctx)

    def __call__(self, hidden: Tensor, ctx: ForwardContext, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: hidden, residual [T, E] -> [T, E]. Mutates: this layer's states."""
        states, metadata = ctx.kv_caches[self.index], ctx.state_of(self.index)
        scanned = self.ops.mamba(self.in_proj(hidden), self.weights, states, metadata)
        return self.out_proj(scanned, residual=residual)

    def _read_projections(self, arch: ModelArch, spec: MambaSpec, ctx: LayerContext) -> tuple[Linear, Linear]:
        return _projections(arch, spec, ctx)

    def _read_weights(self, spec: MambaSpec, ctx: LayerContext) -> MambaWeights:
        derived = spec.time_rank + 2 * spec.state_size
        widen = ctx.child("dt_proj")
        return MambaWeights(
            conv=_conv(spec, ctx.child("conv1d")),
            derive=Linear(ctx.child("x_proj"), spec.inner_size, derived).weight,
            widen=Linear(widen, spec.time_rank, spec.inner_size).weight,
            time_bias=widen.tensor("bias", (spec.inner_size,), dtype=torch.float32),
            decay=decay_of(ctx, (spec.inner_size, spec.state_size)),
            skip=ctx.tensor("D", (spec.inner_size,), dtype=torch.float32),
            norms=_norms(spec, ctx),
            norm_eps=spec.norm_eps,
        )


class MambaPart(MambaMixer):
    """One of several whose weights the checkpoint has in the same tensors; rows into it are channel and gate in turn.

    The sum of what all parts give is the layer's.
    """

    def _read_projections(self, arch: ModelArch, spec: MambaSpec, ctx: LayerContext) -> tuple[Linear, Linear]:
        refuse_split(arch, ctx)
        size, one = arch.hidden_size, _shard(spec)
        into, out = ctx.child("in_proj"), ctx.child("out_proj")
        rows = into.read("weight", (one.parts * spec.in_features, size), one)
        columns = out.read("weight", (size, one.parts * spec.inner_size), replace(one, dim=1))
        in_bias = _part(into, "bias", (spec.in_features,), spec) if spec.has_bias else None
        if in_bias is not None and not in_bias.is_meta:
            in_bias = torch.cat([in_bias[::2], in_bias[1::2]])
        out_bias = out.tensor("bias", (size,), dtype=torch.float32) if spec.has_out_bias else None
        return (
            Linear.of(ctx.ops, into.packed(["weight"], [rows[::2], rows[1::2]]), in_bias),
            Linear.of(ctx.ops, out.packed(["weight"], [columns]), out_bias),
        )

    def _read_weights(self, spec: MambaSpec, ctx: LayerContext) -> MambaWeights:
        channels, state_size, conv = spec.inner_size, spec.state_size, ctx.child("conv1d")
        decay = _part(ctx, "A_log", (1, channels, state_size), spec).view(channels, state_size)
        return MambaWeights(
            conv=ConvWeights(
                weight=_part(conv, "weight", (channels, 1, spec.conv_width), spec).view(channels, spec.conv_width),
                bias=_part(conv, "bias", (channels,), spec) if spec.has_conv_bias else None,
            ),
            derive=_product(ctx, "x_proj_weight", (spec.time_rank + 2 * state_size, channels), spec),
            widen=_product(ctx, "dt_proj_weight", (channels, spec.time_rank), spec),
            time_bias=_part(ctx, "dt_proj_bias", (1, channels), spec).view(channels),
            decay=decay if decay.is_meta else decay.exp_().neg_(),
            skip=_part(ctx, "D", (1, channels), spec).view(channels),
        )


def _shard(spec: MambaSpec) -> ShardSpec:
    """A part's rows of a tensor."""
    assert spec.num_parts is not None
    return ShardSpec(part=spec.part, parts=spec.num_parts)


def _part(ctx: LayerContext, name: str, shape: tuple[int, ...], spec: MambaSpec) -> Tensor:
    """A copy of a part's rows, which are so many, in float32."""
    one = _shard(spec)
    stored = ctx.read_plain(name, (one.parts * shape[0], *shape[1:]), one)
    return stored if stored.is_meta else stored.to(ctx.ops.device, torch.float32, copy=True)


def _product(ctx: LayerContext, name: str, shape: tuple[int, int], spec: MambaSpec) -> LinearWeight:
    """A part's weight of a tensor that has those of all parts one behind the other."""
    one = _shard(spec)
    return ctx.packed([name], [ctx.read_plain(name, (one.parts, *shape), one).view(*shape)])


def mamba_mixer(arch: ModelArch, ctx: LayerContext, index: int) -> MambaMixer:
    """The Mamba at a place among the model's mixers, which may be one part of a layer's."""
    spec = arch.mixers[index]
    is_part = isinstance(spec, MambaSpec) and spec.num_parts is not None
    return (MambaPart if is_part else MambaMixer)(arch, ctx, index)


class Mamba2Mixer:
    """See `Ops.mamba2`."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        spec = arch.mixers[index]
        assert isinstance(spec, Mamba2Spec)
        self.ops, self.index = ctx.ops, arch.caches_of(index)[0]
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
        self.ops, self.index = ctx.ops, arch.caches_of(index)[0]
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

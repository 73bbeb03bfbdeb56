"""Layers of the gated delta rule, of lightning attention, and of the RG-LRU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType

import torch
from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.config.layers.recurrent_mixers import DeltaLayout, GatedDeltaSpec, LightningSpec, RgLruSpec
from quire.layers.activation import activation_of
from quire.layers.context import LayerContext
from quire.layers.linear import Linear
from quire.layers.recurrent.scanned import conv_weights, decay_of, refuse_split
from quire.layers.weights import Rows, split_rows
from quire.ops.contracts.operands import ConvWeights, GatedDeltaWeights, LightningWeights, LinearWeight, RgLruWeights

RG_LRU_FACTOR = -8.0
"""Of the logarithm of what the RG-LRU keeps of its state (c in https://arxiv.org/abs/2402.19427)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeltaNames:
    """What a checkpoint calls the parts of a layer of the gated delta rule."""

    inputs: tuple[str, ...]
    conv: tuple[str, ...] = ("conv1d",)
    norm: str = "norm"
    outputs: tuple[str, ...] = ("out_proj",)
    """Names of the last product, of which the checkpoint has one."""
    gates: tuple[str, str] | None = None
    """Two thin tensors; None where gates are among the inputs."""
    times: tuple[str, str] | None = None


_DELTA_NAMES: Mapping[DeltaLayout, _DeltaNames] = MappingProxyType(
    {
        DeltaLayout.BY_KEY_HEAD: _DeltaNames(inputs=("in_proj_qkvz", "in_proj_ba")),
        DeltaLayout.BY_KIND: _DeltaNames(inputs=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")),
        DeltaLayout.WHOLE: _DeltaNames(inputs=("in_proj",), norm="out_norm"),
        DeltaLayout.APART: _DeltaNames(
            inputs=("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
            conv=("q_conv1d", "k_conv1d", "v_conv1d"),
            norm="o_norm",
            outputs=("o_proj",),
        ),
        DeltaLayout.LOW_RANK: _DeltaNames(
            inputs=("q_proj", "k_proj", "v_proj", "b_proj"),
            conv=("q_conv1d", "k_conv1d", "v_conv1d"),
            norm="o_norm",
            outputs=("o_proj",),
            gates=("g_a_proj", "g_b_proj"),
            times=("f_a_proj", "f_b_proj"),
        ),
        DeltaLayout.CHANNELS: _DeltaNames(
            inputs=("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "f_proj"),
            conv=("q_conv1d", "k_conv1d", "v_conv1d"),
            norm="o_norm",
            outputs=("o_proj", "dense"),
        ),
    }
)


class GatedDelta:
    """See `Ops.gated_delta`."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        spec = arch.mixers[index]
        assert isinstance(spec, GatedDeltaSpec)
        refuse_split(arch, ctx)
        self.ops, self.index = ctx.ops, arch.caches_of(index)[0]
        names, heads, size = _DELTA_NAMES[spec.layout], spec.num_value_heads, arch.hidden_size
        read = _by_key_head if spec.layout is DeltaLayout.BY_KEY_HEAD else _by_kind
        self.in_proj = Linear.of(ctx.ops, read(spec, ctx, size))
        self.gates = _ThinLinear.of_spec(spec, ctx, names.gates, size, spec.inner_size)
        self.times = _ThinLinear.of_spec(spec, ctx, names.times, size, spec.num_times)
        output = next((name for name in names.outputs if ctx.has(f"{name}.weight")), names.outputs[0])
        self.out_proj = Linear(ctx.child(output), spec.inner_size, arch.hidden_size, shard_dim=1)
        self.weights = GatedDeltaWeights(
            conv=_delta_conv(spec, ctx),
            num_key_heads=spec.num_key_heads,
            key_size=spec.key_size,
            time_bias=_time_bias(spec, ctx),
            decay=decay_of(ctx, (1, 1, heads, 1) if spec.layout is DeltaLayout.LOW_RANK else (heads,)).view(heads),
            norm=ctx.child(names.norm).tensor("weight", (spec.value_size,), dtype=torch.float32),
            norm_eps=spec.norm_eps,
            most_rate=spec.most_rate,
            bound=spec.bound,
            gates_by_sigmoid=spec.gate_activation == "sigmoid",
        )

    def __call__(self, hidden: Tensor, ctx: ForwardContext, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: hidden, residual [T, E] -> [T, E]. Mutates: this layer's states."""
        return self.out_proj(self._attended(hidden, ctx), residual=residual)

    def _attended(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        states, metadata = ctx.kv_caches[self.index], ctx.state_of(self.index)
        projected = self.in_proj(hidden)
        gates = None if self.gates is None else self.gates(hidden)
        times = None if self.times is None else self.times(hidden)
        return self.ops.gated_delta(projected, self.weights, states, metadata, gates=gates, times=times)


class _ThinLinear:
    """up(down(x)), with few features between the two."""

    def __init__(self, down: Linear, up: Linear) -> None:
        self.down, self.up = down, up

    @classmethod
    def of_spec(
        cls, spec: GatedDeltaSpec, ctx: LayerContext, names: tuple[str, str] | None, size: int, features: int
    ) -> _ThinLinear | None:
        """None where the layer has no products of these names."""
        if names is None or spec.rank is None:
            return None
        down, up = names
        return cls(Linear(ctx.child(down), size, spec.rank), Linear(ctx.child(up), spec.rank, features))

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: x [T, M] -> [T, N]."""
        return self.up(self.down(x))


def _time_bias(spec: GatedDeltaSpec, ctx: LayerContext) -> Tensor:
    """Shapes: -> [H] or [H, N] float32."""
    stored = ctx.tensor("dt_bias", (spec.num_times,), dtype=torch.float32)
    return stored.view(spec.num_value_heads, spec.key_size) if spec.by_channel else stored


def _delta_conv(spec: GatedDeltaSpec, ctx: LayerContext) -> ConvWeights:
    """One convolution, or three whose channels follow each other: those of queries, keys and values, or, where
    transformers wrote the checkpoint, as many in each as it liked.
    """
    names = _DELTA_NAMES[spec.layout].conv
    channels = (spec.conv_channels,) if len(names) == 1 else spec.conv_parts
    headers = [ctx.header(f"{name}.weight") for name in names]
    stored = tuple(header.shape[0] for header in headers if header is not None and header.shape)
    if len(stored) == len(channels) and sum(stored) == spec.conv_channels:
        channels = stored
    parts = [
        conv_weights(ctx.child(name), count, spec.conv_width, has_bias=False).weight
        for name, count in zip(names, channels, strict=True)
    ]
    return ConvWeights(weight=parts[0] if len(parts) == 1 or parts[0].is_meta else torch.cat(parts), bias=None)


def _by_kind(spec: GatedDeltaSpec, ctx: LayerContext, size: int) -> LinearWeight:
    names = [f"{name}.weight" for name in _DELTA_NAMES[spec.layout].inputs]
    return ctx.packed(names, [ctx.read(name, (rows, size)) for name, rows in zip(names, spec.in_parts, strict=True)])


def _by_key_head(spec: GatedDeltaSpec, ctx: LayerContext, size: int) -> LinearWeight:
    """The rows of each kind, head after head, as the op takes them."""
    heads, each = spec.num_key_heads, spec.num_value_heads // spec.num_key_heads
    values = each * spec.value_size
    names = [f"{name}.weight" for name in _DELTA_NAMES[spec.layout].inputs]
    kinds = dict(zip(names, ((spec.key_size, spec.key_size, values, values), (each, each)), strict=True))
    parts: list[Rows] = []
    for name, rows in kinds.items():
        stored = ctx.read(name, (heads * sum(rows), size))
        parts += _rows_by_kind(stored, heads, rows)
    return ctx.packed(list(kinds), parts)


def _rows_by_kind(stored: Rows, num_heads: int, rows: tuple[int, ...]) -> list[Rows]:
    """Shapes: stored [num_heads * sum(rows), E]."""
    by_head = split_rows(stored, (sum(rows),) * num_heads)
    ends = pairwise(accumulate(rows, initial=0))
    return [head[begin:end] for begin, end in ends for head in by_head]


class LightningAttention:
    """See `Ops.lightning_attention`."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        spec = arch.mixers[index]
        assert isinstance(spec, LightningSpec)
        refuse_split(arch, ctx)
        self.ops, self.index = ctx.ops, arch.caches_of(index)[0]
        names = ["qkv_proj.weight", "output_gate.weight"]
        shapes = [(rows, arch.hidden_size) for rows in spec.in_parts]
        packed = ctx.packed(names, [ctx.read(*named) for named in zip(names, shapes, strict=True)])
        self.in_proj = Linear.of(ctx.ops, packed)
        self.out_proj = Linear(ctx.child("out_proj"), spec.inner_size, arch.hidden_size, shard_dim=1)
        self.weights = LightningWeights(
            decay=torch.tensor([math.exp(-rate) for rate in spec.rates], dtype=torch.float32, device=ctx.ops.device),
            norm=ctx.child("norm").tensor("weight", (spec.inner_size,), dtype=torch.float32),
            norm_eps=spec.norm_eps,
        )

    def __call__(self, hidden: Tensor, ctx: ForwardContext, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: hidden, residual [T, E] -> [T, E]. Mutates: this layer's states."""
        states, metadata = ctx.kv_caches[self.index], ctx.state_of(self.index)
        attended = self.ops.lightning_attention(self.in_proj(hidden), self.weights, states, metadata)
        return self.out_proj(attended, residual=residual)


class RgLru:
    """See `Ops.rg_lru`."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        spec = arch.mixers[index]
        assert isinstance(spec, RgLruSpec)
        refuse_split(arch, ctx)
        self.ops, self.index = ctx.ops, arch.caches_of(index)[0]
        size, width = arch.hidden_size, spec.width
        self.linear_x = Linear(ctx.child("linear_x"), size, width, bias=True)
        self.linear_y = Linear(ctx.child("linear_y"), size, width, bias=True)
        self.linear_out = Linear(ctx.child("linear_out"), width, size, bias=True, shard_dim=1)
        self.activation = activation_of(arch)
        self.weights = RgLruWeights(
            conv=conv_weights(ctx.child("conv_1d"), width, spec.conv_width, has_bias=True),
            gates=_gates(spec, ctx.child("rg_lru")),
            gate_biases=_gate_biases(spec, ctx.child("rg_lru")),
            decay=_rg_lru_decay(spec, ctx.child("rg_lru")),
        )

    def __call__(self, hidden: Tensor, ctx: ForwardContext, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: hidden, residual [T, E] -> [T, E]. Mutates: this layer's states."""
        states, metadata = ctx.kv_caches[self.index], ctx.state_of(self.index)
        scanned = self.ops.rg_lru(
            self.linear_x(hidden), self.linear_y(hidden, activation=self.activation), self.weights, states, metadata
        )
        return self.linear_out(scanned, residual=residual)


GATES = ("input_gate", "recurrent_gate")


def _gates(spec: RgLruSpec, ctx: LayerContext) -> tuple[LinearWeight, ...]:
    """Of each block; stored [X, in, out]."""
    names, size = [f"{gate}_weight" for gate in GATES], spec.block_size
    stored = [ctx.read_plain(name, (spec.num_blocks, size, size)) for name in names]
    if stored[0].is_meta:
        return (ctx.packed(names, [part.view(-1, size) for part in stored]),)
    with ctx.ops.weights_together():
        packed = tuple(ctx.packed([], [part[block].t() for part in stored]) for block in range(spec.num_blocks))
    ctx.release(names)
    return packed


def _gate_biases(spec: RgLruSpec, ctx: LayerContext) -> Tensor:
    shape = (spec.num_blocks, spec.block_size)
    stored = [ctx.tensor(f"{gate}_bias", shape, dtype=torch.float32) for gate in GATES]
    return stored[0] if stored[0].is_meta else torch.cat(stored, dim=1)


def _rg_lru_decay(spec: RgLruSpec, ctx: LayerContext) -> Tensor:
    stored = ctx.tensor("recurrent_param", (spec.width,), dtype=torch.float32)
    return stored if stored.is_meta else torch.nn.functional.softplus(stored).mul_(RG_LRU_FACTOR)

"""Recurrent layers between their products: launches of the kernels of `recurrence_kernels`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from quire.ops.contracts.operands import (
    ConvWeights,
    GatedDeltaWeights,
    LightningWeights,
    Mamba2Weights,
    MambaWeights,
    RgLruWeights,
    StateMetadata,
)
from quire.ops.shared.gated_recurrence import DeltaInputs
from quire.ops.triton.gemm import linear
from quire.ops.triton.kernels import recurrence as kernels
from quire.ops.triton.kernels.recurrence import BLOCK, tile_of
from quire.ops.triton.norm import rms_norm_columns


def allocate_states(*, num_blocks: int, num_bytes: int) -> Tensor:
    """See `Ops.allocate_states`. On torch's default device."""
    return torch.empty(2, num_blocks, num_bytes // 8)


def mamba(projected: Tensor, weights: MambaWeights, states: Tensor, metadata: StateMetadata) -> Tensor:
    """See `Ops.mamba`. Sums over N are those of a program, in one order."""
    channels, state_size = weights.decay.shape
    tile = tile_of(state_size)
    rank, gate = weights.widen.in_features, projected[:, channels:]
    x = _convolved(projected[:, :channels], weights.conv, states, metadata)
    out = projected.new_empty(len(projected), channels)
    derived = linear(x.to(projected.dtype), weights.derive, out_dtype=torch.float32)
    if weights.norms is not None:
        firsts = (0, rank, rank + state_size)
        for first, size, scale in zip(firsts, (rank, state_size, state_size), weights.norms, strict=True):
            scale = derived.new_ones(size) if scale is None else scale
            rms_norm_columns(derived, scale, weights.norm_eps, first=first)
    times = linear(derived[:, :rank].to(projected.dtype).contiguous(), weights.widen, out_dtype=torch.float32)
    vectors = derived[:, rank:]
    kernels.mamba_kernel[(_num_sequences(metadata), triton.cdiv(channels, tile["ROWS"]))](
        x,
        gate,
        times,
        weights.time_bias,
        vectors,
        weights.decay,
        weights.skip,
        out,
        *_pages(states, metadata),
        channels,
        *_halves(states),
        gate.stride(0),
        vectors.stride(0),
        FIRST=weights.conv.num_inputs,
        NUMBERS=state_size,
        **tile,
    )
    return out


def mamba2(projected: Tensor, weights: Mamba2Weights, states: Tensor, metadata: StateMetadata) -> Tensor:
    """See `Ops.mamba2`."""
    heads, groups, state_size = len(weights.decay), weights.num_groups, weights.state_size
    inner, mixed_size = weights.inner_size, weights.conv.weight.shape[0]
    gate, mixed, times = projected.split_with_sizes((inner, mixed_size, heads), dim=1)
    mixed = _convolved(mixed, weights.conv, states, metadata)
    y, size, tile = mixed.new_empty(len(projected), inner), inner // heads, tile_of(state_size)
    kernels.mamba2_kernel[(_num_sequences(metadata), heads, triton.cdiv(size, tile["ROWS"]))](
        mixed,
        times,
        weights.time_bias,
        weights.decay,
        weights.skip,
        y,
        *_pages(states, metadata),
        *_halves(states),
        times.stride(0),
        FIRST=weights.conv.num_inputs,
        HEADS=heads,
        GROUPS=groups,
        SIZE=size,
        NUMBERS=state_size,
        **tile,
    )
    return _gated(y, gate, weights.norm, weights.norm_eps, groups, gated_first=not weights.norms_before_gate)


def short_conv(projected: Tensor, weights: ConvWeights, states: Tensor, metadata: StateMetadata) -> Tensor:
    """See `Ops.short_conv`."""
    write, read, x = projected.chunk(3, dim=1)
    out = projected.new_empty(x.shape)
    _convolve(out, x, weights, states, metadata, factors=write, gates=read)
    return out


def gated_delta(
    projected: Tensor,
    weights: GatedDeltaWeights,
    states: Tensor,
    metadata: StateMetadata,
    *,
    gates: Tensor | None = None,
    times: Tensor | None = None,
) -> Tensor:
    """See `Ops.gated_delta`."""
    heads, size = len(weights.decay), len(weights.norm)
    convolved, gates, rates, times = DeltaInputs.of(projected, weights, gates, times)
    mixed = _convolved(convolved, weights.conv, states, metadata)
    y, tile = mixed.new_empty(len(projected), heads * size), tile_of(weights.key_size)
    kernels.gated_delta_kernel[(_num_sequences(metadata), heads, triton.cdiv(size, tile["ROWS"]))](
        mixed,
        rates,
        times,
        weights.time_bias,
        weights.decay,
        y,
        *_pages(states, metadata),
        *_halves(states),
        rates.stride(0),
        times.stride(0),
        FIRST=weights.conv.num_inputs,
        HEADS=heads,
        KEYS=weights.num_key_heads,
        SIZE=size,
        NUMBERS=weights.key_size,
        MOST_RATE=weights.most_rate,
        BY_CHANNEL=weights.by_channel,
        BOUND=weights.bound or 0.0,
        **tile,
    )
    return _gated(y, gates, weights.norm, weights.norm_eps, heads, silu=not weights.gates_by_sigmoid)


def lightning_attention(
    projected: Tensor, weights: LightningWeights, states: Tensor, metadata: StateMetadata
) -> Tensor:
    """See `Ops.lightning_attention`."""
    heads, inner = len(weights.decay), len(weights.norm)
    size, gate = inner // heads, projected[:, 3 * inner :]
    tile = tile_of(size)
    y = projected.new_empty(len(projected), inner, dtype=torch.float32)
    kernels.lightning_kernel[(_num_sequences(metadata), heads, triton.cdiv(size, tile["ROWS"]))](
        projected,
        weights.decay,
        y,
        *_pages(states, metadata),
        *_halves(states),
        projected.stride(0),
        HEADS=heads,
        SIZE=size,
        **tile,
    )
    return _gated(y, gate, weights.norm, weights.norm_eps, 1, silu=False)


def rg_lru(x: Tensor, gate: Tensor, weights: RgLruWeights, states: Tensor, metadata: StateMetadata) -> Tensor:
    """See `Ops.rg_lru`."""
    channels, out = x.shape[1], torch.empty_like(x)
    u = torch.empty_like(x, dtype=torch.float32)
    _convolve(u, x, weights.conv, states, metadata)
    blocks = u.to(x.dtype).chunk(len(weights.gates), dim=1)
    gates = torch.cat(
        [
            linear(block.contiguous(), weight, bias, out_dtype=torch.float32)
            for block, weight, bias in zip(blocks, weights.gates, weights.gate_biases, strict=True)
        ],
        dim=1,
    )
    kernels.rg_lru_kernel[(_num_sequences(metadata), triton.cdiv(channels, BLOCK))](
        u,
        gates,
        weights.decay,
        gate,
        out,
        *_pages(states, metadata),
        channels,
        *_halves(states),
        gate.stride(0),
        FIRST=weights.conv.num_inputs,
        BLOCK_SIZE=channels // len(weights.gates),
        BLOCK=BLOCK,
    )
    return out


def _convolved(x: Tensor, weights: ConvWeights, states: Tensor, metadata: StateMetadata) -> Tensor:
    """silu of the convolution. Shapes: -> [T, C] float32. Mutates: states."""
    out = x.new_empty(x.shape, dtype=torch.float32)
    _convolve(out, x, weights, states, metadata, silu=True)
    return out


def _convolve(
    out: Tensor,
    x: Tensor,
    weights: ConvWeights,
    states: Tensor,
    metadata: StateMetadata,
    *,
    factors: Tensor | None = None,
    gates: Tensor | None = None,
    silu: bool = False,
) -> None:
    """The convolution of x, times `factors`; then silu, or times `gates`. Mutates: out, states."""
    (num_tokens, channels), width, tiles = x.shape, weights.weight.shape[1], triton.cdiv(x.shape[1], BLOCK)
    query_start, reads, writes = metadata.query_start, metadata.reads, metadata.writes
    num_sequences = _num_sequences(metadata)
    if num_tokens:
        kernels.convolve_kernel[(num_tokens, tiles)](
            x, factors, gates, weights.weight, weights.bias, out, states, query_start, reads, num_sequences, channels,
            *_halves(states), x.stride(0), out.stride(0), WIDTH=width, SILU=silu, BLOCK=BLOCK,
        )  # fmt: skip
    kernels.keep_inputs_kernel[(num_sequences, tiles)](
        x, factors, states, query_start, reads, writes, num_sequences, channels, *_halves(states), x.stride(0),
        WIDTH=width, BLOCK=BLOCK,
    )  # fmt: skip


def _gated(
    y: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    groups: int,
    *,
    gated_first: bool = False,
    silu: bool = True,
) -> Tensor:
    """The norm of each group of y, and the gate, in whose type it is. A weight as long as a group is that of all."""
    out, size = gate.new_empty(y.shape), y.shape[1] // groups
    if len(y):
        kernels.gate_norm_kernel[(len(y), groups)](
            y, gate, weight, out, eps, size, 0 if weight is None or len(weight) == size else size, y.stride(0),
            gate.stride(0), out.stride(0), NORMED=weight is not None, GATED_FIRST=gated_first, SILU=silu,
            BLOCK=triton.next_power_of_2(size),
        )  # fmt: skip
    return out


def _num_sequences(metadata: StateMetadata) -> int:
    return len(metadata.reads)


def _pages(states: Tensor, metadata: StateMetadata) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Arguments of each scan."""
    return states, metadata.query_start, metadata.reads, metadata.writes, _num_sequences(metadata)


def _halves(states: Tensor) -> tuple[int, int]:
    """Numbers of a half of a page, and from one half to the other."""
    return states.shape[2], states.stride(0)

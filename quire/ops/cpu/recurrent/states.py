"""Recurrent layers; `csrc/cpu/recurrent/recurrence.cpp`. What lies between their ops is in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.contracts.operands import ConvWeights, Mamba2Weights, MambaWeights, StateMetadata
from quire.ops.cpu.library import check, load
from quire.ops.cpu.products.gemm import linear
from quire.ops.cpu.runtime.dtypes import ACTIVATIONS, DTYPES
from quire.ops.cpu.runtime.memory import empty, zeros

lib = load()
SLACK = 128
"""Bytes past the last page, as behind pages of keys and values."""


def allocate_states(*, num_blocks: int, num_bytes: int) -> Tensor:
    """See `Ops.allocate_states`. Pages are not touched here."""
    size = num_blocks * num_bytes
    return zeros(size + SLACK)[:size].view(torch.float32).view(2, num_blocks, num_bytes // 8)


def mamba(projected: Tensor, weights: MambaWeights, states: Tensor, metadata: StateMetadata) -> Tensor:
    """See `Ops.mamba`."""
    tokens, dtype = projected.shape[0], projected.dtype
    channels, state_size = weights.decay.shape
    x = empty((tokens, channels), torch.float32)
    rounded = x if dtype == torch.float32 else empty((tokens, channels), dtype)
    convolve(x, rounded, projected, 0, weights.conv, states, metadata, activation="silu")
    derived = linear(rounded, weights.derive, out_dtype=torch.float32)
    del rounded
    time = _derived(derived, weights, dtype)
    wide = linear(time, weights.widen, weights.time_bias, out_dtype=torch.float32)
    del time
    out = empty((tokens, channels), dtype)
    write = derived.data_ptr() + 4 * weights.widen.in_features
    check(
        lib.qr_mamba_scan(
            out.data_ptr(),
            DTYPES[dtype],
            x.data_ptr(),
            wide.data_ptr(),
            projected.data_ptr() + channels * dtype.itemsize,
            2 * channels,
            write,
            write + 4 * state_size,
            derived.shape[1],
            weights.decay.data_ptr(),
            weights.skip.data_ptr(),
            tokens,
            channels,
            state_size,
            weights.conv.num_inputs,
            *places(states, metadata),
        )
    )
    return out


def mamba2(projected: Tensor, weights: Mamba2Weights, states: Tensor, metadata: StateMetadata) -> Tensor:
    """See `Ops.mamba2`."""
    tokens, width = projected.shape
    dtype = projected.dtype
    heads, inner = weights.decay.shape[0], weights.inner_size
    convolved = weights.conv.weight.shape[0]
    x = empty((tokens, convolved), torch.float32)
    convolve(x, x, projected, inner, weights.conv, states, metadata, activation="silu")
    check(
        lib.qr_mamba2_scan(
            x.data_ptr(),
            projected.data_ptr() + (inner + convolved) * dtype.itemsize,
            DTYPES[dtype],
            width,
            weights.time_bias.data_ptr(),
            weights.decay.data_ptr(),
            weights.skip.data_ptr(),
            tokens,
            heads,
            weights.num_groups,
            inner // heads,
            weights.state_size,
            weights.conv.num_inputs,
            *places(states, metadata),
        )
    )
    norm = GatedNorm(weights.norm, weights.norm_eps, weights.num_groups, norms_before_gate=weights.norms_before_gate)
    return gated_norm(x, 0, projected, 0, inner, norm)


def short_conv(projected: Tensor, weights: ConvWeights, states: Tensor, metadata: StateMetadata) -> Tensor:
    """See `Ops.short_conv`."""
    channels = weights.weight.shape[0]
    out = empty((projected.shape[0], channels), projected.dtype)
    convolve(None, out, projected, 2 * channels, weights, states, metadata, factor=0, gate=channels)
    return out


def convolve(
    out: Tensor | None,
    rounded: Tensor,
    projected: Tensor,
    first: int,
    weights: ConvWeights,
    states: Tensor,
    metadata: StateMetadata,
    *,
    factor: int | None = None,
    gate: int | None = None,
    activation: str | None = None,
    num_blocks: int = 1,
) -> None:
    """The convolution of `projected` from column `first` on, in float32 and rounded; factor and gate are columns, too.

    The rounded channels of a block stand together: [num_blocks, T, C / num_blocks].
    Mutates: out, rounded (which may be out), states.
    """
    tokens, width = projected.shape
    channels, num_inputs = weights.weight.shape
    item, start = projected.element_size(), projected.data_ptr()
    check(
        lib.qr_causal_conv(
            None if out is None else out.data_ptr(),
            None if rounded is out else rounded.data_ptr(),
            start + first * item,
            None if factor is None else start + factor * item,
            None if gate is None else start + gate * item,
            DTYPES[projected.dtype],
            width,
            weights.weight.data_ptr(),
            None if weights.bias is None else weights.bias.data_ptr(),
            ACTIVATIONS[activation],
            tokens,
            channels,
            channels // num_blocks,
            num_inputs,
            *places(states, metadata),
        )
    )


def _derived(derived: Tensor, weights: MambaWeights, dtype: torch.dtype) -> Tensor:
    """The time step in few numbers, rounded; it and the vectors beside it are normed. Mutates: derived."""
    tokens, rank = derived.shape[0], weights.widen.in_features
    time = empty((tokens, rank), dtype)
    norms = (None, None, None) if weights.norms is None else weights.norms
    check(
        lib.qr_mamba_derived(
            time.data_ptr(),
            DTYPES[dtype],
            derived.data_ptr(),
            tokens,
            rank,
            weights.decay.shape[1],
            *(None if norm is None else norm.data_ptr() for norm in norms),
            int(weights.norms is not None),
            weights.norm_eps,
        )
    )
    return time


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """What comes behind a scan: an RMS norm of each group of columns, and a gate."""

    weight: Tensor | None
    """Of all columns, or of one group; None without a norm."""
    eps: float
    num_groups: int
    shares_weight: bool = False
    """The weight is that of every group."""
    norms_before_gate: bool = False
    by_sigmoid: bool = False
    """Multiplies by sigmoid(gate) instead of SiLU(gate)."""


def gated_norm(x: Tensor, first: int, gates: Tensor, gate: int, columns: int, norm: GatedNorm) -> Tensor:
    """So many columns of x, from `first` on, gated by those of `gates` from `gate` on and normed, in the gates' dtype.

    Mutates: x.
    """
    tokens = x.shape[0]
    out = empty((tokens, columns), gates.dtype)
    check(
        lib.qr_gated_norm(
            out.data_ptr(),
            DTYPES[out.dtype],
            x.data_ptr() + first * x.itemsize,
            x.shape[1],
            gates.data_ptr() + gate * gates.itemsize,
            gates.shape[1],
            None if norm.weight is None else norm.weight.data_ptr(),
            int(norm.shares_weight),
            tokens,
            norm.num_groups,
            columns // norm.num_groups,
            norm.eps,
            int(norm.norms_before_gate),
            int(norm.by_sigmoid),
        )
    )
    return out


def places(states: Tensor, metadata: StateMetadata) -> tuple[int, ...]:
    """The states, and where those of the step's sequences lie, as the library takes them."""
    _, num_pages, half = states.shape
    return (
        states.data_ptr(),
        num_pages,
        half,
        metadata.query_start.data_ptr(),
        metadata.reads.data_ptr(),
        metadata.writes.data_ptr(),
        metadata.reads.shape[0],
    )

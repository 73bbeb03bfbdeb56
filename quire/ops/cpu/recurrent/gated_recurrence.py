"""The gated delta rule, lightning attention and the RG-LRU; `csrc/cpu/recurrent/`. As in `states`."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.contracts.operands import GatedDeltaWeights, LightningWeights, RgLruWeights, StateMetadata
from quire.ops.cpu.library import check, load
from quire.ops.cpu.products.gemm import linear_into
from quire.ops.cpu.recurrent.states import GatedNorm, convolve, gated_norm, places
from quire.ops.cpu.runtime.dtypes import DTYPES
from quire.ops.cpu.runtime.memory import empty

lib = load()


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
    tokens, width = projected.shape
    dtype = projected.dtype
    heads, size = weights.decay.shape[0], weights.norm.shape[0]
    channels, inner = weights.conv.weight.shape[0], heads * size
    x = empty((tokens, channels), torch.float32)
    convolve(x, x, projected, 0, weights.conv, states, metadata, activation="silu")
    rates = projected.data_ptr() + (channels + (inner if gates is None else 0)) * dtype.itemsize
    check(
        lib.qr_gated_delta_scan(
            x.data_ptr(),
            rates,
            width,
            rates + heads * dtype.itemsize if times is None else times.data_ptr(),
            width if times is None else times.shape[1],
            DTYPES[dtype],
            int(weights.by_channel),
            weights.time_bias.data_ptr(),
            weights.decay.data_ptr(),
            weights.most_rate,
            weights.bound or 0.0,
            tokens,
            heads,
            weights.num_key_heads,
            weights.key_size,
            size,
            weights.conv.num_inputs,
            *places(states, metadata),
        )
    )
    by_sigmoid = weights.gates_by_sigmoid
    norm = GatedNorm(
        weights.norm, weights.norm_eps, heads, shares_weight=True, norms_before_gate=True, by_sigmoid=by_sigmoid
    )
    column = channels if gates is None else 0
    return gated_norm(x, channels - inner, projected if gates is None else gates, column, inner, norm)


def lightning_attention(
    projected: Tensor, weights: LightningWeights, states: Tensor, metadata: StateMetadata
) -> Tensor:
    """See `Ops.lightning_attention`."""
    tokens, width = projected.shape
    heads, inner = weights.decay.shape[0], weights.norm.shape[0]
    out = empty((tokens, inner), torch.float32)
    check(
        lib.qr_lightning_scan(
            out.data_ptr(),
            projected.data_ptr(),
            DTYPES[projected.dtype],
            width,
            weights.decay.data_ptr(),
            tokens,
            heads,
            inner // heads,
            0,
            *places(states, metadata),
        )
    )
    norm = GatedNorm(weights.norm, weights.norm_eps, 1, norms_before_gate=True, by_sigmoid=True)
    return gated_norm(out, 0, projected, 3 * inner, inner, norm)


def rg_lru(x: Tensor, gate: Tensor, weights: RgLruWeights, states: Tensor, metadata: StateMetadata) -> Tensor:
    """See `Ops.rg_lru`. The convolution is rounded block by block, as the gates' products read it."""
    tokens, channels = x.shape
    num_blocks = len(weights.gates)
    block = channels // num_blocks
    convolved = empty((tokens, channels), torch.float32)
    by_block = empty((tokens, channels), x.dtype).view(num_blocks, tokens, block)
    convolve(convolved, by_block, x, 0, weights.conv, states, metadata, num_blocks=num_blocks)
    gates = empty((tokens, 2 * channels), torch.float32).view(num_blocks, tokens, 2 * block)
    for number, (weight, bias) in enumerate(zip(weights.gates, weights.gate_biases, strict=True)):
        linear_into(gates[number], by_block[number], weight, bias)
    del by_block
    out = empty((tokens, channels), x.dtype)
    check(
        lib.qr_rg_lru_scan(
            out.data_ptr(),
            DTYPES[x.dtype],
            convolved.data_ptr(),
            gates.data_ptr(),
            gate.data_ptr(),
            weights.decay.data_ptr(),
            tokens,
            channels,
            block,
            weights.conv.num_inputs,
            *places(states, metadata),
        )
    )
    return out

"""The gated delta rule, lightning attention and the RG-LRU, over the products of an implementation.

Each is evaluated token by token, so that the bits of a sequence are the same however it is cut into steps. For row
invariance see `ops.recurrence`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.contracts.operands import GatedDeltaWeights, LightningWeights, RgLruWeights, StateMetadata
from quire.ops.shared.recurrence import EXP, SILU, SOFTPLUS, Step, apart, convolve, fold_sum, rms, token_by_token

UNIT_EPS = 1e-6
"""Added to the sum of squares by whose root the delta rule's queries and keys are divided."""
SIGMOID, EXPM1 = torch.ops.aten.sigmoid.out, torch.ops.aten.expm1.out


class DeltaInputs(NamedTuple):
    """What `Ops.gated_delta` reads, as views of what it is given."""

    convolved: Tensor
    gates: Tensor
    rates: Tensor
    times: Tensor

    @classmethod
    def of(
        cls, projected: Tensor, weights: GatedDeltaWeights, gates: Tensor | None, times: Tensor | None
    ) -> DeltaInputs:
        """From one tensor, or from three."""
        channels, heads = weights.conv.weight.shape[0], weights.decay.shape[0]
        if gates is not None and times is not None:
            convolved, rates = projected.split_with_sizes((channels, heads), dim=1)
            return cls(convolved, gates, rates, times)
        sizes = (channels, heads * weights.norm.shape[0], heads, weights.time_bias.numel())
        return cls(*projected.split_with_sizes(sizes, dim=1))


def gated_delta(
    projected: Tensor,
    weights: GatedDeltaWeights,
    states: Tensor,
    metadata: StateMetadata,
    gates: Tensor | None,
    times: Tensor | None,
) -> Tensor:
    """`Ops.gated_delta` in float32."""
    heads, keys, size = weights.decay.shape[0], weights.num_key_heads, weights.key_size
    inner, each = heads * weights.norm.shape[0], heads // keys
    convolved, gate, rate, time = (part.float() for part in DeltaInputs.of(projected, weights, gates, times))
    step = Step.of(metadata)
    out = apart(SILU, convolve(convolved, weights.conv, states, step))
    query, key, value = out.split_with_sizes((keys * size, keys * size, inner), dim=1)
    query, key = _unit(query.reshape(-1, keys, 1, 1, size)).div_(size**0.5), _unit(key.reshape(-1, keys, 1, 1, size))
    value = value.reshape(-1, keys, each, inner // heads)
    rate = apart(SIGMOID, rate).mul_(weights.most_rate).reshape(-1, keys, each, 1)
    bias = weights.time_bias.flatten()
    factors = weights.decay.repeat_interleave(len(bias) // heads)
    if weights.bound is None:
        powers = apart(SOFTPLUS, time + bias) * factors
    else:
        powers = apart(SIGMOID, (time + bias) * -factors) * weights.bound
    decay = apart(EXP, powers).reshape(-1, keys, each, 1, len(bias) // heads)

    def update(state: Tensor, tokens: Tensor) -> Tensor:
        state.mul_(decay[tokens])
        change = (value[tokens] - fold_sum(state * key[tokens])).mul_(rate[tokens])
        state.add_(change.unsqueeze(-1) * key[tokens])
        return fold_sum(state * query[tokens])

    y = torch.empty_like(value)
    token_by_token(update, y, states, step, first=weights.conv.num_inputs, shape=(*value.shape[1:], size))
    normed = rms(y.view(-1, heads, inner // heads), weights.norm, weights.norm_eps)
    return normed.view(-1, inner).mul_(apart(SIGMOID if weights.gates_by_sigmoid else SILU, gate))


def _unit(x: Tensor) -> Tensor:
    """Over the last dimension."""
    return x / fold_sum(x * x).add_(UNIT_EPS).sqrt_().unsqueeze(-1)


def lightning_attention(
    projected: Tensor, weights: LightningWeights, states: Tensor, metadata: StateMetadata
) -> Tensor:
    """`Ops.lightning_attention` in float32."""
    heads, inner = weights.decay.shape[0], weights.norm.shape[0]
    size = inner // heads
    given, gate = projected.float().split_with_sizes((3 * inner, inner), dim=1)
    by_head = apart(SILU, given).reshape(-1, heads, 3 * size)
    query, key, value = by_head.unsqueeze(2).split_with_sizes((size, size, size), dim=3)
    decay = weights.decay.view(heads, 1, 1)

    def update(state: Tensor, tokens: Tensor) -> Tensor:
        state.mul_(decay).add_(value[tokens].transpose(2, 3) * key[tokens])
        return fold_sum(state * query[tokens])

    y = torch.empty(projected.shape[0], heads, size)
    token_by_token(update, y, states, Step.of(metadata), first=0, shape=(heads, size, size))
    return rms(y.view(-1, inner), weights.norm, weights.norm_eps).mul_(apart(SIGMOID, gate))


def rg_lru(
    x: Tensor,
    gate: Tensor,
    weights: RgLruWeights,
    states: Tensor,
    metadata: StateMetadata,
    *,
    linear: Callable[..., Tensor],
) -> Tensor:
    """`Ops.rg_lru` in float32, with an implementation's products."""
    step = Step.of(metadata)
    u = convolve(x.float(), weights.conv, states, step)
    blocks = u.to(x.dtype).chunk(len(weights.gates), dim=1)
    gates = [
        linear(block.contiguous(), weight, bias, out_dtype=torch.float32).chunk(2, dim=1)
        for block, weight, bias in zip(blocks, weights.gates, weights.gate_biases, strict=True)
    ]
    opened, kept = (apart(SIGMOID, torch.cat(parts, dim=1)) for parts in zip(*gates, strict=True))
    logarithm = kept * weights.decay
    share = apart(EXPM1, 2 * logarithm).neg_().sqrt_()
    share.index_fill_(0, _first_tokens(step), 1.0)
    added, decay = share.mul_(opened).mul_(u), apart(EXP, logarithm)

    def update(state: Tensor, tokens: Tensor) -> Tensor:
        return state.mul_(decay[tokens]).add_(added[tokens])

    y = torch.empty_like(u)
    token_by_token(update, y, states, step, first=weights.conv.num_inputs, shape=(u.shape[1],))
    return y.mul_(gate)


def _first_tokens(step: Step) -> Tensor:
    """The tokens with which sequences begin."""
    firsts = [start for start, read in zip(step.starts, step.reads, strict=True) if read < 0]
    return torch.tensor(firsts, dtype=torch.int64)

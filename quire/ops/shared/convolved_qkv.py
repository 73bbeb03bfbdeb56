"""Convolved queries and keys in plain torch, around an implementation's products. Row invariance: see `recurrence`."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.contracts.operands import ConvolvedQkvWeights, StateMetadata
from quire.ops.shared.recurrence import Step, Trail, convolved, fold_sum
from quire.ops.threads import one_thread

LEAST_LENGTH = torch.finfo(torch.float32).eps
"""Of a head, that it is divided by."""
ROWS_AT_A_TIME = 32
"""Tokens whose heads are normed at a time."""


def taps_shape(projected: Tensor, weights: ConvolvedQkvWeights) -> tuple[int, int, int]:
    """Of what the products read: heads, tokens, features."""
    return len(weights.joint), projected.shape[0], weights.joint[0].in_features


def num_features(weights: ConvolvedQkvWeights) -> int:
    """Of queries, keys and values."""
    return (weights.num_heads + 2 * weights.num_kv_heads) * weights.head_size


@one_thread()
def fill_taps(
    taps: Tensor,
    qkv: Tensor,
    projected: Tensor,
    query_start: Tensor,
    reads: Tensor,
    writes: Tensor,
    *,
    weights: ConvolvedQkvWeights,
    states: Tensor,
) -> None:
    """What the products of `Ops.convolved_qkv` read, and its values.

    Shapes: taps [H + K, T, W * D], qkv [T, (H + 2K) * D]. Mutates: taps, qkv, states.
    """
    step = Step.of(StateMetadata(query_start=query_start, reads=reads, writes=writes))
    channels, half, _ = weights.sizes
    both, early, late = projected.split_with_sizes(weights.sizes, dim=1)
    trail = Trail(both.float(), states, step, weights.num_past)
    missing = None if weights.product_bias is None else weights.product_bias[-half:]
    values = Trail(late.float(), states, step, 1, first=weights.num_past * channels, missing=missing)
    by_tap = taps.view(*taps.shape[:2], weights.num_taps, weights.head_size)
    for tap in range(weights.num_taps):
        rows = convolved(trail, weights.single, step.num_tokens, lag=weights.num_taps - 1 - tap)
        by_tap[:, :, tap] = rows.view(step.num_tokens, -1, weights.head_size).transpose(0, 1)
    qkv[:, channels : channels + half] = early
    qkv[:, channels + half :] = values.before(1)
    trail.keep(states)
    values.keep(states)


@one_thread()
def fill_heads(qkv: Tensor, projected: Tensor, mixed: Tensor, temperatures: Tensor) -> None:
    """Queries and keys of `Ops.convolved_qkv`, from what its products gave, [H + K, T, D] float32. Mutates: qkv."""
    num_kv_heads, size = len(temperatures), mixed.shape[2]
    num_queries = len(mixed) - num_kv_heads
    for first in range(0, qkv.shape[0], ROWS_AT_A_TIME):
        rows = slice(first, first + ROWS_AT_A_TIME)
        own = projected[rows, : len(mixed) * size].float().reshape(-1, len(mixed), size)
        by_key = own[:, :num_queries].reshape(len(own), num_kv_heads, -1, size)
        means = (by_key + own[:, num_queries:].unsqueeze(2)).mul_(0.5)
        of_keys = _in_order(means).div_(means.shape[2])
        heads = mixed[:, rows].transpose(0, 1) + torch.cat((means.flatten(1, 2), of_keys), dim=1)
        lengths = fold_sum(heads * heads).sqrt_().clamp_(min=LEAST_LENGTH)
        heads.mul_((size**0.5 / lengths).unsqueeze(2))
        heads[:, num_queries:].mul_(temperatures.unsqueeze(1))
        qkv[rows, : len(mixed) * size] = heads.flatten(1)


def _in_order(x: Tensor) -> Tensor:
    """Sums over dimension 2, one after the other."""
    total = x[:, :, 0].clone()
    for part in x.unbind(2)[1:]:
        total.add_(part)
    return total

"""Ops on each element by itself that are plain torch in every implementation, in place.

Row invariance: sums, products and comparisons of two numbers are the same wherever they stand. What torch computes by
a series is not: the end of a stretch of elements meets other instructions than the rest. So rows are computed in
stretches of whole vectors, with zeros behind their end.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.config.layers.experts import ClampedGate
from quire.ops.activation import ACTIVATIONS
from quire.ops.threads import one_thread
from quire.utils.math import round_up

VECTOR = 32
"""Elements that torch's elementwise loops take at a time, at most (two AVX-512 registers)."""
KEY_FEATURES = 4
"""By which heads grow whose keys have biases (`config.layers.mixers.HEAD_MULTIPLE`)."""
ROWS_AT_A_TIME = 8
"""Rows that are widened to float32 at a time: temporaries stay in the cache."""


_GATES: MappingProxyType[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"sigmoid": torch.sigmoid_, "softplus": F.softplus}
)


@one_thread()
def activate(x: Tensor, activation: str, parameters: tuple[float, ...] = ()) -> None:
    """See `Ops.activate`."""
    function = _SERIES[activation]
    room = torch.zeros(ROWS_AT_A_TIME, round_up(x.shape[1], VECTOR))
    for rows in torch.split(x, ROWS_AT_A_TIME):
        wide = room[: rows.shape[0]]
        wide[:, : x.shape[1]] = rows
        rows.copy_(function(wide, *parameters)[:, : x.shape[1]])


@one_thread()
def clip(x: Tensor, limit: float) -> None:
    """See `Ops.clip`."""
    x.clamp_(min=-limit, max=limit)


@one_thread()
def gate(x: Tensor, gates: Tensor, activation: str = "sigmoid") -> None:
    """See `Ops.gate`."""
    count, function = gates.shape[1], _GATES[activation]
    room = torch.zeros(ROWS_AT_A_TIME, round_up(count, VECTOR))
    neighbours = x.view(x.shape[0], count, -1)
    for rows, opening in zip(torch.split(neighbours, ROWS_AT_A_TIME), torch.split(gates, ROWS_AT_A_TIME), strict=True):
        wide = room[: rows.shape[0]]
        wide[:, :count] = opening
        rows.copy_(rows * function(wide)[:, :count].unsqueeze(2))


@one_thread()
def fill_gated_activation(out: Tensor, both: Tensor, activation: str | ClampedGate) -> None:
    """`Ops.gated_activation`. Mutates: out [T, F]."""
    if isinstance(activation, ClampedGate):
        _fill_clamped_gate(out, both, activation)
        return
    size, function = out.shape[1], ACTIVATIONS[activation]
    room = torch.zeros(ROWS_AT_A_TIME, round_up(size, VECTOR))
    for rows, results in zip(torch.split(both, ROWS_AT_A_TIME), torch.split(out, ROWS_AT_A_TIME), strict=True):
        wide = room[: rows.shape[0]]
        wide[:, :size] = rows[:, :size]
        results.copy_(function(wide)[:, :size].mul_(rows[:, size:]))


def _fill_clamped_gate(out: Tensor, both: Tensor, gate: ClampedGate) -> None:
    size = out.shape[1]
    room = torch.zeros(2, ROWS_AT_A_TIME, round_up(size, VECTOR))
    for rows, results in zip(torch.split(both, ROWS_AT_A_TIME), torch.split(out, ROWS_AT_A_TIME), strict=True):
        wide = room[:, : rows.shape[0]]
        wide[..., :size] = rows.view(-1, 2, size).transpose(0, 1)
        opened = wide[0].clamp_(max=gate.limit).mul_(gate.slope)
        values = wide[1].clamp_(min=-gate.limit, max=gate.limit).add_(gate.offset)
        results.copy_(F.silu(opened).div_(gate.slope).mul_(values)[:, :size])


@one_thread()
def fill_columns(out: Tensor, *parts: Tensor) -> None:
    """`Ops.join_columns`. Mutates: out."""
    for part, columns in zip(parts, torch.split(out, [part.shape[1] for part in parts], dim=1), strict=True):
        columns.copy_(part)


@one_thread()
def fill_pairs(out: Tensor, qkv: Tensor, num_heads: int, num_kv_heads: int) -> None:
    """`Ops.pair_values`. Mutates: out."""
    tokens, size = qkv.shape[0], qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    count = num_heads + num_kv_heads
    wide, narrow = out.view(tokens, -1, 2, size), qkv.view(tokens, -1, size)
    wide[:, :count, 0] = narrow[:, :count]
    wide[:, :count, 1] = 0.0
    pairs = narrow[:, count:].view(tokens, 2, -1, size).transpose(1, 2)
    wide[:, count:].view(tokens, 2, -1, 2, size).copy_(pairs.unsqueeze(1))


def biased_size(query: Tensor, key: Tensor, times: Tensor) -> int:
    """Features of what `Ops.bias_keys` gives a token."""
    size = key.shape[1] // times.shape[1]
    return (query.shape[1] // size + 2 * times.shape[1]) * (size + KEY_FEATURES)


@one_thread()
def fill_biased_keys(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, times: Tensor, decay: Tensor, scale: float
) -> None:
    """`Ops.bias_keys`. Mutates: out."""
    tokens, count = times.shape
    size = key.shape[1] // count
    heads = out.view(tokens, -1, size + KEY_FEATURES)
    num_heads = heads.shape[1] - 2 * count
    heads[..., size:] = 0.0
    for part, first in ((query, 0), (key, num_heads), (value, num_heads + count)):
        narrow = part.view(tokens, -1, size)
        heads[:, first : first + narrow.shape[1], :size] = narrow
    heads[:, :num_heads, size : size + 2] = 1.0 / scale
    exact = scale * torch.tensor(1.0 / scale, dtype=out.dtype).item()  # a query's number is rounded
    room = torch.zeros(tokens, round_up(count, VECTOR))
    room[:, :count] = times
    room[:, :count] = F.softplus(room)[:, :count].mul_(decay)
    biases = room.exp_()[:, :count].div_(exact)
    written = heads[:, num_heads : num_heads + count]
    written[..., size] = biases
    written[..., size + 1] = biases - written[..., size].float()


@one_thread()
def fill_differences(out: Tensor, x: Tensor, factor: float) -> None:
    """`Ops.subtract_heads`. Mutates: out."""
    first, second = x.chunk(2, dim=1)
    out.copy_(first.float() - second.float() * factor)


@one_thread()
def scale_shift(x: Tensor, weights: Tensor, residual: Tensor | None = None) -> None:
    """See `Ops.scale_shift`."""
    for first in range(0, x.shape[0], ROWS_AT_A_TIME):
        rows = slice(first, first + ROWS_AT_A_TIME)
        total = x[rows].float().add(weights[1]).mul_(weights[0])
        if residual is not None:
            total.add_(residual[rows].float().add(weights[3]).mul_(weights[2]))
        x[rows] = total


@one_thread()
def scale_heads(x: Tensor, weight: Tensor) -> None:
    """See `Ops.scale_heads`."""
    x.mul_(weight)


@one_thread()
def scale_tokens(x: Tensor, scales: Tensor, positions: Tensor) -> None:
    """See `Ops.scale_tokens`."""
    x.mul_(scales.index_select(0, positions).view(-1, 1, 1))


def _quick_gelu(x: Tensor) -> Tensor:
    return F.silu(x * 1.702).div_(1.702)


def _xielu(x: Tensor, positive: float, negative: float, beta: float, eps: float) -> Tensor:
    below = F.elu(x.clamp(max=eps)).sub_(x).mul_(negative)  # elu is expm1 below zero
    return torch.where(x > 0, x * x * positive, below).add_(x, alpha=beta)


_SERIES: MappingProxyType[str, Callable[..., Tensor]] = MappingProxyType({"quick_gelu": _quick_gelu, "xielu": _xielu})

"""Streams behind gates, and embeddings of n-grams, in plain torch in every implementation.

Row invariance: as in `hyper` and `recurrence`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.ops.contracts.operands import ConvWeights, NGramHashes, StateMetadata
from quire.ops.shared.compressed import row_sums
from quire.ops.shared.hyper import sigmoids, stretches
from quire.ops.shared.recurrence import SILU, Step, Trail, apart, read_states, write_states
from quire.ops.threads import one_thread

LEAST_PRODUCT = 1e-6
"""Of a key and a query, before its root is taken."""
ROWS_AT_A_TIME = 32
"""Of a convolution's inputs."""


@one_thread()
def fill_opened(out: Tensor, x: Tensor, gates: Tensor) -> None:
    """`Ops.open_streams`. Mutates: out [T, E]."""
    size = out.shape[1]
    count = x.shape[1] // size
    for rows in stretches(x):
        opened = sigmoids(gates[rows].float()) * x[rows].float()
        total = opened[:, :size].clone()
        for stream in range(1, count):
            total += opened[:, stream * size : (stream + 1) * size]
        out[rows] = total / count


@one_thread()
def fill_shares(out: Tensor, products: Tensor) -> None:
    """`Ops.stream_shares`. Mutates: out [T, S]."""
    torch.mul(sigmoids(products / products.shape[1]), 2.0, out=out)


@one_thread()
def fill_rows(
    out: Tensor,
    token_ids: Tensor,
    states: Tensor,
    *,
    hashes: NGramHashes,
    metadata: StateMetadata,
    first: int,
) -> None:
    """`Ops.ngram_rows`. Mutates: out [T, heads], states."""
    longest, end = len(hashes.multipliers), hashes.end_id
    behind_end = (token_ids - end).unsqueeze(1).float()
    trail = Trail(behind_end, states, Step.of(metadata), longest - 1, first=first)
    hashed = token_ids * hashes.multipliers[0]
    is_cut = torch.zeros(token_ids.shape, dtype=torch.bool)
    parts = []
    for lag in range(1, longest):
        before = trail.before(lag).squeeze(1).long()
        is_cut |= before == 0
        hashed = hashed ^ (before.masked_fill(is_cut, 0) + end) * hashes.multipliers[lag]
        parts.append(hashed)
    each = out.shape[1] // len(parts)
    by_head = torch.stack(parts, dim=1).repeat_interleave(each, dim=1)
    torch.add(by_head.remainder(hashes.rows), hashes.firsts, out=out)
    trail.keep(states)


@one_thread()
def fill_gated_values(out: Tensor, keys: Tensor, queries: Tensor, values: Tensor) -> None:
    """`Ops.gate_values`. Mutates: out [T, S * E]."""
    size = values.shape[1]
    count = keys.shape[1] // size
    for rows in stretches(keys):
        products = (keys[rows].float() * queries[rows].float()).view(-1, count, size)
        product = row_sums(products).squeeze(2) / math.sqrt(size)
        gates = sigmoids(product.abs().clamp_(min=LEAST_PRODUCT).sqrt_() * product.sign())
        out[rows] = (gates.unsqueeze(2) * values[rows].float().unsqueeze(1)).flatten(1)


@one_thread()
def fill_convolved(
    out: Tensor,
    x: Tensor,
    residual: Tensor,
    states: Tensor,
    *,
    weights: ConvWeights,
    metadata: StateMetadata,
    dilation: int,
) -> None:
    """`Ops.dilated_conv`. Mutates: out [T, C], states."""
    channels, width = weights.weight.shape
    num_past, step = (width - 1) * dilation, Step.of(metadata)
    by_place = weights.weight.t().contiguous()
    for start, count, read, write in zip(step.starts, step.counts, step.reads, step.writes, strict=True):
        window = read_states(states, [read], 0, num_past * channels).view(num_past, channels)
        for begin in range(start, start + count, ROWS_AT_A_TIME):
            rows = slice(begin, min(begin + ROWS_AT_A_TIME, start + count))
            window = torch.cat((window[window.shape[0] - num_past :], x[rows].float()))
            size = rows.stop - rows.start
            total = window[:size] * by_place[0]
            for place in range(1, width):
                total += window[place * dilation : place * dilation + size] * by_place[place]
            out[rows] = apart(SILU, total).add_(residual[rows])
        write_states(states, [write], 0, window[window.shape[0] - num_past :].reshape(1, -1))


def open_streams(x: Tensor, gates: Tensor, *, count: int) -> Tensor:
    """See `Ops.open_streams`."""
    out = x.new_empty(x.shape[0], x.shape[1] // count)
    fill_opened(out, x, gates)
    return out


def stream_shares(products: Tensor) -> Tensor:
    """See `Ops.stream_shares`."""
    out = torch.empty_like(products)
    fill_shares(out, products)
    return out


def ngram_rows(
    token_ids: Tensor, hashes: NGramHashes, states: Tensor, metadata: StateMetadata, *, first: int
) -> Tensor:
    """See `Ops.ngram_rows`."""
    out = token_ids.new_empty(token_ids.shape[0], hashes.rows.shape[0])
    fill_rows(out, token_ids, states, hashes=hashes, metadata=metadata, first=first)
    return out


def gate_values(keys: Tensor, queries: Tensor, values: Tensor) -> Tensor:
    """See `Ops.gate_values`."""
    out = torch.empty_like(keys)
    fill_gated_values(out, keys, queries, values)
    return out


def dilated_conv(
    x: Tensor, residual: Tensor, weights: ConvWeights, states: Tensor, metadata: StateMetadata, *, step: int
) -> Tensor:
    """See `Ops.dilated_conv`."""
    out = torch.empty_like(x)
    fill_convolved(out, x, residual, states, weights=weights, metadata=metadata, dilation=step)
    return out

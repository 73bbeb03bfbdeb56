"""Compressed attention and hyper-connections, which the library has nothing for: plain torch on one thread."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from quire.ops import compressed as plain
from quire.ops import hyper
from quire.ops.cpu.runtime.calls import run_or_note
from quire.ops.cpu.runtime.memory import empty
from quire.ops.operands import CompressorWeights, HyperWeights, RowCache


def rotate_last(x: Tensor, positions: Tensor, cos_sin: Tensor, *, backward: bool = False) -> None:
    """See `Ops.rotate_last`."""
    run_or_note(partial(plain.rotate_last, backward=backward), x, positions, cos_sin)


def store_rows(rows: Tensor, cache: Tensor, slots: Tensor) -> None:
    """See `Ops.store_rows`."""
    run_or_note(partial(_store, cache=cache), rows, slots)


def _store(rows: Tensor, slots: Tensor, *, cache: Tensor) -> None:
    plain.store_rows(rows, cache, slots)


def compress(tail: RowCache, entries: RowCache, weights: CompressorWeights, cos_sin: Tensor) -> None:
    """See `Ops.compress`."""
    run_or_note(partial(plain.compress, tail, entries, weights, cos_sin))


def select_entries(query: Tensor, weights: Tensor, entries: RowCache, *, rate: int, num_selected: int) -> Tensor:
    """See `Ops.select_entries`."""
    selected = empty((query.shape[0], num_selected), torch.int32)
    run_or_note(partial(plain.fill_selected, entries=entries, rate=rate), selected, query, weights)
    return selected


def compressed_attention(
    query: Tensor,
    sinks: Tensor,
    last: RowCache,
    entries: RowCache | None = None,
    selected: Tensor | None = None,
    *,
    scale: float,
    window: int,
    rate: int = 1,
) -> Tensor:
    """See `Ops.compressed_attention`."""
    out = empty((query.shape[0], query.shape[1] * query.shape[2]), query.dtype)
    given = partial(plain.fill_attended, last=last, entries=entries, scale=scale, window=window, rate=rate)
    run_or_note(given, out, query, sinks, selected)
    return out


def read_streams(streams: Tensor, products: Tensor, weights: HyperWeights) -> tuple[Tensor, Tensor]:
    """See `Ops.read_streams`."""
    read = empty((streams.shape[0], streams.shape[1] // weights.count), streams.dtype)
    writing = empty((streams.shape[0], weights.num_written), torch.float32)
    run_or_note(partial(hyper.fill_read, weights=weights), read, writing, streams, products)
    return read, writing


def sum_streams(streams: Tensor, products: Tensor, weights: HyperWeights) -> Tensor:
    """See `Ops.sum_streams`."""
    read = empty((streams.shape[0], streams.shape[1] // weights.count), streams.dtype)
    run_or_note(partial(hyper.fill_read, weights=weights), read, None, streams, products)
    return read


def write_streams(streams: Tensor, out: Tensor, writing: Tensor) -> Tensor:
    """See `Ops.write_streams`."""
    written = empty(streams.shape, streams.dtype)
    run_or_note(hyper.fill_written, written, streams, out, writing)
    return written

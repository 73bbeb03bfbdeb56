"""Compressed attention (`csrc/cpu/attention/compressed.cpp`, `entries.cpp`) and hyper-connections (`hyper.cpp`).

Attention of heads that no page holds is plain torch on one thread.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from quire.ops.contracts.operands import CompressorWeights, HyperWeights, RowCache
from quire.ops.cpu.attention.rows import row_places, step_rows, step_sequences
from quire.ops.cpu.library import check, load
from quire.ops.cpu.runtime.calls import run_or_note
from quire.ops.cpu.runtime.dtypes import CACHE_DTYPES, DTYPES
from quire.ops.cpu.runtime.memory import empty
from quire.ops.shared import compressed as plain

lib = load()
MOST_HEAD = 1024
"""Features of a slot in a page (`kernels/cache.h`)."""
MOST_PARTS = 2
"""Of an entry: attention's, and the indexer's."""


def rotate_last(x: Tensor, positions: Tensor, cos_sin: Tensor, *, backward: bool = False) -> None:
    """See `Ops.rotate_last`."""
    tokens, heads, size = x.shape
    check(
        lib.qr_rotate_last(
            *(x.data_ptr(), DTYPES[x.dtype], positions.data_ptr(), cos_sin.data_ptr(), cos_sin.shape[0]),
            *(tokens, heads, size, cos_sin.shape[1], int(backward)),
        )
    )


def store_rows(rows: Tensor, cache: Tensor, slots: Tensor) -> None:
    """See `Ops.store_rows`."""
    if rows.dtype != cache.dtype:
        run_or_note(partial(_store, cache=cache), rows, slots)
        return
    check(
        lib.qr_store_rows(
            *(cache.data_ptr(), CACHE_DTYPES[cache.dtype], *row_places(cache)),
            *(rows.data_ptr(), rows.shape[1], slots.data_ptr(), rows.shape[0]),
        )
    )


def _store(rows: Tensor, slots: Tensor, *, cache: Tensor) -> None:
    plain.store_rows(rows, cache, slots)


def compress(tail: RowCache, entries: RowCache, weights: CompressorWeights, cos_sin: Tensor) -> None:
    """See `Ops.compress`."""
    norm, index_norm = (*weights.norms, None)[:2]
    assert norm is not None
    assert len(weights.norms) <= MOST_PARTS
    check(
        lib.qr_compress(
            *(entries.rows.data_ptr(), CACHE_DTYPES[entries.rows.dtype], *step_rows(entries)),
            *(tail.rows.data_ptr(), CACHE_DTYPES[tail.rows.dtype], *step_rows(tail)),
            *step_sequences(tail.metadata),
            weights.bias.data_ptr(),
            weights.rate,
            weights.reach,
            *(norm.data_ptr(), norm.shape[0]),
            *((None, 0) if index_norm is None else (index_norm.data_ptr(), index_norm.shape[0])),
            weights.eps,
            *(cos_sin.data_ptr(), *cos_sin.shape),
        )
    )


def tokens_of_entries(selected: Tensor, positions: Tensor, *, rate: int) -> Tensor:
    """See `Ops.tokens_of_entries`."""
    out = empty((selected.shape[0], selected.shape[1] * rate + rate - 1), torch.int32)
    run_or_note(partial(plain.fill_tokens, rate=rate), out, selected, positions)
    return out


def select_entries(query: Tensor, weights: Tensor | None, entries: RowCache, *, rate: int, num_selected: int) -> Tensor:
    """See `Ops.select_entries`."""
    tokens, heads, size = query.shape
    if weights is None:
        weights = empty((tokens, heads), torch.float32)
        run_or_note(_fill_with_ones, weights)
    selected = empty((tokens, num_selected), torch.int32)
    check(
        lib.qr_select_entries(
            selected.data_ptr(),
            num_selected,
            query.data_ptr(),
            DTYPES[query.dtype],
            weights.data_ptr(),
            heads,
            size,
            entries.size,
            entries.rows.data_ptr(),
            CACHE_DTYPES[entries.rows.dtype],
            *step_rows(entries),
            *step_sequences(entries.metadata),
            rate,
        )
    )
    return selected


def _fill_with_ones(x: Tensor) -> None:
    x.fill_(1.0)


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
    tokens, heads, head_size = query.shape
    out = empty((tokens, heads * head_size), query.dtype)
    if head_size % 2 or head_size > MOST_HEAD:
        given = partial(plain.fill_attended, last=last, entries=entries, scale=scale, window=window, rate=rate)
        run_or_note(given, out, query, sinks, selected)
        return out
    check(
        lib.qr_compressed_attention(
            out.data_ptr(),
            query.data_ptr(),
            DTYPES[query.dtype],
            sinks.data_ptr(),
            last.rows.data_ptr(),
            CACHE_DTYPES[last.rows.dtype],
            *step_rows(last),
            *((None, 0, 0, 0, 0, None, 0, 0) if entries is None else (entries.rows.data_ptr(), *step_rows(entries))),
            *step_sequences(last.metadata),
            None if selected is None else selected.data_ptr(),
            0 if selected is None else selected.shape[1],
            heads,
            head_size,
            scale,
            window,
            rate,
        )
    )
    return out


def read_streams(streams: Tensor, products: Tensor, weights: HyperWeights) -> tuple[Tensor, Tensor]:
    """See `Ops.read_streams`."""
    writing = empty((streams.shape[0], weights.num_written), torch.float32)
    return _read(streams, products, weights, writing), writing


def sum_streams(streams: Tensor, products: Tensor, weights: HyperWeights) -> Tensor:
    """See `Ops.sum_streams`."""
    return _read(streams, products, weights, None)


def _read(streams: Tensor, products: Tensor, weights: HyperWeights, writing: Tensor | None) -> Tensor:
    tokens, size = streams.shape[0], streams.shape[1] // weights.count
    read = empty((tokens, size), streams.dtype)
    check(
        lib.qr_read_streams(
            read.data_ptr(),
            None if writing is None else writing.data_ptr(),
            streams.data_ptr(),
            DTYPES[streams.dtype],
            products.data_ptr(),
            weights.scale.data_ptr(),
            weights.base.data_ptr(),
            tokens,
            weights.count,
            size,
            weights.eps,
            weights.norm_eps,
            weights.magnitude,
            weights.least_added,
            weights.iterations,
        )
    )
    return read


def write_streams(streams: Tensor, out: Tensor, writing: Tensor) -> Tensor:
    """See `Ops.write_streams`."""
    tokens, size = out.shape
    count = streams.shape[1] // size
    written = empty(streams.shape, streams.dtype)
    check(
        lib.qr_write_streams(
            written.data_ptr(),
            streams.data_ptr(),
            DTYPES[streams.dtype],
            out.data_ptr(),
            writing.data_ptr(),
            tokens,
            count,
            size,
            int(writing.shape[1] > count),
        )
    )
    return written

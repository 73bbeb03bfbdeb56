"""Paged attention; `csrc/cpu/attention/attention.cpp`."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from quire.ops.contracts.operands import AttentionMetadata
from quire.ops.cpu.library import check, load
from quire.ops.cpu.runtime.calls import run_or_note
from quire.ops.cpu.runtime.dtypes import CACHE_DTYPES, DTYPES
from quire.ops.cpu.runtime.memory import empty
from quire.ops.shared.chunks import by_chunk

lib = load()


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `Ops.paged_attention`."""
    tokens, heads, head_size = query.shape
    out = empty((tokens, heads * head_size), query.dtype)
    attend_pages(
        out,
        query,
        kv_cache,
        metadata,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        slopes=slopes,
        sinks=sinks,
    )
    return out


def chunked_attention(
    query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, *, scale: float, chunk_size: int
) -> Tensor:
    """See `Ops.chunked_attention`."""
    tokens, heads, head_size = query.shape
    out = empty((tokens, heads * head_size), query.dtype)
    run_or_note(partial(_attend_chunks, metadata=metadata, scale=scale, chunk_size=chunk_size), out, query, kv_cache)
    return out


def _attend_chunks(
    out: Tensor, query: Tensor, kv_cache: Tensor, *, metadata: AttentionMetadata, scale: float, chunk_size: int
) -> None:
    attend_pages(out, query, kv_cache, by_chunk(metadata, chunk_size), scale=scale)


def attend_pages(
    out: Tensor,
    query: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """`Ops.paged_attention`, of a cache or of one of its heads. Mutates: out [T, H * D]."""
    _, heads, head_size = query.shape
    _, num_blocks, kv_heads, block_size, width = kv_cache.shape
    tables = metadata.block_tables
    check(
        lib.qr_paged_attention(
            out.data_ptr(),
            DTYPES[out.dtype],
            query.data_ptr(),
            DTYPES[query.dtype],
            kv_cache.data_ptr(),
            CACHE_DTYPES[kv_cache.dtype],
            num_blocks,
            block_size,
            block_size * width,
            kv_cache.stride(1),
            metadata.query_start.data_ptr(),
            metadata.seq_lens.data_ptr(),
            metadata.seq_lens.shape[0],
            tables.data_ptr(),
            tables.stride(0),
            heads,
            kv_heads,
            head_size,
            scale,
            soft_cap or 0.0,
            sliding_window or 0,
            None if slopes is None else slopes.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
        )
    )

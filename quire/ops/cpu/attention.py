"""Paged attention; `csrc/cpu/attention.cpp`. Slopes and sinks are computed in plain torch, many times slower."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from quire.ops.attention import Scores, attend_pages
from quire.ops.chunks import by_chunk
from quire.ops.cpu.calls import run_or_note
from quire.ops.cpu.dtypes import CACHE_DTYPES, DTYPES
from quire.ops.cpu.library import check, load
from quire.ops.cpu.memory import empty
from quire.ops.functional import AttentionMetadata
from quire.utils.math import round_up

lib = load()
SLOTS = 16
"""What slots of a page are padded to a multiple of."""
TOGETHER = {torch.float32: 1, torch.float16: 1, torch.bfloat16: 2, torch.int8: 4}
"""Elements of a key that lie side by side, and slots of values."""


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
    """See `functional.paged_attention`."""
    tokens, heads, head_size = query.shape
    out = empty((tokens, heads * head_size), query.dtype)
    if slopes is not None or sinks is not None:
        scores = Scores(scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, slopes=slopes, sinks=sinks)
        run_or_note(partial(_attend_in_torch, metadata=metadata, scores=scores), out, query, kv_cache)
        return out
    _attend(out, query, kv_cache, metadata, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap)
    return out


def chunked_attention(
    query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, *, scale: float, chunk_size: int
) -> Tensor:
    """See `functional.chunked_attention`."""
    tokens, heads, head_size = query.shape
    out = empty((tokens, heads * head_size), query.dtype)
    run_or_note(partial(_attend_chunks, metadata=metadata, scale=scale, chunk_size=chunk_size), out, query, kv_cache)
    return out


def _attend_chunks(
    out: Tensor, query: Tensor, kv_cache: Tensor, *, metadata: AttentionMetadata, scale: float, chunk_size: int
) -> None:
    _attend(out, query, kv_cache, by_chunk(metadata, chunk_size), scale=scale)


def _attend(
    out: Tensor,
    query: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """`functional.paged_attention` of the library. Mutates: out."""
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
        )
    )


def _attend_in_torch(
    out: Tensor, query: Tensor, kv_cache: Tensor, *, metadata: AttentionMetadata, scores: Scores
) -> None:
    read_pages = partial(_read_pages, kv_cache, head_size=query.shape[2])
    out.copy_(attend_pages(query, read_pages, metadata, scores, num_kv_heads=kv_cache.shape[2]))


def _read_pages(kv_cache: Tensor, blocks: Tensor, *, head_size: int) -> Tensor:
    """Keys and values as `csrc/cpu/kernels/cache.h` lays them out. Shapes: blocks [n] -> [2, n, K, S, D]."""
    block_size, together = kv_cache.shape[3], TOGETHER[kv_cache.dtype]
    slots = round_up(block_size, SLOTS)
    pages = kv_cache[:, blocks].flatten(3)
    keys, values = pages[..., : slots * head_size]
    keys = keys.unflatten(2, (slots // SLOTS, head_size // together, SLOTS, together)).transpose(3, 4)
    values = values.unflatten(2, (slots // together, head_size, together)).transpose(3, 4)
    both = torch.stack([part.reshape(*part.shape[:2], slots, head_size) for part in (keys, values)])
    if kv_cache.dtype == torch.int8:
        scales = pages[..., slots * head_size :][..., : 4 * slots].contiguous().view(torch.float32)
        both = both.float() * scales.unsqueeze(-1)
    return both[..., :block_size, :]

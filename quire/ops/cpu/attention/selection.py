"""Attention over the tokens that an indexer chooses; `csrc/cpu/selection.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.cpu.library import check, load
from quire.ops.cpu.runtime.dtypes import CACHE_DTYPES, DTYPES
from quire.ops.cpu.runtime.memory import empty
from quire.ops.operands import AttentionMetadata

lib = load()


def select_tokens(
    query: Tensor,
    weights: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    num_selected: int,
    head_size: int,
) -> Tensor:
    """See `Ops.select_tokens`."""
    tokens, heads, size = query.shape
    selected = empty((tokens, num_selected), torch.int32)
    check(
        lib.qr_select_tokens(
            selected.data_ptr(),
            num_selected,
            query.data_ptr(),
            DTYPES[query.dtype],
            weights.data_ptr(),
            heads,
            size,
            *_cache(kv_cache),
            head_size,
            *_sequences(metadata),
        )
    )
    return selected


def selected_attention(
    query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, selected: Tensor, *, scale: float
) -> Tensor:
    """See `Ops.selected_attention`."""
    tokens, heads, head_size = query.shape
    out = empty((tokens, heads * head_size), query.dtype)
    check(
        lib.qr_selected_attention(
            out.data_ptr(),
            query.data_ptr(),
            DTYPES[query.dtype],
            *_cache(kv_cache),
            *_sequences(metadata),
            selected.data_ptr(),
            selected.shape[1],
            heads,
            head_size,
            scale,
        )
    )
    return out


def _cache(kv_cache: Tensor) -> tuple[int, ...]:
    """Its address, dtype, number and size of blocks, and what lies from page to page and from block to block."""
    _, num_blocks, _, block_size, width = kv_cache.shape
    dtype = CACHE_DTYPES[kv_cache.dtype]
    return kv_cache.data_ptr(), dtype, num_blocks, block_size, block_size * width, kv_cache.stride(1)


def _sequences(metadata: AttentionMetadata) -> tuple[int, ...]:
    tables, seq_lens = metadata.block_tables, metadata.seq_lens
    starts = metadata.query_start.data_ptr(), seq_lens.data_ptr(), seq_lens.shape[0]
    return *starts, tables.data_ptr(), tables.stride(0)

"""Attention over what an indexer chooses: tokens (`csrc/cpu/attention/selection.cpp`), or blocks (`block_selection.cpp`
there), which are attended to as a context of their own for each token.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from quire.ops.contracts.operands import AttentionMetadata, RowCache
from quire.ops.cpu.attention.paged import attend_pages
from quire.ops.cpu.attention.rows import row_places, step_sequences
from quire.ops.cpu.library import check, load
from quire.ops.cpu.runtime.calls import run_or_note
from quire.ops.cpu.runtime.dtypes import CACHE_DTYPES, DTYPES
from quire.ops.cpu.runtime.memory import empty
from quire.ops.shared.block_selection import by_runs, owners

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


def select_blocks(query: Tensor, keys: RowCache, *, block_size: int, num_selected: int, num_local: int) -> Tensor:
    """See `Ops.select_blocks`."""
    _, heads, size = query.shape
    selected = empty((*query.shape[:2], num_selected), torch.int32)
    tables = keys.metadata.block_tables
    check(
        lib.qr_select_blocks(
            selected.data_ptr(),
            num_selected,
            query.data_ptr(),
            DTYPES[query.dtype],
            heads,
            size,
            keys.rows.data_ptr(),
            CACHE_DTYPES[keys.rows.dtype],
            *row_places(keys.rows),
            tables.data_ptr(),
            tables.stride(0),
            *step_sequences(keys.metadata),
            block_size,
            num_local,
        )
    )
    return selected


def selected_attention(
    query: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    selected: Tensor,
    *,
    scale: float,
    run: int = 1,
    sinks: Tensor | None = None,
    ends_early: bool = False,
) -> Tensor:
    """See `Ops.selected_attention`."""
    tokens, heads, head_size = query.shape
    out = empty((tokens, heads * head_size), query.dtype)
    if selected.dim() == 3:
        given = partial(_attend_runs, metadata=metadata, scale=scale, run=run, sinks=sinks)
        run_or_note(given, out, query, kv_cache, selected)
    elif kv_cache.shape[2] > 1 or ends_early:
        given = partial(_attend_lists, metadata=metadata, scale=scale, sinks=sinks)
        run_or_note(given, out, query, kv_cache, selected)
    else:
        _attend_tokens(out, query, kv_cache, selected, metadata=metadata, scale=scale, sinks=sinks)
    return out


def _attend_lists(
    out: Tensor,
    query: Tensor,
    kv_cache: Tensor,
    selected: Tensor,
    *,
    metadata: AttentionMetadata,
    scale: float,
    sinks: Tensor | None,
) -> None:
    """To the same tokens for every KV head: lists of one length after the other, for the library takes whole ones.

    Mutates: out.
    """
    most = selected.shape[1]
    if metadata.seq_lens.max() <= most:
        attend_pages(out, query, kv_cache, metadata, scale=scale, sinks=sinks)
        return
    owner, positions = owners(metadata)
    counts = (selected >= 0).sum(dim=1)
    lengths = counts.masked_fill(counts > positions, most)  # those that attend to all that they see
    for length in sorted({*lengths.tolist()}):
        tokens = (lengths == length).nonzero().flatten()
        alone = AttentionMetadata(
            query_start=torch.arange(len(tokens) + 1, dtype=torch.int32),
            seq_lens=(positions[tokens] + 1).int(),
            block_tables=metadata.block_tables[owner[tokens]],
            block_size=metadata.block_size,
        )
        chosen, given = selected[tokens, :length].contiguous(), query[tokens]
        out[tokens] = _attend_heads(given, kv_cache, chosen, metadata=alone, scale=scale, sinks=sinks)


def _attend_heads(
    query: Tensor,
    kv_cache: Tensor,
    selected: Tensor,
    *,
    metadata: AttentionMetadata,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Shapes: query [T, H, D] -> [T, H * D]."""
    parts, kv_heads = [], kv_cache.shape[2]
    for head, queries in enumerate(query.chunk(kv_heads, dim=1)):
        part = query.new_empty(query.shape[0], queries.shape[1] * query.shape[2])
        own = None if sinks is None else sinks.chunk(kv_heads)[head]
        of_head = kv_cache[:, :, head : head + 1]
        _attend_tokens(part, queries.contiguous(), of_head, selected, metadata=metadata, scale=scale, sinks=own)
        parts.append(part)
    return torch.cat(parts, dim=1)


def _attend_tokens(
    out: Tensor,
    query: Tensor,
    kv_cache: Tensor,
    selected: Tensor,
    *,
    metadata: AttentionMetadata,
    scale: float,
    sinks: Tensor | None,
) -> None:
    """To those of one KV head. Mutates: out."""
    _, heads, head_size = query.shape
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
            None if sinks is None else sinks.data_ptr(),
        )
    )


def _attend_runs(
    out: Tensor,
    query: Tensor,
    kv_cache: Tensor,
    selected: Tensor,
    *,
    metadata: AttentionMetadata,
    scale: float,
    run: int,
    sinks: Tensor | None,
) -> None:
    """Mutates: out."""
    _, kv_heads, most = selected.shape
    if metadata.seq_lens.max() <= most * run:
        attend_pages(out, query, kv_cache, metadata, scale=scale, sinks=sinks)
        return
    tokens, heads, head_size = query.shape
    by_head = out.view(tokens, kv_heads, -1)
    for head, queries in enumerate(query.chunk(kv_heads, dim=1)):
        part = out.new_empty(tokens, heads // kv_heads * head_size)
        seen = by_runs(metadata, selected[:, head], run)
        own = None if sinks is None else sinks.chunk(kv_heads)[head]
        attend_pages(part, queries.contiguous(), kv_cache[:, :, head : head + 1], seen, scale=scale, sinks=own)
        by_head[:, head] = part


def _cache(kv_cache: Tensor) -> tuple[int, ...]:
    """Its address, dtype, number and size of blocks, and what lies from page to page and from block to block."""
    _, num_blocks, _, block_size, width = kv_cache.shape
    dtype = CACHE_DTYPES[kv_cache.dtype]
    return kv_cache.data_ptr(), dtype, num_blocks, block_size, block_size * width, kv_cache.stride(1)


def _sequences(metadata: AttentionMetadata) -> tuple[int, ...]:
    tables = metadata.block_tables
    return *step_sequences(metadata), tables.data_ptr(), tables.stride(0)

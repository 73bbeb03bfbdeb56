"""Paged attention.

Row invariance: a sequence's queries are taken in zero-padded tiles of TILE_QUERIES, its keys in splits of SPLIT tokens
that start at multiples of SPLIT. Every product has the same shape; every run of exponentials and sums is a split long,
a whole number of vectors; the softmax maximum is exact in any order; the splits' sums are added in the order of the
context. So a token meets the same operations in a decode step, in a chunk of 7 and in a whole prefill, and splits that
it cannot see add exact zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.functional import AttentionMetadata
from quire.ops.reference.cache import dequantize
from quire.ops.threads import one_thread
from quire.utils.math import cdiv

TILE_QUERIES = 8
SPLIT = 128
"""Context tokens per partial sum."""


@one_thread()
def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """See `functional.paged_attention`."""
    num_tokens, num_heads, head_size = query.shape
    out = torch.empty(num_tokens, num_heads, head_size, dtype=query.dtype)
    starts, seq_lens = metadata.query_start.tolist(), metadata.seq_lens.tolist()
    for index, seq_len in enumerate(seq_lens):
        tokens = slice(starts[index], starts[index + 1])
        first_position = seq_len - (tokens.stop - tokens.start)
        seen_from = 0 if sliding_window is None else max(0, first_position - sliding_window + 1)
        base = seen_from // SPLIT * SPLIT
        keys_KUD, values_KUD = _gather(kv_cache, metadata.block_tables[index], base, seen_from, seq_len)
        for start in range(tokens.start, tokens.stop, TILE_QUERIES):
            rows = slice(start, min(start + TILE_QUERIES, tokens.stop))
            position = first_position + start - tokens.start
            out[rows] = _attend(
                query[rows],
                keys_KUD[:, : cdiv(position + rows.stop - rows.start - base, SPLIT) * SPLIT],
                values_KUD[:, : cdiv(position + rows.stop - rows.start - base, SPLIT) * SPLIT],
                position - base,
                scale=scale,
                sliding_window=sliding_window,
                soft_cap=soft_cap,
            )
    return out.view(num_tokens, num_heads * head_size)


def _gather(kv_cache: Tensor, block_table: Tensor, base: int, seen_from: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Keys and values of positions base .. seq_len in float32, zeros before seen_from and up to a whole split.

    Blocks before that of seen_from may belong to somebody else: a weight of 0 times what stands there may be NaN.
    Shapes: each [K, U, D].
    """
    num_kv_heads, block_size = kv_cache.shape[2:4]
    first_block = seen_from // block_size
    pages = kv_cache[:, block_table[first_block : cdiv(seq_len, block_size)]]
    if kv_cache.dtype == torch.int8:
        pages = dequantize(pages)
    head_size = pages.shape[-1]
    tokens = pages.transpose(1, 2).reshape(2, num_kv_heads, -1, head_size)
    skipped = seen_from - first_block * block_size
    gathered = torch.zeros(2, num_kv_heads, cdiv(seq_len - base, SPLIT) * SPLIT, head_size)
    gathered[:, :, seen_from - base : seq_len - base] = tokens[:, :, skipped : skipped + seq_len - seen_from]
    return gathered[0], gathered[1]


def _attend(
    query_THD: Tensor,
    keys_KUD: Tensor,
    values_KUD: Tensor,
    position: int,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """Attention of one tile of queries at position, position + 1, ... over gathered splits. Gives [T, H, D]."""
    num_queries, num_heads, head_size = query_THD.shape
    num_kv_heads, num_keys, _ = keys_KUD.shape
    group, num_splits = num_heads // num_kv_heads, num_keys // SPLIT
    rows = group * TILE_QUERIES

    # 1. the tile, grouped by kv head and repeated for each split: [K * N, G * Q, D]
    tile = torch.zeros(num_kv_heads, group, TILE_QUERIES, head_size)
    tile[:, :, :num_queries] = query_THD.view(num_queries, num_kv_heads, group, head_size).permute(1, 2, 0, 3)
    tile = tile.view(num_kv_heads, 1, rows, head_size).expand(-1, num_splits, -1, -1).reshape(-1, rows, head_size)

    # 2. scores [K, N, G, Q, S], what a query may not see at minus infinity
    keys = keys_KUD.reshape(-1, SPLIT, head_size)
    tile_scores = torch.bmm(tile, keys.transpose(1, 2))
    scores = tile_scores.view(num_kv_heads, num_splits, group, TILE_QUERIES, SPLIT)[:, :, :, :num_queries]
    scores.mul_(scale)
    if soft_cap is not None:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    scores.masked_fill_(_hidden(position, num_queries, num_splits, sliding_window), float("-inf"))

    # 3. softmax and weighted values per split, added in order; the padding's rows hold finite numbers nobody reads
    weights = scores.sub_(scores.amax(dim=(1, 4), keepdim=True)).exp_()
    total = _sum_in_order(weights.sum(-1))
    partial = torch.bmm(tile_scores, values_KUD.reshape(-1, SPLIT, head_size))
    partial = partial.view(num_kv_heads, num_splits, group, TILE_QUERIES, head_size)[:, :, :, :num_queries]
    out = _sum_in_order(partial).div_(total.unsqueeze(-1))
    return out.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_size)


def _hidden(position: int, num_queries: int, num_splits: int, sliding_window: int | None) -> Tensor:
    """Which keys each query must not see. Shapes: -> [N, 1, Q, S] bool."""
    keys = torch.arange(num_splits * SPLIT).view(num_splits, 1, 1, SPLIT)
    queries = torch.arange(position, position + num_queries).unsqueeze(1)
    hidden = keys > queries
    if sliding_window is not None:
        hidden |= keys <= queries - sliding_window
    return hidden


def _sum_in_order(parts: Tensor) -> Tensor:
    """Sum over dimension 1, one after the other: more zeros at either end change no bit."""
    return parts[:, 0] if parts.shape[1] == 1 else parts.cumsum(1)[:, -1]

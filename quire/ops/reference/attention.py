"""Paged attention.

Row invariance: a sequence's queries are taken in zero-padded tiles of TILE_QUERIES, its keys in splits of SPLIT tokens
that start at multiples of SPLIT. Every product has the same shape; every run of exponentials and sums is a split long,
a whole number of vectors; the softmax maximum is exact in any order; the splits' sums are added in the order of the
context. Heads are filled up with zeros to whole vectors: MKL takes the rows of narrow products differently by their
place. So a token meets the same operations in a decode step, in a chunk of 7 and in a whole prefill, and splits that
it cannot see add exact zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.contracts.operands import AttentionMetadata
from quire.ops.reference.cache import TOPS, dequantize
from quire.ops.shared.chunks import by_chunk
from quire.ops.threads import one_thread
from quire.utils.math import cdiv, round_up

TILE_QUERIES = 8
SPLIT = 128
"""Context tokens per partial sum."""
VECTOR = 16
"""Numbers of a vector register, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """From query . key to what softmax takes; see `Ops.paged_attention`."""

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None


@one_thread()
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
    scores = Scores(scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, slopes=slopes, sinks=sinks)
    return _attend_pages(query, kv_cache, metadata, scores)


def chunked_attention(
    query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, *, scale: float, chunk_size: int
) -> Tensor:
    """See `Ops.chunked_attention`."""
    return paged_attention(query, kv_cache, by_chunk(metadata, chunk_size), scale=scale)


def _attend_pages(query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scores: Scores) -> Tensor:
    num_tokens, num_heads, head_size = query.shape
    out = torch.empty(num_tokens, num_heads, head_size, dtype=query.dtype)
    starts, seq_lens, window = metadata.query_start.tolist(), metadata.seq_lens.tolist(), scores.sliding_window
    for index, seq_len in enumerate(seq_lens):
        tokens = slice(starts[index], starts[index + 1])
        first_position = seq_len - (tokens.stop - tokens.start)
        seen_from = 0 if window is None else max(0, first_position - window + 1)
        base = seen_from // SPLIT * SPLIT
        context = gather(kv_cache, metadata, index, base, seen_from, seq_len)
        for start in range(tokens.start, tokens.stop, TILE_QUERIES):
            rows = slice(start, min(start + TILE_QUERIES, tokens.stop))
            position = first_position + start - tokens.start
            visible = context[:, :, : cdiv(position + rows.stop - rows.start - base, SPLIT) * SPLIT]
            out[rows] = attend(query[rows], visible[0], visible[1], position - base, scores)
    return out.view(num_tokens, num_heads * head_size)


def gather(
    kv_cache: Tensor, metadata: AttentionMetadata, index: int, base: int, seen_from: int, seq_len: int
) -> Tensor:
    """Keys and values of positions base .. seq_len in float32, zeros before seen_from and up to a whole split.

    Blocks before that of seen_from may belong to somebody else: a weight of 0 times what stands there may be NaN.
    Shapes: -> [2, K, U, D or more], the rest zeros.
    """
    first_block = seen_from // metadata.block_size
    pages = kv_cache[:, metadata.block_tables[index, first_block : cdiv(seq_len, metadata.block_size)]]
    pages = dequantize(pages) if kv_cache.dtype in TOPS else pages
    _, _, num_kv_heads, _, head_size = pages.shape
    tokens = pages.transpose(1, 2).reshape(2, num_kv_heads, -1, head_size)
    skipped = seen_from - first_block * metadata.block_size
    gathered = torch.zeros(2, num_kv_heads, cdiv(seq_len - base, SPLIT) * SPLIT, round_up(head_size, VECTOR))
    gathered[:, :, seen_from - base : seq_len - base, :head_size] = tokens[
        :, :, skipped : skipped + seq_len - seen_from
    ]
    return gathered


def attend(query_THD: Tensor, keys_KUD: Tensor, values_KUD: Tensor, position: int, scores: Scores) -> Tensor:
    """Attention of one tile of queries at position, position + 1, ... over gathered splits. Gives [T, H, D]."""
    num_queries, num_heads, head_size = query_THD.shape
    num_kv_heads, num_keys, width = keys_KUD.shape
    group, num_splits = num_heads // num_kv_heads, num_keys // SPLIT
    rows = group * TILE_QUERIES

    # 1. the tile, grouped by kv head and repeated for each split: [K * N, G * Q, D or more]
    tile = torch.zeros(num_kv_heads, group, TILE_QUERIES, width)
    tile[:, :, :num_queries, :head_size] = query_THD.view(num_queries, num_kv_heads, group, head_size).permute(
        1, 2, 0, 3
    )
    tile = tile.view(num_kv_heads, 1, rows, width).expand(-1, num_splits, -1, -1).reshape(-1, rows, width)

    # 2. scores [K, N, G, Q, S], what a query may not see at minus infinity
    keys = keys_KUD.reshape(-1, SPLIT, width)
    tile_scores = torch.bmm(tile, keys.transpose(1, 2))
    visible = tile_scores.view(num_kv_heads, num_splits, group, TILE_QUERIES, SPLIT)[:, :, :, :num_queries]
    _score(visible, position, scores)

    # 3. softmax and weighted values per split, added in order; the padding's rows hold finite numbers nobody reads
    largest = visible.amax(dim=(1, 4), keepdim=True)
    if scores.sinks is not None:
        largest = largest.maximum(scores.sinks.view(num_kv_heads, 1, group, 1, 1))
    total = sum_in_order(visible.sub_(largest).exp_().sum(-1))
    if scores.sinks is not None:
        total = total + _of_sinks(scores.sinks, largest)
    partial = torch.bmm(tile_scores, values_KUD.reshape(-1, SPLIT, width))
    partial = partial.view(num_kv_heads, num_splits, group, TILE_QUERIES, width)[:, :, :, :num_queries, :head_size]
    out = sum_in_order(partial).div_(total.unsqueeze(-1))
    return out.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_size)


def _score(values: Tensor, position: int, scores: Scores) -> None:
    """Shapes: values [K, N, G, Q, S]. Mutates: values."""
    num_kv_heads, num_splits, group, num_queries, _ = values.shape
    values.mul_(scores.scale)
    if scores.soft_cap is not None:
        values.div_(scores.soft_cap).tanh_().mul_(scores.soft_cap)
    keys = torch.arange(num_splits * SPLIT).view(num_splits, 1, 1, SPLIT)
    distance = torch.arange(position, position + num_queries).unsqueeze(1) - keys  # [N, 1, Q, S]
    if scores.slopes is not None:
        values.sub_(scores.slopes.view(num_kv_heads, 1, group, 1, 1) * distance)
    hidden = distance < 0
    if scores.sliding_window is not None:
        hidden |= distance >= scores.sliding_window
    values.masked_fill_(hidden, float("-inf"))


def _of_sinks(sinks: Tensor, largest: Tensor) -> Tensor:
    """What sinks add to the softmax's sum, in rows of whole vectors. Shapes: [H], [K, 1, G, Q, 1] -> [K, G, Q]."""
    num_kv_heads, _, group, num_queries, _ = largest.shape
    exponents = sinks.view(num_kv_heads, group, 1) - largest.view(num_kv_heads, group, num_queries)
    return exponents.unsqueeze(-1).expand(-1, -1, -1, SPLIT).contiguous().exp_()[..., 0]


def sum_in_order(parts: Tensor) -> Tensor:
    """Sum over dimension 1, one after the other: more zeros at either end change no bit."""
    return parts[:, 0] if parts.shape[1] == 1 else parts.cumsum(1)[:, -1]

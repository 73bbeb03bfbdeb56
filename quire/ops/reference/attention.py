"""Paged attention: all of it is `ops.attention`, over pages that are read as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.attention import Scores, attend_pages
from quire.ops.chunks import by_chunk
from quire.ops.functional import AttentionMetadata
from quire.ops.reference.cache import dequantize


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

    def read_pages(blocks: Tensor) -> Tensor:
        pages = kv_cache[:, blocks]
        return dequantize(pages) if kv_cache.dtype == torch.int8 else pages

    scores = Scores(scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, slopes=slopes, sinks=sinks)
    return attend_pages(query, read_pages, metadata, scores, num_kv_heads=kv_cache.shape[2])


def chunked_attention(
    query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, *, scale: float, chunk_size: int
) -> Tensor:
    """See `functional.chunked_attention`."""
    return paged_attention(query, kv_cache, by_chunk(metadata, chunk_size), scale=scale)

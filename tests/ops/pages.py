"""Sequences whose keys and values lie in pages, written through the ops under test."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.contracts.operands import AttentionMetadata, RopeAndCacheSpec
from quire.ops.reference.cache import TOPS, dequantize, quantize
from tests.ops.implementations import ops, rand


def spoil(cache: Tensor, blocks: slice | Tensor = slice(None)) -> None:
    """Fill blocks with what must not be read: NaN, and so are the scales of 8 bits."""
    part = cache.view(torch.int8) if cache.dtype in TOPS else cache
    part[:, blocks] = -1 if cache.dtype in TOPS else float("nan")


def apart(cache: Tensor) -> Tensor:
    """A cache of the same shape whose blocks lie in a larger pool, each behind a block of another layer."""
    raw = cache.view(torch.uint8).flatten(2)
    pool = torch.full((2, raw.shape[1], 3 * raw.shape[2]), 0xFF, dtype=torch.uint8)
    size = raw.shape[2]
    return pool[..., size : 2 * size].view(cache.dtype).unflatten(-1, cache.shape[2:])


@dataclass
class Pages:
    """`qkv` of whole sequences, and a cache that holds them in shuffled blocks."""

    implementation: str
    spec: RopeAndCacheSpec
    block_size: int
    qkv: list[Tensor]
    cache: Tensor
    tables: Tensor
    scales: Tensor | None = None
    """Of a cache of 8 bits, [2, K]; each token has its own where there are none."""

    @classmethod
    def of(
        cls,
        implementation: str,
        seq_lens: list[int],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_size: int = 16,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        seed: int = 0,
        is_apart: bool = False,
    ) -> Pages:
        """`is_apart`: blocks have those of other layers between them."""
        spec = RopeAndCacheSpec(num_heads=heads, num_kv_heads=kv_heads, head_size=head_size, rotary_dim=0)
        width = -(-max(seq_lens) // block_size)
        num_blocks = width * len(seq_lens) + 3
        cache = ops(implementation)["allocate_kv_cache"](
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=kv_heads,
            head_size=head_size,
            dtype=cache_dtype or dtype,
        )
        cache = apart(cache) if is_apart else cache
        spoil(cache)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
        tables = order[: width * len(seq_lens)].view(len(seq_lens), width).int()
        width = (heads + 2 * kv_heads) * head_size
        qkv = [rand(length, width, seed=seed + 10 + index, dtype=dtype) for index, length in enumerate(seq_lens)]
        return cls(implementation, spec, block_size, qkv, cache, tables)

    def attend(
        self,
        work: list[tuple[int, int, int]],
        *,
        sliding_window: int | None = None,
        chunk_size: int | None = None,
        soft_cap: float | None = None,
        scale: float = 0.25,
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> list[Tensor]:
        """Compute tokens start..stop of sequences, [(sequence, start, stop)], in one step: one output each."""
        table = ops(self.implementation)
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in work])
        slots = torch.cat(
            [
                self.tables[row, torch.arange(start, stop) // self.block_size].long() * self.block_size
                + torch.arange(start, stop) % self.block_size
                for row, start, stop in work
            ]
        )
        qkv = torch.cat([self.qkv[row][start:stop] for row, start, stop in work])
        query = table["rope_and_cache"](qkv, positions, None, None, None, self.cache, slots, self.spec, self.scales)
        counts = [stop - start for _, start, stop in work]
        metadata = AttentionMetadata(
            query_start=torch.tensor([0, *counts]).cumsum(0).int(),
            seq_lens=torch.tensor([stop for _, _, stop in work], dtype=torch.int32),
            block_tables=self.tables[[row for row, _, _ in work]].contiguous(),
            block_size=self.block_size,
        )
        if chunk_size is not None:
            out = table["chunked_attention"](query, self.cache, metadata, scale=scale, chunk_size=chunk_size)
            return list(out.split(counts))
        out = table["paged_attention"](
            query,
            self.cache,
            metadata,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            slopes=slopes,
            sinks=sinks,
        )
        return list(out.split(counts))

    def _kept(self, rows: Tensor, scales: Tensor | None) -> Tensor:
        """Keys or values [K, T, D] as a cache of 8 bits has them."""
        kept = quantize(rows.transpose(0, 1).float(), self.cache.dtype, scales)
        return dequantize(kept).double().transpose(0, 1)

    def naive(
        self,
        row: int,
        *,
        sliding_window: int | None = None,
        chunk_size: int | None = None,
        soft_cap: float | None = None,
        scale: float = 0.25,
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of a whole sequence in float64, with one matrix of scores. Shapes: -> [T, H * D]."""
        spec, count = self.spec, self.qkv[row].shape[0]
        heads = self.qkv[row].double().view(count, -1, spec.head_size).transpose(0, 1)
        groups = spec.num_heads // spec.num_kv_heads
        query = heads[: spec.num_heads]
        key = heads[spec.num_heads : -spec.num_kv_heads].repeat_interleave(groups, 0)
        value = heads[-spec.num_kv_heads :].repeat_interleave(groups, 0)
        if self.cache.dtype in TOPS:
            given = (None, None) if self.scales is None else self.scales.repeat_interleave(groups, 1)
            key, value = (self._kept(rows, scales) for rows, scales in zip((key, value), given, strict=True))
        scores = query @ key.transpose(1, 2) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        distance = torch.arange(count).unsqueeze(1) - torch.arange(count)
        if slopes is not None:
            scores = scores - slopes.double().view(-1, 1, 1) * distance
        hidden = distance < 0
        if sliding_window is not None:
            hidden |= distance >= sliding_window
        if chunk_size is not None:
            chunks = torch.arange(count) // chunk_size
            hidden |= chunks.unsqueeze(1) != chunks
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, count, 1)], dim=-1)
        weights = scores.softmax(-1)[..., :count]
        return (weights @ value).transpose(0, 1).reshape(count, -1)

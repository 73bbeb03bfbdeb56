"""Paged attention: one kernel for prefill, decode and any mixture of both.

A program takes a tile of rows: neighbouring tokens of one sequence, each with all query heads of one kv head, so that
the products are those of matrices and a key is read once for the group. It walks the keys in tiles that begin at
multiples of `Tiling.keys`, with the online softmax of Milakov and Gimelshein (arXiv:1805.02867) as in FlashAttention
(arXiv:2205.14135).

Row invariance. The context is cut into splits of `Tiling.split` tokens that begin at multiples of it. Each split has a
softmax of its own, and the splits' softmaxes are merged in the order of the context: flash decoding with splits of a
fixed length. Either one program walks all splits of its rows and merges as it goes, or each split has a program and a
second kernel merges: the operations on a row are the same. What a row does not see adds exact zeros to it. So the bits
of a row depend neither on its neighbours, nor on how its context was cut into steps, nor on which of the two was
launched, as long as the tiling is the same. `paged_attention` has one tiling for each kind of layer.

This holds bit by bit in the interpreter (tests). On a GPU it rests on this besides: an element of a product depends
neither on the other rows of the tile nor on their number, since all sums of a row are products. On an H100 it does not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import e, log2

import torch
import triton
from torch import Tensor

from quire.ops.contracts.operands import AttentionMetadata
from quire.ops.triton.cache import SCALED_DTYPES, codes_of, scales_of
from quire.ops.triton.hopper import is_hopper
from quire.ops.triton.kernels.attention import attend_kernel, merge_kernel
from quire.ops.triton.launch import Launch
from quire.utils.math import cdiv

SCRATCH_BYTES = 64 << 20
"""Splits have programs of their own where their results take at most this much memory. Not measured yet."""
LOG2_E = log2(e)
MANY_NUMBERS = 256
"""Larger heads, as those of latents, leave registers for few rows."""
FEW_ROWS = 16
"""The least that a product takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How the work of a layer is cut. All of it is compiled in."""

    rows: int
    """Tokens times query heads, a power of two. No number depends on it."""
    few_rows: int | None = None
    """Those where a step has no more for each sequence, as a rule; None for always `rows`."""
    heads: int | None = None
    """Query heads of a tile, which divide those of a kv head; None for all of these."""
    keys: int
    """A power of two."""
    split: int = 256
    """Context tokens per partial softmax, a multiple of `keys`."""
    merged_rows: int = 4
    """Heads of tokens whose splits one program merges, a power of two. No number depends on it."""
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """From query . key to what the softmax takes; see `Ops.paged_attention` and `chunked_attention`."""

    scale: float
    sliding_window: int | None = None
    chunk_size: int | None = None
    soft_cap: float | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None

    def num_splits(self, context: int, tokens: int, split: int) -> int:
        """The most splits that so many neighbouring tokens see of so long a context."""
        span = min(self.sliding_window or self.chunk_size or context, context) + tokens - 1
        return min(cdiv(context, split), (span - 2) // split + 2)

    def numbers(self) -> dict[str, float | None]:
        """What the kernels take for it. Powers of two are cheaper than those of e."""
        scale, soft_cap = self.scale * LOG2_E, None
        if self.soft_cap is not None:
            scale, soft_cap = self.scale / self.soft_cap, self.soft_cap * LOG2_E
        return {"scale": scale, "soft_cap": soft_cap, "window": self.sliding_window, "chunk": self.chunk_size}


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """What attention is given."""

    query: Tensor
    kv_cache: Tensor
    metadata: AttentionMetadata
    view: View

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.query.shape[1] // self.kv_cache.shape[2]

    @property
    def product_dtype(self) -> torch.dtype:
        """What products take: the model's dtype, also of 8 bits; float32 where the cache has another one."""
        model, cache = self.query.dtype, self.kv_cache.dtype
        return model if cache in (model, *SCALED_DTYPES) else torch.float32

    def tiling(self) -> Tiling:
        """That of the layer: by its shapes and dtypes, never by a step's.

        Chosen by speed for 16-bit heads on Hopper; the others by registers and shared memory
        (`tools/compile_triton.py`).
        """
        head_size, has_scales = self.query.shape[2], self.kv_cache.dtype in SCALED_DTYPES
        if head_size > MANY_NUMBERS:
            heads = next(count for count in range(min(self.group, FEW_ROWS), 0, -1) if self.group % count == 0)
            num_stages = 1 if self.product_dtype == torch.float32 else 2
            return Tiling(rows=FEW_ROWS, heads=heads, keys=16, num_warps=8, num_stages=num_stages)
        rows = triton.next_power_of_2(self.group)
        if self.product_dtype == torch.float32:  # without tensor cores
            return Tiling(rows=max(rows, 16), keys=32, num_warps=4, num_stages=1)
        if is_hopper() and head_size <= 128 and rows <= FEW_ROWS and not has_scales:
            return Tiling(rows=64, few_rows=FEW_ROWS, keys=64, num_warps=4, num_stages=2)
        least_rows = 32 if has_scales and head_size > 128 else 64
        num_warps = 8 if has_scales or rows > 64 or head_size > 128 else 4
        return Tiling(rows=max(rows, least_rows), keys=32, num_warps=num_warps, num_stages=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """What the splits leave to be merged; S of them lie side by side."""

    values: Tensor
    """[T, H, S, D] float32"""
    sums: Tensor
    """[T, H, S, 2] float32: the largest exponent, and the sum of powers."""

    @classmethod
    def of(cls, query: Tensor, num_splits: int) -> Scratch:
        """Uninitialised."""
        num_tokens, num_heads, head_size = query.shape
        floats = partial(torch.empty, dtype=torch.float32, device=query.device)
        return cls(
            values=floats(num_tokens, num_heads, num_splits, head_size),
            sums=floats(num_tokens, num_heads, num_splits, 2),
        )


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
    view = View(scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, slopes=slopes, sinks=sinks)
    return attend(AttentionWork(query, kv_cache, metadata, view))


def chunked_attention(
    query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, *, scale: float, chunk_size: int
) -> Tensor:
    """See `Ops.chunked_attention`. Reads no lengths on the host."""
    return attend(AttentionWork(query, kv_cache, metadata, View(scale=scale, chunk_size=chunk_size)))


def attend(work: AttentionWork, *, tiling: Tiling | None = None, scratch_bytes: int = SCRATCH_BYTES) -> Tensor:
    """Attention in a tiling; None is the layer's. The bits depend on the tiling, and not on the scratch."""
    num_tokens, num_heads, head_size = work.query.shape
    out = work.query.new_empty(num_tokens, num_heads * head_size)
    for launch in launches(work, out, tiling or work.tiling(), scratch_bytes):
        launch.run()
    return out


def launches(work: AttentionWork, out: Tensor, tiling: Tiling, scratch_bytes: int) -> list[Launch]:
    """What computes `out`. It depends on shapes alone, so that nothing waits for the device."""
    num_tokens, num_heads, head_size = work.query.shape
    if num_tokens == 0:
        return []
    context = work.metadata.block_tables.shape[1] * work.metadata.block_size
    if tiling.few_rows is not None and num_tokens * work.group <= tiling.few_rows * len(work.metadata.seq_lens):
        tiling = replace(tiling, rows=tiling.few_rows)
    num_splits = work.view.num_splits(context, tiling.rows // (tiling.heads or work.group), tiling.split)
    if num_splits <= 1 or 4 * num_tokens * num_heads * num_splits * (head_size + 2) > scratch_bytes:
        return [_attention(work, out, tiling, None)]
    scratch = Scratch.of(work.query, num_splits)
    return [_attention(work, out, tiling, scratch), _merge(work, out, tiling, scratch)]


def _attention(work: AttentionWork, out: Tensor, tiling: Tiling, scratch: Scratch | None) -> Launch:
    """Of all splits; with scratch, of each by itself, and `out` waits for the merge."""
    query, metadata = work.query, work.metadata
    _, _, num_kv_heads, slots, width = work.kv_cache.shape
    head_tiles = work.group // (tiling.heads or work.group)
    num_sequences, num_splits = metadata.seq_lens.shape[0], scratch.sums.shape[2] if scratch else 1
    num_tiles = query.shape[0] // (tiling.rows // (tiling.heads or work.group)) + num_sequences
    return Launch(
        kernel=attend_kernel,
        grid=(num_tiles, num_kv_heads * head_tiles, num_splits),
        arguments={
            "out": out,
            "partial_values": scratch.values if scratch else None,
            "partial_sums": scratch.sums if scratch else None,
            "query": query,
            "kv_cache": codes_of(work.kv_cache),
            "scales": scales_of(work.kv_cache),
            "half_stride": work.kv_cache.stride(0),
            "tables": metadata.block_tables,
            "table_stride": metadata.block_tables.stride(0),
            "slopes": work.view.slopes,
            **_steps(work, num_splits),
            **work.view.numbers(),
        },
        constants={
            "ROWS": tiling.rows,
            "KEYS": tiling.keys,
            "KV_HEADS": num_kv_heads,
            "HEAD_TILES": head_tiles,
            "SLOTS": slots,
            "PAGE": slots * width,
            "BLOCK": work.kv_cache.stride(1),
            # the interpreter, where there is no GPU, has no arithmetic of bfloat16
            "WIDE": work.product_dtype == torch.float32 or query.is_cpu,
            **_shapes(query, tiling),
        },
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def _merge(work: AttentionWork, out: Tensor, tiling: Tiling, scratch: Scratch) -> Launch:
    num_tokens, num_heads, _ = work.query.shape
    return Launch(
        kernel=merge_kernel,
        grid=(cdiv(num_tokens * num_heads, tiling.merged_rows),),
        arguments={
            "out": out,
            "partial_values": scratch.values,
            "partial_sums": scratch.sums,
            "window": work.view.sliding_window,
            "chunk": work.view.chunk_size,
            **_steps(work, scratch.sums.shape[2]),
        },
        constants={"ROWS": tiling.merged_rows, **_shapes(work.query, tiling)},
        num_stages=1,
    )


def _steps(work: AttentionWork, num_splits: int) -> dict[str, object]:
    """Arguments that both kernels take."""
    metadata = work.metadata
    return {
        "query_start": metadata.query_start,
        "seq_lens": metadata.seq_lens,
        "num_sequences": metadata.seq_lens.shape[0],
        "num_slots": num_splits,
        "sinks": work.view.sinks,
    }


def _shapes(query: Tensor, tiling: Tiling) -> dict[str, object]:
    """Constants that both kernels take."""
    _, num_heads, head_size = query.shape
    padded = max(16, triton.next_power_of_2(head_size))
    return {"SPLIT": tiling.split, "HEADS": num_heads, "SIZE": head_size, "PADDED_SIZE": padded}

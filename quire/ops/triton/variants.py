"""Kernels of attention layers in the shapes of common models, for checks that they compile where no GPU is at hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.contracts.operands import AttentionMetadata, RopeAndCacheSpec
from quire.ops.triton import rotary
from quire.ops.triton.attention import SCRATCH_BYTES, AttentionWork, View, launches
from quire.ops.triton.cache import allocate_kv_cache
from quire.ops.triton.variant import Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What a layer's kernels are compiled for."""

    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    """None for that of the model."""
    slots: int = 64
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    slopes: bool = False
    sinks: bool = False

    def cache(self) -> Tensor:
        """Pages, on the default device."""
        return allocate_kv_cache(
            num_blocks=1024,
            block_size=self.slots,
            num_kv_heads=self.kv_heads,
            head_size=self.size,
            dtype=self.cache_dtype or self.dtype,
        )


ATTENTION = (
    LayerShape(),
    LayerShape(dtype=torch.float16, slots=16),
    LayerShape(dtype=torch.float32, slots=16),
    LayerShape(cache_dtype=torch.int8),
    LayerShape(cache_dtype=torch.float8_e4m3fn),
    LayerShape(cache_dtype=torch.float32),
    LayerShape(heads=64, size=64, window=128, sinks=True),
    LayerShape(heads=16, size=256, window=4096, soft_cap=50.0),
    LayerShape(heads=16, size=256, cache_dtype=torch.int8),
    LayerShape(heads=71, kv_heads=1, size=64, slopes=True),
    LayerShape(heads=32, kv_heads=32, size=80),
    LayerShape(heads=40, chunk=8192),
    LayerShape(heads=128, kv_heads=1, size=576),
    LayerShape(heads=16, kv_heads=1, size=576, cache_dtype=torch.int8),
)


def attention_variants(shape: LayerShape) -> Iterator[Variant]:
    """The kernels of one layer: with the splits in one program each, and merged by another; and all in one."""
    with torch.device("meta"):
        view = View(
            scale=0.1,
            sliding_window=shape.window,
            chunk_size=shape.chunk,
            soft_cap=shape.soft_cap,
            slopes=torch.empty(shape.heads) if shape.slopes else None,
            sinks=torch.empty(shape.heads) if shape.sinks else None,
        )
        metadata = AttentionMetadata(
            query_start=torch.empty(9, dtype=torch.int32),
            seq_lens=torch.empty(8, dtype=torch.int32),
            block_tables=torch.empty(8, 500, dtype=torch.int32),
            block_size=shape.slots,
        )
        query = torch.empty(8, shape.heads, shape.size, dtype=shape.dtype)
        work, out = AttentionWork(query, shape.cache(), metadata, view), torch.empty_like(query)
        for scratch_bytes in (0, SCRATCH_BYTES):
            for launch in launches(work, out, work.tiling(), scratch_bytes):
                yield launch.variant()


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeShape:
    """What the kernel in front of attention is compiled for."""

    layer: LayerShape
    rotary_dim: int
    interleaved: bool = False
    normed: bool = False


ROPES = (
    RopeShape(layer=LayerShape(), rotary_dim=128),
    RopeShape(layer=LayerShape(), rotary_dim=128, normed=True),
    RopeShape(layer=LayerShape(cache_dtype=torch.int8), rotary_dim=128, normed=True),
    RopeShape(layer=LayerShape(cache_dtype=torch.float8_e4m3fn), rotary_dim=128, normed=True),
    RopeShape(layer=LayerShape(dtype=torch.float16, slots=16), rotary_dim=64, interleaved=True),
    RopeShape(layer=LayerShape(heads=16, size=256), rotary_dim=64, normed=True),
    RopeShape(layer=LayerShape(heads=32, kv_heads=32, size=80, dtype=torch.float32), rotary_dim=32),
    RopeShape(layer=LayerShape(heads=71, kv_heads=1, size=64), rotary_dim=0),
)


def rope_variant(shape: RopeShape) -> Variant:
    """The kernel of one layer."""
    layer, tokens = shape.layer, 8
    spec = RopeAndCacheSpec(
        num_heads=layer.heads,
        num_kv_heads=layer.kv_heads,
        head_size=layer.size,
        rotary_dim=shape.rotary_dim,
        interleaved=shape.interleaved,
    )
    with torch.device("meta"):
        return rotary.launch(
            torch.empty(tokens, layer.heads, layer.size, dtype=layer.dtype),
            torch.empty(tokens, (layer.heads + 2 * layer.kv_heads) * layer.size, dtype=layer.dtype),
            torch.empty(tokens, dtype=torch.int64),
            torch.empty(4096, shape.rotary_dim) if shape.rotary_dim else None,
            torch.empty(layer.size) if shape.normed else None,
            torch.empty(layer.size) if shape.normed else None,
            layer.cache(),
            torch.empty(tokens, dtype=torch.int64),
            spec,
        ).variant()


VARIANTS = (
    *(variant for shape in ATTENTION for variant in attention_variants(shape)),
    *(rope_variant(shape) for shape in ROPES),
)

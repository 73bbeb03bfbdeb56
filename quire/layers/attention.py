"""`Attention`: from a layer's QKV projection to its attended values, over the paged cache."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from quire.attention.context import ForwardContext, GroupContext
from quire.config.layers.mixers import PositionScale
from quire.ops.contracts.operands import RopeAndCacheSpec
from quire.ops.contracts.ops import Ops


@lru_cache(maxsize=4)
def position_scales(scale: PositionScale, max_model_len: int, device: str = "cpu") -> Tensor:
    """What queries are multiplied by at each position. Shapes: -> [max_model_len] float32."""
    return torch.tensor([scale.at(position) for position in range(max_model_len)], device=device)


class Attention:
    """One layer's attention; what is fixed about it is stored here, what a step changes comes with the context."""

    def __init__(
        self,
        ops: Ops,
        index: int,
        spec: RopeAndCacheSpec,
        *,
        scale: float,
        cos_sin: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        sliding_window: int | None = None,
        chunk_size: int | None = None,
        soft_cap: float | None = None,
        query_weight: Tensor | None = None,
        query_scales: Tensor | None = None,
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> None:
        """`index` is the layer's place in `ForwardContext.kv_caches`; query_weight [D], or [H, D], multiplies rotated
        queries, query_scales [P] those at each position; kv_scales [2, K] are of a KV cache of 8 bits. Attention in
        chunks has no window, no soft cap, slopes or sinks.
        """
        self.ops = ops
        self.index = index
        self.spec = spec
        self.scale = scale
        self.cos_sin = cos_sin
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.sliding_window = sliding_window
        self.chunk_size = chunk_size
        self.soft_cap = soft_cap
        self.query_weight = query_weight
        self.query_scales = query_scales
        self.slopes = slopes
        self.sinks = sinks
        self.kv_scales = kv_scales

    def __call__(self, qkv: Tensor, ctx: ForwardContext) -> Tensor:
        """Shapes: qkv [T, (H + 2K) * D] -> [T, H * D]. Mutates: this layer's cache."""
        query, kv_cache, group = self.write(qkv, ctx), ctx.kv_caches[self.index], self.group(ctx)
        if self.chunk_size is not None:
            return self.ops.chunked_attention(
                query, kv_cache, group.attention, scale=self.scale, chunk_size=self.chunk_size
            )
        return self.ops.paged_attention(
            query,
            kv_cache,
            group.attention,
            scale=self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            slopes=self.slopes,
            sinks=self.sinks,
        )

    def write(self, qkv: Tensor, ctx: ForwardContext) -> Tensor:
        """Queries, with keys and values written. Shapes: qkv [T, (H + 2K) * D] -> [T, H, D]. Mutates: the cache."""
        query = self.ops.rope_and_cache(
            qkv,
            ctx.positions,
            self.cos_sin,
            self.q_norm,
            self.k_norm,
            ctx.kv_caches[self.index],
            self.group(ctx).slot_mapping,
            self.spec,
            self.kv_scales,
        )
        if self.query_weight is not None:
            self.ops.scale_heads(query, self.query_weight)
        if self.query_scales is not None:
            self.ops.scale_tokens(query, self.query_scales, ctx.positions)
        return query

    def group(self, ctx: ForwardContext) -> GroupContext:
        """Where the layer's keys and values lie."""
        return ctx.groups[ctx.group_of_layer[self.index]]

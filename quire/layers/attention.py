"""`Attention`: from a layer's QKV projection to its attended values, over the paged cache."""

from __future__ import annotations

from torch import Tensor

from quire.attention.context import ForwardContext
from quire.ops import functional
from quire.ops.functional import RopeAndCacheSpec


class Attention:
    """One layer's attention; what is fixed about it is stored here, what a step changes comes with the context."""

    def __init__(
        self,
        index: int,
        spec: RopeAndCacheSpec,
        *,
        scale: float,
        cos_sin: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        query_weight: Tensor | None = None,
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """`index` is the layer's place in `ForwardContext.kv_caches`; query_weight [D] multiplies rotated queries."""
        self.index = index
        self.spec = spec
        self.scale = scale
        self.cos_sin = cos_sin
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.sliding_window = sliding_window
        self.soft_cap = soft_cap
        self.query_weight = query_weight
        self.slopes = slopes
        self.sinks = sinks

    def __call__(self, qkv: Tensor, ctx: ForwardContext) -> Tensor:
        """Shapes: qkv [T, (H + 2K) * D] -> [T, H * D]. Mutates: this layer's cache."""
        kv_cache, group = ctx.kv_caches[self.index], ctx.groups[ctx.group_of_layer[self.index]]
        query = functional.rope_and_cache(
            qkv, ctx.positions, self.cos_sin, self.q_norm, self.k_norm, kv_cache, group.slot_mapping, self.spec
        )
        if self.query_weight is not None:
            functional.scale_heads(query, self.query_weight)
        return functional.paged_attention(
            query,
            kv_cache,
            group.attention,
            scale=self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            slopes=self.slopes,
            sinks=self.sinks,
        )

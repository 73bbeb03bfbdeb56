"""What chooses the blocks of tokens that attention sees, for the queries of each KV head by itself (MiniMax M3).

It has a query for each KV head, and one key of each token, which the cache keeps as a row of its own.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.config.layers.mixers import AttentionSpec
from quire.layers.attention import Attention
from quire.layers.context import LayerContext, refuse_elsewhere
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.ops.contracts.operands import RopeAndCacheSpec, RowCache

PUBLISHED, RESAVED = "index_", "indexer."
"""What the names of weights begin with: as published, and where transformers wrote them."""


class BlockIndexer:
    """Scores the blocks of each token's context, and gives those of the highest scores."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int, attention: Attention) -> None:
        mixer = arch.mixers[index]
        assert isinstance(mixer, AttentionSpec)
        assert mixer.blocks is not None
        refuse_elsewhere(arch, ctx, "attention to blocks that an indexer chooses")
        spec = mixer.blocks
        self.ops, self.spec, self.attention = ctx.ops, spec, attention
        self.cache = arch.caches_of(index)[1]
        prefix = RESAVED if ctx.has(f"{RESAVED}q_proj.weight") else PUBLISHED
        self.query = Linear(ctx.child(f"{prefix}q_proj"), arch.hidden_size, spec.num_heads * spec.head_size)
        self.key = Linear(ctx.child(f"{prefix}k_proj"), arch.hidden_size, spec.head_size)
        self.query_norm, self.key_norm = (
            RMSNorm(ctx.child(prefix + name), spec.head_size, arch.norm_eps, offset=arch.norms.offset)
            for name in ("q_norm", "k_norm")
        )
        self.rotary = RopeAndCacheSpec(
            num_heads=spec.num_heads,
            num_kv_heads=0,
            head_size=spec.head_size,
            rotary_dim=mixer.rope.rotary_dim if mixer.rope else 0,
            norm_eps=arch.norm_eps,
        )

    def select(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """See `Ops.select_blocks`. Shapes: hidden [T, E] -> [T, K, N] int32. Mutates: the cache of keys."""
        spec, keys = self.spec, self._write_keys(hidden, ctx)
        query = self._rotated(self.query(hidden), self.query_norm, self.rotary, ctx)
        return self.ops.select_blocks(
            query, keys, block_size=spec.block_size, num_selected=spec.num_selected, num_local=spec.num_local
        )

    def _write_keys(self, hidden: Tensor, ctx: ForwardContext) -> RowCache:
        group = ctx.groups[ctx.group_of_layer[self.cache]]
        keys = RowCache(rows=ctx.kv_caches[self.cache], size=self.spec.head_size, metadata=group.attention)
        key = self._rotated(self.key(hidden), self.key_norm, replace(self.rotary, num_heads=1), ctx)
        self.ops.store_rows(key.flatten(1), keys.rows, group.slot_mapping)
        return keys

    def _rotated(self, x: Tensor, norm: RMSNorm, spec: RopeAndCacheSpec, ctx: ForwardContext) -> Tensor:
        """Behind the norm of each head. Shapes: x [T, H * I] -> [T, H, I]."""
        at = self.attention
        kv_cache, slots = ctx.kv_caches[at.index], at.group(ctx).slot_mapping
        return self.ops.rope_and_cache(x, ctx.positions, at.cos_sin, norm.weight, None, kv_cache, slots, spec)

"""Attention over the tokens that an indexer chooses (DeepSeek sparse attention, arXiv 2512.02556, section 2.1).

The indexer's key of a token is written with its latent, as the last features of the cached key, which attention's own
queries do not see: they have zeros there. Its queries are products of attention's low-rank ones.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.config.layers.mixers import IndexerSpec, LatentAttentionSpec
from quire.errors import ConfigError
from quire.layers.attention import Attention
from quire.layers.context import LayerContext
from quire.layers.latent import LatentAttention, LowRankQuery, QueryWithGates
from quire.layers.linear import Linear
from quire.layers.norm import LayerNorm
from quire.layers.quantization.schemes import DENSE
from quire.layers.weights import split_rows
from quire.ops.contracts.operands import RopeAndCacheSpec


class Indexer:
    """Scores the context of each token, and gives the positions of the highest scores."""

    def __init__(
        self, arch: ModelArch, mixer: LatentAttentionSpec, spec: IndexerSpec, ctx: LayerContext, attention: Attention
    ) -> None:
        if ctx.ops.name == "triton":
            raise ConfigError(
                f"{arch.source}: attention over tokens that an indexer chooses (index_topk) is what the triton ops do "
                "not have yet; give device='cpu'"
            )
        assert mixer.query_rank is not None
        self.ops, self.spec, self.attention = ctx.ops, spec, attention
        num_before = spec.head_size - mixer.rope_size if spec.rotates_last else 0
        self.query = _product(ctx.child("wq_b"), mixer.query_rank, [spec.head_size] * spec.num_heads, num_before)
        self.key = _product(ctx.child("wk"), arch.hidden_size, [spec.head_size], num_before)
        self.key_norm = _norm(ctx.child("k_norm"), spec, num_before)
        # In float32 whatever the model's dtype: a rounding error that chooses another token is no small one.
        exact = replace(ctx.child("weights_proj"), scheme=DENSE, dtype=torch.float32)
        self.weights = exact.packed(["weight"], [exact.read("weight", (spec.num_heads, arch.hidden_size))])
        self.rotary = RopeAndCacheSpec(
            num_heads=spec.num_heads,
            num_kv_heads=0,
            head_size=spec.head_size,
            rotary_dim=mixer.rope_size,
            interleaved=spec.interleaved,
        )

    def keys(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """What the cache keeps of each token. Shapes: hidden [T, E] -> [T, I]."""
        return self._rotate(self.key_norm(self.key(hidden)), replace(self.rotary, num_heads=1), ctx).flatten(1)

    def select(self, low: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """See `Ops.select_tokens`; the keys have been written. Shapes: low [T, rank], hidden [T, E] -> [T, N] int32."""
        query = self._rotate(self.query(low), self.rotary, ctx)
        weights = self.ops.linear(hidden, self.weights, out_dtype=torch.float32)
        kv_cache, metadata = ctx.kv_caches[self.attention.index], self.attention.group(ctx).attention
        return self.ops.select_tokens(
            query,
            weights,
            kv_cache,
            metadata,
            num_selected=self.spec.num_selected,
            head_size=self.attention.spec.head_size,
        )

    def _rotate(self, x: Tensor, spec: RopeAndCacheSpec, ctx: ForwardContext) -> Tensor:
        """Shapes: x [T, H * I] -> [T, H, I]."""
        at = self.attention
        kv_cache, slots = ctx.kv_caches[at.index], at.group(ctx).slot_mapping
        return self.ops.rope_and_cache(x, ctx.positions, at.cos_sin, None, None, kv_cache, slots, spec)


def _product(ctx: LayerContext, in_features: int, heads: list[int], num_before: int) -> Linear:
    """To heads of these sizes. Features that rotate come first: a score is the same in any order of features. In the
    checkpoint they stand behind `num_before` others.
    """
    if not num_before:
        return Linear(ctx, in_features, sum(heads))
    stored = ctx.read("weight", (sum(heads), in_features))
    parts = split_rows(stored, [part for size in heads for part in (num_before, size - num_before)])
    turned = [part for pair in zip(parts[1::2], parts[::2], strict=True) for part in pair]
    return Linear.of(ctx.ops, ctx.packed(["weight"], turned))


def _norm(ctx: LayerContext, spec: IndexerSpec, num_before: int) -> LayerNorm:
    """Of keys, whose features are in the order of `_product`."""
    norm = LayerNorm(ctx, spec.head_size, spec.norm_eps)
    assert norm.bias is not None
    if num_before and not norm.weight.is_meta:
        norm.weight, norm.bias = norm.weight.roll(-num_before), norm.bias.roll(-num_before)
    return norm


class IndexedAttention(LatentAttention):
    """Attention over the latents of chosen tokens."""

    query: LowRankQuery

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        super().__init__(arch, ctx, index)
        mixer = arch.mixers[index]
        assert isinstance(mixer, LatentAttentionSpec)
        assert mixer.indexer is not None
        self.indexer = Indexer(arch, mixer, mixer.indexer, ctx.child("indexer"), self.attention)

    def __call__(self, hidden: Tensor, ctx: ForwardContext, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: hidden, residual [T, E] -> [T, E]. Mutates: this layer's cache."""
        values = self._values(self._attended(hidden, ctx))
        return self.o_proj(self._gated(values, hidden), residual=residual)

    def _attended(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        low = self.query.lower(hidden)
        return self._attend(low, low, hidden, ctx)

    def _attend(self, read: Tensor, low: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Of queries that are a product of `read`, and an indexer's, of `low`."""
        at = self.attention
        query = at.write(self._indexed_qkv(read, hidden, ctx), ctx)
        ctx.choice.tokens = None
        selected = self.indexer.select(low, hidden, ctx)
        if self.indexer.spec.is_shared:
            ctx.choice.tokens = selected
        kv_cache, metadata = ctx.kv_caches[at.index], at.group(ctx).attention
        return self.ops.selected_attention(query, kv_cache, metadata, selected, scale=at.scale, sinks=at.sinks)

    def _indexed_qkv(self, read: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        query, compressed, key = self.query.up(read), self.compressed(hidden), self.indexer.keys(hidden, ctx)
        return self.ops.latent_qkv(query, compressed, self.kv_a_norm.weight, self.to_latents, self.spec, key)


class SharedChoiceAttention(LatentAttention):
    """Attention over the latents of the tokens that the last indexer before this layer chose."""

    def __call__(self, hidden: Tensor, ctx: ForwardContext, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: hidden, residual [T, E] -> [T, E]. Mutates: this layer's cache."""
        values = self._values(self._attended(hidden, ctx))
        return self.o_proj(self._gated(values, hidden), residual=residual)

    def _attended(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        assert ctx.choice.tokens is not None
        at = self.attention
        query = at.write(self._qkv(hidden), ctx)
        kv_cache, metadata = ctx.kv_caches[at.index], at.group(ctx).attention
        tokens = ctx.choice.tokens
        return self.ops.selected_attention(query, kv_cache, metadata, tokens, scale=at.scale, sinks=at.sinks)


class QueryGatedAttention(IndexedAttention):
    """Attention over the latents of chosen tokens, behind gates that are products of low-rank queries (A.X-K2)."""

    query: QueryWithGates

    def __call__(self, hidden: Tensor, ctx: ForwardContext, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: hidden, residual [T, E] -> [T, E]. Mutates: this layer's cache."""
        return self.o_proj(self._opened(hidden, ctx), residual=residual)

    def _opened(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        low, both = self.query.lower_both(hidden)
        values = self._values(self._attend(both, low, hidden, ctx))
        self.ops.gate(values, self.query.gates(both), "sigmoid")
        return values

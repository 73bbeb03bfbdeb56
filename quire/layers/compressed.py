"""Attention over the last tokens and entries that stand for earlier ones (DeepSeek V4).

All queries read one key of each token, which is its value, too. A compressor makes one entry of so many tokens, as soon
as all of them are there; an indexer may choose which entries a query sees. What the cache keeps of a layer is in up to
three KV groups: keys of the last tokens, products and gates of the tokens of unfinished entries, and entries. Entries
are computed from what the cache keeps, tokens in order, so how a prompt was cut into chunks changes no bit.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.config.layers.mixers import CompressedAttentionSpec, CompressorSpec, IndexerSpec
from quire.errors import ConfigError
from quire.layers.context import LayerContext
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.quantization.schemes import DENSE
from quire.layers.rotary import rotary_table
from quire.layers.weights import ShardSpec
from quire.ops.contracts.operands import CompressorWeights, HeadWeights, LatentSpec, LinearWeight, RowCache

COMPRESSOR = "compressor"
INDEXER = "indexer"


class CompressedAttention:
    """Low-rank queries, one key, attention, and an output of two products."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        mixer = arch.mixers[index]
        assert isinstance(mixer, CompressedAttentionSpec)
        _check_supported(arch, ctx)
        size, names = arch.hidden_size, arch.family.names
        self.ops, self.spec, self.caches = ctx.ops, mixer, arch.caches_of(index)
        self.query_down = Linear(ctx.child("wq_a"), size, mixer.query_rank)
        self.query_norm = RMSNorm(ctx.child("q_norm"), mixer.query_rank, arch.norm_eps)
        self.query_up = Linear(ctx.child("wq_b"), mixer.query_rank, mixer.num_heads * mixer.head_size)
        self.head_norm = RMSNorm(ctx, mixer.head_size, arch.norm_eps, has_weight=False)
        self.key = Linear(ctx.child("wkv"), size, mixer.head_size)
        self.key_norm = RMSNorm(ctx.child("norm"), mixer.head_size, arch.norm_eps)
        self.sinks = ctx.tensor(names.sinks, (mixer.num_heads,), dtype=torch.float32)
        self.cos_sin = rotary_table(mixer.rope, ctx.max_model_len, ctx.ops.device)
        self.groups, self.group_spec = _group_weights(mixer, ctx), _group_spec(mixer)
        self.output = Linear(ctx.child("wo_b"), mixer.num_groups * mixer.group_rank, size)
        self.compressor: Compressor | None = None
        if mixer.compressor is not None:
            self.compressor = Compressor(arch, mixer, mixer.compressor, ctx, self.caches)
        self.indexer: EntryIndexer | None = None
        if mixer.compressor is not None and mixer.compressor.indexer is not None:
            self.indexer = EntryIndexer(arch, mixer, mixer.compressor.indexer, ctx.child(INDEXER), self.cos_sin)

    def __call__(self, hidden: Tensor, ctx: ForwardContext, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: hidden, residual [T, E] -> [T, E]. Mutates: this layer's caches."""
        mixer, low = self.spec, self.query_norm(self.query_down(hidden))
        query, last = self._query(low, ctx), self._write_key(hidden, ctx)
        entries = selected = None
        if self.compressor is not None:
            entries = self.compressor.write(hidden, self.cos_sin, ctx)
            if self.indexer is not None:
                selected = self.indexer.select(low, hidden, entries, self.compressor.spec.rate, ctx)
        attended = self.ops.compressed_attention(
            query,
            self.sinks,
            last,
            entries,
            selected,
            scale=mixer.query_scale,
            window=mixer.window,
            rate=1 if mixer.compressor is None else mixer.compressor.rate,
        )
        del query, selected, low
        heads = attended.view(-1, mixer.num_heads, mixer.head_size)
        self.ops.rotate_last(heads, ctx.positions, self.cos_sin, backward=True)
        return self.output(self.ops.latent_values(attended, self.groups, self.group_spec), residual=residual)

    def _query(self, low: Tensor, ctx: ForwardContext) -> Tensor:
        """Shapes: low [T, rank] -> [T, H, D]."""
        mixer = self.spec
        query = self.head_norm(self.query_up(low).view(-1, mixer.head_size))
        query = query.view(-1, mixer.num_heads, mixer.head_size)
        self.ops.rotate_last(query, ctx.positions, self.cos_sin)
        return query

    def _write_key(self, hidden: Tensor, ctx: ForwardContext) -> RowCache:
        key = self.key_norm(self.key(hidden))
        self.ops.rotate_last(key.unsqueeze(1), ctx.positions, self.cos_sin)
        cache = _rows(ctx, self.caches[0], self.spec.head_size)
        self.ops.store_rows(key, cache.rows, ctx.groups[ctx.group_of_layer[self.caches[0]]].slot_mapping)
        return cache


class Compressor:
    """Writes the products and gates of tokens, and the entries that they finish."""

    def __init__(
        self, arch: ModelArch, mixer: CompressedAttentionSpec, spec: CompressorSpec, ctx: LayerContext, caches: range
    ) -> None:
        self.ops, self.spec = ctx.ops, spec
        _, self.tail, self.entries = caches
        own, parts = ctx.child(COMPRESSOR), [mixer.head_size]
        contexts = [own]
        if spec.indexer is not None:
            contexts.append(ctx.child(INDEXER).child(COMPRESSOR))
            parts.append(spec.indexer.head_size)
        self.size = sum(parts)
        widths = [spec.num_products * part for part in parts]
        self.width = sum(widths)
        self.products = Linear.of(ctx.ops, _products(arch, ctx, contexts, widths))
        biases = [
            each.tensor("ape", (spec.rate, width), dtype=torch.float32)
            for each, width in zip(contexts, widths, strict=True)
        ]
        norms = [RMSNorm(each.child("norm"), part, arch.norm_eps) for each, part in zip(contexts, parts, strict=True)]
        self.weights = CompressorWeights(
            rate=spec.rate,
            reach=spec.reach,
            bias=biases[0] if biases[0].is_meta else torch.cat(biases, dim=1),
            norms=tuple(norm.weight for norm in norms),
            eps=arch.norm_eps,
        )

    def write(self, hidden: Tensor, cos_sin: Tensor, ctx: ForwardContext) -> RowCache:
        """Gives the entries. Shapes: hidden [T, E]. Mutates: the layer's caches."""
        tail, entries = _rows(ctx, self.tail, 2 * self.width), _rows(ctx, self.entries, self.size)
        slots = ctx.groups[ctx.group_of_layer[self.tail]].slot_mapping
        self.ops.store_rows(self.products(hidden), tail.rows, slots)
        self.ops.compress(tail, entries, self.weights, cos_sin)
        return entries


class EntryIndexer:
    """Scores the entries that each token may see, and gives those of the highest scores."""

    def __init__(
        self, arch: ModelArch, mixer: CompressedAttentionSpec, spec: IndexerSpec, ctx: LayerContext, cos_sin: Tensor
    ) -> None:
        self.ops, self.spec, self.cos_sin = ctx.ops, spec, cos_sin
        self.query = Linear(ctx.child("wq_b"), mixer.query_rank, spec.num_heads * spec.head_size)
        # In float32 whatever the model's dtype: a rounding error that chooses another entry is no small one.
        exact = replace(ctx.child("weights_proj"), scheme=DENSE, dtype=torch.float32)
        self.weights = exact.packed(["weight"], [exact.read("weight", (spec.num_heads, arch.hidden_size))])

    def select(self, low: Tensor, hidden: Tensor, entries: RowCache, rate: int, ctx: ForwardContext) -> Tensor:
        """See `Ops.select_entries`. Shapes: low [T, rank], hidden [T, E] -> [T, N] int32."""
        query = self.query(low).view(-1, self.spec.num_heads, self.spec.head_size)
        self.ops.rotate_last(query, ctx.positions, self.cos_sin)
        weights = self.ops.linear(hidden, self.weights, out_dtype=torch.float32)
        return self.ops.select_entries(query, weights, entries, rate=rate, num_selected=self.spec.num_selected)


def _check_supported(arch: ModelArch, ctx: LayerContext) -> None:
    """Raises: ConfigError where the ops lack what it needs, or the model would be split."""
    if ctx.ops.name == "triton":
        raise ConfigError(f"{arch.source}: the triton ops do not have compressed attention yet; give device='cpu'")
    if ctx.parallel.tp.size > 1:
        raise ConfigError(f"{arch.source}: compressed attention is not split between processes. Use one process.")


def _rows(ctx: ForwardContext, cache: int, size: int) -> RowCache:
    return RowCache(rows=ctx.kv_caches[cache], size=size, metadata=ctx.groups[ctx.group_of_layer[cache]].attention)


def _products(arch: ModelArch, ctx: LayerContext, contexts: list[LayerContext], widths: list[int]) -> LinearWeight:
    """Products of attention and indexer, then their gates."""
    names, rows = [], []
    for name in ("wkv.weight", "wgate.weight"):
        for each, width in zip(contexts, widths, strict=True):
            names.append(f"{each.name.removeprefix(ctx.name)[1:]}.{name}")
            rows.append(each.read(name, (width, arch.hidden_size)))
    return ctx.packed(names, rows)


def _group_weights(mixer: CompressedAttentionSpec, ctx: LayerContext) -> HeadWeights:
    """Of the first product of the output: one of each group of heads."""
    child, count, spec = ctx.child("wo_a"), mixer.num_groups, _group_spec(mixer)
    shape = (count * mixer.group_rank, spec.latent_size)
    with ctx.ops.weights_together():
        weights = [
            child.packed(["weight"], [child.read("weight", shape, ShardSpec(part=group, parts=count))])
            for group in range(count)
        ]
    return HeadWeights(heads=tuple(weights))


def _group_spec(mixer: CompressedAttentionSpec) -> LatentSpec:
    """A group of heads as `Ops.latent_values` has a head."""
    size = mixer.num_heads * mixer.head_size // mixer.num_groups
    return LatentSpec(
        num_heads=mixer.num_groups,
        rope_size=0,
        nope_size=0,
        latent_size=size,
        value_size=mixer.group_rank,
        head_size=size,
    )

"""How a layer's tokens learn of those before them: the mixer of each layer, as data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.layers.layer_kinds import Heads
from quire.config.layers.rope import RopeConfig
from quire.messages.kv import FullAttentionSpec, KVCacheSpec, PageSpec, SlidingWindowSpec
from quire.messages.variants import Variants
from quire.utils.math import round_up


class Mixer(Variants):
    """Base of the kinds of mixers."""

    __slots__ = ()

    @property
    def num_caches(self) -> int:
        """Things that the layer keeps in the KV cache."""
        return 1

    @classmethod
    def kinds(cls) -> tuple[type[Any], ...]:
        """See `Variants`."""
        from quire.config.layers.recurrent_mixers import RECURRENT  # they derive from this class

        return AttentionSpec, LatentAttentionSpec, CompressedAttentionSpec, *RECURRENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """What the parts of a mixer or an MLP are multiplied by (muP, https://arxiv.org/abs/2203.03466).

    Its weights carry the factors: they are multiplied in float32 when they are read.
    """

    input: float = 1.0
    """Of the hidden states that are read."""
    inner: tuple[float, ...] = ()
    """Of each part of the first product, bias included; none for ones."""
    output: float = 1.0
    """Of the last product, bias included."""

    @property
    def are_ones(self) -> bool:
        """Whether they change nothing."""
        return all(factor == 1.0 for factor in (self.input, *self.inner, self.output))


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionScale:
    """1 + beta * log(1 + floor((position + first) / period)): what keeps the softmax over long contexts sharp."""

    beta: float
    period: int
    first: int = 0
    only_unrotated: bool = False
    """Layers that rotate queries do not multiply them."""

    def at(self, position: int) -> float:
        """What a query there is multiplied by."""
        return 1.0 + self.beta * math.log(1 + (position + self.first) // self.period)


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerScale(PositionScale):
    """(1 + (position + first) / period) ** beta, for the same."""

    def at(self, position: int) -> float:
        """See `PositionScale`."""
        return math.pow(1.0 + (position + self.first) / self.period, self.beta)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionExperts:
    """Experts in place of the products to queries and to outputs (mixture of attention heads, JetMoE).

    An expert has one query head for each KV head. A token's query heads are those of its experts.
    """

    num_experts: int
    num_chosen: int
    """Experts of a token, chosen by their logits and weighed by the softmax over those of the chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBlock:
    """Attention and an MLP behind it that several layers share (Zamba 2, https://arxiv.org/abs/2411.15242).

    They read the hidden states beside the token embeddings. What they give passes a product of the layer's own, as do
    the inputs of their products: adapters, of two thin products each, whose outputs are added.
    """

    name: str
    """What the checkpoint calls it."""
    first: int
    """The first of the layers, under whose name the checkpoint has the block."""
    is_first: bool
    number: int
    """Of the layer among all that share a block, by which its adapters are named."""
    intermediate_size: int
    has_bias: bool
    """Of the MLP."""
    rank: int
    """Features between the products of an adapter; 0 where there are none."""
    adapts_attention: bool
    """Queries, keys and values have adapters, too, not the MLP alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIndexerSpec:
    """Chooses the blocks of tokens that attention sees, for the query heads of each KV head by itself (MiniMax M3).

    A block's score is the largest query . key of its tokens. The cache keeps a key of each token for this.
    """

    num_heads: int
    """Of queries, one for each KV head; all of them read one key of each token."""
    head_size: int
    """Its first features rotate, as many as those of attention."""
    block_size: int
    """Tokens of a block, the first of which stands at a multiple of it; a multiple of the KV cache's block size."""
    num_selected: int
    """Blocks that a query attends to, at most."""
    num_local: int
    """The query's own block and those before it that are among them always, so many together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanIndexerSpec:
    """Chooses blocks of tokens by the means of their keys, for all query heads alike (Qwen4-Exp).

    A block's score is the sum over the indexer's heads of max(query . key, 0). The cache keeps the keys of whole
    blocks, and those of the last tokens, of which the next one is made.
    """

    num_heads: int
    """Of queries; all of them read one key of each block."""
    head_size: int
    """Its first features rotate, as many as those of attention."""
    rate: int
    """Tokens of a block, the first of which stands at a multiple of it."""
    num_selected: int
    """Whole blocks that a query attends to, at most. The tokens behind the last whole block it sees in any case."""

    @property
    def num_tokens(self) -> int:
        """That a query attends to, at most."""
        return self.num_selected * self.rate + self.rate - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(Mixer):
    """Attention over the keys and values of all tokens, or of the last ones."""

    heads: Heads
    window: int | None
    """Tokens a query sees at most, itself included; None for all."""
    is_chunked: bool = False
    """A query sees those from the last multiple of the window's size on."""
    rope: RopeConfig | None
    """None where queries and keys are not rotated."""
    query_scale: float
    """Multiplies query . key."""
    position_scale: PositionScale | None = None
    """Multiplies each query by its position; None for nothing."""
    slopes: tuple[float, ...] | None = None
    """What the scores of each query head lose with each token of distance; None for nothing."""
    has_sinks: bool = False
    """Whether each query head has a learned score of no token."""
    num_gates: int = 0
    """What was attended to is multiplied by the sigmoids of so many gates: of each feature, or of each head."""
    experts: AttentionExperts | None = None
    """None where all tokens have the same query heads."""
    shared: SharedBlock | None = None
    """None where the layer's attention is its own."""
    blocks: BlockIndexerSpec | None = None
    """None where queries attend to all tokens that they see."""
    means: MeanIndexerSpec | None = None
    """Likewise, of an indexer that reads the means of blocks."""
    difference: float | None = None
    """For differential attention (https://arxiv.org/abs/2410.05258): what its learned factor begins with. Heads attend
    to the values of two KV heads; of what the second half of them gives, the factor's share is taken from the first."""
    biases_keys: bool = False
    """Scores of a key gain a number that its value says. Heads are larger by as much as brings it in."""
    reads: int | None = None
    """The place of the mixer whose keys and values it attends over, of an earlier layer; None for its own."""
    factors: Factors = Factors()
    """The inner ones are those of queries, keys and values."""
    output_bias: str | None = None
    """The checkpoint's name of a bias of the output that this layer has and the model's others have not."""

    def kv_cache_specs(self, page: PageSpec) -> tuple[KVCacheSpec, ...]:
        """What the layer keeps in the KV cache, a block of which is a page with the layer's own heads."""
        page = replace(page, num_kv_heads=self.cached.num_kv_heads, head_size=self.cached.head_size)
        if self.window is not None:
            return (SlidingWindowSpec(page=page, window=self.window),)
        own = FullAttentionSpec(page=page)
        if self.blocks is not None:
            return own, FullAttentionSpec(page=_rows(page, self.blocks.head_size, 1))
        if self.means is not None:
            size, rate = self.means.head_size, self.means.rate
            tail = SlidingWindowSpec(page=_rows(page, 2 * size, 1), window=rate)
            return own, tail, FullAttentionSpec(page=_rows(page, size, rate))
        return (own,)

    @property
    def cached(self) -> Heads:
        """The heads that attention has: of keys with zeros behind them, where values of two heads lie together; of
        values with zeros behind them, where keys have biases."""
        size = self.heads.head_size
        if self.biases_keys:
            return replace(self.heads, head_size=size + HEAD_MULTIPLE, value_size=size)
        return self.heads if self.difference is None else replace(self.heads, head_size=2 * size)

    @property
    def num_caches(self) -> int:
        """Keys and values; and keys of an indexer: of all tokens, or of the last ones and of blocks."""
        return 1 + (self.blocks is not None) + 2 * (self.means is not None)


HEAD_MULTIPLE = 4
"""The native kernels keep keys of such a size in every dtype of the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """Chooses the tokens that attention sees by scores of its own (DeepSeek sparse attention, arXiv 2512.02556).

    A token's score is the sum over the indexer's heads of weight * max(query . key, 0).
    """

    num_heads: int
    """Of queries; all of them read one key of each token, which the cache keeps behind the latent."""
    head_size: int
    """Its first features rotate, as many as those of attention; its last ones in compressed attention, or by
    `rotates_last`."""
    num_selected: int
    """Tokens, or entries, of the context that a query attends to, at most: those of the highest scores."""
    interleaved: bool
    """Whether pairs of neighbouring features rotate, not the two halves; attention may do the other."""
    rotates_last: bool = False
    norm_eps: float = 1e-6
    """Of the norm of keys, whatever the model's others have."""
    is_shared: bool = False
    """Whether layers behind this one attend to what it chose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionSpec(Mixer):
    """Attention over latents (MLA): keys and values of all heads are products of one short vector for each token."""

    num_heads: int
    """Of queries; all of them read one latent of each token."""
    query_rank: int | None
    """Features between the two products that give the queries; None for one product."""
    latent_size: int
    rope_size: int
    """Rotated features of each query, and of the one rotated key that all heads share."""
    nope_size: int
    """Features of each query that are not rotated."""
    value_size: int
    """Of a head."""
    rope: RopeConfig | None
    """None where nothing is rotated: the shared key is there all the same."""
    interleaved: bool
    """Rotates neighbours (2i, 2i + 1) instead of (i, i + rope_size / 2)."""
    query_scale: float
    """Multiplies query . key."""
    position_scale: PositionScale | None = None
    """Multiplies each query by its position; None for nothing."""
    norm_eps: float = 1e-6
    """Of the norms of latents and of low-rank queries, whatever the model's others have."""
    query_norm_scale: float = 1.0
    """Multiplies low-rank queries behind their norm."""
    latent_norm_scale: float = 1.0
    """Multiplies latents behind their norm."""
    has_key_norm: bool = False
    """The key that all heads share has a norm of its own before its rotation."""
    window: int | None = None
    """Tokens a query sees at most, itself included; None for all."""
    indexer: IndexerSpec | None = None
    """None where queries attend to all tokens that they see, or to those that another layer chose."""
    num_shared: int | None = None
    """Queries attend to the tokens that the last indexer before this layer chose, so many at most."""
    has_sinks: bool = False
    """Whether each head has a learned score of no token."""
    num_gates: int = 0
    """What was attended to is multiplied by the sigmoids of so many gates: of each feature, or of each head."""
    gates_with_queries: bool = False
    """The gates of a head stand behind its query in one product, which reads low-rank queries behind their norm and,
    beside them, before it."""

    @property
    def cached_size(self) -> int:
        """What the cache keeps of a token: the rotated key, the latent, padding, and the indexer's key."""
        return cached_latent_size(self.rope_size, self.latent_size, self.indexer.head_size if self.indexer else 0)

    @property
    def num_selected(self) -> int | None:
        """Tokens that a query attends to, at most; None for all that it sees."""
        return self.num_shared if self.indexer is None else self.indexer.num_selected

    def kv_cache_specs(self, page: PageSpec) -> tuple[KVCacheSpec, ...]:
        """What the layer keeps in the KV cache, a block of which is a page."""
        page = replace(page, head_size=self.cached_size)
        if self.window is not None:
            return (SlidingWindowSpec(page=page, window=self.window),)
        return (FullAttentionSpec(page=page),)


def cached_latent_size(rope_size: int, latent_size: int, index_size: int = 0) -> int:
    """Elements of the one KV head of latent attention, and of an indexer's key behind it."""
    return round_up(rope_size + latent_size, HEAD_MULTIPLE) + index_size


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorSpec:
    """Makes one entry of so many tokens, which stands for them in attention once all of them are there (DeepSeek V4).

    Each feature of an entry is a sum over the tokens, weighed by a softmax of gates.
    """

    rate: int
    """Tokens of an entry."""
    overlaps: bool
    """An entry is also of the tokens of the one before it, by other products of these than their own entry."""
    indexer: IndexerSpec | None
    """Chooses entries by scores of its own; it compresses its keys likewise. None where queries see all entries."""

    @property
    def num_products(self) -> int:
        """Of each feature of an entry, that a token has."""
        return 1 + self.overlaps

    @property
    def reach(self) -> int:
        """Tokens that an entry is made of."""
        return self.rate * self.num_products

    def parts(self, head_size: int) -> tuple[int, ...]:
        """Features of an entry: of attention, and of the indexer's key behind them."""
        return (head_size, self.indexer.head_size) if self.indexer else (head_size,)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttentionSpec(Mixer):
    """Attention over the last tokens and entries that stand for earlier ones, whose keys are their values.

    The cache keeps up to three things of a layer: keys of the last tokens, what the compressor needs of the tokens of
    an unfinished entry, and entries. `layers/compressed.py` computes it.
    """

    num_heads: int
    """Of queries; all of them read one key of each token."""
    head_size: int
    window: int
    """Tokens that a query sees at most, itself included."""
    rope: RopeConfig
    """Of the last features of each head, in pairs of neighbours. What was attended to is rotated back."""
    query_rank: int
    """Features between the two products that give the queries."""
    num_groups: int
    """Parts of all heads' outputs, each of which passes a product of its own, and then all together one more."""
    group_rank: int
    """Features that such a product gives."""
    compressor: CompressorSpec | None
    """None in layers that see the last tokens alone."""

    @property
    def position_scale(self) -> None:
        """Queries are not scaled by their positions."""
        return None

    @property
    def query_scale(self) -> float:
        """Multiplies query . key."""
        return 1.0 / math.sqrt(self.head_size)

    @property
    def num_caches(self) -> int:
        """See `kv_cache_specs`."""
        return 1 if self.compressor is None else 3

    def kv_cache_specs(self, page: PageSpec) -> tuple[KVCacheSpec, ...]:
        """The keys of the last tokens; products and gates of the last tokens, for the compressor; and entries."""
        own = SlidingWindowSpec(page=_rows(page, self.head_size, 1), window=self.window)
        if self.compressor is None:
            return (own,)
        spec, size = self.compressor, sum(self.compressor.parts(self.head_size))
        tail = SlidingWindowSpec(page=_rows(page, 2 * spec.num_products * size, 1), window=spec.reach)
        return own, tail, FullAttentionSpec(page=_rows(page, size, spec.rate))


def _rows(page: PageSpec, size: int, rate: int) -> PageSpec:
    """A page of rows of so many features, each of which is of so many tokens."""
    return replace(page, num_kv_heads=1, head_size=round_up(size, 2) // 2, rate=rate, slot_multiple=1)


def latent_alike(keys: ConfigKeys, spec: LatentAttentionSpec, num_layers: int) -> Sequence[LatentAttentionSpec]:
    """All layers have the same mixer."""
    return (spec,) * num_layers


LatentRule = Callable[[ConfigKeys, int, Mapping[str, str]], LatentAttentionSpec]
"""From a config, its longest context and the family's aliases to the mixer of all layers."""
LatentLayersRule = Callable[[ConfigKeys, LatentAttentionSpec, int], Sequence[LatentAttentionSpec]]
"""From a config, the mixer that a `LatentRule` gave and a number of layers to the mixer of each layer."""
BlockRule = Callable[[ConfigKeys, int, Heads, RopeConfig | None], Sequence[BlockIndexerSpec | None]]
"""From a config, a number of layers, their heads and how these rotate to what chooses the blocks that each layer
attends to."""
MeanRule = Callable[[ConfigKeys, int, Heads, RopeConfig | None], Sequence[MeanIndexerSpec | None]]
"""As a `BlockRule`, of indexers that read the means of blocks."""
CompressedRule = Callable[[ConfigKeys, int, int], list[CompressedAttentionSpec]]
"""From a config, a number of layers and the longest context to the mixer of each layer."""

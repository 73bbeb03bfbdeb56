"""How a layer's tokens learn of those before them: the mixer of each layer, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from quire.config.config_keys import ConfigKeys
from quire.config.layers.layer_kinds import Heads
from quire.config.layers.rope import RopeConfig
from quire.messages.kv import FullAttentionSpec, KVCacheSpec, PageSpec, SlidingWindowSpec
from quire.messages.variants import Variants
from quire.utils.math import round_up


class Mixer(Variants):
    """Base of the kinds of mixers."""

    __slots__ = ()

    @classmethod
    def kinds(cls) -> tuple[type[Any], ...]:
        """See `Variants`."""
        recurrent = (MambaSpec, Mamba2Spec, ShortConvSpec, GatedDeltaSpec, LightningSpec, RgLruSpec)
        return AttentionSpec, LatentAttentionSpec, *recurrent


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

    first: int
    """The first of the layers, under whose name the checkpoint has the block."""
    is_first: bool
    number: int
    """Of the layer among all that share a block, by which its adapters are named."""
    intermediate_size: int
    has_bias: bool
    """Of the MLP."""
    rank: int
    """Features between the products of an adapter."""
    adapts_attention: bool
    """Queries, keys and values have adapters, too, not the MLP alone."""


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
    reads: int | None = None
    """The place of the mixer whose keys and values it attends over, of an earlier layer; None for its own."""
    factors: Factors = Factors()
    """The inner ones are those of queries, keys and values."""
    output_bias: str | None = None
    """The checkpoint's name of a bias of the output that this layer has and the model's others have not."""

    def kv_cache_spec(self, page: PageSpec) -> KVCacheSpec:
        """What the layer keeps in the KV cache, a block of which is a page with the layer's own heads."""
        page = replace(page, num_kv_heads=self.heads.num_kv_heads, head_size=self.heads.head_size)
        return FullAttentionSpec(page=page) if self.window is None else SlidingWindowSpec(page=page, window=self.window)


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
    """Its first features rotate, as many as those of attention."""
    num_selected: int
    """Tokens of the context that a query attends to, at most: those of the highest scores."""
    interleaved: bool
    """Whether pairs of neighbouring features rotate, not the two halves; attention may do the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionSpec(Mixer):
    """Attention over latents (MLA): keys and values of all heads are products of one short vector for each token."""

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
    indexer: IndexerSpec | None = None
    """None where queries attend to all tokens that they see."""
    is_gated: bool = False
    """What each head attended to is multiplied by a sigmoid of its own."""

    @property
    def window(self) -> None:
        """Queries see all tokens."""
        return None

    @property
    def cached_size(self) -> int:
        """What the cache keeps of a token: the rotated key, the latent, padding, and the indexer's key."""
        return cached_latent_size(self.rope_size, self.latent_size, self.indexer.head_size if self.indexer else 0)

    def kv_cache_spec(self, page: PageSpec) -> KVCacheSpec:
        """What the layer keeps in the KV cache, a block of which is a page."""
        return FullAttentionSpec(page=page)


def cached_latent_size(rope_size: int, latent_size: int, index_size: int = 0) -> int:
    """Elements of the one KV head of latent attention, and of an indexer's key behind it."""
    return round_up(rope_size + latent_size, HEAD_MULTIPLE) + index_size


LatentRule = Callable[[ConfigKeys, int, Mapping[str, str]], LatentAttentionSpec]
"""From a config, its longest context and the family's aliases to the mixer of all layers."""


class StepNorms(StrEnum):
    """RMS norms of what a Mamba layer derives from its input: time steps, and the vectors that write and read."""

    NONE = "none"
    PLAIN = "plain"
    """Without a weight."""
    WEIGHTED = "weighted"


class GateNorm(StrEnum):
    """The RMS norm of what a Mamba 2 layer scans, for each group of heads."""

    BEHIND = "behind"
    """Behind the gate."""
    BEFORE = "before"
    """Before the gate."""
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(Mixer):
    """The selective state space of Mamba (https://arxiv.org/abs/2312.00752): each channel has a state of its own."""

    inner_size: int
    """Channels."""
    state_size: int
    """Numbers of each channel's state."""
    conv_width: int
    """Tokens that the convolution before the scan sees, the token itself included."""
    time_rank: int
    """Width of the projection that gives the time steps."""
    has_bias: bool
    """Of the projections into and out of the layer."""
    has_conv_bias: bool
    norms: StepNorms = StepNorms.NONE
    norm_eps: float = 0.0

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution."""
        return self.inner_size

    @property
    def in_features(self) -> int:
        """What the projection into the layer gives: the convolution's input, and the gate."""
        return 2 * self.inner_size

    @property
    def num_state_elements(self) -> int:
        """Numbers of the layer's state: the last inputs of the convolution, and those of the scan."""
        return (self.conv_width - 1) * self.conv_channels + self.inner_size * self.state_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec(Mixer):
    """The selective state space of Mamba 2 (https://arxiv.org/abs/2405.21060): channels of a head decay alike."""

    num_heads: int
    head_size: int
    """Channels of a head."""
    state_size: int
    """Numbers of each channel's state."""
    num_groups: int
    """Heads of a group are written and read by the same vectors, and their outputs are normed together."""
    conv_width: int
    """Tokens that the convolution before the scan sees, the token itself included."""
    has_bias: bool
    """Of the projections into and out of the layer."""
    has_conv_bias: bool
    norm_eps: float
    norm: GateNorm = GateNorm.BEHIND
    factors: Factors = Factors()
    """The inner ones are those of `in_parts`."""

    @property
    def inner_size(self) -> int:
        """Channels."""
        return self.num_heads * self.head_size

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: those of the heads, and the vectors that write and read of each group."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def in_features(self) -> int:
        """What the projection into the layer gives: the gate, the convolution's input, and a time step per head."""
        return sum(self.in_parts)

    @property
    def in_parts(self) -> tuple[int, ...]:
        """Its widths: gate, channels, the vectors that write and those that read, time steps."""
        vectors = self.num_groups * self.state_size
        return self.inner_size, self.inner_size, vectors, vectors, self.num_heads

    @property
    def num_state_elements(self) -> int:
        """Numbers of the layer's state: the last inputs of the convolution, and those of the scan."""
        return (self.conv_width - 1) * self.conv_channels + self.inner_size * self.state_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec(Mixer):
    """A gated convolution of each channel over the last tokens (LFM2): out(c * conv(b * x))."""

    inner_size: int
    """Channels."""
    conv_width: int
    """Tokens that the convolution sees, the token itself included."""
    has_bias: bool
    """Of the projections into and out of the layer."""
    has_conv_bias: bool

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution."""
        return self.inner_size

    @property
    def in_features(self) -> int:
        """What the projection into the layer gives: two gates and the convolution's input."""
        return 3 * self.inner_size

    @property
    def state_size(self) -> int:
        """Nothing is scanned."""
        return 0

    @property
    def num_state_elements(self) -> int:
        """Numbers of the layer's state: the last inputs of the convolution."""
        return (self.conv_width - 1) * self.conv_channels


class DeltaLayout(StrEnum):
    """How a checkpoint has the product into a layer of the gated delta rule."""

    BY_KEY_HEAD = "by_key_head"
    """Two tensors, each with all of one key head, then all of the next (Qwen3-Next)."""
    BY_KIND = "by_kind"
    """A tensor for queries, keys and values, and one each for gates, rates and time steps (Qwen3.5)."""
    WHOLE = "whole"
    """One tensor, with the kinds in the same order (Lara Mini)."""
    APART = "apart"
    """A tensor for each kind, and a convolution for each of queries, keys and values (OLMo Hybrid)."""
    LOW_RANK = "low_rank"
    """As APART, but gates and time steps are products of two thin tensors each (Kimi Linear)."""
    CHANNELS = "channels"
    """As APART, with a time step of each channel (Ling)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaSpec(Mixer):
    """Linear attention by the gated delta rule (https://arxiv.org/abs/2412.06464), behind a short convolution."""

    num_key_heads: int
    num_value_heads: int
    """A multiple of the key heads, each of which serves neighbours."""
    key_size: int
    """Of a head, of queries as of keys."""
    value_size: int
    conv_width: int
    """Tokens that the convolution sees, the token itself included."""
    layout: DeltaLayout
    norm_eps: float
    most_rate: float = 1.0
    """By which the sigmoids of rates are multiplied: 2 lets a state change its sign."""
    by_channel: bool = False
    """Each channel of a key decays by itself, instead of a head as one (https://arxiv.org/abs/2510.26692)."""
    bound: float | None = None
    """Below zero: the logarithm of the least that a token leaves of a channel. Its decay is a sigmoid then."""
    gate_activation: str = "silu"
    """What gates pass before they multiply: silu or sigmoid."""
    rank: int | None = None
    """Features between the two products that give gates, and between those that give time steps; None where one
    product gives all."""

    @property
    def inner_size(self) -> int:
        """Channels: those of all values."""
        return self.num_value_heads * self.value_size

    @property
    def num_times(self) -> int:
        """Time steps of a token."""
        return self.num_value_heads * (self.key_size if self.by_channel else 1)

    @property
    def state_size(self) -> int:
        """Numbers of each channel's state."""
        return self.key_size

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return sum(self.conv_parts)

    @property
    def conv_parts(self) -> tuple[int, ...]:
        """Channels of queries, of keys and of values."""
        return (self.num_key_heads * self.key_size,) * 2 + (self.inner_size,)

    @property
    def in_features(self) -> int:
        """What the product into the layer gives: the convolution's input, the gate, and two numbers per value head; of
        a low rank, gates and time steps are not in it.
        """
        return sum(self.in_parts)

    @property
    def in_parts(self) -> tuple[int, ...]:
        """Rows of the tensors, or parts of tensors, in which the checkpoint has the product into the layer."""
        keys, heads = self.num_key_heads, self.num_value_heads
        if self.layout is DeltaLayout.LOW_RANK:
            return *self.conv_parts, heads
        if self.layout in (DeltaLayout.APART, DeltaLayout.CHANNELS):
            return *self.conv_parts, self.inner_size, heads, self.num_times
        if self.layout is DeltaLayout.BY_KIND:
            return self.conv_channels, self.inner_size, heads, heads
        if self.layout is DeltaLayout.WHOLE:
            return (self.conv_channels + self.inner_size + 2 * heads,)
        values = self.inner_size // keys
        return (self.key_size,) * 2 * keys + (values,) * 2 * keys + (heads // keys,) * 2 * keys

    @property
    def num_state_elements(self) -> int:
        """Numbers of the layer's state: the last inputs of the convolution, and those of the rule."""
        return (self.conv_width - 1) * self.conv_channels + self.inner_size * self.state_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningSpec(Mixer):
    """Lightning attention (https://arxiv.org/abs/2401.04658): linear attention, each head with a decay of its own."""

    num_heads: int
    head_size: int
    rates: tuple[float, ...]
    """Of each head: what a token leaves of the state is exp(-rate)."""
    norm_eps: float

    @property
    def inner_size(self) -> int:
        """Channels: those of all values."""
        return self.num_heads * self.head_size

    @property
    def state_size(self) -> int:
        """Numbers of each channel's state."""
        return self.head_size

    @property
    def in_features(self) -> int:
        """What the products into the layer give: query, key and value of each head, and the gate."""
        return sum(self.in_parts)

    @property
    def in_parts(self) -> tuple[int, ...]:
        """Rows of the tensors in which the checkpoint has the product into the layer."""
        return 3 * self.inner_size, self.inner_size

    @property
    def num_state_elements(self) -> int:
        """Numbers of the layer's state."""
        return self.inner_size * self.state_size


@dataclass(frozen=True, slots=True, kw_only=True)
class RgLruSpec(Mixer):
    """The real-gated linear recurrent unit of Griffin (https://arxiv.org/abs/2402.19427), behind a convolution."""

    width: int
    """Channels, each with one number of state."""
    num_blocks: int
    """The gates of as many equal parts of the channels are products of that part alone."""
    conv_width: int
    """Tokens that the convolution sees, the token itself included."""

    @property
    def inner_size(self) -> int:
        """Channels."""
        return self.width

    @property
    def state_size(self) -> int:
        """Numbers of each channel's state."""
        return 1

    @property
    def block_size(self) -> int:
        """Channels of a block."""
        return self.width // self.num_blocks

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution."""
        return self.width

    @property
    def in_features(self) -> int:
        """What the two products into the layer give: the gate, and the convolution's input."""
        return 2 * self.width

    @property
    def num_state_elements(self) -> int:
        """Numbers of the layer's state: the last inputs of the convolution, and those of the unit."""
        return self.conv_width * self.width


RecurrentSpec = MambaSpec | Mamba2Spec | ShortConvSpec | GatedDeltaSpec | LightningSpec | RgLruSpec
"""Mixers that keep a state of fixed size."""
if TYPE_CHECKING:
    MixerSpec = AttentionSpec | LatentAttentionSpec | RecurrentSpec
else:
    MixerSpec = Mixer  # what messages are decoded by: a codec knows no union of dataclasses
"""The kinds of mixers that there are."""

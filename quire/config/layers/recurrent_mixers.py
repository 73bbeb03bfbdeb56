"""The mixers that keep a state of fixed size, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from quire.config.layers.mixers import Factors, Mixer


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

    part: int = 0
    """Which of the layer's mixers this is, where several share its channels equally (Zamba)."""
    num_parts: int | None = None
    """How many they are; the checkpoint has the weights of all in the same tensors. None where tensors are the
    mixer's own."""
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
    def has_out_bias(self) -> bool:
        """Whether the projection out has a bias: that of a layer's first part is the layer's."""
        return self.has_bias and self.part == 0

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolvedQkvSpec(Mixer):
    """What gives the queries, keys and values of the layer's attention (CCA, https://arxiv.org/abs/2510.04476): queries
    and keys pass a convolution of each feature and one of each head; half of the values are the token's before."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    single_width: int
    """Tokens that the convolution of each feature sees, the token itself included."""
    joint_width: int
    """Likewise, of that of all features of a head."""
    has_bias: bool
    """Of the products before."""

    @property
    def conv_channels(self) -> int:
        """Channels of the convolutions: queries and keys."""
        return (self.num_heads + self.num_kv_heads) * self.head_size

    @property
    def conv_width(self) -> int:
        """Tokens that both see together."""
        return self.single_width + self.joint_width - 1

    @property
    def inner_size(self) -> int:
        """Features of queries, keys and values."""
        return self.conv_channels + self.num_kv_heads * self.head_size

    @property
    def state_size(self) -> int:
        """Nothing is scanned."""
        return 0

    @property
    def in_features(self) -> int:
        """What the products give."""
        return sum(self.in_parts)

    @property
    def in_parts(self) -> tuple[int, ...]:
        """Queries, keys, and the halves of values: that of the token, and that of the one behind it."""
        keys = self.num_kv_heads * self.head_size
        return self.num_heads * self.head_size, keys, keys // 2, keys // 2

    @property
    def num_state_elements(self) -> int:
        """Numbers of the layer's state: the last inputs of the convolutions, and the late half of the last values."""
        return (self.conv_width - 1) * self.conv_channels + self.in_parts[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class NGramSpec(Mixer):
    """Embeddings of a token together with those before it (n-grams), which are added to all streams of the token
    (Qwen4-Exp).

    Each head looks an n-gram up by a hash, in rows of one table that are its own. Of all heads' rows beside each other
    products are made: a value, and a key of each stream, which says how much of the value the stream gets. A
    convolution that skips tokens is added. `layers/recurrent/ngrams.py` computes it.
    """

    num_streams: int
    stream_size: int
    longest: int
    """Tokens of the longest n-gram; inputs of the convolution lie as far apart."""
    head_rows: tuple[int, ...]
    """Rows of the heads: those of n-grams of two tokens, then of three, and so on, equally many."""
    num_rows: int
    """Of the table; there may be some behind those of the heads."""
    head_size: int
    """Features of a row."""
    multipliers: tuple[int, ...]
    """Of a hash: of the token itself, of the one before it, and so on."""
    end_id: int
    """The token across which n-grams do not reach, and which stands for what is before it."""
    conv_width: int
    """Inputs of the convolution, the token itself included."""

    @property
    def embedding_size(self) -> int:
        """Of the rows of all heads beside each other."""
        return len(self.head_rows) * self.head_size

    @property
    def inner_size(self) -> int:
        """Channels: those of all streams."""
        return self.num_streams * self.stream_size

    @property
    def num_past(self) -> int:
        """Tokens before it that a token's convolution reaches back."""
        return (self.conv_width - 1) * self.longest

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution."""
        return self.inner_size

    @property
    def in_features(self) -> int:
        """What the products of an n-gram's embedding give: keys and the value."""
        return self.inner_size + self.stream_size

    @property
    def state_size(self) -> int:
        """Nothing is scanned."""
        return 0

    @property
    def num_state_elements(self) -> int:
        """Numbers of the layer's state: the last inputs of the convolution, and the last tokens."""
        return self.num_past * self.conv_channels + self.longest - 1


RecurrentSpec = (
    MambaSpec | Mamba2Spec | ShortConvSpec | GatedDeltaSpec | LightningSpec | RgLruSpec | ConvolvedQkvSpec | NGramSpec
)
"""Mixers that keep a state of fixed size."""
RECURRENT = (
    MambaSpec,
    Mamba2Spec,
    ShortConvSpec,
    GatedDeltaSpec,
    LightningSpec,
    RgLruSpec,
    ConvolvedQkvSpec,
    NGramSpec,
)
"""The same, to go through."""


def parts_of(spec: RecurrentSpec | None) -> tuple[RecurrentSpec, ...]:
    """The recurrent mixers of a layer, given the first."""
    if spec is None:
        return ()
    if not isinstance(spec, MambaSpec) or spec.num_parts is None:
        return (spec,)
    return tuple(replace(spec, part=part) for part in range(spec.num_parts))

"""What ops are given: weights as an implementation keeps them, and where the tokens of a step lie."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quire.config.gguf.tensor_types import BY_NAME
from quire.config.memory.weights.formats import NESTED_BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, kw_only=True)
class LinearWeight:
    """A weight in the layout its implementation streams; only the ops that made it know that layout.

    Equal only to itself: implementations keep what they derive.
    """

    out_features: int
    in_features: int
    format: str
    """dense, the name of a quantised format, or mixed."""
    tensors: dict[str, Tensor] = field(repr=False)
    """Implementation-defined storage."""
    parts: tuple[LinearWeight, ...] = ()
    """Of a mixed one: weights of different formats, whose outputs lie side by side. It has no storage of its own."""

    @property
    def num_bytes(self) -> int:
        """Of its storage."""
        return sum(tensor.nbytes for tensor in self.tensors.values()) + sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedScales:
    """Scales of groups, or what is taken off offsets, as codes times a number of each 256 neighbouring columns."""

    codes: Tensor
    """[N, M / G] int8"""
    units: Tensor
    """[N, M / 256] float32; the last 256 columns may be fewer."""

    def __getitem__(self, rows: slice | Tensor) -> NestedScales:
        """Of some of the rows."""
        return NestedScales(codes=self.codes[rows], units=self.units[rows])

    def times(self, factor: float) -> NestedScales:
        """Multiplied by a number."""
        return replace(self, units=self.units * factor)

    def numbers(self, group_size: int) -> Tensor:
        """Shapes: -> [N, M / G] float32."""
        units = self.units.repeat_interleave(NESTED_BLOCK // group_size, dim=1)
        return self.codes * units[:, : self.codes.shape[1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedRows:
    """Rows of a weight as a checkpoint brings them quantised, whatever its format, before an implementation packs them.

    Groups of G neighbouring columns share a scale: weight[n, m] = value[n, m] * scales[n, m // G] + offset, where value
    is levels[values[n, m]] if there are levels, and offset is -zero_points * scales or `offsets`, if there are any.
    """

    values: Tensor
    """[N, M]: int8, or float8_e4m3fn. Where bits is 2: -1 .. 2, 3: -4 .. 3, 4: -8 .. 7, 5: -16 .. 15, 6: -32 .. 31;
    where there are levels: 0 .. 15."""
    bits: int
    """2, 3, 4, 5, 6 or 8: what a value needs."""
    scales: Tensor
    """[N, M / G] float32; the last group may be shorter."""
    group_size: int
    """G; M where a row has one scale."""
    zero_points: Tensor | None = None
    """[N, M / G] int8"""
    offsets: Tensor | None = None
    """[N, M / G] float32; not beside zero points."""
    levels: tuple[float, ...] | None = None
    """Sixteen numbers that a code of four bits stands for. Kernels take integers of int8."""
    nested: tuple[NestedScales, ...] = ()
    """What scales are made of, in groups of 16 or 32, where kernels may keep that instead. Beside offsets a second one:
    offsets are the scales times what takes the least value that bits have to zero, less its numbers."""
    order: Tensor | None = None
    """[M] int32: column m multiplies feature order[m] of the input; None where that is m."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, M)"""
        rows, columns = self.values.shape
        return rows, columns

    @property
    def is_meta(self) -> bool:
        """Whether a reader that only checks gave it."""
        return self.values.is_meta

    def __getitem__(self, rows: slice | Tensor) -> QuantizedRows:
        """Some of the rows."""
        zero_points, offsets = (None if part is None else part[rows] for part in (self.zero_points, self.offsets))
        return replace(
            self,
            values=self.values[rows],
            scales=self.scales[rows],
            zero_points=zero_points,
            offsets=offsets,
            nested=tuple(part[rows] for part in self.nested),
        )

    def times(self, factor: float) -> QuantizedRows:
        """The weight multiplied by a number."""
        offsets = None if self.offsets is None else self.offsets * factor
        nested = tuple(part.times(factor) for part in self.nested)
        return replace(self, scales=self.scales * factor, offsets=offsets, nested=nested)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRows:
    """Rows of a weight in the blocks of a GGUF file, as they are there; `ops.blocks` says what they hold."""

    type_name: str
    """One of `config.gguf.tensor_types.QUANTIZED`."""
    blocks: Tensor
    """[N, bytes of a row] uint8"""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, M)"""
        rows, row_bytes = self.blocks.shape
        kind = BY_NAME[self.type_name]
        return rows, row_bytes // kind.block_bytes * kind.block_size

    @property
    def is_meta(self) -> bool:
        """Whether a reader that only checks gave it."""
        return self.blocks.is_meta

    def __getitem__(self, rows: slice | Tensor) -> BlockRows:
        """Some of the rows."""
        return replace(self, blocks=self.blocks[rows])


StoredRows = QuantizedRows | BlockRows
"""Rows of a weight as a checkpoint brings them quantised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """A table of embeddings whose rows become numbers of `dtype` when they are looked up."""

    rows: BlockRows
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """A gated MLP: down(activation(gate(x)) * up(x)); or one without a gate: down(activation(up(x)))."""

    gate_up: LinearWeight
    """[2F, M], or [F, M] without a gate."""
    down: LinearWeight
    """[N, F]"""
    gate_up_bias: Tensor | None = None
    """[2F] or [F] float32"""
    down_bias: Tensor | None = None
    """[N] float32"""

    @property
    def is_gated(self) -> bool:
        """Whether the first product has gates."""
        return self.gate_up.out_features != self.down.in_features


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, kw_only=True)
class MixtureWeights:
    """The parameters of a mixture of experts. Implementations may keep what belongs to one as long as it lives."""

    router: LinearWeight
    """[X, M] float32, X with identities and skips, and one more row where the shared expert has a gate. M is another
    size than the experts' where the router is given something else to read."""
    router_bias: Tensor | None = None
    """As many numbers as the router has rows, float32."""
    experts: tuple[ExpertWeights, ...]
    choice_bias: Tensor | None = None
    """[X] float32: added to scores where experts are chosen, not where they are weighed."""
    scales: Tensor | None = None
    """[X] float32: what the weights of experts that were chosen are multiplied by in the end."""
    shared: ExpertWeights | None = None
    """An expert that every token passes."""
    num_identities: int = 0
    """So many more to choose from behind the experts give what they read. Beside them there are no scales, no shared
    expert, and no weights that multiply what experts read."""
    num_skips: int = 0
    """So many more behind those give nothing, likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionExpertWeights:
    """The products of experts in front of and behind attention."""

    router: LinearWeight
    """[X, M] float32"""
    queries: tuple[LinearWeight, ...]
    """[K * D, M] of each expert"""
    outputs: tuple[LinearWeight, ...]
    """[N, K * D] of each expert"""
    output_bias: Tensor
    """[N] float32: added once for each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeAndCacheSpec:
    """What is fixed about one attention layer's way from the QKV projection to query and cache."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    rotary_dim: int
    """Leading elements of each head that are rotated; 0 rotates nothing."""
    interleaved: bool = False
    """Pairs (2i, 2i+1) instead of (i, i + rotary_dim/2)."""
    norm_eps: float = 1e-6
    """For the optional per-head norms."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class HeadWeights:
    """A weight of each query head, all of one shape. Equal only to itself: implementations keep what they derive."""

    heads: tuple[LinearWeight, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """What is fixed about one layer of attention over latents. Shape letters: P, U, C, W and D of its sizes."""

    num_heads: int
    rope_size: int
    """P: rotated features of a query, and of the key that all heads share."""
    nope_size: int
    """U: features of a query that are not rotated."""
    latent_size: int
    """C"""
    value_size: int
    """W: of a head."""
    head_size: int
    """D: of the one KV head, [rotated key | latent | zeros]; P + C or more."""
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Where the tokens of this step and their contexts lie. CPU ops read the tensors on the host.

    Ops of a device that captures graphs are also given sequences of nobody's, to make up their number: one token at
    position 0 in a context of length 0, which attention gives zeros for, without a slot to write to (-1).
    Shapes: R sequences, T tokens. Tokens of one sequence are adjacent and in order of position.
    """

    query_start: Tensor
    """[R + 1] int32: sequence r owns tokens query_start[r] .. query_start[r + 1]."""
    seq_lens: Tensor
    """[R] int32: context length after this step; the sequence's last token stands at position seq_lens[r] - 1."""
    block_tables: Tensor
    """[R, max blocks] int32; entries that no token sees may be any block that there is."""
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCache:
    """Rows that compressed attention keeps of tokens, or of entries that stand for several, and where they lie."""

    rows: Tensor
    """[2, B, 1, Y, X]"""
    size: int
    """Features of a row, 2 * X or one less."""
    metadata: AttentionMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorWeights:
    """What makes entries of the products and gates of tokens. F features of each of them."""

    rate: int
    """Tokens that an entry stands for."""
    reach: int
    """Tokens that it is made of: as many, or twice as many where entries overlap."""
    bias: Tensor
    """[rate, F] float32: added to the gates, by the token's place in its own entry."""
    norms: tuple[Tensor, ...]
    """[D] float32, and of the indexer's key [I]: weights of RMS norms of an entry's parts."""
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperWeights:
    """How a half of a layer reads and writes the streams of a token; P numbers of each."""

    count: int
    """S: streams."""
    scale: Tensor
    """[P] float32"""
    base: Tensor
    """[P] float32"""
    iterations: int
    """0 where streams are not mixed."""
    eps: float
    norm_eps: float
    magnitude: float
    least_added: float

    @property
    def num_written(self) -> int:
        """Numbers by which streams are written: 0 where they are only read."""
        return self.base.shape[0] - self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMetadata:
    """Where the tokens of this step and the states of their sequences lie.

    Shapes: R sequences, T tokens. Tokens of one sequence are adjacent and in order of position.
    """

    query_start: Tensor
    """[R + 1] int32: sequence r owns tokens query_start[r] .. query_start[r + 1]."""
    reads: Tensor
    """[R] int32: the page with the state before the step; -1 where a sequence begins, whose state is zero."""
    writes: Tensor
    """[R] int32: the page that gets the state after the step; no sequence of the step reads it. -1, where graphs are
    captured, for sequences of nobody's: their state is written nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvWeights:
    """A causal convolution of each channel by itself."""

    weight: Tensor
    """[C, W] float32; the last column multiplies the token itself."""
    bias: Tensor | None
    """[C] float32"""

    @property
    def num_inputs(self) -> int:
        """Numbers of a sequence's last inputs, which the next token sees."""
        channels, width = self.weight.shape
        return channels * (width - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaWeights:
    """The parameters of a Mamba layer between its two projections. C channels, N numbers of a state, Q ranks."""

    conv: ConvWeights
    derive: LinearWeight
    """[Q + 2N, C]: the time step in Q numbers, and the vectors that write and read."""
    widen: LinearWeight
    """[C, Q]: the time step of each channel."""
    time_bias: Tensor
    """[C] float32"""
    decay: Tensor
    """[C, N] float32, below zero."""
    skip: Tensor
    """[C] float32"""
    norms: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None
    """Weights of the RMS norms of time step, writing and reading vector, [Q], [N], [N] float32; None for ones. Without
    norms None."""
    norm_eps: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Weights:
    """The parameters of a Mamba 2 layer between its two projections. H heads of D channels, N numbers of a state."""

    conv: ConvWeights
    num_groups: int
    """G: the heads of a group are written and read by the same vectors."""
    state_size: int
    time_bias: Tensor
    """[H] float32"""
    decay: Tensor
    """[H] float32, below zero."""
    skip: Tensor
    """[H] float32"""
    norm: Tensor | None
    """[H * D] float32; None without a norm."""
    norm_eps: float
    norms_before_gate: bool = False

    @property
    def inner_size(self) -> int:
        """H * D"""
        return self.conv.weight.shape[0] - 2 * self.num_groups * self.state_size


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaWeights:
    """The parameters of the gated delta rule between a layer's two products. H value heads of D channels, K key heads,
    whose keys have N numbers.
    """

    conv: ConvWeights
    num_key_heads: int
    key_size: int
    time_bias: Tensor
    """[H] float32; [H, N] where each channel of a key decays by itself."""
    decay: Tensor
    """[H] float32, below zero."""
    norm: Tensor
    """[D] float32"""
    norm_eps: float
    most_rate: float = 1.0
    """By which sigmoids are multiplied to be rates, at most 2."""
    bound: float | None = None
    """Below zero, where each channel decays by itself: the logarithm of the least that a token leaves of a state."""
    gates_by_sigmoid: bool = False
    """Gates pass a sigmoid, instead of silu."""

    @property
    def by_channel(self) -> bool:
        """Whether each channel of a key decays by itself, instead of a head as one."""
        return self.time_bias.dim() > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningWeights:
    """The parameters of lightning attention between a layer's two products. H heads of D channels."""

    decay: Tensor
    """[H] float32: what a token leaves of each head's state."""
    norm: Tensor
    """[H * D] float32"""
    norm_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RgLruWeights:
    """The parameters of an RG-LRU behind its convolution. X blocks of P channels each."""

    conv: ConvWeights
    gates: tuple[LinearWeight, ...]
    """X times [2P, P]: the input's gate, then the recurrence's."""
    gate_biases: Tensor
    """[X, 2P] float32"""
    decay: Tensor
    """[X * P] float32, below zero: the logarithm of what a token leaves of the state where the gate is 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolvedQkvWeights:
    """The parameters of convolved queries and keys. H query and K key/value heads of D features."""

    num_heads: int
    num_kv_heads: int
    single: ConvWeights
    """Of each of (H + K) * D features by itself."""
    joint: tuple[LinearWeight, ...]
    """[D, W * D] of each of H + K heads: the convolution of all its features together, over W tokens, oldest first."""
    joint_bias: Tensor
    """[H + K, D] float32"""
    temperatures: Tensor
    """[K] float32: what keys of each head are multiplied by behind their norm."""
    product_bias: Tensor | None
    """Of the product before, float32: its last K * D / 2 numbers are the late half of values of no token."""

    @property
    def head_size(self) -> int:
        """D"""
        return self.joint[0].out_features

    @property
    def num_taps(self) -> int:
        """W"""
        return self.joint[0].in_features // self.head_size

    @property
    def num_past(self) -> int:
        """Tokens before one that its queries and keys are made of."""
        return self.single.weight.shape[1] - 1 + self.num_taps - 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Features of queries and keys, and of the halves of values."""
        half = self.num_kv_heads * self.head_size // 2
        return self.single.weight.shape[0], half, half


@dataclass(frozen=True, slots=True, kw_only=True)
class NGramHashes:
    """How n-grams become rows of a table."""

    end_id: int
    """The token across which n-grams do not reach."""
    multipliers: Tensor
    """[N] int64: of the token itself, of the one before it, and so on; the longest n-gram has N tokens."""
    rows: Tensor
    """[heads] int64: how many each head has; heads of n-grams of two tokens first, then of three, equally many."""
    firsts: Tensor
    """[heads] int64: the first of them."""


class Largest(NamedTuple):
    """The largest logit of each row: all that a step needs of its logits where every row takes the likeliest token."""

    values: Tensor
    """[R] float32."""
    token_ids: Tensor
    """[R] int64."""


class Graph(Protocol):
    """A run of ops whose arguments are fixed: what they read and write stays where it is, its contents may change."""

    def replay(self) -> tuple[Tensor, ...]:
        """Do the run again and give its outputs, valid until another graph of the same set is recorded or replayed."""


class Graphs(Protocol):
    """A set of graphs of which one runs at a time."""

    only_ops: bool
    """Whether a replay repeats nothing but ops: what the run computes by other means is as it was when recorded."""

    captures: bool
    """Whether it takes the device for long, and memory for good: only a few graphs are recorded, between requests."""

    def record(self, run: Callable[[], tuple[Tensor, ...]]) -> Graph:
        """A graph of `run`, which may be called for it several times, or without its ops being run. What they read must
        outlive it.

        Raises: whatever `run` does, and where a device cannot capture it.
        """

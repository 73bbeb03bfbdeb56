"""`FamilySpec`: how a family of models differs from Llama, as data. Knows no tensors.

`quire.config.families` has one for each family. Everything derives from it: what is read of config.json, the number of
parameters, the memory plan, the groups of the KV cache, and the decoder that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.layers.experts import ClampedGate, ExpertsRule, ExpertsSpec
from quire.config.layers.layer_kinds import (
    Heads,
    HeadsRule,
    LayerKind,
    LayerRule,
    ReadRule,
    RotationRule,
    all_full,
    all_rotated,
    heads_alike,
    none_read,
)
from quire.config.layers.mixers import (
    AttentionExperts,
    BlockRule,
    CompressedRule,
    Factors,
    LatentLayersRule,
    LatentRule,
    MeanRule,
    PositionScale,
    SharedBlock,
    latent_alike,
)
from quire.config.layers.ngrams import NGramRule, no_ngrams
from quire.config.layers.recurrent import AttentionRule, RecurrentRule, no_recurrence, without_state
from quire.config.layers.rope import RopeConfig
from quire.config.layers.streams import GatedStreamsSpec, HyperSpec, LayerEmbeddingsSpec, SphereSpec, StreamsSpec

DECODER = "quire.models.decoder:DecoderForCausalLM"


class NormKind(StrEnum):
    """What a norm computes."""

    RMS = "rms"
    LAYER = "layer"


class HeadNorms(StrEnum):
    """Norms of queries and keys before their rotation, RMS norms unless said otherwise."""

    NONE = "none"
    EACH = "each"
    """Each head by itself, all with one weight."""
    ROTATED = "rotated"
    """As EACH, but behind the rotation."""
    WHOLE = "whole"
    """All heads of a token together."""
    UNIT_ROTATED = "unit_rotated"
    """Each head by itself behind the rotation, without a weight, in layers that rotate."""
    LAYER = "layer"
    """A layer norm of each head by itself, all with one weight and one bias."""
    LAYER_OWN = "layer_own"
    """A layer norm of each head by itself, each with a weight of its own, without bias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """The norms of a model, by the checkpoint's names; None where there is none."""

    kind: NormKind = NormKind.RMS
    has_weight: bool = True
    has_bias: bool = False
    offset: float = 0.0
    """Added to every weight, heads' included; 1 where the checkpoint stores weight - 1."""
    embedding: str | None = None
    """Of token embeddings."""
    input: str | None = "input_layernorm"
    """Before attention."""
    skips_first: bool = False
    """Whether the first layer has no norm before attention."""
    post_attention: str | None = None
    """Behind attention, before it is added to the residual."""
    pre_mlp: str | None = "post_attention_layernorm"
    """Before the MLP. Where attention and MLP are parallel and there is none, the MLP reads what attention reads."""
    post_mlp: str | None = None
    """Behind the MLP, before it is added to the residual."""
    final: str | None = "norm"
    """Behind the last layer."""
    attended: str | None = None
    """An RMS norm of what all heads of plain attention give together, before the output's product."""
    gated: str | None = None
    """An RMS norm of the inner features of a gated MLP, before its last product."""
    inner_eps: float | None = None
    """Of all others over hidden states, whatever config.json says."""
    heads: HeadNorms = HeadNorms.NONE
    of_values: bool = False
    """RMS norms of each value head, without a weight."""
    gate_rank: int = 0
    """Features between the two products of a gate behind a norm: what the norm gives is multiplied by the sigmoid of
    what it makes of it."""
    with_gate: tuple[str, ...] = ()
    """The norms before attention and MLP that have such a gate."""
    recurrent: Norms | None = None
    """Of layers that keep a state, where those have others."""
    with_experts: Norms | None = None
    """Of layers whose MLP is a mixture of experts, where those have others. A checkpoint may have these for all layers;
    the others do not read what they have not."""

    @property
    def of_mixers(self) -> tuple[str | None, str | None]:
        """Before and behind the mixers of a layer that has any."""
        return self.input, self.post_attention

    @property
    def of_mlp(self) -> tuple[str | None, str | None]:
        """Before and behind the MLP of a layer that has one."""
        return self.pre_mlp, self.post_mlp


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """residual * kept + output * added."""

    kept: float
    added: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Joins:
    """How attention and MLP are added where the norm before them is the residual, too."""

    attention: Join
    recurrent: Join
    mlp: Join


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Factors that config.json sets."""

    embedding: float = 1.0
    """Of token embeddings."""
    residual: float = 1.0
    """Of what attention and MLP add to the residual."""
    logits: float = 1.0
    """The last norm carries it, so there must be one, and the head must have no bias."""
    query: float | None = None
    """Of query . key; None for 1 / sqrt(head size)."""
    attention: Factors = Factors()
    by_depth: bool = False
    """Whether layer i divides the query's factor by i + 1."""
    averages: bool = False
    """Whether hidden states are sums over the root of how many parts they have: the embedding, and what each attention
    and MLP gave. Only norms read them. Where these read the sums themselves, their eps is so many times larger."""
    of_features: tuple[str, str] | None = None
    """What the checkpoint calls the factors of each feature of the residual, before what attention gives is added to
    it, and before what the MLP gives is; `model_class` computes them."""
    of_layers: bool = False
    """Whether each layer has a number that multiplies what it gives, which `model_class` computes."""
    has_shifts: bool = False
    """Whether the embeddings, what each attention and MLP gives, and the residual that it is added to have a scale and
    a shift of each feature, which `model_class` computes."""
    joins: Joins | None = None
    """For families that add to what they read; None where attention and MLP are added to the residual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTransform:
    """norm(activation(dense(x))) of what the last norm gives: what the head reads in its place."""

    activation: str
    """As transformers names it."""
    has_bias: bool
    """Of the product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveSpec:
    """Sines and cosines of positions."""

    first: int = 0
    """What the first position counts as."""
    has_slowest: bool = False
    """Whether the slowest wave turns by 1 / 10,000 for a position; if not, the one behind it would."""
    skips_padding: bool = False
    """Whether the position that the padding token has for an id has zeros."""


class MlpKind(StrEnum):
    """What an MLP computes."""

    GATED = "gated"
    """down(activation(gate(x)) * up(x))"""
    SPARSE = "sparse"
    """As GATED, with the largest gates only."""
    PLAIN = "plain"
    """down(activation(up(x)))"""
    EXPERTS = "experts"
    """Gated MLPs of which each token passes a few."""
    NONE = "none"
    """Nothing: the layer is its mixer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """The MLP of one layer."""

    kind: MlpKind
    intermediate_size: int
    """Of the widest expert in a mixture of experts."""
    has_bias: bool
    experts: ExpertsSpec | None = None
    beside: ExpertsSpec | None = None
    """A mixture of experts beside a gated MLP, which `model_class` computes: between norms of its own (Gemma 4), or
    added behind the layer that follows (LongCat Flash)."""
    cutoff: float = 0.0
    """Of a sparse MLP: gates lose their mean and so many of their standard deviations; those below zero are zero."""
    factors: Factors = Factors()
    """Of a gated MLP; the inner ones are those of gate and up."""
    gate: ClampedGate | None = None
    """Of a gated MLP, in place of the model's activation and a product."""


MlpRule = Callable[[ConfigKeys, int, int], tuple[MlpSpec, ...]]
"""From a config, a number of layers and `intermediate_size` to the MLP of each layer."""
Flag = bool | str
"""Whether something is so, or the key of config.json that says it."""


def is_set(keys: ConfigKeys, flag: Flag) -> bool:
    """The value of a flag in a config. Raises: ConfigError."""
    return flag if isinstance(flag, bool) else keys.flag(flag, default=False)


def gated(bias: Flag = False) -> MlpRule:
    """Every layer has a gated MLP."""
    return lambda keys, num_layers, size: _alike(MlpKind.GATED, size, is_set(keys, bias), num_layers)


def plain(bias: Flag = False) -> MlpRule:
    """Every layer has an MLP of two linear layers."""
    return lambda keys, num_layers, size: _alike(MlpKind.PLAIN, size, is_set(keys, bias), num_layers)


def experts(rule: ExpertsRule, bias: Flag = False, dense_size: str = "intermediate_size") -> MlpRule:
    """Mixtures of experts in the layers that a rule names, gated MLPs in the others, as wide as a key says.

    MLPs and shared experts have a bias, or neither has.
    """

    def mlps(keys: ConfigKeys, num_layers: int, size: int) -> tuple[MlpSpec, ...]:
        size, has_bias = keys.count(dense_size, default=size), is_set(keys, bias)
        plain = MlpSpec(kind=MlpKind.GATED, intermediate_size=size, has_bias=has_bias)
        return tuple(plain if spec is None else mixture(spec, has_bias) for spec in rule(keys, num_layers))

    return mlps


def no_mlp(keys: ConfigKeys, num_layers: int, size: int) -> tuple[MlpSpec, ...]:
    """No layer has an MLP."""
    return _alike(MlpKind.NONE, 0, False, num_layers)


def mixture(spec: ExpertsSpec, has_shared_bias: bool = False) -> MlpSpec:
    """A layer's mixture of experts."""
    spec = replace(spec, has_shared_bias=has_shared_bias and spec.shared_size > 0)
    widest = max(spec.size, spec.shared_size)
    return MlpSpec(kind=MlpKind.EXPERTS, intermediate_size=widest, has_bias=False, experts=spec)


def _alike(kind: MlpKind, size: int, has_bias: bool, num_layers: int) -> tuple[MlpSpec, ...]:
    return (MlpSpec(kind=kind, intermediate_size=size, has_bias=has_bias),) * num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """What the checkpoint calls the parts of a model. A tuple names several tensors that one linear layer computes."""

    base: str = "model"
    """Left out of all names where the checkpoint was saved without its head."""
    embedding: str = "embed_tokens"
    positions: str | None = None
    """A table of learned positions; without one, queries and keys are rotated."""
    unused_positions: int = 0
    """Leading rows of that table which no position uses."""
    layers: str = "layers"
    attention: str = "self_attn"
    recurrent: str = "mamba"
    """The mixer of a recurrent layer."""
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    qkv_by_head: bool = False
    """Whether one tensor has, for each key/value head in turn, its query heads, the key, and the value."""
    qkv_groups: int | None = None
    """In how many groups of heads one tensor has query heads, then values, then keys; None if it does not."""
    gate: str | None = None
    """Of gated attention, where the gates of all heads are a tensor of their own, without bias."""
    gate_bias: str | None = None
    """Beside that tensor, a number for each head, which is added to its gates."""
    output: str = "o_proj"
    sinks: str = "sinks"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    mlp: str | None = "mlp"
    """None where its parts are named beside attention."""
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    up: str = "up_proj"
    """Of a plain MLP."""
    activation: str = "act_fn"
    """Of a plain MLP, where it has parameters."""
    down: str = "down_proj"
    head: str = "lm_head"
    experts_transposed: bool = False
    """Whether a tensor of all experts has each expert's weight [in, out]."""
    experts_mixed: bool = False
    """Whether its rows of gate and up take turns."""
    hyper: tuple[str, str, str] = ("hc_attn_", "hc_ffn_", "hc_head_")
    """What begins the names of hyper-connections' parameters: around attention and around the MLP, in a layer, and of
    the last reading, in the model."""
    resaved: tuple[tuple[str, str], ...] = ()
    """(part of a name, what a checkpoint that transformers wrote has in its place). Parts begin behind a dot."""
    transposed: frozenset[str] = frozenset()
    """Linear layers whose weight is stored [in, out]."""


def _no_image_layers(keys: ConfigKeys) -> frozenset[int]:
    return frozenset()


def _no_changes(keys: ConfigKeys) -> Mapping[str, Any]:
    return {}


def _no_position_scale(keys: ConfigKeys) -> PositionScale | None:
    return None


def _no_slopes(keys: ConfigKeys, num_heads: int) -> tuple[float, ...] | None:
    return None


def _no_attention_experts(keys: ConfigKeys) -> AttentionExperts | None:
    return None


def _none_shared(keys: ConfigKeys, num_layers: int) -> tuple[SharedBlock | None, ...]:
    return (None,) * num_layers


def _no_blocks(keys: ConfigKeys, num_layers: int, heads: Heads, rope: RopeConfig | None) -> tuple[None, ...]:
    return (None,) * num_layers


def _no_differences(keys: ConfigKeys, num_layers: int) -> tuple[None, ...]:
    return (None,) * num_layers


def _no_scales(keys: ConfigKeys) -> Scales:
    return Scales()


def _no_head_transform(keys: ConfigKeys) -> HeadTransform | None:
    return None


def _one_stream(keys: ConfigKeys) -> StreamsSpec | None:
    return None


def _no_sphere(keys: ConfigKeys) -> SphereSpec | None:
    return None


def _one_hidden_state(keys: ConfigKeys) -> HyperSpec | None:
    return None


def _no_gated_streams(keys: ConfigKeys) -> GatedStreamsSpec | None:
    return None


def _no_layer_embeddings(keys: ConfigKeys) -> LayerEmbeddingsSpec | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySpec:
    """What is read from the config.json of a family, what its layers are made of, and how its weights are called."""

    architecture: str = ""
    """For configs that name only the model_type."""
    model_class: str = DECODER
    """ "package.module:Class", for families that compute what the decoder cannot."""

    spellings: Mapping[str, str] = field(default_factory=dict)
    """Llama's key -> the family's, which counts first."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What the class of the family assumes in transformers when config.json leaves a key out. A key that only some
    families have (`sliding_window`, `rotary_dim`) is read for those that have a default for it."""
    derived: Callable[[ConfigKeys], Mapping[str, Any]] = _no_changes
    """Values of Llama's keys that follow from other keys of the family."""
    ignored: tuple[str, ...] = ()
    """Keys of the family that its model never looks at in transformers; other values than null are reported."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Keys that must be null, false or left out -> what quire does instead, and the remedy."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Values of rope_type and of the activation that mean another one in configs of this family."""

    image_layers: Callable[[ConfigKeys], frozenset[int]] = _no_image_layers
    """Numbers of layers in the checkpoint that only images make use of; a text does not pass them."""
    recurrent: RecurrentRule = no_recurrence
    """Which layers keep a state."""
    attends: AttentionRule = without_state
    """Which layers have attention, the others by default. Where none has, its keys are not read. A layer with both adds
    up what they give; one with neither is nothing but its MLP."""
    layer_kinds: LayerRule = all_full
    heads: HeadsRule = heads_alike
    """The heads of each kind of layer, where they differ."""
    window_flag: str | None = None
    """The key without which no layer has its window."""
    is_chunked: bool = False
    """Layers with a window see the context from the last multiple of its size on."""
    rotated: RotationRule = all_rotated
    sliding_theta: str | None = None
    """The key of the rotary base of layers with a window, where they have one of their own."""
    waves: WaveSpec | None = None
    """For families that add sines and cosines of positions to embeddings."""
    rotates_pairs: bool = False
    """Rotates neighbours (2i, 2i + 1) instead of (i, i + rotary_dim / 2)."""
    latent: LatentRule | None = None
    """For families whose layers attend over latents (`config.latent`)."""
    latent_layers: LatentLayersRule = latent_alike
    """What differs between their layers."""
    compressed: CompressedRule | None = None
    """For families whose layers attend over the last tokens and entries that stand for earlier ones, which
    `model_class` computes."""
    rotates_back: bool = False
    """Rotates the other way round."""
    slopes: Callable[[ConfigKeys, int], tuple[float, ...] | None] = _no_slopes
    """From a config and a number of query heads to what each head's scores lose with each token of distance (ALiBi)."""
    position_scale: Callable[[ConfigKeys], PositionScale | None] = _no_position_scale
    """What queries are multiplied by at each position."""
    has_sinks: Flag = False
    """Each query head has a learned score of no token."""
    sinks_in: tuple[LayerKind, ...] = tuple(LayerKind)
    """The kinds of layers that have these scores."""
    is_gated: Flag = False
    """What each head attended to passes a gate: the product that `names.gate` names, or else the one of the queries,
    which has the gate of each head behind its query."""
    gates_heads: Flag = False
    """A gate is one number for a head, instead of one for each of its features."""
    gate_activation: str = "sigmoid"
    """What gates pass before they multiply: sigmoid or softplus."""
    attention_experts: Callable[[ConfigKeys], AttentionExperts | None] = _no_attention_experts
    """For families in which each token chooses its query heads."""
    differences: Callable[[ConfigKeys, int], Sequence[float | None]] = _no_differences
    """What the factors of differential attention begin with in each layer."""
    biases_keys: Flag = False
    """Scores of each key gain a number that its value says (Doge)."""
    blocks: BlockRule = _no_blocks
    """What chooses the blocks of tokens that a layer attends to."""
    means: MeanRule = _no_blocks
    """What chooses them by the means of their keys, where attention has gates."""
    shared: Callable[[ConfigKeys, int], tuple[SharedBlock | None, ...]] = _none_shared
    """For families whose layers share attention and an MLP, which `model_class` computes."""
    reads: ReadRule = none_read
    """Which layers attend over the keys and values of an earlier one, in families all of whose layers have attention
    and no other mixer."""
    streams: Callable[[ConfigKeys], StreamsSpec | None] = _one_stream
    """For families whose tokens have several hidden states, which take turns; `model_class` computes them."""
    hyper: Callable[[ConfigKeys], HyperSpec | None] = _one_hidden_state
    """For families whose tokens have several hidden states that layers read and write together (hyper-connections),
    which `model_class` computes."""
    gated_streams: Callable[[ConfigKeys], GatedStreamsSpec | None] = _no_gated_streams
    """For families whose tokens have several hidden states that layers read through gates; `model_class` computes
    them."""
    ngrams: NGramRule = no_ngrams
    """Which layers embed a token together with those before it, which `model_class` computes."""
    sphere: Callable[[ConfigKeys], SphereSpec | None] = _no_sphere
    """For families whose hidden states have length 1, and some of whose layers are passed several times; each pass
    counts as a layer, and `model_class` computes them."""
    layer_embeddings: Callable[[ConfigKeys], LayerEmbeddingsSpec | None] = _no_layer_embeddings
    """For families whose tokens have embeddings for each layer, which `model_class` computes."""
    norms: Norms | Callable[[ConfigKeys], Norms] = Norms()
    is_parallel: Flag = False
    """Attention and MLP read the same residual; their sum is added to it."""
    mlp: MlpRule = gated("mlp_bias")
    attention_bias: Flag = "attention_bias"
    """Of the query, key and value projections."""
    output_bias: Flag = "attention_bias"
    """Of the attention's output."""
    last_output_bias: str | None = None
    """What the checkpoint calls a bias of the attention's output that the last layer has and no other."""
    head_bias: Flag = False
    head_transform: Callable[[ConfigKeys], HeadTransform | None] = _no_head_transform
    """What stands between the last norm and the head, which `model_class` computes."""
    scales: Callable[[ConfigKeys], Scales] = _no_scales
    output_vocab: str | None = None
    """The key of the number of tokens with logits. Ids behind them have embeddings only, for parts of images: prompts
    may not hold them."""
    names: WeightNames = WeightNames()

    def norms_of(self, keys: ConfigKeys) -> Norms:
        """The norms of a model. Raises: ConfigError."""
        return self.norms if isinstance(self.norms, Norms) else self.norms(keys)

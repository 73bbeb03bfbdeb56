"""`ModelArch`: one normalised view over every dialect of config.json.

Reads what is common; `families` says what each family spells or leaves out. Knows no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.families import family_of
from quire.config.family_spec import DECODER, FamilySpec, HeadNorms, HeadTransform, MlpSpec, Norms, Scales, is_set
from quire.config.identify import identify
from quire.config.joins import check_joins
from quire.config.layers.any_mixer import MixerSpec
from quire.config.layers.by_layer import BY_LAYER
from quire.config.layers.experts import ExpertsSpec
from quire.config.layers.layer_kinds import Heads, LayerKind
from quire.config.layers.mixers import AttentionSpec, CompressedAttentionSpec, LatentAttentionSpec, PositionScale
from quire.config.layers.recurrent_mixers import ConvolvedQkvSpec, RecurrentSpec, parts_of
from quire.config.layers.rope import RopeConfig, attention_factor, read_ropes
from quire.config.layers.streams import GatedStreamsSpec, HyperSpec, LayerEmbeddingsSpec, SphereSpec, StreamsSpec
from quire.config.memory.weights.stored import THROUGH_TRANSFORMERS, StoredWeights
from quire.config.quantized.config import StoredQuantization, read_quantization
from quire.config.quantized.stored import StoredFormat
from quire.config.text_part import text_part
from quire.errors import ConfigError, shown
from quire.log import get_logger
from quire.messages.kv import (
    DTYPE_BYTES,
    SCALED_DTYPES,
    SLOT_MULTIPLES,
    KVCacheSpec,
    KVLayout,
    PageSpec,
    StatePage,
    StateSpec,
    kv_layout,
)
from quire.utils.math import cdiv, round_up

log = get_logger(__name__)

MAX_LAYERS = 10_000
"""More can only be a mistake, and every layer costs memory before the first weight is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What may differ from layer to layer."""

    mixers: tuple[MixerSpec, ...]
    """What its tokens learn of those before them by: the sum of what these give is added to the residual, but for that
    of n-grams, which stands before the others. None in a layer that is nothing but its MLP."""
    mlp: MlpSpec
    has_input_norm: bool = True
    """Whether there is a norm before its mixers, if the model has one there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArch:
    """What the rest of quire knows about a model before it reads a weight."""

    source: str
    """Where the config came from, for messages."""
    architecture: str
    """The class name in `architectures`, which the model registry looks up."""
    model_type: str
    vocab_size: int
    """Tokens that have logits, which are those that prompts may hold."""
    num_embeddings: int
    """Rows of the checkpoint's embedding. Those behind the tokens' stand for parts of images and are not read."""
    hidden_size: int
    embedding_size: int
    """Width of the token embeddings; differs from hidden_size only where they are projected (OPT 350m)."""
    intermediate_size: int
    num_layers: int
    num_heads: int
    """Of attention layers, as the two that follow; 0 where the model has none. Where heads differ from layer to layer,
    those that Llama's keys name: `AttentionSpec.heads` has a layer's own."""
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    norm_eps: float
    activation: str
    """As transformers names it."""
    tie_word_embeddings: bool
    attention_bias: bool
    """Whether the query, key and value projections have a bias."""
    output_bias: bool
    """Whether the attention's output projection has one."""
    head_bias: bool
    """Whether the output head has one."""
    head_transform: HeadTransform | None
    """What stands between the last norm and the head."""
    norms: Norms
    is_parallel: bool
    """Whether attention and MLP read the same residual."""
    layers: tuple[LayerSpec, ...]
    attn_soft_cap: float | None
    final_soft_cap: float | None
    clip_qkv: float | None
    """The largest magnitude of queries, keys and values; None for any."""
    scales: Scales
    streams: StreamsSpec | None
    """Of a model whose tokens have several hidden states, which take turns."""
    hyper: HyperSpec | None
    """Of a model whose tokens have several hidden states, which layers read and write together."""
    gated_streams: GatedStreamsSpec | None
    """Of a model whose tokens have several hidden states, which layers read through gates."""
    sphere: SphereSpec | None
    """Of a model whose hidden states have length 1. Each pass through a layer counts as one."""
    layer_embeddings: LayerEmbeddingsSpec | None
    """Of a model whose tokens have an embedding for each layer."""
    image_layers: frozenset[int]
    """Numbers of layers in the checkpoint that a text does not pass, which are not among the model's."""
    dtype: str
    """float32, bfloat16 or float16: what the checkpoint says it holds."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    raw: Mapping[str, Any] = field(repr=False)
    """The config as it was read; for family-specific keys only."""
    quantization: StoredQuantization | None = None
    """How the checkpoint has its weights quantised; None where they are plain."""
    quantized: tuple[StoredFormat, ...] = ()
    """Each weight that its headers have quantised."""
    stored: StoredWeights | None = None
    """Of a model that transformers builds; None for quire's own."""

    @classmethod
    def from_config(cls, raw: Mapping[str, Any], *, source: str, family: FamilySpec | None = None) -> ModelArch:
        """Normalise a parsed config.json, read as `family` has it (default: the one that it names).

        Raises: ConfigError naming the key, its value and the remedy.
        """
        raw = text_part(raw, source)
        architecture, model_type = identify(raw, source, is_checked=family is not None)
        family = family_of(architecture, model_type) if family is None else family
        keys = _keys(raw, source, family)
        _report_ignored(keys, family)
        arch = cls(
            source=source,
            architecture=architecture,
            model_type=model_type,
            **_sizes(keys, family),
            norm_eps=keys.positive("rms_norm_eps", default=1e-5),
            activation=_activation(keys, family),
            tie_word_embeddings=keys.flag("tie_word_embeddings", default=False),
            attention_bias=is_set(keys, family.attention_bias),
            output_bias=is_set(keys, family.output_bias),
            head_bias=is_set(keys, family.head_bias),
            head_transform=family.head_transform(keys),
            norms=family.norms_of(keys),
            is_parallel=is_set(keys, family.is_parallel),
            attn_soft_cap=_soft_cap(keys, family, "attn_logit_softcapping"),
            final_soft_cap=_soft_cap(keys, family, "final_logit_softcapping"),
            clip_qkv=keys.optional_positive("clip_qkv") if "clip_qkv" in keys.defaults else None,
            scales=family.scales(keys),
            streams=family.streams(keys),
            hyper=family.hyper(keys),
            gated_streams=family.gated_streams(keys),
            sphere=family.sphere(keys),
            layer_embeddings=family.layer_embeddings(keys),
            image_layers=family.image_layers(keys),
            dtype=_dtype(keys),
            eos_token_ids=_token_ids(keys, "eos_token_id", _vocab_size(keys, family)),
            bos_token_id=next(iter(_token_ids(keys, "bos_token_id", _vocab_size(keys, family))), None),
            quantization=read_quantization(raw, source),
            raw=raw,
        )
        if family.model_class == DECODER:
            check_joins(arch)
        return arch

    @property
    def family(self) -> FamilySpec:
        """How models of this type differ from Llama."""
        return THROUGH_TRANSFORMERS if self.stored is not None else family_of(self.architecture, self.model_type)

    @property
    def ropes(self) -> frozenset[RopeConfig]:
        """The rotations of the layers, each once."""
        return frozenset(mixer.rope for mixer in self.attentions if mixer.rope is not None)

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        """Those of all layers, in order."""
        return tuple(mixer for layer in self.layers for mixer in layer.mixers)

    def places_of(self, layer: int) -> range:
        """The places of a layer's mixers among those of the model."""
        first = sum(len(before.mixers) for before in self.layers[:layer])
        return range(first, first + len(self.layers[layer].mixers))

    @property
    def attentions(self) -> tuple[AttentionSpec | LatentAttentionSpec | CompressedAttentionSpec, ...]:
        """Those of the mixers that are attention, in order."""
        kinds = (AttentionSpec, LatentAttentionSpec, CompressedAttentionSpec)
        return tuple(mixer for mixer in self.mixers if isinstance(mixer, kinds))

    @property
    def plain_attentions(self) -> tuple[AttentionSpec, ...]:
        """Those of them that attend over keys and values."""
        return tuple(mixer for mixer in self.attentions if isinstance(mixer, AttentionSpec))

    @property
    def whole_blocks(self) -> frozenset[int]:
        """Tokens that attention takes at a time, of which blocks of the KV cache must be divisors: chunks, and blocks
        that indexers choose."""
        chunks = {mixer.window for mixer in self.plain_attentions if mixer.is_chunked and mixer.window is not None}
        return frozenset(chunks | {mixer.blocks.block_size for mixer in self.plain_attentions if mixer.blocks})

    @property
    def is_gated(self) -> bool:
        """Whether attention has gates."""
        return any(mixer.num_gates for mixer in self.plain_attentions)

    def norms_of(self, layer: LayerSpec) -> Norms:
        """The norms of a layer."""
        if self.norms.with_experts is not None and layer.mlp.experts is not None:
            return self.norms.with_experts
        if not layer.has_input_norm:
            return replace(self.norms, input=None)
        has_state = any(isinstance(mixer, RecurrentSpec) for mixer in layer.mixers)
        return self.norms.recurrent if has_state and self.norms.recurrent is not None else self.norms

    @property
    def recurrences(self) -> tuple[RecurrentSpec, ...]:
        """Those of the mixers that keep a state, in order."""
        return tuple(mixer for mixer in self.mixers if isinstance(mixer, RecurrentSpec))

    @property
    def is_convolved(self) -> bool:
        """Whether attention gets queries, keys and values from the recurrent mixers of its layers."""
        return any(isinstance(mixer, ConvolvedQkvSpec) for mixer in self.recurrences)

    @property
    def position_scales(self) -> frozenset[PositionScale]:
        """What queries are multiplied by at their positions, each once."""
        return frozenset(mixer.position_scale for mixer in self.attentions if mixer.position_scale is not None)

    @property
    def mixtures(self) -> frozenset[ExpertsSpec]:
        """The mixtures of experts of the layers, each once."""
        mixtures = (spec for layer in self.layers for spec in (layer.mlp.experts, layer.mlp.beside))
        return frozenset(spec for spec in mixtures if spec is not None)

    @property
    def widest_mlp(self) -> int:
        """Inner features of the widest MLP or expert."""
        widths = (max(mlp.intermediate_size, mlp.beside.size if mlp.beside else 0) for mlp in self.mlps)
        return max(widths)

    @property
    def mlps(self) -> tuple[MlpSpec, ...]:
        """Those of all layers, in order."""
        return tuple(layer.mlp for layer in self.layers)

    def kv_cache_specs(self, block_size: int, dtype: str, *, ops: str) -> list[KVCacheSpec]:
        """What the mixers keep in the KV cache, in the order of `mixers`, where `ops` serve; each `num_caches` things.

        Where a block of so many tokens has fewer bytes than a recurrent state, blocks are of more tokens.
        """
        num_state_bytes = max((8 * cdiv(mixer.num_state_elements, 2) for mixer in self.recurrences), default=0)
        if not self.attentions:
            num_bytes = round_up(num_state_bytes, 128)
            return [_state_spec(mixer, num_bytes, block_size) for mixer in self.recurrences]
        page = _page_for(self, block_size, dtype, SLOT_MULTIPLES[ops], num_state_bytes)
        _check_chunks(self, page.block_size)
        _check_indexed_blocks(self, page.block_size)
        return [
            spec
            for mixer in self.mixers
            for spec in (
                [_state_spec(mixer, page.num_bytes, page.block_size)]
                if isinstance(mixer, RecurrentSpec)
                else mixer.kv_cache_specs(page)
            )
        ]

    @property
    def with_weights(self) -> ModelArch:
        """The model without the layers that are passes through earlier ones."""
        if self.sphere is None:
            return self
        sources = [self.sphere.layer_of(index) for index in range(self.num_layers)]
        kept = [layer for index, layer in enumerate(self.layers) if sources[index] not in sources[:index]]
        once = replace(self.sphere, num_loops=1)
        return replace(self, layers=tuple(kept), num_layers=len(kept), sphere=once)

    def caches_of(self, place: int) -> range:
        """The places of what a mixer keeps, given its own."""
        counts = [mixer.num_caches for mixer in self.mixers]
        first = sum(counts[:place])
        return range(first, first + counts[place])

    def kv_layout(self, block_size: int, dtype: str, *, ops: str) -> KVLayout:
        """How the mixers share the pages of the KV cache."""
        reads = [
            (place, mixer.reads)
            for place, mixer in enumerate(self.mixers)
            if isinstance(mixer, AttentionSpec) and mixer.reads is not None
        ]
        return kv_layout(self.kv_cache_specs(block_size, dtype, ops=ops), reads)


def _page_for(arch: ModelArch, block_size: int, dtype: str, slot_multiple: int, num_state_bytes: int) -> PageSpec:
    """A block of an attention layer, of the fewest times `block_size` tokens in which a recurrent state finds room."""
    sizes = {"num_kv_heads": arch.num_kv_heads, "head_size": arch.head_size}
    block_size = _whole_entries(arch, block_size, dtype)
    page = PageSpec(**sizes, dtype=dtype, block_size=block_size, slot_multiple=slot_multiple)
    times = cdiv(num_state_bytes, page.num_bytes)
    while num_state_bytes > page.num_bytes or (num_state_bytes and page.num_bytes % 8):
        page = PageSpec(**sizes, dtype=dtype, block_size=times * block_size, slot_multiple=slot_multiple)
        times += 1
    return page


def _whole_entries(arch: ModelArch, block_size: int, dtype: str) -> int:
    """Tokens of a block that has whole entries of every compressor or indexer; as given where there are none.

    Raises: ConfigError for a cache of 8 bits, which has no room for such rows.
    """
    specs = [mixer.compressor for mixer in arch.mixers if isinstance(mixer, CompressedAttentionSpec)]
    rates = [spec.rate for spec in specs if spec is not None]
    rates += [mixer.means.rate for mixer in arch.plain_attentions if mixer.means]
    has_blocks = any(mixer.blocks or mixer.means for mixer in arch.plain_attentions)
    if (specs or has_blocks) and dtype in SCALED_DTYPES:
        what = "what compressed attention keeps" if specs else "the keys of indexers"
        raise ConfigError(f"{arch.source}: a KV cache of {dtype} has no room for {what}. Leave kv_cache_dtype out.")
    return round_up(block_size, math.lcm(*rates))


def _check_chunks(arch: ModelArch, block_size: int) -> None:
    """Refuse blocks that a chunk of attention does not begin with. Raises: ConfigError."""
    for size in {mixer.window for mixer in arch.plain_attentions if mixer.window is not None and mixer.is_chunked}:
        if size % block_size:
            raise ConfigError(
                f"{arch.source}: attention is within chunks of {size} tokens, which blocks of {block_size} do not "
                "divide. Choose a --block-size that does."
            )


def _check_indexed_blocks(arch: ModelArch, block_size: int) -> None:
    """Refuse blocks that those which an indexer chooses are not made of. Raises: ConfigError."""
    for spec in {mixer.blocks for mixer in arch.plain_attentions if mixer.blocks is not None}:
        if spec.block_size % block_size:
            raise ConfigError(
                f"{arch.source}: an indexer chooses blocks of {spec.block_size} tokens (index_block_size), which KV "
                f"blocks of {block_size} do not divide. Choose a --block-size that does."
            )


def _state_spec(mixer: RecurrentSpec, num_bytes: int, block_size: int) -> StateSpec:
    return StateSpec(page=StatePage(num_elements=mixer.num_state_elements, num_bytes=num_bytes, block_size=block_size))


def _keys(raw: Mapping[str, Any], source: str, family: FamilySpec) -> ConfigKeys:
    """The config as the family reads it. Raises: ConfigError for what quire does not do."""
    keys = ConfigKeys(raw, source, family.defaults, family.spellings)
    for name, instead in family.refused.items():
        value = raw.get(name, family.defaults.get(name))
        if value is not None and value is not False:
            raise ConfigError(f"{source}: {name} is {shown(value)}, but quire {instead}")
    if raw.get(BY_LAYER) and BY_LAYER not in family.defaults:
        keys.refuse(BY_LAYER, raw[BY_LAYER], "must be left out: layers of this family have no keys of their own")
    return ConfigKeys({**raw, **family.derived(keys)}, source, family.defaults, family.spellings)


def _sizes(keys: ConfigKeys, family: FamilySpec) -> dict[str, Any]:
    """The numbers of `ModelArch`, and its layers, which are as many."""
    hidden_size = keys.count("hidden_size")
    num_layers = keys.count("num_hidden_layers", most=MAX_LAYERS) - len(family.image_layers(keys))
    max_position = keys.count("max_position_embeddings")
    recurrent = family.recurrent(keys, num_layers)
    attends = family.attends(keys, recurrent)
    heads = _heads(keys, hidden_size) if any(attends) else Heads(num_heads=0, num_kv_heads=0, head_size=0)
    mixers = _mixers(keys, family, recurrent, attends, heads, max_position)
    ngrams = family.ngrams(keys, recurrent)
    mixers = [each if own is None else (own, *each) for own, each in zip(ngrams, mixers, strict=True)]
    intermediate_size = keys.count("intermediate_size", default=4 * hidden_size)
    mlps = family.mlp(keys, num_layers, intermediate_size)
    layers = [LayerSpec(mixers=each, mlp=mlp) for each, mlp in zip(mixers, mlps, strict=True)]
    if family.norms_of(keys).skips_first:
        layers[0] = replace(layers[0], has_input_norm=False)
    return {
        "vocab_size": _vocab_size(keys, family),
        "num_embeddings": keys.count("vocab_size"),
        "hidden_size": hidden_size,
        "embedding_size": keys.count("word_embed_proj_dim", default=hidden_size),
        "intermediate_size": intermediate_size,
        "num_layers": num_layers,
        "num_heads": heads.num_heads,
        "num_kv_heads": heads.num_kv_heads,
        "head_size": heads.head_size,
        "max_position_embeddings": max_position,
        "layers": tuple(layers),
    }


def _vocab_size(keys: ConfigKeys, family: FamilySpec) -> int:
    """Tokens that have logits: all that have embeddings, unless a key of the family says less."""
    size = keys.count("vocab_size")
    name = family.output_vocab
    output = None if name is None else keys.optional_count(name)
    if name is None or output is None or output == size:
        return size
    if output > size:
        keys.refuse(name, output, f"must be at most vocab_size ({size})")
    if keys.flag("tie_word_embeddings", default=False):
        keys.refuse("tie_word_embeddings", True, f"must be false: the head has only {output} rows ({name})")
    return output


def _heads(keys: ConfigKeys, hidden_size: int) -> Heads:
    """Those of attention that Llama's keys name."""
    num_heads = keys.count("num_attention_heads")
    _, given = keys.given("num_key_value_heads")
    num_kv_heads = num_heads if given is None else keys.count("num_key_value_heads")
    if num_heads % num_kv_heads:
        keys.refuse(
            "num_key_value_heads", num_kv_heads, f"must divide num_attention_heads ({num_heads}) without remainder"
        )
    head_size = _head_size(keys, hidden_size, num_heads)
    return Heads(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size)


def _head_size(keys: ConfigKeys, hidden_size: int, num_heads: int) -> int:
    _, given = keys.given("head_dim")  # null is not the default, but what follows from the others
    if given is not None:
        return keys.count("head_dim")
    if hidden_size % num_heads:
        keys.refuse(
            "hidden_size",
            hidden_size,
            f"must be a multiple of num_attention_heads ({num_heads}) unless head_dim says otherwise",
        )
    return hidden_size // num_heads


def _report_ignored(keys: ConfigKeys, family: FamilySpec) -> None:
    for name in family.ignored:
        if keys.raw.get(name) is not None:
            log.warning("config.json sets %s, which transformers ignores, too source=%s", name, keys.source)


def _soft_cap(keys: ConfigKeys, family: FamilySpec, name: str) -> float | None:
    return None if name in family.ignored else keys.optional_positive(name)


def _activation(keys: ConfigKeys, family: FamilySpec) -> str:
    name = keys.text("hidden_act")
    return family.aliases.get(name, name)


def _mixers(
    keys: ConfigKeys,
    family: FamilySpec,
    recurrent: Sequence[RecurrentSpec | None],
    attends: Sequence[bool],
    heads: Heads,
    max_position: int,
) -> list[tuple[MixerSpec, ...]]:
    """Those of each layer: attention, then the recurrent one. Raises: ConfigError where no layer has any."""
    if not any(attends) and not any(recurrent):
        raise ConfigError(f"{keys.source}: no layer has attention or a state, so tokens would not see each other.")
    attention: Sequence[MixerSpec | None] = (None,) * len(recurrent)
    if any(attends):
        attention = _attentions(keys, family, len(recurrent), heads, max_position)
    return [
        tuple(spec for spec in (seeing if is_seeing else None, *parts_of(state)) if spec is not None)
        for seeing, is_seeing, state in zip(attention, attends, recurrent, strict=True)
    ]


def _attentions(
    keys: ConfigKeys, family: FamilySpec, num_layers: int, heads: Heads, max_position: int
) -> list[MixerSpec]:
    """What each layer has if it has attention."""
    if family.compressed is not None:
        return [*family.compressed(keys, num_layers, max_position)]
    if family.latent is not None:
        latent = family.latent(keys, max_position, family.aliases)
        latent = replace(latent, position_scale=family.position_scale(keys))
        return [*family.latent_layers(keys, latent, num_layers)]
    kinds, window, scales = family.layer_kinds(keys, num_layers), _window(keys, family), family.scales(keys)
    slopes, has_sinks = family.slopes(keys, heads.num_heads), is_set(keys, family.has_sinks)
    reads, of_kind = family.reads(keys, kinds), family.heads(keys, heads)
    is_gated, by_head = is_set(keys, family.is_gated), is_set(keys, family.gates_heads)
    ropes = {} if slopes is not None else _ropes(keys, family, of_kind, max_position)
    position_scale, shared = family.position_scale(keys), family.shared(keys, num_layers)
    differences = family.differences(keys, num_layers)
    blocks = family.blocks(keys, num_layers, heads, ropes.get(LayerKind.FULL))
    means = family.means(keys, num_layers, heads, ropes.get(LayerKind.FULL))
    return [
        AttentionSpec(
            heads=of_kind[kind],
            window=None if kind is LayerKind.FULL else window,
            is_chunked=family.is_chunked and kind is not LayerKind.FULL and window is not None,
            rope=ropes.get(kind) if rotates else None,
            query_scale=_query_scale(scales, of_kind[kind]) / (index + 1 if scales.by_depth else 1),
            position_scale=None if rotates and position_scale and position_scale.only_unrotated else position_scale,
            slopes=slopes,
            has_sinks=has_sinks and kind in family.sinks_in,
            num_gates=is_gated * (of_kind[kind].num_heads if by_head else of_kind[kind].query_size),
            experts=family.attention_experts(keys),
            shared=shared[index],
            blocks=blocks[index],
            means=means[index],
            difference=differences[index],
            biases_keys=is_set(keys, family.biases_keys),
            reads=reads[index],
            factors=scales.attention,
            output_bias=family.last_output_bias if index == num_layers - 1 else None,
        )
        for index, (kind, rotates) in enumerate(zip(kinds, family.rotated(keys, kinds), strict=True))
    ]


def _query_scale(scales: Scales, heads: Heads) -> float:
    return 1.0 / math.sqrt(heads.head_size) if scales.query is None else scales.query


def _ropes(
    keys: ConfigKeys, family: FamilySpec, heads: Mapping[LayerKind, Heads], max_position: int
) -> Mapping[LayerKind, RopeConfig]:
    """How each kind of layer rotates. A norm behind the rotation takes back what that multiplies by."""
    if family.names.positions is not None:
        return {}
    head_sizes = {kind: each.head_size for kind, each in heads.items()}
    ropes = read_ropes(keys, head_sizes, max_position, family.aliases, family.sliding_theta)
    is_normed = family.norms_of(keys).heads in (HeadNorms.ROTATED, HeadNorms.UNIT_ROTATED)
    ropes = {kind: replace(rope, is_backward=family.rotates_back) for kind, rope in ropes.items()}
    return {kind: _unscaled(rope) if is_normed else rope for kind, rope in ropes.items()}


def _unscaled(rope: RopeConfig) -> RopeConfig:
    return replace(rope, attention_factor=1.0, normed_factor=attention_factor(rope))


def _window(keys: ConfigKeys, family: FamilySpec) -> int | None:
    if family.window_flag is not None and not keys.flag(family.window_flag, default=False):
        return None
    return keys.optional_count("sliding_window")


def refuse_quantization(raw: Mapping[str, Any], source: str) -> None:
    """Raises: ConfigError for a checkpoint that was quantised before, of a model that transformers builds."""
    quantization = read_quantization(raw, source)
    if quantization is not None:
        raise ConfigError(
            f"{source}: the weights are quantised ({quantization.method}), which a model that runs through "
            "transformers may not be. Use the unquantised version of this model."
        )


def _dtype(keys: ConfigKeys) -> str:
    _, value = keys.find(("dtype", "torch_dtype"))
    if value is None:
        return "float32"
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if not isinstance(name, str) or name not in DTYPE_BYTES:
        keys.refuse("torch_dtype", value, f"must be one of {', '.join(DTYPE_BYTES)}")
    return name


_ABSENT = object()


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _token_ids(keys: ConfigKeys, name: str, vocab_size: int) -> tuple[int, ...]:
    """One id, several or none. Family defaults that do not fit the vocabulary belong to another tokenizer."""
    value = keys.raw.get(name, _ABSENT)
    if value is _ABSENT:
        defaults = _as_list(keys.defaults.get(name))
        return tuple(defaults) if all(token_id < vocab_size for token_id in defaults) else ()
    listed = _as_list(value)
    for token_id in listed:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            keys.refuse(name, value, f"must be a token id from 0 to {vocab_size - 1}, a list of them, or null")
    return tuple(listed)

"""The tensors that a model of a family is made of, from its `ModelArch` alone; `sizes` says what they take.

Says of numbers what `quire.models` builds: a test compares the two for every family, dtype and quantisation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from quire.config.arch import LayerSpec, ModelArch
from quire.config.family_spec import HeadNorms, MlpKind, MlpSpec
from quire.config.layers.any_mixer import MixerSpec
from quire.config.layers.experts import ExpertsSpec
from quire.config.layers.layer_kinds import Heads
from quire.config.layers.mixers import (
    AttentionSpec,
    CompressedAttentionSpec,
    IndexerSpec,
    LatentAttentionSpec,
    SharedBlock,
)
from quire.config.layers.recurrent_mixers import (
    ConvolvedQkvSpec,
    GatedDeltaSpec,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    NGramSpec,
    RecurrentSpec,
    RgLruSpec,
    ShortConvSpec,
)
from quire.config.memory.weights.latent import latent_floats, latent_linears
from quire.config.memory.weights.linear import LinearShape, Shape
from quire.config.memory.weights.recurrent import (
    convolved_linears,
    linear_attention_linears,
    ngram_linears,
    num_hash_words,
    num_ngram_rows,
    recurrent_floats,
    recurrent_linears,
    rg_lru_linears,
)
from quire.config.memory.weights.streams import (
    num_copied,
    num_equal,
    num_layer_embeddings,
    num_repeated,
    num_sphere_parameters,
    sphere_floats,
    stream_floats,
    stream_linears,
)
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightShapes:
    """All parameters of a model."""

    body: tuple[LinearShape, ...]
    head: LinearShape
    """Also the embedding where the two are tied."""
    table: int
    """Numbers of the table of token embeddings."""
    tables: int
    """Numbers of other tables: of positions, of the embeddings of single layers, and of n-grams."""
    floats: int
    """Norms and biases, which are kept in float32."""
    is_tied: bool
    is_transposed: bool
    """The checkpoint stores weights of the body [in, out]."""


def weight_shapes(arch: ModelArch) -> WeightShapes:
    """The parameters of a model; those of a plug-in's class as its spec says.

    Raises: ConfigError for a model that transformers builds.
    """
    if arch.stored is not None:
        raise ConfigError(
            f"{arch.source}: {arch.architecture} runs through transformers, so quire does not know the shapes of its "
            "products, nor what they cost. Take a model that quire has."
        )
    passed = _layer_linears(arch)
    arch = arch.with_weights
    names, linears = arch.family.names, _layer_linears(arch)
    if arch.embedding_size != arch.hidden_size:
        linears.update([((arch.hidden_size,), arch.embedding_size), ((arch.embedding_size,), arch.hidden_size)])
    positions = 0 if names.positions is None else arch.max_position_embeddings + names.unused_positions
    if arch.family.waves is not None:
        positions = arch.max_position_embeddings
    return WeightShapes(
        body=(
            *(
                LinearShape(parts=shape[0], in_features=shape[1], count=n, active=max(n, passed[shape]))
                for shape, n in linears.items()
            ),
            *_mixtures(arch),
            *_attention_experts(arch),
            *_index_weights(arch),
            *stream_linears(arch),
            *_head_transform(arch),
        ),
        head=LinearShape(parts=(arch.vocab_size,), in_features=arch.embedding_size),
        table=arch.vocab_size * arch.embedding_size,
        tables=positions * arch.hidden_size + num_layer_embeddings(arch) + num_ngram_rows(arch),
        floats=_num_floats(arch),
        is_tied=arch.tie_word_embeddings,
        is_transposed=bool(names.transposed) or names.experts_transposed,
    )


def _layer_linears(arch: ModelArch) -> Counter[Shape]:
    """Linear layers of all layers, but for those of experts."""
    linears = Counter[Shape]()
    for layer in arch.layers:
        for mixer in layer.mixers:
            linears.update(_MIXERS[type(mixer)](arch, mixer))
        linears.update(_MLPS[layer.mlp.kind](arch, layer.mlp))
        linears.update(_norm_gates(arch, layer))
    return linears


def _head_transform(arch: ModelArch) -> list[LinearShape]:
    size = arch.hidden_size
    return [] if arch.head_transform is None else [LinearShape(parts=(size,), in_features=size, count=1)]


def num_parameters(arch: ModelArch) -> int:
    """Parameters of a model, tied ones counted once; exact for the families quire ships."""
    if arch.stored is not None:
        return arch.stored.num_parameters
    arch = arch.with_weights
    shapes = weight_shapes(arch)
    head = 0 if shapes.is_tied else shapes.head.num_weights
    linears = sum(shape.count * shape.num_weights for shape in shapes.body)
    floats = (
        shapes.floats
        - _num_made(arch)
        + _num_activation_parameters(arch)
        + _num_differences(arch)
        + num_sphere_parameters(arch)
        - sphere_floats(arch)
        + arch.scales.of_layers * arch.num_layers
    )
    return (
        linears
        + head
        + arch.num_embeddings * arch.embedding_size
        + shapes.tables
        - _num_made_rows(arch)
        - _num_twice(arch)
        - _num_zeros(arch)
        + floats
    )


def _num_made(arch: ModelArch) -> int:
    """Numbers that the checkpoint does not have: ones in place of weights of norms, biases of gates, which it has once
    for a head, zeros that indexers of means add to gates, and what makes rows of n-grams."""
    heads = 0 if arch.norms.has_weight and arch.norms.heads is not HeadNorms.UNIT_ROTATED else _num_head_norms(arch)
    heads += sum(mixer.num_gates - mixer.heads.num_heads for mixer in _with_gate_biases(arch))
    heads += sum(mixer.means.rate * mixer.means.head_size for mixer in arch.plain_attentions if mixer.means)
    heads += num_hash_words(arch) + num_equal(arch)
    heads += _num_value_norms(arch) + sum(mixer.head_size for mixer in compressions(arch)) + num_repeated(arch)
    return heads if arch.norms.has_weight else _num_norms(arch) * arch.hidden_size + heads


def _num_made_rows(arch: ModelArch) -> int:
    """Numbers of tables that the checkpoint does not have: sines and cosines of positions, and the embeddings of single
    layers of tokens that it has none for, which are those of the first token."""
    waves = 0 if arch.family.waves is None else arch.max_position_embeddings * arch.hidden_size
    return waves + num_copied(arch)


def _num_twice(arch: ModelArch) -> int:
    """Numbers of products to keys that are loaded once more in place of products to values."""
    of_feature = arch.hidden_size + arch.attention_bias
    return sum(of_feature * mixer.heads.kv_size for mixer in arch.plain_attentions if has_keys_twice(mixer))


def _num_zeros(arch: ModelArch) -> int:
    """Numbers that fill up the weights of values narrower than keys, and that give indexers of means gates of zero."""
    of_key = arch.hidden_size + arch.attention_bias
    read = sum(own.num_unused * own.num_kv_heads * of_key for own in (mixer.heads for mixer in arch.plain_attentions))
    given = sum(own.num_unused * own.num_heads for own in (mixer.cached for mixer in arch.plain_attentions))
    gates = sum(mixer.means.head_size for mixer in arch.plain_attentions if mixer.means)
    return read + (given + gates) * arch.hidden_size


def has_keys_twice(mixer: MixerSpec) -> bool:
    """Whether the product to keys is there a second time, for values that are keys."""
    return isinstance(mixer, AttentionSpec) and mixer.heads.values_are_keys and mixer.reads is None


def _num_activation_parameters(arch: ModelArch) -> int:
    """Numbers of the activations of plain MLPs; an xIELU has four."""
    num_plain = sum(layer.mlp.kind is MlpKind.PLAIN for layer in arch.layers)
    return 4 * num_plain * (arch.activation == "xielu")


def _num_differences(arch: ModelArch) -> int:
    """Numbers of the factors of differential attention beyond the ones of its norms, which the checkpoint does not
    have: four vectors of a head, and ones for two."""
    return sum(2 * mixer.heads.head_size for mixer in arch.plain_attentions if mixer.difference is not None)


def num_active_parameters(arch: ModelArch) -> int:
    """Parameters that one token meets: all of them, but for the experts that it is not sent to."""
    if arch.stored is not None:
        return arch.stored.num_parameters
    idle = sum(max(0, shape.count * shape.num_weights - shape.num_active) for shape in weight_shapes(arch).body)
    for layer in arch.layers:
        experts = layer.mlp.experts
        if experts is not None and experts.has_bias:
            idle += (experts.num_experts - experts.routing.num_chosen) * (2 * experts.size + arch.hidden_size)
    return num_parameters(arch) - idle


def _qkv(arch: ModelArch, own: Heads) -> Shape:
    size, heads, kv_heads = own.head_size, own.num_heads, own.num_kv_heads
    names = arch.family.names
    if _gates_are_behind_queries(arch):
        return (size,) * heads + (kv_heads * size,) * 2, arch.hidden_size
    if names.qkv_by_head or names.qkv_groups is not None:
        groups = names.qkv_groups or kv_heads
        return (heads // groups * size,) * groups + (kv_heads // groups * size,) * 2 * groups, arch.hidden_size
    return (heads * size, kv_heads * size, kv_heads * size), arch.hidden_size


def _gates_are_behind_queries(arch: ModelArch) -> bool:
    return arch.is_gated and arch.family.names.gate is None


def _gate(arch: ModelArch, mixer: AttentionSpec) -> Shape:
    """The gates of attention; head by head where they are behind queries."""
    size, heads = mixer.heads.head_size, mixer.heads.num_heads
    return (size,) * heads if _gates_are_behind_queries(arch) else (mixer.num_gates,), arch.hidden_size


def _with_gate_biases(arch: ModelArch) -> list[AttentionSpec]:
    """Attention whose gates have biases: the checkpoint has a number for each head."""
    return [mixer for mixer in arch.plain_attentions if mixer.num_gates and arch.family.names.gate_bias is not None]


def _output(arch: ModelArch, own: Heads) -> Shape:
    return (arch.hidden_size,), own.query_size


def _attention(arch: ModelArch, mixer: MixerSpec) -> Counter[Shape]:
    assert isinstance(mixer, AttentionSpec)
    own = mixer.heads
    if mixer.shared is not None:
        return _shared_block(arch, own, mixer.shared)
    if arch.is_convolved:
        return Counter([_output(arch, own)])
    if mixer.experts is not None:  # the others are in `_attention_experts`
        return Counter([((2 * own.kv_size,), arch.hidden_size)])
    if mixer.reads is not None:
        return Counter([((own.query_size,), arch.hidden_size), _output(arch, own)])
    if mixer.biases_keys:
        return Counter(_biased(arch, own, mixer.cached))
    more = [_gate(arch, mixer)] if mixer.num_gates else []
    if mixer.blocks is not None:
        index = mixer.blocks
        more += [((index.num_heads * index.head_size,), arch.hidden_size), ((index.head_size,), arch.hidden_size)]
    if mixer.means is not None:
        count, size = mixer.means.num_heads, mixer.means.head_size
        more += [((count * size,), arch.hidden_size), ((size, size), arch.hidden_size)]
    return Counter([_qkv(arch, own), _output(arch, own), *more])


def _biased(arch: ModelArch, own: Heads, cached: Heads) -> list[Shape]:
    """Of attention whose keys have biases; its output reads zeros, too."""
    products = [((size,), arch.hidden_size) for size in _qkv(arch, own)[0]]
    return [*products, ((own.num_kv_heads,), own.kv_size), _output(arch, cached)]


def _shared_block(arch: ModelArch, own: Heads, shared: SharedBlock) -> Counter[Shape]:
    """What the layer has of its own, and the block itself with the first of its layers."""
    size, inner, rank = arch.hidden_size, shared.intermediate_size, shared.rank
    qkv = _qkv(arch, own)[0]
    shapes = Counter[Shape]([((size,), size)])
    if rank:
        shapes.update([((rank,), size), ((2 * inner,), rank)])
    if shared.adapts_attention:
        shapes.update([shape for features in qkv for shape in (((rank,), 2 * size), ((features,), rank))])
    if shared.is_first:
        shapes.update([(qkv, 2 * size), _output(arch, own), ((inner, inner), size), ((size,), inner)])
    return shapes


def _compressed(arch: ModelArch, mixer: MixerSpec) -> Counter[Shape]:
    """Each group of heads has a weight of its own; products and gates of a compressor are one."""
    assert isinstance(mixer, CompressedAttentionSpec)
    size, features = arch.hidden_size, mixer.num_heads * mixer.head_size
    shapes = Counter[Shape]([((mixer.query_rank,), size), ((features,), mixer.query_rank), ((mixer.head_size,), size)])
    shapes[(mixer.group_rank,), features // mixer.num_groups] += mixer.num_groups
    shapes[(size,), mixer.num_groups * mixer.group_rank] += 1
    spec = mixer.compressor
    if spec is not None:
        parts = tuple(spec.num_products * part for part in spec.parts(mixer.head_size))
        shapes[parts * 2, size] += 1
        if spec.indexer is not None:
            shapes[(spec.indexer.num_heads * spec.indexer.head_size,), mixer.query_rank] += 1
    return shapes


def _compressed_floats(mixer: CompressedAttentionSpec) -> int:
    """Norms, sinks, and what is added to gates. The norm of heads has ones."""
    floats = mixer.query_rank + 2 * mixer.head_size + mixer.num_heads
    if mixer.compressor is not None:
        size = sum(mixer.compressor.parts(mixer.head_size))
        floats += size + mixer.compressor.rate * mixer.compressor.num_products * size
    return floats


def compressions(arch: ModelArch) -> list[CompressedAttentionSpec]:
    """Those of the mixers that attend over the last tokens and entries, in order."""
    return [mixer for mixer in arch.mixers if isinstance(mixer, CompressedAttentionSpec)]


def _index_weights(arch: ModelArch) -> list[LinearShape]:
    """Of indexers, what weighs their heads."""
    of_entries = (mixer.compressor.indexer for mixer in compressions(arch) if mixer.compressor is not None)
    found = [*indexers(arch), *(indexer for indexer in of_entries if indexer is not None)]
    counts = Counter(indexer.num_heads for indexer in found)
    size = arch.hidden_size
    return [LinearShape(parts=(n,), in_features=size, count=count, dtype="float32") for n, count in counts.items()]


def indexers(arch: ModelArch) -> list[IndexerSpec]:
    """Those of the layers that have one, in order."""
    found = (mixer.indexer for mixer in arch.attentions if isinstance(mixer, LatentAttentionSpec))
    return [indexer for indexer in found if indexer is not None]


_MIXERS: Mapping[type[MixerSpec], Callable[[ModelArch, MixerSpec], Counter[Shape]]] = MappingProxyType(
    {
        AttentionSpec: _attention,
        LatentAttentionSpec: latent_linears,
        CompressedAttentionSpec: _compressed,
        MambaSpec: recurrent_linears,
        Mamba2Spec: recurrent_linears,
        ShortConvSpec: recurrent_linears,
        GatedDeltaSpec: linear_attention_linears,
        LightningSpec: linear_attention_linears,
        RgLruSpec: rg_lru_linears,
        ConvolvedQkvSpec: convolved_linears,
        NGramSpec: ngram_linears,
    }
)
"""The linear layers of a mixer, and how many it has of each."""


def _mixer_floats(arch: ModelArch, mixer: MixerSpec) -> int:
    """Numbers of a mixer that are kept in float32: biases, its own norms, and vectors of a recurrence."""
    if isinstance(mixer, RecurrentSpec):
        return recurrent_floats(arch, mixer)
    if isinstance(mixer, CompressedAttentionSpec):
        return _compressed_floats(mixer)
    biases = arch.output_bias * arch.hidden_size
    if arch.is_convolved:
        return biases
    if isinstance(mixer, AttentionSpec) and mixer.shared is not None:
        shared = mixer.shared
        mlp = shared.has_bias * (2 * shared.intermediate_size + arch.hidden_size)
        return shared.is_first * (3 * arch.hidden_size + mlp)
    if isinstance(mixer, AttentionSpec) and mixer.experts is not None:
        return arch.hidden_size
    if isinstance(mixer, AttentionSpec):
        own = mixer.heads
        biases += (mixer.output_bias is not None) * arch.hidden_size
        biases += (arch.norms.attended is not None) * own.query_size
        biases += 2 * mixer.blocks.head_size if mixer.blocks else 0
        biases += (2 + mixer.means.rate) * mixer.means.head_size if mixer.means else 0
        biases += mixer.cached.head_size if mixer.difference is not None else 0
        biases += mixer.biases_keys * own.num_kv_heads * (1 + arch.attention_bias)
        gate = _gates_are_behind_queries(arch) * own.query_size
        features = own.query_size if mixer.reads is not None else sum(_qkv(arch, own)[0])
        return biases + arch.attention_bias * (features + gate) + mixer.has_sinks * own.num_heads
    return biases + latent_floats(arch, mixer)


def _gated(arch: ModelArch, mlp: MlpSpec) -> list[Shape]:
    inner = mlp.intermediate_size
    return [((inner, inner), arch.hidden_size), ((arch.hidden_size,), inner)]


def _plain(arch: ModelArch, mlp: MlpSpec) -> list[Shape]:
    inner = mlp.intermediate_size
    return [((inner,), arch.hidden_size), ((arch.hidden_size,), inner)]


_MLPS: Mapping[MlpKind, Callable[[ModelArch, MlpSpec], list[Shape]]] = MappingProxyType(
    {
        MlpKind.GATED: _gated,
        MlpKind.SPARSE: _gated,
        MlpKind.PLAIN: _plain,
        MlpKind.EXPERTS: lambda arch, mlp: [],
        MlpKind.NONE: lambda arch, mlp: [],
    }
)
"""But for mixtures of experts, which `_mixtures` adds."""


def _mixtures(arch: ModelArch) -> list[LinearShape]:
    """Linear layers of the mixtures of experts."""
    counts = Counter(experts for mlp in arch.mlps for experts in (mlp.experts, mlp.beside) if experts is not None)
    return [shape for experts, count in counts.items() for shape in _mixture(arch, experts, count)]


def _attention_experts(arch: ModelArch) -> list[LinearShape]:
    """Linear layers of experts that give queries and outputs."""
    size, inner = arch.hidden_size, arch.num_kv_heads * arch.head_size
    counts = Counter(mixer.experts for mixer in arch.plain_attentions if mixer.experts is not None)
    shapes = []
    for experts, count in counts.items():
        number, active = count * experts.num_experts, count * experts.num_chosen
        shapes += [
            LinearShape(parts=(experts.num_experts,), in_features=size, count=count, dtype="float32"),
            LinearShape(parts=(inner,), in_features=size, count=number, active=active),
            LinearShape(parts=(size,), in_features=inner, count=number, active=active),
        ]
    return shapes


def _mixture(arch: ModelArch, experts: ExpertsSpec, count: int) -> list[LinearShape]:
    size, chosen = arch.hidden_size, experts.routing.num_chosen
    router = (experts.num_candidates, 1) if experts.has_shared_gate else (experts.num_candidates,)
    rank = size if experts.router is None else experts.router.rank
    shapes = [LinearShape(parts=router, in_features=rank, count=count, dtype="float32")]
    if experts.router is not None:
        shapes.append(LinearShape(parts=(rank,), in_features=size, count=count, dtype="float32"))
        shapes.append(LinearShape(parts=(rank,), in_features=rank, count=2 * count, dtype="float32"))
    parts = 1 + experts.is_gated
    shapes += _experts(size, experts.size, parts, count * experts.num_experts, count * chosen)
    return shapes + (_experts(size, experts.shared_size, parts, count, count) if experts.shared_size else [])


def _experts(size: int, inner: int, parts: int, count: int, active: int) -> list[LinearShape]:
    return [
        LinearShape(parts=(inner,) * parts, in_features=size, count=count, active=active),
        LinearShape(parts=(size,), in_features=inner, count=count, active=active),
    ]


def _beside_floats(arch: ModelArch, experts: ExpertsSpec) -> int:
    """With the norms around experts and their MLP, and ones, which the router's norm has in place of the scale that its
    weight carries, where there is such a scale (Gemma 4)."""
    return _expert_floats(arch, experts) + experts.has_router_scale * 4 * arch.hidden_size


def _expert_floats(arch: ModelArch, experts: ExpertsSpec) -> int:
    parts = 1 + experts.is_gated
    bias = experts.has_shared_bias * (parts * experts.shared_size + arch.hidden_size)
    bias += experts.has_bias * experts.num_experts * (parts * experts.size + arch.hidden_size)
    bias += experts.has_common_bias * arch.hidden_size
    bias += experts.has_choice_bias * experts.num_candidates
    bias += experts.has_token_table * arch.vocab_size * experts.routing.num_chosen
    if experts.router is not None:  # biases, a norm, and factors of what the layer before read
        bias += (4 + experts.router.reads_last) * experts.router.rank
    return bias + (experts.has_router_bias + experts.has_router_scale) * experts.num_experts


def _num_floats(arch: ModelArch) -> int:
    """Numbers of norms and biases, and of recurrent layers' vectors."""
    floats = sum(_mixer_floats(arch, mixer) for mixer in arch.mixers)
    floats += stream_floats(arch) + sphere_floats(arch)
    floats += arch.scales.has_shifts * (2 + 8 * arch.num_layers) * arch.hidden_size
    for layer in arch.layers:
        floats += 0 if layer.mlp.experts is None else _expert_floats(arch, layer.mlp.experts)
        floats += 0 if layer.mlp.beside is None else _beside_floats(arch, layer.mlp.beside)
        floats += (arch.norms.gated is not None) * layer.mlp.intermediate_size
        floats += 0 if arch.scales.of_features is None else 2 * arch.hidden_size
        floats += layer.mlp.has_bias * sum(sum(parts) for parts, _ in _MLPS[layer.mlp.kind](arch, layer.mlp))
    norms = _num_norms(arch) * arch.hidden_size * (1 + arch.norms.has_bias)
    norms += _num_head_norms(arch) + _num_value_norms(arch)
    if arch.head_transform is not None:
        norms += arch.head_transform.has_bias * arch.hidden_size
    return floats + arch.head_bias * arch.vocab_size + norms + sum(m.num_gates for m in _with_gate_biases(arch))


def _num_norms(arch: ModelArch) -> int:
    """Norms over hidden states."""
    ends = sum(end is not None for end in (arch.norms.embedding, arch.norms.final, arch.head_transform))
    return ends + sum(_num_layer_norms(arch, layer) for layer in arch.layers)


def _norm_gates(arch: ModelArch, layer: LayerSpec) -> list[Shape]:
    """The products of gates behind norms."""
    norms, size = arch.norms_of(layer), arch.hidden_size
    return [((norms.gate_rank,), size), ((size,), norms.gate_rank)] * len(norms.with_gate)


def _num_layer_norms(arch: ModelArch, layer: LayerSpec) -> int:
    norms = arch.norms_of(layer)
    names = [*(norms.of_mixers if layer.mixers else ()), *(norms.of_mlp if layer.mlp.kind is not MlpKind.NONE else ())]
    return len(names) - names.count(None)


def _num_head_norms(arch: ModelArch) -> int:
    """Numbers of norms of heads. Those behind the rotation share ones and have one weight for query and key."""
    size, all_heads = arch.head_size, (arch.num_heads + arch.num_kv_heads) * arch.head_size
    if arch.norms.heads is HeadNorms.EACH and len(arch.plain_attentions) == len(arch.attentions):
        return sum((2 - (mixer.reads is not None)) * mixer.heads.head_size for mixer in arch.plain_attentions)
    if arch.norms.heads is HeadNorms.UNIT_ROTATED:
        return 2 * size * sum(mixer.rope is not None for mixer in arch.attentions)
    return (
        len(arch.attentions)
        * {
            HeadNorms.NONE: 0,
            HeadNorms.EACH: 2 * size,
            HeadNorms.ROTATED: 2 * size,
            HeadNorms.WHOLE: all_heads,
            HeadNorms.LAYER: 4 * size,
            HeadNorms.LAYER_OWN: all_heads,
        }[arch.norms.heads]
    )


def _num_value_norms(arch: ModelArch) -> int:
    """Ones, in place of weights that norms of values do not have."""
    return arch.norms.of_values * sum(mixer.heads.head_size for mixer in arch.plain_attentions if mixer.reads is None)


def context_per_token(arch: ModelArch) -> float:
    """Tokens of context whose attention, in all layers, takes as many operations as all linear layers of one token.

    Of a longer context than their window, layers that have one read only that: see `window_shares`. Infinite where no
    layer has attention.
    """
    if not arch.attentions:
        return math.inf
    if arch.stored is not None:
        linear = arch.stored.num_linear
    else:
        linear = sum(shape.num_active for shape in weight_shapes(arch).body)
    return linear / (2 * sum(query_sizes(arch)))


def query_sizes(arch: ModelArch) -> list[int]:
    """Features of the queries of each attention layer, and half those of each indexer, which weighs no values."""
    return [size for size, _ in _queries(arch)]


def _queries(arch: ModelArch) -> list[tuple[int, int | None]]:
    """As `query_sizes`, with the tokens that they see at most; None for all."""
    found = list[tuple[int, int | None]]()
    for mixer in arch.attentions:
        if isinstance(mixer, AttentionSpec):
            found += _plain_queries(mixer)
        elif isinstance(mixer, CompressedAttentionSpec):
            found += _compressed_queries(mixer)
        else:
            found.append((mixer.num_heads * mixer.cached_size, mixer.num_selected or mixer.window))
            if mixer.indexer is not None:
                found.append((mixer.indexer.num_heads * mixer.indexer.head_size // 2, None))
    return found


def _plain_queries(mixer: AttentionSpec) -> list[tuple[int, int | None]]:
    size, index, means = mixer.cached.query_size, mixer.blocks, mixer.means
    if means is not None:
        return [(size, means.num_tokens), (max(1, means.num_heads * means.head_size // (2 * means.rate)), None)]
    if index is None:
        return [(size, mixer.window)]
    return [(size, index.num_selected * index.block_size), (max(1, index.num_heads * index.head_size // 2), None)]


def _compressed_queries(mixer: CompressedAttentionSpec) -> list[tuple[int, int | None]]:
    """As `_queries`: a token of the context counts as its share of an entry."""
    size, spec = mixer.num_heads * mixer.head_size, mixer.compressor
    found: list[tuple[int, int | None]] = [(size, mixer.window)]
    if spec is not None and spec.indexer is not None:
        index = spec.indexer
        found.append((max(1, size // spec.rate), index.num_selected * spec.rate))
        found.append((max(1, index.num_heads * index.head_size // (2 * spec.rate)), None))
    elif spec is not None:
        found.append((max(1, size // spec.rate), None))
    return found


def window_shares(arch: ModelArch) -> tuple[tuple[int, float], ...]:
    """(window, share of attention in layers that have it): they read no more of the context than that, or attend to no
    more tokens of it that an indexer chooses."""
    windows = Counter[int]()
    for size, window in _queries(arch):
        if window is not None:
            windows[window] += size
    total = sum(query_sizes(arch))
    return tuple((window, size / total) for window, size in sorted(windows.items()))

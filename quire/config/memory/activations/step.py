"""How many bytes the activations of a step take, as `ops.cpu.memory.Arena` lays them out: the first gap that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from quire.config.arch import LayerSpec, ModelArch
from quire.config.family_spec import MlpKind, MlpSpec, NormKind, Norms
from quire.config.layers.any_mixer import MixerSpec
from quire.config.layers.layer_kinds import Heads
from quire.config.layers.mixers import (
    AttentionSpec,
    BlockIndexerSpec,
    CompressedAttentionSpec,
    LatentAttentionSpec,
    MeanIndexerSpec,
    SharedBlock,
)
from quire.config.layers.recurrent_mixers import RecurrentSpec
from quire.config.layers.streams import LayerEmbeddingsSpec, SphereSpec, StreamsSpec
from quire.config.memory.activations.convolved import convolved_layer
from quire.config.memory.activations.gated_streams import gated_stream_step
from quire.config.memory.activations.hyper import hyper_step
from quire.config.memory.activations.latent import attend_latents, open_attended
from quire.config.memory.activations.layout import FLOAT, INT32, Places, StepLayout
from quire.config.memory.activations.mlp import feed
from quire.config.memory.activations.recurrent import recur
from quire.config.memory.activations.reference import has_shortcuts, reference_activation_bytes
from quire.messages.kv import DTYPE_BYTES


def activation_bytes(arch: ModelArch, dtype: str, num_tokens: int, *, ops: str) -> int:
    """Bytes of a step's activations at their most: pieces end when Python lets go of the tensors."""
    if ops != "cpu":
        return num_tokens * reference_activation_bytes(arch, DTYPE_BYTES[dtype])
    return _step(arch, dtype, num_tokens).peak


def step_logits_bytes(arch: ModelArch, dtype: str, num_tokens: int, num_sampled: int, *, ops: str) -> int:
    """Bytes that the logits of `num_sampled` rows take beyond `activation_bytes`, whose places they use again."""
    logits = num_sampled * arch.vocab_size * 4
    if ops != "cpu":
        return logits * (1 if arch.vocab_size % 32 == 0 else 2)
    layout = _step(arch, dtype, num_tokens)
    before = layout.peak
    layout.free("hidden")
    sampled = num_sampled * arch.hidden_size * DTYPE_BYTES[dtype]
    layout.place("sampled", sampled)
    if arch.head_transform is not None:
        layout.place("transformed", sampled)
        layout.place("renormed", sampled)
        layout.free("transformed")
    layout.place("logits", logits)
    return layout.peak - before


def _step(arch: ModelArch, dtype: str, num_tokens: int) -> StepLayout:
    layout = StepLayout(num_tokens, DTYPE_BYTES[dtype])
    if arch.scales.embedding != 1.0:
        layout.take("rows", arch.hidden_size)
    layout.take("hidden", arch.hidden_size)
    if arch.scales.embedding != 1.0:
        layout.free("rows")
    if arch.norms.embedding is not None:
        layout.take("normed", arch.hidden_size)
        layout.free("hidden")
        layout.rename("normed", "hidden")
    if _has_shared_blocks(arch):  # which read the embeddings again
        layout.rename("hidden", "embedded")
        layout.place("hidden", 0)
    if arch.streams is not None:
        _streams(layout, arch, arch.streams)
        layout.take("normed", arch.hidden_size)
        return layout
    if arch.hyper is not None:
        hyper_step(layout, arch, arch.hyper)
        return layout
    if arch.gated_streams is not None:
        gated_stream_step(layout, arch, arch.gated_streams, _mix_one)
        return layout
    if arch.sphere is not None:
        _sphere(layout, arch, arch.sphere)
        layout.take("normed", arch.hidden_size)
        return layout
    if arch.layer_embeddings is not None:
        _embed_layers(layout, arch, arch.layer_embeddings)
    ends: dict[tuple[Places, LayerSpec], Places] = {}
    for layer in arch.layers[:: 2 if has_shortcuts(arch) else 1]:  # each meets the gaps that the one before left
        start = layout.places(), layer
        if start in ends:
            layout.restore(ends[start])
        else:
            _rule_of(arch, layer)(layout, arch, layer)
            ends[start] = layout.places()
    layout.take("normed", arch.hidden_size)
    layout.free(*(["embeddings"] if arch.layer_embeddings else []), *(["routed"] if "routed" in layout else []))
    return layout


def _has_shared_blocks(arch: ModelArch) -> bool:
    return any(mixer.shared is not None for mixer in arch.plain_attentions)


def _rule_of(arch: ModelArch, layer: LayerSpec) -> Callable[[StepLayout, ModelArch, LayerSpec], None]:
    if has_shortcuts(arch):
        return _shortcut_layer
    if arch.is_convolved:
        return convolved_layer
    if any(isinstance(mixer, AttentionSpec) and mixer.shared is not None for mixer in layer.mixers):
        return _shared_layer
    return _layer if arch.scales.joins is None else _joined_layer


def _shortcut_layer(layout: StepLayout, arch: ModelArch, layer: LayerSpec) -> None:
    """Two layers, and the experts that read what the first MLP reads."""
    _half(layout, arch, layer, "between", ("shortcut",))
    _half(layout, arch, layer, "out", ())
    layout.take("joined", arch.hidden_size)
    layout.free("out", "shortcut", "between", "hidden")
    layout.rename("joined", "hidden")


def _half(layout: StepLayout, arch: ModelArch, layer: LayerSpec, out: str, beside: tuple[str, ...]) -> None:
    size = arch.hidden_size
    layout.take("normed", size)
    _mix_one(layout, arch, layer.mixers[0])
    layout.free("normed")
    layout.take("normed", size)
    for piece in beside:
        layout.take(piece, size)
    layout.take("inner", layer.mlp.intermediate_size)
    layout.take(out, size)
    layout.free("inner", "normed", "mixed")


def _shared_layer(layout: StepLayout, arch: ModelArch, layer: LayerSpec) -> None:
    """A shared block, and recurrences that read what it adds (`models/variants/zamba2.py`)."""
    attention, *recurrences = layer.mixers
    assert isinstance(attention, AttentionSpec)
    assert attention.shared is not None
    size = arch.hidden_size
    _attend_beside_embeddings(layout, arch, attention.shared)
    layout.take("renormed", size)
    layout.free("mixed")
    _feed_shared(layout, arch, attention.shared)
    layout.take("read", size)
    layout.free("fed")
    layout.take("normed", size)
    for number, recurrence in enumerate(recurrences):
        assert isinstance(recurrence, RecurrentSpec)
        recur(layout, arch, recurrence)
        layout.free(*(["between"] if number else []))
        layout.rename("mixed", "between")
    layout.free("normed", "read", "hidden")
    layout.rename("between", "hidden")


def _attend_beside_embeddings(layout: StepLayout, arch: ModelArch, shared: SharedBlock) -> None:
    size, heads = arch.hidden_size, arch.num_heads * arch.head_size
    parts = (heads, *(arch.num_kv_heads * arch.head_size,) * 2)
    layout.take("both", 2 * size)
    layout.take("normed", 2 * size)
    layout.free("both")
    if shared.adapts_attention:
        for index, features in enumerate(parts):
            layout.take("thin", shared.rank)
            layout.take(f"part {index}", features)
            layout.free("thin")
        layout.take("adapted", sum(parts))
        layout.free("part 0", "part 1", "part 2")
    layout.take("qkv", sum(parts))
    layout.free(*(["adapted"] if shared.adapts_attention else []))
    layout.take("query", heads)
    layout.take("attended", heads)
    layout.free("qkv", "query")
    layout.take("mixed", size)
    layout.free("attended", "normed")


def _feed_shared(layout: StepLayout, arch: ModelArch, shared: SharedBlock) -> None:
    if shared.rank:
        layout.take("thin", shared.rank)
        layout.take("adapted", 2 * shared.intermediate_size)
        layout.free("thin")
    layout.take("both", 2 * shared.intermediate_size)
    layout.free(*(["adapted"] if shared.rank else []))
    layout.take("inner", shared.intermediate_size)
    layout.free("both")
    layout.take("fed", arch.hidden_size)
    layout.free("inner", "renormed")


def _streams(layout: StepLayout, arch: ModelArch, streams: StreamsSpec) -> None:
    """Streams made of the embeddings, the layers, and the streams' mean (`models/variants/gemma3n.py`)."""
    size, others = arch.hidden_size, range(1, streams.count)
    assert arch.layer_embeddings is not None
    layout.rename("hidden", "stream 0")
    _embed_layers(layout, arch, arch.layer_embeddings)
    _take_each(layout, "spread", others, size)
    _take_each(layout, "stream", others, size)
    _free_each(layout, "spread", others)
    for layer in arch.layers:
        _stream_layer(layout, arch, layer, streams, arch.layer_embeddings)
    _take_each(layout, "part", others, size)
    _take_each(layout, "matched", others, size)
    layout.take("hidden", size)
    for _ in others:
        layout.take("total", size)
        layout.free("hidden")
        layout.rename("total", "hidden")
    _free_each(layout, "part", others)
    _free_each(layout, "matched", others)
    _free_each(layout, "stream", range(streams.count))
    layout.free("embeddings")


def _sphere(layout: StepLayout, arch: ModelArch, sphere: SphereSpec) -> None:
    """Layers before the middle, passes through it that each begin with what those gave, and the rest."""
    size = arch.hidden_size
    for index, layer in enumerate(arch.layers):
        _pass_through_middle(layout, size, sphere, index)
        (mixer,) = layer.mixers
        assert isinstance(mixer, AttentionSpec)
        layout.take("normed", size)
        _attend(layout, arch, mixer)
        _move(layout, size, "between")
        layout.take("normed", size)
        layout.take("inner", layer.mlp.intermediate_size)
        layout.renew("inner", layer.mlp.intermediate_size)
        layout.take("mixed", size)
        layout.free("inner")
        _move(layout, size, "out")
        layout.free("between", "hidden")
        layout.rename("out", "hidden")
    _pass_through_middle(layout, size, sphere, arch.num_layers)


def _pass_through_middle(layout: StepLayout, size: int, sphere: SphereSpec, index: int) -> None:
    """What stands before a layer of this index, where a pass begins."""
    starts = [sphere.num_before + sphere.num_repeated * loop for loop in range(sphere.num_loops)]
    for _ in range(starts.count(index)):
        if index == sphere.num_before and "looped" not in layout:
            layout.take("looped", size)
        layout.take("begun", size)
        layout.free("hidden")
        layout.rename("begun", "hidden")


def _move(layout: StepLayout, size: int, out: str) -> None:
    """A half of a layer replaces a share of the hidden states."""
    layout.free("normed")
    layout.take("kept", size)
    layout.take(out, size)
    layout.free("kept", "mixed")


def _embed_layers(layout: StepLayout, arch: ModelArch, spec: LayerEmbeddingsSpec) -> None:
    """The embeddings of all layers; their norm has a row for each."""
    width = arch.num_layers * spec.size
    layout.take("raw", width)
    layout.take("rows", width)
    layout.free("raw")
    layout.take("projected", width)
    layout.take("joined", spec.size, rows=arch.num_layers)
    layout.take("embeddings", spec.size, rows=arch.num_layers)
    layout.free("rows", "projected", "joined")


def _stream_layer(
    layout: StepLayout, arch: ModelArch, layer: LayerSpec, streams: StreamsSpec, embeddings: LayerEmbeddingsSpec
) -> None:
    size, every, others = arch.hidden_size, range(streams.count), range(1, streams.count)
    (mixer,) = layer.mixers
    assert isinstance(mixer, AttentionSpec)
    _route(layout, arch, streams)
    _take_each(layout, "predicted", every, size)
    layout.free("routed")
    layout.take("normed", size)
    layout.take("thin", streams.laurel_rank)
    layout.take("wide", size)
    layout.free("thin")
    layout.take("low rank", size)
    layout.free("wide")
    _attend(layout, arch, mixer)
    layout.take("joined", size)
    layout.free("mixed")
    layout.take("halved", size)
    layout.take("between", size)
    layout.free("halved", "normed", "low rank", "joined")
    _feed(layout, arch, arch.norms, layer.mlp)
    layout.free("between")
    _route(layout, arch, streams)
    layout.take("error", size)
    _take_each(layout, "corrected", every, size)
    layout.free("routed", "error")
    layout.take("read", size)
    _add_embedding(layout, arch, embeddings, "added")
    _take_each(layout, "next", others, size)
    layout.free("read", "added", "out")
    layout.rename("corrected 0", "next 0")
    for kind, indices in (("corrected", others), ("predicted", every), ("stream", every)):
        _free_each(layout, kind, indices)
    for index in every:
        layout.rename(f"next {index}", f"stream {index}")


def _add_embedding(layout: StepLayout, arch: ModelArch, spec: LayerEmbeddingsSpec, piece: str) -> None:
    """What a layer makes of its embeddings (`models/variants/layer_embeddings.py`)."""
    layout.take("gated", spec.size)
    layout.take("projected", arch.hidden_size)
    layout.take(piece, arch.hidden_size)
    layout.free("projected", "gated")


def _route(layout: StepLayout, arch: ModelArch, streams: StreamsSpec) -> None:
    layout.take("router", arch.hidden_size)
    layout.take("routed", streams.count, FLOAT)
    layout.free("router")


def _take_each(layout: StepLayout, kind: str, indices: Iterable[int], columns: int) -> None:
    for index in indices:
        layout.take(f"{kind} {index}", columns)


def _free_each(layout: StepLayout, kind: str, indices: Iterable[int]) -> None:
    layout.free(*(f"{kind} {index}" for index in indices))


def _layer(layout: StepLayout, arch: ModelArch, layer: LayerSpec) -> None:
    last = "hidden"
    if layer.mixers:
        _mix(layout, arch, arch.norms_of(layer), layer.mixers)
        last = "between"
    if layer.mlp.kind is not MlpKind.NONE:
        _feed(layout, arch, arch.norms_of(layer), layer.mlp)
        last = "out"
        layout.free(*(["between"] if layer.mixers else []))
    if arch.layer_embeddings is not None:
        _add_embedding(layout, arch, arch.layer_embeddings, "embedded")
        layout.free(last)
        layout.rename("embedded", last)
    if arch.scales.of_layers:
        layout.take("scaled", arch.hidden_size)
        layout.free(last)
        layout.rename("scaled", last)
    if last != "hidden":
        layout.free("hidden")
        layout.rename(last, "hidden")


def _mix(layout: StepLayout, arch: ModelArch, norms: Norms, mixers: Sequence[MixerSpec]) -> None:
    """Each mixer adds to what those before it gave."""
    _norm(layout, norms, norms.input, arch.hidden_size)
    for number, mixer in enumerate(mixers):
        _mix_one(layout, arch, mixer)
        layout.free(*(["between"] if number else []))
        layout.rename("mixed", "between")
    _join(layout, arch, norms.post_attention, "between")
    if not arch.is_parallel:
        _end_norm(layout, norms.input)


def _feed(layout: StepLayout, arch: ModelArch, norms: Norms, mlp: MlpSpec) -> None:
    size = arch.hidden_size
    if arch.is_parallel and norms.pre_mlp is not None:
        layout.take("renormed", size)
        _end_norm(layout, norms.input)
        layout.rename("renormed", "normed")
    elif not arch.is_parallel:
        _norm(layout, norms, norms.pre_mlp, size)
    feed(layout, arch, mlp)
    if mlp.beside is not None:
        _mix_beside(layout, arch)
        return
    _join(layout, arch, norms.post_mlp, "out")
    _end_norm(layout, norms.input if arch.is_parallel and norms.pre_mlp is None else norms.pre_mlp)


def _mix_beside(layout: StepLayout, arch: ModelArch) -> None:
    """Experts beside the MLP that gave "out", which read other norms than it did (`models/variants/gemma4.py`)."""
    size = arch.hidden_size
    layout.free("normed")
    layout.take("mlp normed", size)
    layout.take("read", size)
    layout.take("routed", size)
    layout.take("mixed", size)
    layout.free("read", "routed")
    layout.take("added", size)
    layout.free("mlp normed", "mixed")
    layout.take("joined", size)
    layout.free("added", "out")
    layout.rename("joined", "out")


def _joined_layer(layout: StepLayout, arch: ModelArch, layer: LayerSpec) -> None:
    """Of a family with `Joins`: each half adds to what it reads."""
    size = arch.hidden_size
    layout.take("normed", size)
    _mix_one(layout, arch, layer.mixers[0])
    _join_normed(layout, size, "mixed")
    layout.take("renormed", size)
    layout.free("normed", "mixed")
    layout.rename("renormed", "normed")
    layout.take("inner", 0 if layer.mlp.experts else layer.mlp.intermediate_size)
    layout.take("out", size)
    layout.free("inner")
    _join_normed(layout, size, "out")
    layout.free("normed", "hidden")
    layout.rename("out", "hidden")


def _join_normed(layout: StepLayout, size: int, piece: str) -> None:
    layout.take("kept", size)
    layout.take("joined", size)
    layout.free(piece, "kept")
    layout.rename("joined", piece)


def _mix_one(layout: StepLayout, arch: ModelArch, mixer: MixerSpec) -> None:
    if isinstance(mixer, RecurrentSpec):
        recur(layout, arch, mixer)
    else:
        _attend(layout, arch, mixer)


def _attend(
    layout: StepLayout, arch: ModelArch, mixer: AttentionSpec | LatentAttentionSpec | CompressedAttentionSpec
) -> None:
    assert not isinstance(mixer, CompressedAttentionSpec), "models of which have streams"
    if isinstance(mixer, LatentAttentionSpec):
        attend_latents(layout, arch, mixer)
        return
    heads, keys_values = mixer.cached.query_size, 2 * mixer.cached.kv_size * (mixer.reads is None)
    is_difference = mixer.difference is not None
    if mixer.experts is not None:
        layout.take("keys and values", keys_values)
    if is_difference:
        layout.take("narrow", (heads + keys_values) // 2)
    if mixer.biases_keys:
        _bias(layout, mixer.heads)
    layout.take("qkv", heads + keys_values)
    layout.free(*(["normed query", "normed key", "value", "times"] if mixer.biases_keys else []))
    layout.free(*(["keys and values"] if mixer.experts is not None else []))
    layout.free(*(["narrow"] if is_difference else []))
    layout.take("query", heads)
    is_chosen = mixer.blocks is not None or mixer.means is not None
    if mixer.blocks is not None:
        _select_blocks(layout, mixer.blocks)
    if mixer.means is not None:
        _select_by_means(layout, mixer.means)
    layout.take("attended", heads)
    layout.free("selected" if is_chosen else "qkv", "query")
    open_attended(layout, mixer.num_gates)
    if arch.norms.attended is not None or arch.sphere is not None:
        layout.renew("attended", heads)
    if is_difference:
        layout.renew("attended", heads // 2)
        layout.take("renormed", mixer.cached.head_size, rows=mixer.heads.num_heads // 2)
        layout.free("attended")
        layout.rename("renormed", "attended")
    layout.take("mixed", arch.hidden_size)
    layout.free("attended")


def _bias(layout: StepLayout, heads: Heads) -> None:
    """Queries, keys, values and time steps, each by a product of its own."""
    for name, count in (("query", heads.num_heads), ("key", heads.num_kv_heads)):
        layout.take("raw", count * heads.head_size)
        layout.take(f"normed {name}", heads.head_size, rows=count)
        layout.free("raw")
    layout.take("value", heads.kv_size)
    layout.take("times", heads.num_kv_heads, FLOAT)


def _select_blocks(layout: StepLayout, indexer: BlockIndexerSpec) -> None:
    """What queries attend to, once they are rotated (`layers/indexers/blocks.py`)."""
    size = indexer.head_size
    layout.free("qkv")
    layout.take("raw", size)
    layout.take("key", size)
    layout.free("raw", "key")
    layout.take("raw", indexer.num_heads * size)
    layout.take("index query", indexer.num_heads * size)
    layout.free("raw")
    layout.take("selected", indexer.num_heads * indexer.num_selected, INT32)
    layout.free("index query")


def _select_by_means(layout: StepLayout, indexer: MeanIndexerSpec) -> None:
    """As `_select_blocks` (`layers/indexers/means.py`)."""
    count, size = indexer.num_heads, indexer.head_size
    layout.free("qkv")
    layout.take("key", 2 * size)
    layout.free("key")
    layout.take("raw", count * size)
    layout.take("index query", size, rows=count)
    layout.free("raw")
    layout.take("weights", count, FLOAT)
    layout.take("entries", indexer.num_selected, INT32)
    layout.free("weights")
    layout.take("selected", indexer.num_tokens, INT32)
    layout.free("entries", "index query")


def _norm(layout: StepLayout, norms: Norms, name: str | None, size: int) -> None:
    if name is not None:
        layout.take("normed", size)
    if name in norms.with_gate:
        layout.take("thin", norms.gate_rank)
        layout.take("gate", size)
        layout.free("thin", "gate")


def _end_norm(layout: StepLayout, name: str | None) -> None:
    if name is not None:
        layout.free("normed")


def _join(layout: StepLayout, arch: ModelArch, norm: str | None, piece: str) -> None:
    """What a part gives is normed, scaled and added to the residual; without norm or scale its product adds it."""
    is_scaled = arch.scales.residual != 1.0
    for _ in range((norm is not None) + (is_scaled or (norm is not None and arch.norms.kind is NormKind.LAYER))):
        layout.take("joined", arch.hidden_size)
        layout.free(piece)
        layout.rename("joined", piece)

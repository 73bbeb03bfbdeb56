"""How many bytes the activations of a token take where the reference ops compute, or those of Triton: an estimate."""

from __future__ import annotations

from quire.config.arch import ModelArch
from quire.config.layers.mixers import CompressedAttentionSpec, LatentAttentionSpec
from quire.config.layers.recurrent_mixers import GatedDeltaSpec, RecurrentSpec
from quire.config.memory.weights.shapes import compressions


def reference_activation_bytes(arch: ModelArch, item: int) -> int:
    """Bytes for each token: the reference computes in float32 and rounds what it returns."""
    size, (heads, qkv) = arch.hidden_size, _widest_heads(arch)
    recurrent = max(
        (
            item * (2 * size + _scanned_features(mixer) + mixer.inner_size) + 4 * mixer.in_features
            for mixer in arch.recurrences
        ),
        default=0,
    )
    latent = max((_reference_latent_bytes(arch, item, mixer) for mixer in _latent_mixers(arch)), default=0)
    latent = max([latent, *(_reference_compressed_bytes(arch, item, mixer) for mixer in set(compressions(arch)))])
    beside = item * size * any(len(layer.mixers) > 1 for layer in arch.layers)
    more = size * (arch.is_parallel or arch.norms.post_mlp is not None or arch.scales.residual != 1.0)
    more += 2 * size * (arch.scales.joins is not None)
    inner = arch.widest_mlp
    beside += 4 * 2 * size * bool(arch.norms.with_gate)
    attention = item * (2 * size + qkv + 2 * heads) + 4 * (qkv + 2 * heads)
    mlp = item * (4 * size + more + inner) + 4 * (size + 4 * inner)
    if arch.streams is not None:
        beside += item * 4 * arch.streams.count * size
    if arch.hyper is not None:
        beside += item * 2 * arch.hyper.count * size + 4 * 2 * arch.hyper.num_products
    if arch.gated_streams is not None:
        beside += (item + 4) * 6 * arch.gated_streams.count * size
    if arch.layer_embeddings is not None:
        beside += item * 4 * arch.num_layers * arch.layer_embeddings.size
    if any(layer.beside for layer in arch.mlps):
        mlp += item * 4 * size
    if any(experts.has_mlp_beside for experts in arch.mixtures):
        mlp += item * size
    if has_shortcuts(arch):
        beside += item * 2 * size
    if any((arch.gated_streams, arch.streams, arch.hyper, arch.layer_embeddings)):
        mlp += beside
    return max(beside + max(attention, recurrent, latent), mlp)


def _scanned_features(mixer: RecurrentSpec) -> int:
    """What all products before a scan give it."""
    if isinstance(mixer, GatedDeltaSpec) and mixer.rank is not None:
        return mixer.in_features + mixer.inner_size + mixer.num_times
    return mixer.in_features


def _widest_heads(arch: ModelArch) -> tuple[int, int]:
    """Features of queries, and of queries, keys and values, of the widest attention."""
    heads = arch.num_heads * arch.head_size
    widths = [(heads, heads + 2 * arch.num_kv_heads * arch.head_size)]
    widths += [(own.query_size, own.query_size + 2 * own.kv_size) for own in (m.cached for m in arch.plain_attentions)]
    return max(width for width, _ in widths), max(width for _, width in widths)


def _latent_mixers(arch: ModelArch) -> set[LatentAttentionSpec]:
    return {mixer for mixer in arch.attentions if isinstance(mixer, LatentAttentionSpec)}


def _reference_latent_bytes(arch: ModelArch, item: int, mixer: LatentAttentionSpec) -> int:
    """While queries are taken to the latents, or values from them; the products of all heads stand there twice."""
    heads, size, latent = mixer.num_heads, 2 * arch.hidden_size, mixer.latent_size
    before = heads * (2 * mixer.nope_size + mixer.rope_size + latent) + 4 * latent + 2 * mixer.rope_size
    joined = max(heads * latent, (heads + 2) * mixer.cached_size)
    behind = heads * (mixer.cached_size + latent + 2 * mixer.value_size)
    chosen = _reference_index_bytes(item, mixer) if mixer.indexer else 0
    return item * (size + max(before + joined, behind)) + 12 * max(latent, mixer.nope_size, mixer.value_size) + chosen


def _reference_compressed_bytes(arch: ModelArch, item: int, mixer: CompressedAttentionSpec) -> int:
    """Queries before and behind their norm, what was attended to, keys; or what a compressor reads, with its sums."""
    heads, spec = mixer.num_heads * mixer.head_size, mixer.compressor
    numbers = 2 * arch.hidden_size + 2 * mixer.query_rank + 2 * heads + 2 * mixer.head_size
    widest = max(heads, arch.hidden_size)
    if spec is not None:
        widest = max(widest, 2 * spec.num_products * sum(spec.parts(mixer.head_size)))
    if spec is not None and spec.indexer is not None:
        numbers += spec.indexer.num_heads * spec.indexer.head_size + 2 * spec.indexer.num_selected
    return item * (numbers + widest) + 8 * widest


def _reference_index_bytes(item: int, mixer: LatentAttentionSpec) -> int:
    """Low-rank queries, and the indexer's, before and behind the rotation; its keys, weights and choice."""
    assert mixer.indexer is not None
    assert mixer.query_rank is not None
    heads, size = mixer.indexer.num_heads, mixer.indexer.head_size
    return item * (mixer.query_rank + 2 * (heads + 1) * size) + 4 * (heads + 1) * size + 4 * mixer.indexer.num_selected


def has_shortcuts(arch: ModelArch) -> bool:
    """Whether two layers at a time share a mixture of experts (`models/variants/longcat_flash.py`)."""
    return any(mlp.beside is not None and not mlp.beside.has_router_scale for mlp in arch.mlps)

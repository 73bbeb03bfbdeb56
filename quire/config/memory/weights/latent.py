"""The tensors of attention over latents, as `shapes` counts them."""

from __future__ import annotations

from collections import Counter

from quire.config.arch import ModelArch
from quire.config.layers.any_mixer import MixerSpec
from quire.config.layers.mixers import LatentAttentionSpec
from quire.config.memory.weights.linear import Shape


def latent_linears(arch: ModelArch, mixer: MixerSpec) -> Counter[Shape]:
    """Each head has two weights of its own: from its query to the latents, and from them to its values."""
    assert isinstance(mixer, LatentAttentionSpec)
    heads, size, latent, key = mixer.num_heads, arch.hidden_size, mixer.latent_size, mixer.rope_size
    shapes = Counter[Shape]([((size,), heads * mixer.value_size)])
    shapes.update([((latent,), size), ((key,), size)] if mixer.has_key_norm else [((latent + key,), size)])
    shapes.update(_queries(arch, mixer))
    shapes[(mixer.latent_size,), mixer.nope_size] += heads
    shapes[(mixer.value_size,), mixer.latent_size] += heads
    if mixer.num_gates and not mixer.gates_with_queries:
        shapes[(mixer.num_gates,), size] += 1
    if mixer.indexer is not None:
        assert mixer.query_rank is not None
        index = mixer.indexer
        shapes.update([((index.num_heads * index.head_size,), mixer.query_rank), ((index.head_size,), size)])
    return shapes


def _queries(arch: ModelArch, mixer: LatentAttentionSpec) -> list[Shape]:
    """The products that give queries, head by head where gates stand behind them."""
    heads, rank, query = mixer.num_heads, mixer.query_rank, mixer.nope_size + mixer.rope_size
    if rank is None:
        return [((heads * query,), arch.hidden_size)]
    if not mixer.gates_with_queries:
        return [((rank,), arch.hidden_size), ((heads * query,), rank)]
    both = [((size,) * heads, 2 * rank) for size in (query, mixer.num_gates // heads)]
    return [((rank,), arch.hidden_size), *both]


def latent_floats(arch: ModelArch, mixer: LatentAttentionSpec) -> int:
    """Norms, sinks, and biases but for the output's."""
    rank, index = mixer.query_rank or 0, 2 * mixer.indexer.head_size if mixer.indexer else 0
    norms = rank + mixer.latent_size + index + mixer.has_key_norm * mixer.rope_size
    return (
        norms + mixer.has_sinks * mixer.num_heads + arch.attention_bias * (rank + mixer.latent_size + mixer.rope_size)
    )

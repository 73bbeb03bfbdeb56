"""Activations of attention over latents (`layers/latent.py`, `layers/indexers/tokens.py`)."""

from __future__ import annotations

from quire.config.arch import ModelArch
from quire.config.layers.mixers import IndexerSpec, LatentAttentionSpec
from quire.config.memory.activations.layout import FLOAT, INT32, StepLayout


def attend_latents(layout: StepLayout, arch: ModelArch, mixer: LatentAttentionSpec) -> None:
    """Attention, from what its norm gives to "mixed"."""
    if mixer.indexer is not None:
        _attend_indexed(layout, mixer, mixer.indexer)
    else:
        _attend(layout, mixer)
    layout.take("mixed", arch.hidden_size)
    layout.free("attended")


def _attend(layout: StepLayout, mixer: LatentAttentionSpec) -> None:
    """To all that queries see, or to what another layer chose."""
    heads, is_shared = mixer.num_heads * mixer.cached_size, mixer.num_shared is not None
    _compress(layout, mixer)
    layout.take("qkv", heads + 2 * mixer.cached_size)
    layout.free("projected", "compressed")
    layout.take("query", heads)
    layout.free(*(["qkv"] if is_shared else []))
    layout.take("attended", heads)
    layout.free("query", *([] if is_shared else ["qkv"]))
    _expand(layout, mixer)
    open_attended(layout, mixer.num_gates)


def _attend_indexed(layout: StepLayout, mixer: LatentAttentionSpec, indexer: IndexerSpec) -> None:
    """Attention over the latents that an indexer chooses (`layers/indexers/tokens.py`)."""
    assert mixer.query_rank is not None
    heads, size = mixer.num_heads * mixer.cached_size, indexer.head_size
    layout.take("down", mixer.query_rank)
    layout.take("low", mixer.query_rank)
    if mixer.gates_with_queries:
        layout.take("both", 2 * mixer.query_rank)
    layout.free("down")
    layout.take("projected", mixer.num_heads * (mixer.nope_size + mixer.rope_size))
    _latent_and_key(layout, mixer)
    layout.take("raw", size)
    layout.take("raw normed", size)
    layout.free("raw")
    layout.take("key", size)
    layout.free("raw normed")
    layout.take("qkv", heads + 2 * mixer.cached_size)
    layout.free("projected", "compressed", "key")
    layout.take("query", heads)
    layout.free("qkv")
    if "choice" in layout:
        layout.free("choice")
    layout.take("raw", indexer.num_heads * size)
    layout.take("index query", indexer.num_heads * size)
    layout.free("raw")
    layout.take("weights", indexer.num_heads, FLOAT)
    layout.take("selected", indexer.num_selected, INT32)
    layout.free("index query", "weights")
    layout.take("attended", heads)
    layout.free("query", *(() if mixer.gates_with_queries else ("low",)))
    if indexer.is_shared:
        layout.rename("selected", "choice")
    else:
        layout.free("selected")
    _expand(layout, mixer)
    open_attended(layout, mixer.num_gates)
    layout.free(*(("low", "both") if mixer.gates_with_queries else ()))


def _compress(layout: StepLayout, mixer: LatentAttentionSpec) -> None:
    """Queries and latents, as `latent_qkv` reads them."""
    if mixer.query_rank is not None:
        layout.take("down", mixer.query_rank)
        layout.take("down normed", mixer.query_rank)
        layout.free("down")
    layout.take("projected", mixer.num_heads * (mixer.nope_size + mixer.rope_size))
    if mixer.query_rank is not None:
        layout.free("down normed")
    _latent_and_key(layout, mixer)


def _latent_and_key(layout: StepLayout, mixer: LatentAttentionSpec) -> None:
    latent, key = mixer.latent_size, mixer.rope_size
    if mixer.has_key_norm:
        layout.take("latent", latent)
        layout.take("raw key", key)
        layout.take("shared key", key)
        layout.free("raw key")
    layout.take("compressed", latent + key)
    layout.free(*(["latent", "shared key"] if mixer.has_key_norm else []))


def _expand(layout: StepLayout, mixer: LatentAttentionSpec) -> None:
    """The values of what was attended to, by `latent_values`."""
    layout.take("values", mixer.num_heads * mixer.value_size)
    layout.free("attended")
    layout.rename("values", "attended")


def open_attended(layout: StepLayout, num_gates: int) -> None:
    """Gates of what was attended to."""
    layout.take("gate", num_gates)
    layout.free("gate")

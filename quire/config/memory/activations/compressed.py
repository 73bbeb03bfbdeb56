"""Activations of compressed attention (`layers/compressed.py`)."""

from __future__ import annotations

from quire.config.arch import ModelArch
from quire.config.layers.mixers import CompressedAttentionSpec
from quire.config.memory.activations.layout import FLOAT, INT32, StepLayout


def attend_compressed(layout: StepLayout, arch: ModelArch, mixer: CompressedAttentionSpec) -> None:
    """From what its norm gives to "mixed"."""
    heads, size, spec = mixer.num_heads, mixer.head_size, mixer.compressor
    layout.take("down", mixer.query_rank)
    layout.take("low", mixer.query_rank)
    layout.free("down")
    layout.take("raw", heads * size)
    layout.take("query", size, rows=heads)
    layout.free("raw")
    layout.take("raw", size)
    layout.take("key", size)
    layout.free("raw", "key")
    if spec is not None:
        layout.take("products", 2 * spec.num_products * sum(spec.parts(size)))
        layout.free("products")
    indexer = spec.indexer if spec is not None else None
    if indexer is not None:
        layout.take("index query", indexer.num_heads * indexer.head_size)
        layout.take("weights", indexer.num_heads, FLOAT)
        layout.take("selected", indexer.num_selected, INT32)
        layout.free("index query", "weights")
    layout.take("attended", heads * size)
    layout.free("query", "low", *(["selected"] if indexer is not None else []))
    layout.take("values", mixer.num_groups * mixer.group_rank)
    layout.take("mixed", arch.hidden_size)
    layout.free("attended", "values")

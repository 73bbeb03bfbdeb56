"""Activations of models with hyper-connections and compressed attention (`models/deepseek_v4.py`)."""

from __future__ import annotations

from quire.config.arch import ModelArch
from quire.config.layers.mixers import CompressedAttentionSpec
from quire.config.layers.streams import HyperSpec
from quire.config.memory.step_layout import FLOAT, INT32, StepLayout


def hyper_step(layout: StepLayout, arch: ModelArch, hyper: HyperSpec) -> None:
    """Streams that halves of layers read and write (`models/deepseek_v4.py`)."""
    size = arch.hidden_size
    layout.take("streams", hyper.count * size)
    layout.free("hidden")
    for layer in arch.layers:
        (mixer,), experts = layer.mixers, layer.mlp.experts
        assert isinstance(mixer, CompressedAttentionSpec)
        assert experts is not None
        _read_streams(layout, hyper, size)
        layout.take("normed", size)
        _attend_compressed(layout, arch, mixer)
        _write_streams(layout, hyper, size, "mixed")
        _read_streams(layout, hyper, size)
        layout.take("normed", size)
        if experts.has_token_table:
            layout.take("given", experts.routing.num_chosen, INT32)
        layout.take("out", size)
        layout.free(*(["given"] if experts.has_token_table else []))
        _write_streams(layout, hyper, size, "out")
    layout.take("products", hyper.count, FLOAT)
    layout.take("hidden", size)
    layout.free("products")
    layout.take("normed", size)
    layout.free("streams")


def _read_streams(layout: StepLayout, hyper: HyperSpec, size: int) -> None:
    layout.take("products", hyper.num_products, FLOAT)
    layout.take("read", size)
    layout.take("writing", hyper.num_products - hyper.count, FLOAT)
    layout.free("products")


def _write_streams(layout: StepLayout, hyper: HyperSpec, size: int, given: str) -> None:
    layout.free("normed")
    layout.take("written", hyper.count * size)
    layout.free(given, "read", "writing", "streams")
    layout.rename("written", "streams")


def _attend_compressed(layout: StepLayout, arch: ModelArch, mixer: CompressedAttentionSpec) -> None:
    """Attention over the last tokens and entries (`layers/compressed.py`)."""
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

"""Activations of models with streams behind gates (`models/variants/gated_streams.py`), and of n-grams
(`layers/recurrent/ngrams.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from quire.config.arch import ModelArch
from quire.config.layers.any_mixer import MixerSpec
from quire.config.layers.recurrent_mixers import NGramSpec
from quire.config.layers.streams import GatedStreamsSpec
from quire.config.memory.activations.layout import FLOAT, INT64, StepLayout
from quire.config.memory.activations.mlp import feed


def gated_stream_step(
    layout: StepLayout,
    arch: ModelArch,
    spec: GatedStreamsSpec,
    mix: Callable[[StepLayout, ModelArch, MixerSpec], None],
) -> None:
    """Streams that halves of layers read and write; `mix` is what a mixer takes."""
    size = arch.hidden_size
    layout.take("streams", spec.count * size)
    layout.free("hidden")
    for layer in arch.layers:
        *before, mixer = layer.mixers
        for ngrams in before:
            assert isinstance(ngrams, NGramSpec)
            _embed_ngrams(layout, ngrams)
        _read(layout, spec, size)
        mix(layout, arch, mixer)
        _write(layout, spec, size, "mixed")
        _read(layout, spec, size)
        feed(layout, arch, layer.mlp)
        _write(layout, spec, size, "out")
    _normed(layout, "stream normed", spec.count, size)
    layout.place("hidden", 0)
    _open(layout, spec, size, "normed")
    layout.free("stream normed", "streams")


def _read(layout: StepLayout, spec: GatedStreamsSpec, size: int) -> None:
    _normed(layout, "stream normed", spec.count, size)
    _open(layout, spec, size, "read")
    layout.take("products", spec.count, FLOAT)
    layout.take("writing", spec.count, FLOAT)
    layout.free("products", "stream normed")


def _open(layout: StepLayout, spec: GatedStreamsSpec, size: int, piece: str) -> None:
    layout.take("thin", spec.rank)
    layout.take("gates", spec.count * size)
    layout.free("thin")
    layout.take(piece, size)
    layout.free("gates")


def _write(layout: StepLayout, spec: GatedStreamsSpec, size: int, given: str) -> None:
    layout.take("written", spec.count * size)
    layout.free(given, "read", "writing", "streams")
    layout.rename("written", "streams")


def _normed(layout: StepLayout, piece: str, count: int, size: int) -> None:
    layout.take(piece, size, rows=count)


def _embed_ngrams(layout: StepLayout, spec: NGramSpec) -> None:
    count, size = spec.num_streams, spec.stream_size
    layout.take("rows", len(spec.head_rows), INT64)
    layout.take("embedded", spec.head_size, rows=len(spec.head_rows))
    layout.free("rows")
    layout.take("raw", spec.inner_size)
    _normed(layout, "keys", count, size)
    layout.free("raw")
    _normed(layout, "queries", count, size)
    layout.take("value", size)
    layout.take("values", spec.inner_size)
    layout.free("keys", "queries", "value", "embedded")
    _normed(layout, "values normed", count, size)
    layout.take("convolved", spec.inner_size)
    layout.free("values normed", "values")
    layout.take("written", spec.inner_size)
    layout.free("convolved", "streams")
    layout.rename("written", "streams")

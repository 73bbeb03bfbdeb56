"""Activations of models with hyper-connections (`models/variants/hyper_connections.py`)."""

from __future__ import annotations

from quire.config.arch import ModelArch
from quire.config.layers.any_mixer import MixerSpec
from quire.config.layers.mixers import CompressedAttentionSpec, LatentAttentionSpec
from quire.config.layers.streams import HyperSpec
from quire.config.memory.activations.compressed import attend_compressed
from quire.config.memory.activations.latent import attend_latents
from quire.config.memory.activations.layout import FLOAT, StepLayout
from quire.config.memory.activations.mlp import feed


def hyper_step(layout: StepLayout, arch: ModelArch, hyper: HyperSpec) -> None:
    """Streams that halves of layers read and write."""
    size = arch.hidden_size
    layout.take("streams", hyper.count * size)
    layout.free("hidden")
    for layer in arch.layers:
        (mixer,) = layer.mixers
        _read_streams(layout, hyper, size)
        layout.take("normed", size)
        _attend(layout, arch, mixer)
        _write_streams(layout, hyper, size, "mixed")
        _read_streams(layout, hyper, size)
        layout.take("normed", size)
        feed(layout, arch, layer.mlp)
        _write_streams(layout, hyper, size, "out")
    layout.take("products", hyper.count, FLOAT)
    layout.take("hidden", size)
    layout.free("products")
    layout.take("normed", size)
    layout.free("streams")


def _attend(layout: StepLayout, arch: ModelArch, mixer: MixerSpec) -> None:
    if isinstance(mixer, CompressedAttentionSpec):
        attend_compressed(layout, arch, mixer)
    else:
        assert isinstance(mixer, LatentAttentionSpec)
        attend_latents(layout, arch, mixer)


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

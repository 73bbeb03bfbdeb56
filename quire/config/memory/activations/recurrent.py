"""Activations of recurrent layers."""

from __future__ import annotations

from quire.config.arch import ModelArch
from quire.config.layers.recurrent_mixers import (
    GatedDeltaSpec,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    RecurrentSpec,
    RgLruSpec,
)
from quire.config.memory.activations.layout import FLOAT, StepLayout


def recur(layout: StepLayout, arch: ModelArch, mixer: RecurrentSpec) -> None:
    """From "normed" to "mixed"."""
    parts = (mixer.width, mixer.width) if isinstance(mixer, RgLruSpec) else (mixer.in_features,)
    pieces = [f"projected {index}" for index in range(len(parts))]
    for piece, columns in zip(pieces, parts, strict=True):
        layout.take(piece, columns)
    if isinstance(mixer, GatedDeltaSpec) and mixer.rank is not None:
        for piece, columns in (("gates", mixer.inner_size), ("times", mixer.num_times)):
            layout.take("thin", mixer.rank)
            layout.take(piece, columns)
            layout.free("thin")
            pieces.append(piece)
    if isinstance(mixer, MambaSpec):
        _derive(layout, mixer)
        layout.take("scanned", mixer.inner_size)
        layout.free("convolved", "derived", "wide")
    elif isinstance(mixer, RgLruSpec):
        _open(layout, mixer)
        layout.take("scanned", mixer.inner_size)
        layout.free("convolved", "gates")
    elif isinstance(mixer, Mamba2Spec | GatedDeltaSpec | LightningSpec):
        layout.take("convolved", mixer.inner_size if isinstance(mixer, LightningSpec) else mixer.conv_channels, FLOAT)
        layout.take("scanned", mixer.inner_size)
        layout.free("convolved")
    else:
        layout.take("scanned", mixer.inner_size)
    layout.free(*pieces)
    layout.take("mixed", arch.hidden_size)
    layout.free("scanned")


def _derive(layout: StepLayout, mixer: MambaSpec) -> None:
    """What Mamba's scan reads beside the projection, all of it in float32."""
    layout.take("convolved", mixer.inner_size, FLOAT)
    if layout.item != FLOAT:
        layout.take("rounded", mixer.inner_size)
    layout.take("derived", mixer.time_rank + 2 * mixer.state_size, FLOAT)
    if layout.item != FLOAT:
        layout.free("rounded")
    layout.take("time", mixer.time_rank)
    layout.take("wide", mixer.inner_size, FLOAT)
    layout.free("time")


def _open(layout: StepLayout, mixer: RgLruSpec) -> None:
    """The gates of an RG-LRU, and the convolution that they and the scan read."""
    layout.take("convolved", mixer.width, FLOAT)
    layout.take("by block", mixer.width)
    layout.take("gates", 2 * mixer.width, FLOAT)
    layout.free("by block")

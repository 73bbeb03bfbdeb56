"""Activations of layers with convolved queries and keys (`models/variants/zaya.py`)."""

from __future__ import annotations

from quire.config.arch import LayerSpec, ModelArch
from quire.config.layers.experts import RouterMlpSpec
from quire.config.layers.mixers import AttentionSpec
from quire.config.layers.recurrent_mixers import ConvolvedQkvSpec
from quire.config.memory.activations.layout import FLOAT, StepLayout
from quire.config.memory.activations.mlp import feed


def convolved_layer(layout: StepLayout, arch: ModelArch, layer: LayerSpec) -> None:
    """Attention, and experts whose router reads what that of the layer before did, "routed"."""
    size, experts = arch.hidden_size, layer.mlp.experts
    attention, state = layer.mixers
    assert isinstance(attention, AttentionSpec)
    assert isinstance(state, ConvolvedQkvSpec)
    assert experts is not None
    assert experts.router is not None
    _convolve(layout, arch, state)
    layout.take("query", attention.heads.query_size)
    layout.take("attended", attention.heads.query_size)
    layout.free("qkv", "query")
    layout.take("between", size)
    layout.free("attended")
    layout.take("normed", size)
    _route(layout, experts.router)
    feed(layout, arch, layer.mlp)
    layout.free("normed", "read", "between", "hidden")
    layout.rename("out", "hidden")
    layout.free(*(["routed"] if experts.router.reads_last else []))
    layout.rename("thin", "routed")


def _convolve(layout: StepLayout, arch: ModelArch, spec: ConvolvedQkvSpec) -> None:
    heads = spec.num_heads + spec.num_kv_heads
    layout.take("normed", arch.hidden_size)
    layout.take("projected", spec.in_features)
    layout.take("qkv", spec.inner_size)
    layout.take("taps", spec.joint_width * spec.head_size, rows=heads)
    layout.take("joint", spec.head_size, FLOAT, rows=heads)
    layout.free("taps", "joint", "projected", "normed")


def _route(layout: StepLayout, router: RouterMlpSpec) -> None:
    if router.reads_last:
        layout.take("own", router.rank, FLOAT)
        layout.take("thin", router.rank, FLOAT)
        layout.free("own")
    else:
        layout.take("thin", router.rank, FLOAT)
    layout.take("router normed", router.rank, FLOAT)
    layout.take("inner", router.rank, FLOAT)
    layout.free("router normed")
    layout.take("read", router.rank, FLOAT)
    layout.free("inner")

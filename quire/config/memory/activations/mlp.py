"""Activations of an MLP, or of a mixture of experts (`models/blocks.py`, `layers/experts.py`)."""

from __future__ import annotations

from quire.config.arch import ModelArch
from quire.config.family_spec import MlpKind, MlpSpec
from quire.config.layers.experts import ExpertsSpec
from quire.config.memory.activations.layout import INT32, StepLayout


def feed(layout: StepLayout, arch: ModelArch, mlp: MlpSpec) -> None:
    """From what it reads to "out"."""
    if mlp.experts is not None:
        _pass_experts(layout, arch.hidden_size, mlp.experts)
        return
    inner = mlp.intermediate_size
    layout.take("gates", 2 * inner if mlp.kind is MlpKind.SPARSE else 0)
    layout.take("both", 2 * inner if mlp.gate is not None else 0)
    layout.take("inner", inner)
    layout.free("both")
    if arch.norms.gated is not None:
        layout.renew("inner", inner)
    layout.take("out", arch.hidden_size)
    layout.free("gates", "inner")


def _pass_experts(layout: StepLayout, size: int, experts: ExpertsSpec) -> None:
    """Those that a table names, and the shared one that is computed before the others."""
    layout.take("given", experts.routing.num_chosen if experts.has_token_table else 0, INT32)
    if experts.has_mlp_beside:
        layout.take("inner", experts.shared_size)
        layout.take("shared", size)
        layout.free("inner")
    layout.take("out", size)
    layout.free("given", *(["shared"] if experts.has_mlp_beside else []))

"""A mixture of experts over the packed products of `gemm`.

Which experts a step touches is known only when it runs, so a graph cannot hold it as native ops: it holds a call of
this function between two runs of them.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from quire.config.experts import ClampedGate, Routing
from quire.ops.cpu.calls import run_or_note
from quire.ops.cpu.gemm import gated_linear, linear
from quire.ops.cpu.memory import empty
from quire.ops.functional import MixtureWeights
from quire.ops.mixture import mix


def mixture_of_experts(
    x: Tensor,
    weights: MixtureWeights,
    routing: Routing,
    *,
    activation: str | ClampedGate,
    residual: Tensor | None = None,
) -> Tensor:
    """See `functional.mixture_of_experts`."""
    out = empty((x.shape[0], weights.experts[0].down.out_features), x.dtype)
    run_or_note(partial(_compute, weights=weights, routing=routing, activation=activation), out, x, residual)
    return out


def _compute(
    out: Tensor,
    x: Tensor,
    residual: Tensor | None,
    *,
    weights: MixtureWeights,
    routing: Routing,
    activation: str | ClampedGate,
) -> None:
    total = mix(x, weights, routing, activation=activation, residual=residual, linear=linear, gated_linear=gated_linear)
    out.copy_(total)

"""A mixture of experts: the products of `gemm`, expert by expert."""

from __future__ import annotations

from torch import Tensor

from quire.config.experts import ClampedGate, Routing
from quire.ops.mixture import mix
from quire.ops.operands import MixtureWeights
from quire.ops.reference.gemm import gated_linear, linear
from quire.ops.threads import one_thread


@one_thread()
def mixture_of_experts(
    x: Tensor,
    weights: MixtureWeights,
    routing: Routing,
    *,
    activation: str | ClampedGate,
    residual: Tensor | None = None,
) -> Tensor:
    """See `functional.mixture_of_experts`."""
    total = mix(x, weights, routing, activation=activation, residual=residual, linear=linear, gated_linear=gated_linear)
    return total.to(x.dtype)

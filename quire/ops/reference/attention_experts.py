"""Experts in front of and behind attention: the products of `gemm`, expert by expert."""

from __future__ import annotations

from torch import Tensor

from quire.config.layers.experts import Routing
from quire.ops.contracts.operands import AttentionExpertWeights
from quire.ops.reference.experts import route
from quire.ops.reference.gemm import linear
from quire.ops.shared.attention_experts import fill_outputs, fill_queries
from quire.ops.threads import one_thread


@one_thread()
def expert_queries(
    x: Tensor, keys_values: Tensor, weights: AttentionExpertWeights, routing: Routing, head_size: int
) -> Tensor:
    """See `Ops.expert_queries`."""
    num_features = routing.num_chosen * weights.queries[0].out_features
    out = x.new_empty(x.shape[0], num_features + keys_values.shape[1])
    fill_queries(out, x, keys_values, weights=weights, routing=routing, head_size=head_size, linear=linear, route=route)
    return out


@one_thread()
def expert_outputs(
    attended: Tensor,
    x: Tensor,
    weights: AttentionExpertWeights,
    routing: Routing,
    head_size: int,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """See `Ops.expert_outputs`."""
    out = x.new_empty(x.shape[0], weights.outputs[0].out_features)
    fill_outputs(
        out, attended, x, residual, weights=weights, routing=routing, head_size=head_size, linear=linear, route=route
    )
    return out

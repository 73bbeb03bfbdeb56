"""Experts in front of and behind attention: the products of `gemm`, expert by expert."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from quire.config.layers.experts import Routing
from quire.ops.contracts.operands import AttentionExpertWeights
from quire.ops.cpu.products.experts import route
from quire.ops.cpu.products.gemm import linear
from quire.ops.cpu.runtime.calls import run_or_note
from quire.ops.cpu.runtime.memory import empty
from quire.ops.shared.attention_experts import fill_outputs, fill_queries


def expert_queries(
    x: Tensor, keys_values: Tensor, weights: AttentionExpertWeights, routing: Routing, head_size: int
) -> Tensor:
    """See `Ops.expert_queries`."""
    num_features = routing.num_chosen * weights.queries[0].out_features
    out = empty((x.shape[0], num_features + keys_values.shape[1]), x.dtype)
    fill = partial(fill_queries, weights=weights, routing=routing, head_size=head_size, linear=linear, route=route)
    run_or_note(fill, out, x, keys_values)
    return out


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
    out = empty((x.shape[0], weights.outputs[0].out_features), x.dtype)
    fill = partial(fill_outputs, weights=weights, routing=routing, head_size=head_size, linear=linear, route=route)
    run_or_note(fill, out, attended, x, residual)
    return out

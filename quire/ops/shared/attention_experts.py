"""Experts in front of and behind attention, over the products of an implementation.

Row invariance: each token is routed by itself, and what its experts give is added in the order of their indices, in
float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from quire.config.layers.experts import Routing
from quire.ops.contracts.operands import AttentionExpertWeights

Linear = Callable[..., Tensor]
Route = Callable[[Tensor, Routing, Tensor | None], tuple[Tensor, Tensor]]
"""Logits of the experts -> the chosen ones of each row, best first, and their weights; `reference.experts.route`."""


def fill_queries(
    out: Tensor,
    x: Tensor,
    keys_values: Tensor,
    *,
    weights: AttentionExpertWeights,
    routing: Routing,
    head_size: int,
    linear: Linear,
    route: Route,
) -> None:
    """`Ops.expert_queries`. Mutates: out [T, (H + 2K) * D]."""
    num_features = out.shape[1] - keys_values.shape[1]
    out[:, num_features:] = keys_values
    queries = _by_choice(out[:, :num_features], routing, head_size)
    for index, rows, places, _ in _chosen(x, weights, routing, linear, route):
        given = linear(x.index_select(0, rows), weights.queries[index])
        queries[rows, :, places] = given.view(rows.shape[0], -1, head_size)


def fill_outputs(
    out: Tensor,
    attended: Tensor,
    x: Tensor,
    residual: Tensor | None,
    *,
    weights: AttentionExpertWeights,
    routing: Routing,
    head_size: int,
    linear: Linear,
    route: Route,
) -> None:
    """`Ops.expert_outputs`. Mutates: out [T, N]."""
    heads = _by_choice(attended, routing, head_size)
    total = weights.output_bias.repeat(x.shape[0], 1)
    for index, rows, places, scales in _chosen(x, weights, routing, linear, route):
        read = heads[rows, :, places].flatten(1)
        given = linear(read, weights.outputs[index], out_dtype=torch.float32)
        total.index_add_(0, rows, given.mul_(scales.unsqueeze(1)))
    out.copy_(total if residual is None else total.add_(residual))


def _by_choice(heads: Tensor, routing: Routing, head_size: int) -> Tensor:
    """A view of query heads. Shapes: [T, H * D] -> [T, K, num_chosen, D]."""
    return heads.view(heads.shape[0], -1, routing.num_chosen, head_size)


def _chosen(
    x: Tensor, weights: AttentionExpertWeights, routing: Routing, linear: Linear, route: Route
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Of each expert that is touched, in order: its index, its rows, as which of their choices, and their weights."""
    chosen, scales = route(linear(x.float(), weights.router), routing, None)
    for index in range(len(weights.queries)):
        rows, places = (chosen == index).nonzero(as_tuple=True)
        if rows.shape[0]:
            yield index, rows, places, scales[rows, places]

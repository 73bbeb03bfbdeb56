"""A mixture of experts: how many tokens an expert has never reaches the host.

Row invariance: a row is routed by itself; its products are those of `products`; the parts are added in the order of the
experts' indices.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import triton
from torch import Tensor

from quire.config.layers.experts import ClampedGate, Routing, Scores
from quire.ops.contracts.operands import ExpertWeights, MixtureWeights
from quire.ops.triton.alignment import aligned, in_models
from quire.ops.triton.elementwise import activate, fill_clamped_gate, finish_product
from quire.ops.triton.expert_products import Pairs, Product, fill, stacked
from quire.ops.triton.gemm import gated_linear, linear
from quire.ops.triton.kernels import experts as kernels
from quire.ops.triton.variant import Variant, variant_of

SCORE_CODES = {Scores.SOFTMAX: 0, Scores.SIGMOID: 1, Scores.LOGITS: 2, Scores.LOGITS_SIGMOID: 3}
BLOCK = 1024
"""Columns of the sum that a program computes."""


@dataclass(frozen=True, slots=True)
class _Products:
    """The two products of one mixture's experts, in parts."""

    gate_up: tuple[Product, ...]
    down: tuple[Product, ...]


_products: WeakKeyDictionary[MixtureWeights, _Products] = WeakKeyDictionary()


def mixture_of_experts(
    x: Tensor,
    weights: MixtureWeights,
    routing: Routing,
    *,
    activation: str | ClampedGate,
    residual: Tensor | None = None,
    routed: Tensor | None = None,
    given: Tensor | None = None,
) -> Tensor:
    """See `Ops.mixture_of_experts`. Raises: ConfigError for experts whose weights have different formats.

    Models whose experts are identities in part, or given by a table, are not loaded for a GPU.
    """
    assert given is None
    expert, num_experts = weights.experts[0], len(weights.experts)
    out = x.new_empty(x.shape[0], expert.down.out_features)
    if not x.shape[0]:
        return out
    x = aligned(x)
    read = x if routed is None else aligned(routed)
    logits = linear(read, weights.router, weights.router_bias, out_dtype=torch.float32)
    chosen, scales = route(logits, num_experts, routing, weights.choice_bias, weights.scales)
    pairs, products = _sorted(chosen, num_experts), _products_of(weights)
    inner = _inner(x, expert, products.gate_up, pairs, scales if routing.weighs_input else None, activation)
    parts = inner.new_empty(len(inner), out.shape[1], dtype=torch.float32)
    fill(parts, inner, products.down, pairs, activation=None)
    shared = None if weights.shared is None else _shared(x, weights.shared, activation)
    has_gate = logits.shape[1] > num_experts
    kernels.sum_experts_kernel[(len(out), triton.cdiv(out.shape[1], BLOCK))](
        parts,
        pairs.places,
        None if routing.weighs_input else scales,
        shared,
        logits[:, num_experts:] if shared is not None and has_gate else None,
        residual,
        out,
        routing.shared_factor,
        out.shape[1],
        logits.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        NUM_CHOSEN=routing.num_chosen,
        BLOCK=BLOCK,
    )
    return out


def route(
    logits: Tensor,
    num_experts: int,
    routing: Routing,
    choice_bias: Tensor | None,
    expert_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The experts of each row, in the order of their indices, and their weights.

    Shapes: logits [T, num_experts or more] float32, choice_bias, expert_scales [X] float32 -> [T, num_chosen] int32,
    [T, num_chosen] float32.
    """
    groups, num_groups = routing.groups, 1 if routing.groups is None else routing.groups.count
    chosen = logits.new_empty(len(logits), routing.num_chosen, dtype=torch.int32)
    scales = logits.new_empty(len(logits), routing.num_chosen)
    kernels.route_kernel[(len(logits),)](
        logits,
        choice_bias if routing.near is None else None,
        expert_scales,
        chosen,
        scales,
        logits.stride(0),
        num_groups,
        num_experts // num_groups,
        float(routing.least_sum),
        float(routing.added_to_sum),
        float(routing.factor),
        None if routing.near is None else float(routing.near),
        SCORES=SCORE_CODES[routing.scores if routing.near is None else Scores.LOGITS],
        NUM_CHOSEN=routing.num_chosen,
        NUM_BEST=0 if groups is None else groups.num_best,
        NUM_CHOSEN_GROUPS=0 if groups is None else groups.num_chosen,
        RENORMALIZED=routing.renormalized,
        GROUPS=triton.next_power_of_2(num_groups),
        SIZE=triton.next_power_of_2(num_experts // num_groups),
        CHOICES=triton.next_power_of_2(routing.num_chosen),
    )
    return chosen, scales


def _sorted(chosen: Tensor, num_experts: int) -> Pairs:
    """Shapes: chosen [T, num_chosen] int32."""
    experts, order = chosen.flatten().sort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    bounds = torch.arange(num_experts + 1, dtype=torch.int32, device=order.device)
    return Pairs(order, places, torch.searchsorted(experts, bounds), chosen.shape[1])


def _inner(
    x: Tensor,
    expert: ExpertWeights,
    products: tuple[Product, ...],
    pairs: Pairs,
    scales: Tensor | None,
    activation: str | ClampedGate,
) -> Tensor:
    """What the second products read. Shapes: -> [P, F] in x's dtype, by place."""
    inner = x.new_empty(len(pairs.order), expert.down.in_features)
    if isinstance(activation, ClampedGate):
        both = x.new_empty(len(inner), expert.gate_up.out_features, dtype=torch.float32)
        fill(both, x, products, pairs, activation=None, gathers=True, scales=scales)
        fill_clamped_gate(inner, both, activation)
    elif expert.is_gated and len(products) > 1:  # the two halves of a feature may lie in different parts
        both = x.new_empty(len(inner), expert.gate_up.out_features, dtype=torch.float32)
        fill(both, x, products, pairs, activation=None, gathers=True, scales=scales)
        finish_product(inner, both, None, None, activation, gated=True)
    else:
        gated = expert.is_gated
        fill(inner, x, products, pairs, activation=activation, gated=gated, gathers=True, scales=scales)
    return inner


def _shared(x: Tensor, expert: ExpertWeights, activation: str | ClampedGate) -> Tensor:
    """The output of the expert that every token passes. Shapes: -> [T, N] float32."""
    first = (x, expert.gate_up, expert.gate_up_bias)
    if isinstance(activation, ClampedGate):
        inner = x.new_empty(len(x), expert.down.in_features)
        fill_clamped_gate(inner, linear(*first, out_dtype=torch.float32), activation)
    elif expert.is_gated:
        inner = gated_linear(*first, activation=activation)
    elif activation == "quick_gelu":
        inner = linear(*first)
        activate(inner, activation)
    else:
        inner = linear(*first, activation=activation)
    return linear(inner, expert.down, expert.down_bias, out_dtype=torch.float32)


def _products_of(weights: MixtureWeights) -> _Products:
    found = _products.get(weights)
    if found is None:
        experts = weights.experts
        found = _products[weights] = _Products(
            stacked([expert.gate_up for expert in experts], [expert.gate_up_bias for expert in experts]),
            stacked([expert.down for expert in experts], [expert.down_bias for expert in experts]),
        )
    return found


def _route_variants() -> list[Variant]:
    types = dict.fromkeys(("logits", "choice_bias", "expert_scales", "weights"), "*fp32") | {"chosen": "*i32"}
    types |= dict.fromkeys(("least_sum", "added_to_sum", "factor", "near"), "fp32")
    common = {"NUM_CHOSEN": 8, "CHOICES": 8, "RENORMALIZED": True}
    in_groups = {"SCORES": 1, "NUM_BEST": 2, "NUM_CHOSEN_GROUPS": 4, "GROUPS": 8, "SIZE": 32}
    plain = {"SCORES": 0, "NUM_BEST": 0, "NUM_CHOSEN_GROUPS": 0, "GROUPS": 1, "SIZE": 128}
    return [
        variant_of(kernels.route_kernel, types, common | in_groups, absent=("near", "expert_scales")),
        variant_of(kernels.route_kernel, types, common | plain, absent=("near", "choice_bias")),
        variant_of(
            kernels.route_kernel, types, common | plain | {"SCORES": 2}, absent=("choice_bias", "expert_scales")
        ),
    ]


def _sum_variant() -> Variant:
    types = {"parts": "*fp32", "places": "*i64", "weights": "*fp32", "shared": "*fp32", "shared_logits": "*fp32"}
    types |= {"residual": "*bf16", "out": "*bf16", "shared_factor": "fp32"}
    return variant_of(kernels.sum_experts_kernel, types, {"NUM_CHOSEN": 8, "BLOCK": BLOCK})


VARIANTS: tuple[Variant, ...] = in_models((*_route_variants(), _sum_variant()))

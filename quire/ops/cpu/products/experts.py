"""A mixture of experts as one op; `csrc/cpu/products/experts.cpp`.

The library reads weights and routing from structures of 8-byte words (`quire_cpu/products.h`), which are written once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from quire.config.layers.experts import ClampedGate, Routing, Scores
from quire.ops.contracts.operands import ExpertWeights, MixtureWeights
from quire.ops.cpu.library import check, load, word
from quire.ops.cpu.runtime.dtypes import ACTIVATIONS, DTYPES
from quire.ops.cpu.runtime.memory import empty
from quire.ops.cpu.runtime.weights import words_of

lib = load()
SCORES = {Scores.SOFTMAX: 0, Scores.SIGMOID: 1, Scores.LOGITS: 2, Scores.LOGITS_SIGMOID: 3, Scores.SQRT_SOFTPLUS: 4}
"""By `qr_scores`."""
NONE = -1.0
"""In place of `Routing.near`."""
PLAIN = ClampedGate(limit=math.inf)
SLOPED: Mapping[str, tuple[str, ClampedGate]] = MappingProxyType(
    {"quick_gelu": ("silu", ClampedGate(limit=math.inf, slope=1.702))}
)
"""Activations that are another one of slope * x, divided by the slope."""


@dataclass(frozen=True, slots=True)
class _Written:
    """The structures of one mixture."""

    experts: Tensor
    mixture: Tensor


_written: WeakKeyDictionary[MixtureWeights, _Written] = WeakKeyDictionary()


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
    """See `Ops.mixture_of_experts`."""
    out = empty((x.shape[0], weights.experts[0].down.out_features), x.dtype)
    written = _written.get(weights)
    if written is None:
        written = _written[weights] = _write(weights)
    check(
        lib.qr_mixture_of_experts(
            out.data_ptr(),
            x.data_ptr(),
            None if routed is None else routed.data_ptr(),
            DTYPES[(x if routed is None else routed).dtype],
            None if given is None else given.data_ptr(),
            DTYPES[x.dtype],
            None if residual is None else residual.data_ptr(),
            x.shape[0],
            written.mixture.data_ptr(),
            write_routing(routing).data_ptr(),
            _write_gating(activation, weights.experts[0].is_gated).data_ptr(),
        )
    )
    return out


def route(logits: Tensor, routing: Routing, choice_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `reference.experts.route`."""
    rows, num_experts = logits.shape
    chosen = torch.empty(rows, routing.num_chosen, dtype=torch.int32)
    weights = torch.empty(rows, routing.num_chosen)
    bias = None if choice_bias is None else choice_bias.data_ptr()
    addresses = (chosen.data_ptr(), weights.data_ptr(), logits.data_ptr(), bias)
    check(lib.qr_route(*addresses, rows, num_experts, write_routing(routing).data_ptr()))
    return chosen.long(), weights


@functools.cache
def write_routing(routing: Routing) -> Tensor:
    """A `qr_routing`, kept for good: graphs refer to it."""
    groups = routing.groups
    return _words(
        [
            routing.num_chosen,
            SCORES[routing.scores],
            *((0, 0, 0) if groups is None else (groups.count, groups.num_chosen, groups.num_best)),
            routing.renormalized,
            routing.weighs_input,
            float(routing.least_sum),
            float(routing.added_to_sum),
            float(routing.factor),
            float(routing.shared_factor),
            NONE if routing.near is None else float(routing.near),
            0.0 if groups is None else groups.left_out,
        ]
    )


@functools.cache
def _write_gating(activation: str | ClampedGate, is_gated: bool) -> Tensor:
    """A `qr_gating`, kept for good as well."""
    name, gate = (
        ("silu", activation) if isinstance(activation, ClampedGate) else SLOPED.get(activation, (activation, PLAIN))
    )
    return _words([is_gated, ACTIVATIONS[name], float(gate.limit), float(gate.slope), float(gate.offset)])


def _write(weights: MixtureWeights) -> _Written:
    shared = () if weights.shared is None else (weights.shared,)
    experts = _words([value for expert in (*weights.experts, *shared) for value in _expert(expert)])
    num_experts, down = len(weights.experts), weights.experts[0].down
    num_candidates = num_experts + weights.num_identities + weights.num_skips
    mixture = _words(
        [
            *words_of(weights.router, weights.router_bias),
            0 if weights.choice_bias is None else weights.choice_bias.data_ptr(),
            0 if weights.scales is None else weights.scales.data_ptr(),
            experts.data_ptr(),
            num_experts,
            bool(shared),
            weights.router.out_features > num_candidates,
            weights.experts[0].gate_up.in_features,
            down.out_features,
            weights.num_identities,
            weights.num_skips,
            weights.router.in_features,
        ]
    )
    return _Written(experts, mixture)


def _expert(expert: ExpertWeights) -> list[int]:
    """A `qr_expert`."""
    gate_up, down = expert.gate_up, expert.down
    return [*words_of(gate_up, expert.gate_up_bias), *words_of(down, expert.down_bias), down.in_features]


def _words(values: Sequence[float]) -> Tensor:
    return torch.tensor([word(value) for value in values], dtype=torch.int64)

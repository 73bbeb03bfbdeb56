"""A mixture of experts: who goes where, the products of `gemm` expert by expert, and how the parts are added up.

Row invariance: each row is routed by itself, and what its experts give is added in the order of their indices, in
float32, whatever else the step computes. Sums over a token's experts are written out, because torch adds up a row in an
order that depends on the number of rows; softmax runs row by row, and the rest is exact in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.config.layers.experts import ClampedGate, ExpertGroups, Routing, Scores
from quire.ops.contracts.operands import ExpertWeights, MixtureWeights
from quire.ops.reference.elementwise import gated_activation
from quire.ops.reference.gemm import gated_linear, linear
from quire.ops.shared.elementwise import VECTOR, activate
from quire.ops.threads import one_thread
from quire.utils.math import round_up


@one_thread()
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
    logits = linear((x if routed is None else routed).float(), weights.router, weights.router_bias)
    total = torch.zeros(x.shape[0], weights.experts[0].down.out_features)
    for part in parts_of(logits, weights, routing, given):
        rows = x if part.rows is None else x.index_select(0, part.rows)
        if part.weighs_input:
            rows = (rows * part.weights.unsqueeze(1)).to(x.dtype)
        out = _output(rows, part.expert, activation)
        if not part.weighs_input:
            out.mul_(part.weights.unsqueeze(1))
        if part.rows is None:
            total.add_(out)
        else:
            total.index_add_(0, part.rows, out)
    return (total if residual is None else total.add_(residual)).to(x.dtype)


def _output(rows: Tensor, expert: ExpertWeights | None, activation: str | ClampedGate) -> Tensor:
    """What an expert gives, or an identity. Shapes: rows [n, M] -> [n, N] float32."""
    if expert is None:
        return rows.to(torch.float32, copy=True)
    inner = _inner(rows, expert, activation)
    return linear(inner, expert.down, expert.down_bias, out_dtype=torch.float32)


def _inner(rows: Tensor, expert: ExpertWeights, activation: str | ClampedGate) -> Tensor:
    """What the second product reads. Shapes: rows [n, M] -> [n, F]."""
    first = (rows, expert.gate_up, expert.gate_up_bias)
    if isinstance(activation, ClampedGate):
        return gated_activation(linear(*first, out_dtype=torch.float32), activation).to(rows.dtype)
    if expert.is_gated:
        return gated_linear(*first, activation=activation)
    if activation != "quick_gelu":
        return linear(*first, activation=activation)
    inner = linear(*first)
    activate(inner, activation)
    return inner


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of a step that pass one expert."""

    expert: ExpertWeights | None
    """None for identities."""
    rows: Tensor | None
    """[n] int64, ascending; None for all."""
    weights: Tensor
    """[n] float32: what the expert's output is multiplied by."""
    weighs_input: bool = False
    """What the expert reads is multiplied instead."""


def parts_of(logits: Tensor, weights: MixtureWeights, routing: Routing, given: Tensor | None = None) -> Iterator[Part]:
    """What each expert that is touched has to do, in the order of their indices; then the shared one, or identities.

    Shapes: logits [T, X], of experts and identities and, behind them, of the shared expert's gate.
    """
    num_experts = len(weights.experts)
    first_skip = num_experts + weights.num_identities
    num_candidates = first_skip + weights.num_skips
    chosen, scales = route(logits[:, :num_candidates].contiguous(), routing, weights.choice_bias, given)
    is_identity = (chosen >= num_experts) & (chosen < first_skip)
    of_identities = _row_sums(scales.masked_fill(~is_identity, 0.0)) if weights.num_identities else None
    if weights.scales is not None:
        scales = scales * weights.scales[chosen]
    places = chosen.flatten().sort(stable=True).indices
    rows, scales = places // routing.num_chosen, scales.flatten()[places]
    end = 0
    for index, count in enumerate(torch.bincount(chosen.flatten(), minlength=num_experts)[:num_experts].tolist()):
        begin, end = end, end + count
        if count:
            yield Part(weights.experts[index], rows[begin:end], scales[begin:end], routing.weighs_input)
    if weights.shared is not None:
        yield Part(weights.shared, None, _shared_scales(logits[:, num_candidates:]).mul_(routing.shared_factor))
    if of_identities is not None:
        yield Part(None, None, of_identities)


def route(
    logits: Tensor, routing: Routing, choice_bias: Tensor | None, given: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The experts of each row, best first, and their weights; or the weights of those that are given.

    Shapes: logits [T, X] float32, choice_bias [X] float32, given [T, num_chosen] int32 -> [T, num_chosen] int64,
    [T, num_chosen] float32.
    """
    if given is not None:
        chosen = given.long()
        return chosen, _weights(_SCORES[routing.scores](logits).gather(1, chosen), routing)
    if routing.near is not None:
        return _one_by_one(logits, routing.num_chosen, routing.near)
    scores = _SCORES[routing.scores](logits)
    ranked = scores if choice_bias is None else scores + choice_bias
    if routing.groups is not None:
        ranked = _in_best_groups(ranked, routing.groups)
    chosen = _best(ranked, routing.num_chosen)
    return chosen, _weights(scores.gather(1, chosen), routing)


def _weights(weights: Tensor, routing: Routing) -> Tensor:
    """Of the scores of chosen experts. Shapes: [T, num_chosen] -> [T, num_chosen]."""
    if routing.scores is Scores.LOGITS:
        weights = weights.softmax(dim=-1)
    elif routing.scores is Scores.LOGITS_SIGMOID:
        weights = _sigmoid(weights)
    if routing.renormalized:
        sums = _row_sums(weights).clamp_(min=routing.least_sum).add_(routing.added_to_sum)
        weights = weights / sums.unsqueeze(1)
    return weights if routing.factor == 1.0 else weights * routing.factor


def _one_by_one(logits: Tensor, num_chosen: int, near: float) -> tuple[Tensor, Tensor]:
    """SparseMixer (2409.12136) without its noise, as `PhimoeTopKRouter` of transformers computes it."""
    left, chosen, weights = logits, [], []
    for _ in range(num_chosen):
        best = _best(left, 1)
        highest = left.gather(1, best)
        is_far = (highest - logits) / logits.abs().maximum(highest) > near
        chosen.append(best)
        weights.append(left.masked_fill(is_far, -torch.inf).softmax(dim=-1).gather(1, best))
        left = left.scatter(1, best, -torch.inf)
    return torch.cat(chosen, dim=1), torch.cat(weights, dim=1)


def _sigmoid(logits: Tensor) -> Tensor:
    """As a softmax beside 0: torch computes the end of a stretch of elements with other instructions than the rest, but
    rows of a softmax all alike.
    """
    return torch.stack([logits, torch.zeros_like(logits)], dim=-1).softmax(dim=-1)[..., 0].contiguous()


def _sqrt_softplus(logits: Tensor) -> Tensor:
    """In rows of whole vectors, as torch computes the end of a stretch of elements otherwise."""
    wide = logits.new_zeros(logits.shape[0], round_up(logits.shape[1], VECTOR))
    wide[:, : logits.shape[1]] = logits
    return F.softplus(wide).sqrt_()[:, : logits.shape[1]].contiguous()


_SCORES: Mapping[Scores, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        Scores.SOFTMAX: lambda logits: logits.softmax(dim=-1),
        Scores.SIGMOID: _sigmoid,
        Scores.LOGITS: lambda logits: logits,
        Scores.LOGITS_SIGMOID: lambda logits: logits,
        Scores.SQRT_SOFTPLUS: _sqrt_softplus,
    }
)


def _best(scores: Tensor, count: int) -> Tensor:
    """Columns of each row's highest scores, best first, the lower one where two are equal. Shapes: -> [T, count]."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()


def _in_best_groups(ranked: Tensor, groups: ExpertGroups) -> Tensor:
    """The scores of experts, those of groups that are left out replaced. Shapes: ranked [T, X] -> [T, X]."""
    in_groups = ranked.view(ranked.shape[0], groups.count, ranked.shape[1] // groups.count)
    highest = in_groups.sort(dim=-1, descending=True).values[..., : groups.num_best]
    of_groups = _row_sums(highest.flatten(0, 1)).view(-1, groups.count)
    is_left_out = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, _best(of_groups, groups.num_chosen), False)
    return in_groups.masked_fill(is_left_out.unsqueeze(-1), groups.left_out).flatten(1)


def _row_sums(values: Tensor) -> Tensor:
    """From left to right. Shapes: [T, k] -> [T]."""
    total = values[:, 0].clone()
    for column in values.unbind(dim=1)[1:]:
        total.add_(column)
    return total


def _shared_scales(gate: Tensor) -> Tensor:
    """Sigmoid of the gate's logits, or ones without a gate. Shapes: gate [T, 1 or 0] float32 -> [T]."""
    return _sigmoid(gate[:, 0]) if gate.shape[1] else torch.ones(gate.shape[0])

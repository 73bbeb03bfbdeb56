"""A mixture of experts against one written down token by token, and the bits of rows in company."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as nn

from quire.config.layers.experts import ClampedGate, ExpertGroups, Routing, Scores
from quire.ops.backends import ops_of
from quire.ops.contracts.operands import ExpertWeights, MixtureWeights
from quire.ops.contracts.ops import Ops
from quire.ops.reference.experts import route
from tests.ops.implementations import assert_close, assert_rows_alone, implementations_of, native_route, rand

SIZE, INNER, NUM_EXPERTS, NUM_ROWS = 60, 44, 9, 39
ROUTINGS = {
    "softmax first": Routing(num_chosen=3),
    "renormalized": Routing(num_chosen=3, renormalized=True),
    "softmax of the chosen": Routing(num_chosen=4, scores=Scores.LOGITS),
    "sigmoid": Routing(num_chosen=3, scores=Scores.SIGMOID, factor=2.5, shared_factor=0.5),
    "groups by their best": Routing(num_chosen=4, groups=ExpertGroups(count=3, num_chosen=2, num_best=1), factor=16.0),
    "groups by their two best": Routing(
        num_chosen=3,
        scores=Scores.SIGMOID,
        groups=ExpertGroups(count=3, num_chosen=1, num_best=2),
        renormalized=True,
        least_sum=1e-20,
    ),
    "groups whose others have a score": Routing(
        num_chosen=3,
        scores=Scores.SIGMOID,
        groups=ExpertGroups(count=3, num_chosen=1, num_best=2, left_out=0.6),
    ),
    "one after the other": Routing(num_chosen=3, scores=Scores.LOGITS, near=0.9),
    "logits choose, sigmoids weigh": Routing(num_chosen=3, scores=Scores.LOGITS_SIGMOID, renormalized=True),
    "what experts read is weighed": Routing(num_chosen=2, scores=Scores.SIGMOID, weighs_input=True, shared_factor=0.5),
    "one": Routing(num_chosen=1),
    "all": Routing(num_chosen=NUM_EXPERTS, renormalized=True),
    "divided by no less than": Routing(num_chosen=2, renormalized=True, least_sum=0.9),
    "roots of softplus": Routing(num_chosen=3, scores=Scores.SQRT_SOFTPLUS, renormalized=True, factor=1.5),
    "divided by more": Routing(num_chosen=2, scores=Scores.SIGMOID, renormalized=True, added_to_sum=0.1),
}
GATES = {
    "beside one": ClampedGate(limit=0.7, slope=1.702, offset=1.0),
    "silu": ClampedGate(limit=0.9),
}
SHARED = ("none", "plain", "gated")


@pytest.fixture(params=implementations_of("mixture_of_experts"))
def ops(request: pytest.FixtureRequest) -> Ops:
    return ops_of(request.param)


def best(candidates: list[int], scores: list[float]) -> list[int]:
    return sorted(candidates, key=lambda index: (-scores[index], index))


def in_groups(ranked: Tensor, groups: ExpertGroups | None) -> list[float]:
    if groups is None:
        return ranked.tolist()
    size = NUM_EXPERTS // groups.count
    of_groups = [sum(sorted(group.tolist())[-groups.num_best :]) for group in ranked.split(size)]
    chosen = best(list(range(groups.count)), of_groups)[: groups.num_chosen]
    return [score if i // size in chosen else groups.left_out for i, score in enumerate(ranked.tolist())]


def one_after_the_other(logits: list[float], num_chosen: int, near: float) -> tuple[list[int], list[float]]:
    left, weights = list(range(NUM_EXPERTS)), []
    chosen = best(left, logits)[:num_chosen]
    for index in chosen:
        highest = logits[index]
        close = [logits[i] for i in left if (highest - logits[i]) / max(abs(logits[i]), highest) <= near]
        weights.append(math.exp(highest) / sum(map(math.exp, close)))
        left.remove(index)
    return chosen, weights


class Mixture:
    """Weights as drawn, and as an implementation packs them."""

    def __init__(
        self,
        ops: Ops,
        shared: str = "none",
        *,
        bias: bool = False,
        has_biases: bool = False,
        gate: ClampedGate | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.ops, self.dtype, self.gate, self.has_biases = ops, dtype, gate, has_biases
        self.router = rand(NUM_EXPERTS + (shared == "gated"), SIZE, seed=1) * 0.3
        widths = [INNER] * NUM_EXPERTS + [70] * (shared != "none")
        self.gates, self.ups, self.downs = (
            [self._weight(width, 10 * kind + index) for index, width in enumerate(widths)] for kind in (1, 2, 3)
        )
        self.downs = [down.t().contiguous() for down in self.downs]
        self.choice_bias = rand(NUM_EXPERTS, seed=5) if bias else None
        self.router_bias = rand(len(self.router), seed=6) * has_biases
        self.biases = [
            (rand(2 * width, seed=50 + index) * has_biases, rand(SIZE, seed=70 + index) * has_biases)
            for index, width in enumerate(widths)
        ]
        packed = [self._packed(index) for index in range(len(widths))]
        self.weights = MixtureWeights(
            router=self.ops.pack_linear([self.router], dtype=torch.float32),
            router_bias=self.router_bias if has_biases else None,
            experts=tuple(packed[:NUM_EXPERTS]),
            choice_bias=self.choice_bias,
            shared=packed[NUM_EXPERTS] if shared != "none" else None,
        )
        self.is_gated = shared == "gated"

    def _weight(self, width: int, seed: int) -> Tensor:
        return (rand(width, SIZE, seed=seed) * 0.2).to(self.dtype)

    def _packed(self, index: int) -> ExpertWeights:
        gate_up, down = [self.gates[index], self.ups[index]], [self.downs[index]]
        biases = self.biases[index] if self.has_biases else (None, None)
        return ExpertWeights(
            gate_up=self.ops.pack_linear(gate_up, dtype=self.dtype),
            down=self.ops.pack_linear(down, dtype=self.dtype),
            gate_up_bias=biases[0],
            down_bias=biases[1],
        )

    def expected(self, x: Tensor, routing: Routing, residual: Tensor | None) -> Tensor:
        """In float64, one token after the other."""
        rows = [self._row(row.double(), routing) for row in x]
        out = torch.stack(rows)
        return out if residual is None else out + residual.double()

    def _row(self, x: Tensor, routing: Routing) -> Tensor:
        logits = self.router.double() @ x + self.router_bias.double()
        logits, gate = logits[:NUM_EXPERTS], logits[NUM_EXPERTS:]
        if routing.near is not None:
            chosen, weights = one_after_the_other(logits.tolist(), routing.num_chosen, routing.near)
            return self._sum(x, routing, chosen, weights, gate)
        known = {
            Scores.SOFTMAX: logits.softmax(0),
            Scores.SIGMOID: logits.sigmoid(),
            Scores.SQRT_SOFTPLUS: torch.nn.functional.softplus(logits).sqrt(),
        }
        scores = known.get(routing.scores, logits)
        ranked = scores + (0.0 if self.choice_bias is None else self.choice_bias.double())
        chosen = best(list(range(NUM_EXPERTS)), in_groups(ranked, routing.groups))[: routing.num_chosen]
        weigh = {Scores.LOGITS: partial(torch.softmax, dim=0), Scores.LOGITS_SIGMOID: torch.sigmoid}
        weights = weigh.get(routing.scores, torch.clone)(scores[chosen])
        if routing.renormalized:
            weights = weights / (max(weights.sum().item(), routing.least_sum) + routing.added_to_sum)
        weights = weights * routing.factor
        return self._sum(x, routing, chosen, weights.tolist(), gate)

    def _sum(self, x: Tensor, routing: Routing, chosen: list[int], weights: list[float], gate: Tensor) -> Tensor:
        if routing.weighs_input:
            out = sum(self._expert(weight * x, index) for weight, index in zip(weights, chosen, strict=True))
        else:
            out = sum(weight * self._expert(x, index) for weight, index in zip(weights, chosen, strict=True))
        if self.weights.shared is not None:
            factor = routing.shared_factor * (gate.sigmoid() if self.is_gated else 1.0)
            out = out + self._expert(x, NUM_EXPERTS) * factor
        assert isinstance(out, Tensor)
        return out

    def _expert(self, x: Tensor, index: int) -> Tensor:
        gate, up, down = (part[index].double() for part in (self.gates, self.ups, self.downs))
        inner_bias, out_bias = (bias.double() for bias in self.biases[index])
        opened, values = gate @ x + inner_bias[: len(gate)], up @ x + inner_bias[len(gate) :]
        if self.gate is None:
            return down @ (nn.silu(opened) * values) + out_bias
        opened, values = opened.clamp(max=self.gate.limit), values.clamp(-self.gate.limit, self.gate.limit)
        return down @ (opened * (self.gate.slope * opened).sigmoid() * (values + self.gate.offset)) + out_bias

    def __call__(self, x: Tensor, routing: Routing, residual: Tensor | None = None) -> Tensor:
        return self.ops.mixture_of_experts(x, self.weights, routing, activation=self.gate or "silu", residual=residual)


UNGATED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu2": lambda x: x.relu() ** 2,
    "quick_gelu": lambda x: x * (1.702 * x).sigmoid(),
    "silu": nn.silu,
}


class Ungated(Mixture):
    """Of experts that are down(activation(up(x)))."""

    def __init__(self, ops: Ops, activation: str, **options: Any) -> None:
        self.activation = activation
        super().__init__(ops, **options)

    def _packed(self, index: int) -> ExpertWeights:
        biases = self.biases[index] if self.has_biases else (None, None)
        return ExpertWeights(
            gate_up=self.ops.pack_linear([self.ups[index]], dtype=self.dtype),
            down=self.ops.pack_linear([self.downs[index]], dtype=self.dtype),
            gate_up_bias=None if biases[0] is None else biases[0][: len(biases[0]) // 2].clone(),
            down_bias=biases[1],
        )

    def _expert(self, x: Tensor, index: int) -> Tensor:
        up, down = (part[index].double() for part in (self.ups, self.downs))
        inner_bias, out_bias = (bias.double() for bias in self.biases[index])
        return down @ UNGATED[self.activation](up @ x + inner_bias[: len(up)]) + out_bias

    def __call__(self, x: Tensor, routing: Routing, residual: Tensor | None = None) -> Tensor:
        return self.ops.mixture_of_experts(x, self.weights, routing, activation=self.activation, residual=residual)


@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("activation", UNGATED)
def test_experts_without_a_gate_are_those_written_down(ops: Ops, activation: str, has_biases: bool) -> None:
    x, mixture = rand(NUM_ROWS, SIZE), Ungated(ops, activation, shared="plain", has_biases=has_biases)
    routing = ROUTINGS["sigmoid"]
    assert_close(mixture(x, routing, x), mixture.expected(x, routing, x))


@pytest.mark.parametrize("activation", UNGATED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_experts_without_a_gate_stands_alone(ops: Ops, activation: str, dtype: torch.dtype) -> None:
    mixture, x = Ungated(ops, activation, shared="plain", dtype=dtype), rand(NUM_ROWS, SIZE, dtype=dtype)
    assert_rows_alone(lambda rows: mixture(x[rows], ROUTINGS["sigmoid"]), NUM_ROWS)


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_mixture_is_the_one_written_down(ops: Ops, routing: str, shared: str) -> None:
    mixture, x, residual = Mixture(ops, shared), rand(NUM_ROWS, SIZE), rand(NUM_ROWS, SIZE, seed=9)
    assert_close(mixture(x, ROUTINGS[routing], residual), mixture.expected(x, ROUTINGS[routing], residual))


@pytest.mark.parametrize(
    "name",
    ["renormalized", "sigmoid", "logits choose, sigmoids weigh", "groups by their best", "groups by their two best"],
)
def test_a_bias_chooses_but_does_not_weigh(ops: Ops, name: str) -> None:
    mixture, x = Mixture(ops, "plain", bias=True), rand(NUM_ROWS, SIZE)
    routing = ROUTINGS[name]
    assert_close(mixture(x, routing), mixture.expected(x, routing, None))
    assert not torch.equal(mixture(x, routing), Mixture(ops, "plain")(x, routing))


@pytest.mark.parametrize("gate", [None, *GATES])
@pytest.mark.parametrize("shared", SHARED)
def test_products_have_biases_and_gates_are_clamped(ops: Ops, gate: str | None, shared: str) -> None:
    mixture = Mixture(ops, shared, has_biases=True, gate=None if gate is None else GATES[gate])
    x, routing = rand(NUM_ROWS, SIZE), ROUTINGS["softmax of the chosen"]
    assert_close(mixture(x, routing), mixture.expected(x, routing, None))
    assert not torch.allclose(
        mixture(x, routing), Mixture(ops, shared, has_biases=gate is not None)(x, routing), atol=1e-2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", GATES)
def test_a_row_with_biases_and_a_clamped_gate_stands_alone(ops: Ops, gate: str, dtype: torch.dtype) -> None:
    mixture = Mixture(ops, "plain", has_biases=True, gate=GATES[gate], dtype=dtype)
    x, routing = rand(NUM_ROWS, SIZE, dtype=dtype), ROUTINGS["softmax of the chosen"]
    assert_rows_alone(lambda rows: mixture(x[rows], routing), NUM_ROWS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_row_does_not_depend_on_its_neighbours(ops: Ops, routing: str, shared: str, dtype: torch.dtype) -> None:
    mixture, x = Mixture(ops, shared, dtype=dtype), rand(NUM_ROWS, SIZE, dtype=dtype)
    residual = rand(NUM_ROWS, SIZE, seed=9, dtype=dtype)
    assert_rows_alone(lambda rows: mixture(x[rows], ROUTINGS[routing], residual[rows]), NUM_ROWS)


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("scores", list(Scores))
def test_experts_that_are_given_are_only_weighed(ops: Ops, scores: Scores, shared: str) -> None:
    """Those that the router would choose have the bits that they have then; one may be there several times."""
    mixture = Mixture(ops, shared=shared)
    routing, x = Routing(num_chosen=3, scores=scores, renormalized=True), rand(NUM_ROWS, SIZE)
    logits = ops.linear(x, mixture.weights.router, out_dtype=torch.float32)[:, :NUM_EXPERTS].contiguous()
    chosen, _ = native_route(logits, routing, None) if ops.name == "cpu" else route(logits, routing, None)

    def computed(given: Tensor | None) -> Tensor:
        return ops.mixture_of_experts(x, mixture.weights, routing, activation="silu", given=given)

    assert torch.equal(computed(chosen.int()), computed(None))
    same = computed(torch.full((NUM_ROWS, 3), 4, dtype=torch.int32))
    one = replace(routing, num_chosen=1)
    alone = ops.mixture_of_experts(
        x, mixture.weights, one, activation="silu", given=torch.full((NUM_ROWS, 1), 4, dtype=torch.int32)
    )
    assert_close(same, alone.double())


@pytest.mark.parametrize("format", ["int8", "int4_g32"])
def test_rounded_experts_are_close_and_their_rows_stand_alone(format: str, ops: Ops) -> None:
    if ops.name == "reference":
        pytest.skip("the reference has no quantised weights")
    mixture, x, routing = Mixture(ops), rand(NUM_ROWS, SIZE), ROUTINGS["renormalized"]
    exact = mixture(x, routing)
    experts = tuple(
        ExpertWeights(
            gate_up=ops.quantize_linear([gate, up], format=format), down=ops.quantize_linear([down], format=format)
        )
        for gate, up, down in zip(mixture.gates, mixture.ups, mixture.downs, strict=True)
    )
    mixture.weights = MixtureWeights(router=mixture.weights.router, experts=experts)
    rounded = mixture(x, routing)
    assert (rounded - exact).norm() < {"int8": 0.03, "int4_g32": 0.25}[format] * exact.norm()
    assert_rows_alone(lambda rows: mixture(x[rows], routing), NUM_ROWS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", ["none", "gated"])
def test_a_router_may_read_something_else_and_experts_have_scales(ops: Ops, shared: str, dtype: torch.dtype) -> None:
    """Scales of zero leave an expert out, and those of one change nothing: so two such mixtures add up to the whole."""
    mixture, routing = Mixture(ops, shared, dtype=dtype), ROUTINGS["renormalized"]
    x, routed, residual = (rand(NUM_ROWS, SIZE, seed=seed, dtype=dtype) for seed in (0, 3, 9))

    def scaled(scales: Tensor | None, rows: slice = slice(None)) -> Tensor:
        weights = replace(mixture.weights, scales=scales)
        return ops.mixture_of_experts(
            x[rows], weights, routing, activation="silu", residual=residual[rows], routed=routed[rows]
        )

    scales = rand(NUM_EXPERTS, seed=4)
    whole, rest = scaled(None).double(), scaled(torch.zeros(NUM_EXPERTS)).double()
    assert_rows_alone(lambda rows: scaled(scales, rows), NUM_ROWS)
    assert torch.equal(scaled(torch.ones(NUM_EXPERTS)).double(), whole)
    assert not torch.allclose(mixture(x, routing, residual).double(), whole, atol=1e-2), "routed by what experts read"
    by_expert = [scaled(torch.eye(NUM_EXPERTS)[index]).double() - rest for index in range(NUM_EXPERTS)]
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    expected = rest + sum(scale * part for scale, part in zip(scales.double(), by_expert, strict=True))
    assert (scaled(scales).double() - expected).abs().max() < tolerance * expected.abs().max()
    if dtype == torch.float32 and shared == "none":
        mixed = torch.stack([mixture._row(row, routing) for row in routed.double()])
        own = ops.mixture_of_experts(routed, mixture.weights, routing, activation="silu", routed=routed)
        assert_close(own, mixed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bias", "num_chosen"), [(0.0, 6), (9.0, 3), (-9.0, 3), (9.0, 1)], ids=str)
@pytest.mark.parametrize("has_residual", [False, True])
def test_identities_give_what_they_read(
    ops: Ops, bias: float, num_chosen: int, has_residual: bool, dtype: torch.dtype
) -> None:
    """Some of those chosen, all of them, and none."""
    mixture, num_identities, routing = Mixture(ops, dtype=dtype), 4, Routing(num_chosen=num_chosen, factor=2.5)
    router = rand(NUM_EXPERTS + num_identities, SIZE, seed=1) * 0.3
    choice_bias = rand(len(router), seed=5) * 0.1
    choice_bias[NUM_EXPERTS:] += bias
    weights = MixtureWeights(
        router=ops.pack_linear([router], dtype=torch.float32),
        experts=mixture.weights.experts,
        choice_bias=choice_bias,
        num_identities=num_identities,
    )
    x, more = rand(NUM_ROWS, SIZE, dtype=dtype), rand(NUM_ROWS, SIZE, seed=9, dtype=dtype)

    def run(rows: slice = slice(None)) -> Tensor:
        residual = more[rows] if has_residual else None
        return ops.mixture_of_experts(x[rows], weights, routing, activation="silu", residual=residual)

    def expected(row: Tensor) -> Tensor:
        scores = (router.double() @ row).softmax(0)
        chosen = best(list(range(len(router))), (scores + choice_bias).tolist())[:num_chosen]
        out = [2.5 * scores[i] * (mixture._expert(row, i) if i < NUM_EXPERTS else row) for i in chosen]
        return torch.stack(out).sum(0)

    assert_close(run(), torch.stack([expected(row) for row in x.double()]) + more.double() * has_residual)
    assert_rows_alone(run, NUM_ROWS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("routed_dtype", [torch.float32, None])
@pytest.mark.parametrize("num_identities", [0, 2])
@pytest.mark.parametrize(("bias", "num_chosen"), [(0.0, 1), (0.0, 5), (9.0, 2), (-9.0, 1)], ids=str)
@pytest.mark.parametrize("has_residual", [False, True])
def test_skips_give_nothing_and_a_router_may_read_other_features(
    ops: Ops,
    bias: float,
    num_chosen: int,
    num_identities: int,
    has_residual: bool,
    routed_dtype: torch.dtype | None,
    dtype: torch.dtype,
) -> None:
    """Some of those chosen are skips, all of them, and none."""
    mixture, num_skips, width = Mixture(ops, dtype=dtype), 3, 23
    first_skip = NUM_EXPERTS + num_identities
    router = rand(first_skip + num_skips, width, seed=1) * 0.3
    choice_bias = rand(len(router), seed=5) * 0.1
    choice_bias[first_skip:] += bias
    weights = MixtureWeights(
        router=ops.pack_linear([router], dtype=torch.float32),
        experts=mixture.weights.experts,
        choice_bias=choice_bias,
        num_identities=num_identities,
        num_skips=num_skips,
    )
    x, more = rand(NUM_ROWS, SIZE, dtype=dtype), rand(NUM_ROWS, SIZE, seed=9, dtype=dtype)
    routed, routing = rand(NUM_ROWS, width, seed=7, dtype=routed_dtype or dtype), Routing(num_chosen=num_chosen)

    def run(rows: slice = slice(None)) -> Tensor:
        residual = more[rows] if has_residual else None
        return ops.mixture_of_experts(
            x[rows], weights, routing, activation="silu", residual=residual, routed=routed[rows]
        )

    def expected(row: Tensor, read: Tensor) -> Tensor:
        scores = (router.double() @ read).softmax(0)
        chosen = best(list(range(len(router))), (scores + choice_bias).tolist())[:num_chosen]
        kept = [i for i in chosen if i < first_skip]
        out = [scores[i] * (mixture._expert(row, i) if i < NUM_EXPERTS else row) for i in kept]
        return torch.stack([torch.zeros_like(row), *out]).sum(0)

    rows = [expected(*each) for each in zip(x.double(), routed.double(), strict=True)]
    assert_close(run(), torch.stack(rows) + more.double() * has_residual)
    assert_rows_alone(run, NUM_ROWS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_may_have_biases(ops: Ops, dtype: torch.dtype) -> None:
    """Beside experts that give nothing but them, for their weights are zero."""
    mixture, x = Mixture(ops, "plain", dtype=dtype), rand(NUM_ROWS, SIZE, dtype=dtype)
    gates = [rand(2 * INNER, seed=index) for index in range(NUM_EXPERTS)]
    ends = [rand(SIZE, seed=90 + index) for index in range(NUM_EXPERTS)]
    experts = tuple(
        replace(
            expert,
            gate_up=ops.pack_linear([torch.zeros(2 * INNER, SIZE)], dtype=dtype),
            gate_up_bias=gate,
            down_bias=end,
        )
        for expert, gate, end in zip(mixture.weights.experts, gates, ends, strict=True)
    )
    weights = MixtureWeights(router=mixture.weights.router, experts=experts)
    actual = ops.mixture_of_experts(x, weights, ROUTINGS["all"], activation="gelu")
    each = [
        down.double() @ (nn.gelu(gate[:INNER].double()) * gate[INNER:].double()) + end.double()
        for down, gate, end in zip(mixture.downs, gates, ends, strict=False)
    ]
    shares = (x.double() @ mixture.router.double().t()).softmax(dim=-1)
    assert_close(actual, shares @ torch.stack(each))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_native_routing_is_that_of_torch(routing: str) -> None:
    logits, bias = rand(300, NUM_EXPERTS), rand(NUM_EXPERTS, seed=3)
    for choice_bias in (None, bias):
        if ROUTINGS[routing].near is not None and choice_bias is not None:
            continue
        chosen, weights = native_route(logits, ROUTINGS[routing], choice_bias)
        expected, expected_weights = route(logits, ROUTINGS[routing], choice_bias)
        assert torch.equal(chosen, expected)
        torch.testing.assert_close(weights, expected_weights)


def test_native_routing_reads_all_that_a_routing_says() -> None:
    """A new field must reach `qr_routing`, or the native op would ignore it; so must one of a gate `qr_gating`."""
    assert {item.name for item in fields(Routing)} == {
        *("num_chosen", "scores", "groups", "renormalized", "least_sum", "added_to_sum", "factor", "shared_factor"),
        *("weighs_input", "near"),
    }
    assert [item.name for item in fields(ExpertGroups)] == ["count", "num_chosen", "num_best", "left_out"]
    assert {item.name for item in fields(ClampedGate)} == {"limit", "slope", "offset"}
    assert [item.name for item in fields(MixtureWeights)] == [
        *("router", "router_bias", "experts", "choice_bias", "scales", "shared", "num_identities", "num_skips")
    ]
    assert [item.name for item in fields(ExpertWeights)] == ["gate_up", "down", "gate_up_bias", "down_bias"]


def test_equal_scores_go_to_the_lower_index() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 2.0], [0.0] * 6])
    for scores in Scores:
        chosen, weights = route(logits, Routing(num_chosen=4, scores=scores), None)
        assert chosen.tolist() == [[1, 2, 4, 3], [0, 1, 2, 3]]
        assert weights[0, 0] == weights[0, 1] == weights[0, 2] > weights[0, 3]


def test_equal_groups_go_to_the_lower_index() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0, 2.0, 3.0], [0.0] * 6])
    groups = ExpertGroups(count=3, num_chosen=1, num_best=2)
    for scores in (Scores.SIGMOID, Scores.LOGITS):
        chosen, _ = route(logits, Routing(num_chosen=2, scores=scores, groups=groups), None)
        assert chosen.tolist() == [[2, 3], [0, 1]]


@pytest.mark.parametrize("name", ["renormalized", "groups by their two best"])
def test_a_row_that_is_not_a_number_stays_alone(ops: Ops, name: str) -> None:
    mixture, x = Mixture(ops, "gated"), rand(5, SIZE)
    expected = mixture(x, ROUTINGS[name])
    x[2] = float("nan")
    actual = mixture(x, ROUTINGS[name])
    others = [0, 1, 3, 4]
    assert torch.equal(actual[others], expected[others])
    assert actual[2].isnan().all()


@pytest.mark.parametrize(("num_rows", "dtype"), [(1, torch.float32), (4, torch.float32), (64, torch.bfloat16)])
def test_a_replay_routes_anew(ops: Ops, num_rows: int, dtype: torch.dtype) -> None:
    """Of 64 rows in bfloat16, native ops pass each other tiles, which the mixture does not read."""
    mixture, routing = Mixture(ops, "gated", dtype=dtype), ROUTINGS["renormalized"]
    buffer = torch.zeros(num_rows, SIZE, dtype=dtype)
    norm = 1 + rand(SIZE, seed=2)

    def run() -> tuple[Tensor, ...]:
        hidden = mixture(ops.rms_norm(buffer, norm, 1e-6), routing, buffer)
        return (mixture(ops.rms_norm(hidden, norm, 1e-6), routing, hidden),)

    graph = ops.make_graphs().record(run)
    for seed in range(3):
        buffer.copy_(rand(num_rows, SIZE, seed=seed))
        assert torch.equal(graph.replay()[0], run()[0])

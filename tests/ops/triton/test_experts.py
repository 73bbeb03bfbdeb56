"""A mixture of experts in Triton. Tolerances are those of `implementations.TOLERANCE`: sums in another order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from quire.config.layers.experts import ClampedGate, Routing
from quire.errors import ConfigError
from quire.ops.contracts.operands import ExpertWeights, MixtureWeights, StoredRows
from quire.ops.reference import experts as reference
from quire.ops.reference import quantized as reference_quantized
from tests.ops.implementations import assert_close, rand
from tests.ops.test_experts import GATES, ROUTINGS
from tests.ops.triton.device import DEVICE, randoms
from tests.ops.triton.test_quantized import FORMATS
from tests.ops.triton.test_quantized import made as made_rows

from quire.ops.triton import experts, gemm, quantized  # isort: skip  (device decides whether Triton can be imported)

SIZE, INNER, NUM_EXPERTS = 30, 20, 9


def expert(
    seed: int, dtype: torch.dtype, device: torch.device, *, width: int = INNER, gated: bool = True, biases: bool = False
) -> ExpertWeights:
    features = 2 * width if gated else width
    first, second = rand(features, SIZE, seed=seed) * 0.2, rand(SIZE, width, seed=seed + 100) * 0.2
    return ExpertWeights(
        gate_up=gemm.pack_linear([first], dtype=dtype, device=device),
        down=gemm.pack_linear([second], dtype=dtype, device=device),
        gate_up_bias=rand(features, seed=seed + 200).to(device) if biases else None,
        down_bias=rand(SIZE, seed=seed + 300).to(device) if biases else None,
    )


def mixture(
    dtype: torch.dtype = torch.float32,
    device: torch.device = DEVICE,
    *,
    shared: str = "none",
    gated: bool = True,
    biases: bool = False,
) -> MixtureWeights:
    """shared: "none", "plain", or "gated" for one with a gate of its own."""
    router = rand(NUM_EXPERTS + (shared == "gated"), SIZE, seed=1) * 0.3
    return MixtureWeights(
        router=gemm.pack_linear([router], dtype=torch.float32, device=device),
        router_bias=rand(len(router), seed=6).to(device) if biases else None,
        experts=tuple(expert(10 + i, dtype, device, gated=gated, biases=biases) for i in range(NUM_EXPERTS)),
        shared=None if shared == "none" else expert(90, dtype, device, width=30, gated=gated, biases=biases),
    )


def by_expert(chosen: Tensor, weights: Tensor) -> Tensor:
    return torch.zeros(len(chosen), NUM_EXPERTS).scatter_(1, chosen.long(), weights)


KNOWN = [
    name
    for name, routing in ROUTINGS.items()
    if routing.scores in experts.SCORE_CODES and (routing.groups is None or routing.groups.left_out == -math.inf)
]
"""Others are refused where experts are made."""


@pytest.mark.parametrize(
    ("name", "has_bias"),
    [*((name, False) for name in KNOWN), *((name, True) for name in ("sigmoid", "groups by their two best"))],
)
def test_rows_are_routed_as_the_reference_routes_them(name: str, has_bias: bool) -> None:
    routing, logits = ROUTINGS[name], rand(4, NUM_EXPERTS + 1) * 2
    logits[1, :4] = logits[1, 4]  # equal ones
    logits[2] = 0.0
    bias = rand(NUM_EXPERTS, seed=5) if has_bias else None
    expected = reference.route(logits[:, :NUM_EXPERTS].contiguous(), routing, bias)
    own_bias = None if bias is None else bias.to(DEVICE)
    chosen, weights = experts.route(logits.to(DEVICE), NUM_EXPERTS, routing, own_bias)
    assert torch.equal(chosen.cpu().long(), expected[0].sort(dim=1).values)
    assert_close(by_expert(chosen.cpu(), weights.cpu()), by_expert(*expected))


def assert_like_reference(
    dtype: torch.dtype, routing: Routing, *, activation: str | ClampedGate = "silu", num_rows: int = 5, **options: bool
) -> None:
    x, residual = randoms(num_rows, SIZE, dtype=dtype), randoms(num_rows, SIZE, seed=9, dtype=dtype)
    made, on_cpu = mixture(dtype, **options), mixture(dtype, torch.device("cpu"), **options)
    actual = experts.mixture_of_experts(x, made, routing, activation=activation, residual=residual)
    expected = reference.mixture_of_experts(x.cpu(), on_cpu, routing, activation=activation, residual=residual.cpu())
    assert actual.dtype == dtype
    assert_close(actual.cpu(), expected)


@pytest.mark.parametrize(
    ("dtype", "shared"), [(torch.float32, "none"), (torch.bfloat16, "plain"), (torch.float16, "gated")]
)
def test_a_mixture_is_that_of_the_reference(dtype: torch.dtype, shared: str) -> None:
    assert_like_reference(dtype, replace(ROUTINGS["sigmoid"], shared_factor=0.5), shared=shared)


@pytest.mark.parametrize("num_rows", [1, 20])
def test_experts_may_have_no_rows_or_several_tiles(num_rows: int) -> None:
    assert_like_reference(torch.bfloat16, ROUTINGS["one"], num_rows=num_rows)


@pytest.mark.parametrize("activation", [*GATES, "relu2", "quick_gelu"])
def test_products_have_biases_and_other_activations(activation: str) -> None:
    gate = GATES.get(activation)
    routing = ROUTINGS["softmax of the chosen"]
    assert_like_reference(
        torch.float16, routing, activation=gate or activation, gated=gate is not None, biases=True, shared="plain"
    )


@pytest.mark.parametrize("shared", ["none", "gated"])
def test_a_router_may_read_something_else_and_experts_have_scales(shared: str) -> None:
    x, routed, scales = randoms(5, SIZE), randoms(5, SIZE, seed=3), rand(NUM_EXPERTS, seed=4)
    made = replace(mixture(shared=shared), scales=scales.to(DEVICE))
    on_cpu = replace(mixture(device=torch.device("cpu"), shared=shared), scales=scales)
    routing = ROUTINGS["renormalized"]
    actual = experts.mixture_of_experts(x, made, routing, activation="silu", routed=routed)
    expected = reference.mixture_of_experts(x.cpu(), on_cpu, routing, activation="silu", routed=routed.cpu())
    assert_close(actual.cpu(), expected)
    assert not torch.allclose(
        experts.mixture_of_experts(x, made, routing, activation="silu").cpu(), expected, atol=1e-2
    )


def test_what_experts_read_may_be_weighed() -> None:
    assert_like_reference(torch.bfloat16, ROUTINGS["what experts read is weighed"])


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    dtype = torch.bfloat16
    made, x = mixture(dtype, shared="gated"), randoms(52, SIZE, dtype=dtype)  # 17 for each expert: not the first tile
    routing = ROUTINGS["groups by their two best"]
    whole = experts.mixture_of_experts(x, made, routing, activation="silu")
    for rows in (slice(0, 1), slice(3, 20)):
        assert torch.equal(experts.mixture_of_experts(x[rows], made, routing, activation="silu"), whole[rows])
    x[2] = torch.nan
    out = experts.mixture_of_experts(x[:5], made, routing, activation="silu")
    assert out[2].isnan().all()
    assert torch.equal(out[[0, 1, 3, 4]], whole[[0, 1, 3, 4]])


def test_a_mixture_takes_no_rows() -> None:
    out = experts.mixture_of_experts(randoms(0, SIZE), mixture(), ROUTINGS["one"], activation="silu")
    assert out.shape == (0, SIZE)


Parts = Callable[[int, int, int], list[StoredRows | Tensor]]
"""Rows, columns, seed -> what a weight is packed from."""


def parts_of(*names: str) -> Parts:
    """Rows of these formats, as many of each."""

    def made(rows: int, columns: int, seed: int) -> list[StoredRows | Tensor]:
        each = rows // len(names)
        return [made_rows(each, columns, seed=seed + i, **FORMATS[name]) for i, name in enumerate(names)]

    return made


def quantized_mixtures(first: Parts, second: Parts, *, biases: bool) -> tuple[MixtureWeights, MixtureWeights]:
    """A mixture for the device, and one of the numbers that its codes stand for, for the reference."""
    plain = [mixture(device=device, biases=biases, shared="plain") for device in (DEVICE, torch.device("cpu"))]
    packs = (partial(quantized.pack_quantized, device=DEVICE), reference_quantized.pack_quantized)
    found = []
    for made, pack in zip(plain, packs, strict=True):
        experts_ = tuple(
            replace(each, gate_up=pack(first(2 * INNER, SIZE, 300 + i)), down=pack(second(SIZE, INNER, 400 + i)))
            for i, each in enumerate(made.experts)
        )
        found.append(replace(made, experts=experts_))
    return found[0], found[1]


@pytest.mark.parametrize(
    ("first", "second", "activation", "routing"),
    [
        (("int8",), ("int8",), "silu", "softmax of the chosen"),
        (("int4_g32",), ("int8_g32_zeros",), "gelu", "sigmoid"),
        (("int4_g32_offsets",), ("int8_g16_offsets",), "silu", "what experts read is weighed"),
        (("levels_g32",), ("levels_g32",), "beside one", "one"),
        (("int4_g32", "int8"), ("int8", "int4_g32"), "silu", "softmax of the chosen"),
        (("float8",), ("float8_g128",), "silu", "sigmoid"),
    ],
)
def test_quantised_experts_give_what_their_codes_stand_for(
    first: tuple[str, ...], second: tuple[str, ...], activation: str, routing: str
) -> None:
    made, wide = quantized_mixtures(parts_of(*first), parts_of(*second), biases=activation == "silu")
    x = randoms(7, SIZE, dtype=torch.bfloat16)
    gate = GATES[activation] if activation == "beside one" else activation
    actual = experts.mixture_of_experts(x, made, ROUTINGS[routing], activation=gate)
    expected = reference.mixture_of_experts(x.cpu(), wide, ROUTINGS[routing], activation=gate)
    assert_close(actual.cpu(), expected)
    assert torch.equal(experts.mixture_of_experts(x[2:4], made, ROUTINGS[routing], activation=gate), actual[2:4])


def test_experts_of_several_formats_are_refused() -> None:
    made, _ = quantized_mixtures(parts_of("int8"), parts_of("int8"), biases=False)
    other = replace(made, experts=(mixture().experts[0], *made.experts[1:]))
    with pytest.raises(ConfigError, match=r"one format; those of one layer are dense .*, int8"):
        experts.mixture_of_experts(randoms(2, SIZE), other, ROUTINGS["one"], activation="silu")


def test_experts_with_an_order_of_inputs_are_refused() -> None:
    rows = replace(made_rows(SIZE, INNER, bits=8, group=INNER), order=torch.arange(INNER, dtype=torch.int32).flip(0))
    made, _ = quantized_mixtures(parts_of("int8"), lambda *_: [rows], biases=False)
    with pytest.raises(ConfigError, match="another order"):
        experts.mixture_of_experts(randoms(2, SIZE), made, ROUTINGS["one"], activation="silu")

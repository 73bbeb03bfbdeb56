"""Elementwise ops: values, and rows that do not depend on their neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quire.config.layers.experts import ClampedGate
from tests.ops.implementations import assert_close, assert_rows_alone, implementations_of, ops, rand, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("implementation", implementations_of("scale_add"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 64, 1000])
def test_scale_add_rounds_once(implementation: str, dtype: torch.dtype, size: int) -> None:
    x, residual = rand(13, size, dtype=dtype), rand(13, size, seed=1, dtype=dtype)
    assert torch.equal(run(implementation, "scale_add", x, 1.0, residual), x + residual)
    assert torch.equal(run(implementation, "scale_add", x, 5.65625), (x.double() * 5.65625).to(dtype))
    assert_close(run(implementation, "scale_add", x, -3.0, residual), (x.double() * -3 + residual.double()).to(dtype))


@pytest.mark.parametrize("implementation", implementations_of("soft_cap"))
def test_soft_cap_is_a_scaled_tanh(implementation: str) -> None:
    logits = rand(13, 20_011) * 40
    logits[0, :5] = torch.tensor([0.0, 1e-6, -3e4, 3e4, -torch.inf])

    def capped(rows: slice) -> torch.Tensor:
        part = logits[rows].clone()
        ops(implementation)["soft_cap"](part, 30.0)
        return part

    expected = 30 * torch.tanh(logits.double() / 30)
    assert (capped(slice(0, 13)).double() - expected).abs().max() < 1e-5
    assert_rows_alone(capped, 13)


XIELU = (0.9, 0.7, 0.5, -1e-6)


def naive_xielu(x: Tensor) -> Tensor:
    positive, negative, beta, eps = XIELU
    below = negative * (torch.expm1(x.clamp(max=eps)) - x) + beta * x
    return torch.where(x > 0, positive * x.square() + beta * x, below)


ACTIVATIONS: dict[str, tuple[tuple[float, ...], Callable[[Tensor], Tensor]]] = {
    "quick_gelu": ((), lambda x: x * torch.sigmoid(1.702 * x)),
    "xielu": (XIELU, naive_xielu),
}


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@pytest.mark.parametrize("implementation", implementations_of("activate"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 33, 96, 1000])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activate_computes_each_row_by_itself(
    implementation: str, dtype: torch.dtype, size: int, activation: str
) -> None:
    parameters, naive = ACTIVATIONS[activation]
    x = rand(21, size, dtype=dtype) * 4

    def activated(rows: slice) -> Tensor:
        part = x[rows].clone()
        ops(implementation)["activate"](part, activation, parameters)
        return part

    assert_close(activated(slice(0, 21)), naive(x.double()))
    assert_rows_alone(activated, 21)


@pytest.mark.parametrize("implementation", implementations_of("activate"))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activate_keeps_what_is_broken_broken(implementation: str, activation: str) -> None:
    x = torch.tensor([[math.nan, 1.0, -1.0]])
    ops(implementation)["activate"](x, activation, ACTIVATIONS[activation][0])
    assert x.isnan().tolist() == [[True, False, False]]


@pytest.mark.parametrize("implementation", implementations_of("clip"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_clip_bounds_magnitudes(implementation: str, dtype: torch.dtype) -> None:
    x = rand(13, 50, dtype=dtype)
    expected = x.clamp(-0.5, 0.5)
    ops(implementation)["clip"](x, 0.5)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("implementation", implementations_of("scale_heads"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_tokens_scales_by_position(implementation: str, dtype: torch.dtype) -> None:
    x, scales, positions = rand(5, 3, 22, dtype=dtype), rand(9, seed=1), torch.tensor([8, 0, 3, 3, 5])
    expected = (x.float() * scales[positions].view(5, 1, 1)).to(dtype)
    ops(implementation)["scale_tokens"](x, scales, positions)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("implementation", implementations_of("scale_shift"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_residual", [False, True])
def test_scale_shift_rounds_once(implementation: str, dtype: torch.dtype, has_residual: bool) -> None:
    x, residual, weights = rand(77, 37, dtype=dtype), rand(77, 37, seed=1, dtype=dtype), rand(4, 37, seed=2)

    def scaled(rows: slice) -> Tensor:
        part = x[rows].clone()
        ops(implementation)["scale_shift"](part, weights, residual[rows] if has_residual else None)
        return part

    scale, shift, of_residual, shift_of_residual = weights
    expected = (x.float() + shift) * scale
    if has_residual:
        expected = expected + (residual.float() + shift_of_residual) * of_residual
    assert torch.equal(scaled(slice(None)), expected.to(dtype))
    assert_rows_alone(scaled, 77)


@pytest.mark.parametrize("implementation", implementations_of("scale_heads"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_heads_rounds_once(implementation: str, dtype: torch.dtype) -> None:
    x, weight = rand(13, 3, 22, dtype=dtype), rand(22, seed=1)
    expected = (x.float() * weight).to(dtype)
    ops(implementation)["scale_heads"](x, weight)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("implementation", implementations_of("gated_activation"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 33, 1000])
@pytest.mark.parametrize("activation", GATES)
def test_gated_activation_computes_each_row_by_itself(
    implementation: str, dtype: torch.dtype, size: int, activation: str
) -> None:
    both = rand(21, 2 * size, dtype=dtype) * 4
    gate, up = both.double().split(size, dim=1)

    def gated(rows: slice) -> Tensor:
        return run(implementation, "gated_activation", both[rows], activation)

    assert_close(gated(slice(0, 21)), GATES[activation](gate) * up)
    assert_rows_alone(gated, 21)


@pytest.mark.parametrize("implementation", implementations_of("join_columns"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_join_columns_puts_rows_beside_each_other(implementation: str, dtype: torch.dtype) -> None:
    parts = [rand(13, size, seed=size, dtype=dtype) for size in (1, 40, 22)]
    joined = run(implementation, "join_columns", parts)
    assert torch.equal(joined, torch.cat(parts, dim=1))
    assert joined.is_contiguous()


@pytest.mark.parametrize("implementation", implementations_of("pair_values"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_pair_values_puts_values_of_two_heads_behind_each_other(implementation: str, dtype: torch.dtype) -> None:
    heads, kv_heads, size = 6, 4, 5
    qkv = rand(3, (heads + 2 * kv_heads) * size, dtype=dtype)
    found = run(implementation, "pair_values", qkv, heads, kv_heads).view(3, -1, 2 * size)
    given = qkv.view(3, -1, size)
    expected = torch.cat([given, torch.zeros_like(given)], dim=2)
    for head in range(kv_heads):
        first, second = (given[:, heads + kv_heads + head % 2 + half] for half in (0, 2))
        expected[:, heads + kv_heads + head] = torch.cat([first, second], dim=1)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("implementation", implementations_of("bias_keys"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 3), (1, 1)])
def test_bias_keys_adds_numbers_to_scores(implementation: str, dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    size, scale = 8, 8**-0.5
    query, key, value = (rand(13, count * size, seed=count, dtype=dtype) for count in (heads, kv_heads, kv_heads))
    times, decay = rand(13, kv_heads, seed=9) * 3, rand(kv_heads, seed=10)

    def made(rows: slice) -> Tensor:
        return run(implementation, "bias_keys", query[rows], key[rows], value[rows], times[rows], decay, scale)

    queries, keys, values = made(slice(0, 13)).view(13, -1, size + 4).split((heads, kv_heads, kv_heads), dim=1)
    assert torch.equal(queries[..., :size].reshape(13, -1), query)
    assert torch.equal(keys[..., :size].reshape(13, -1), key)
    assert torch.equal(values, F.pad(value.view(13, kv_heads, size), (0, 4)))
    gained = torch.einsum("tkd,thd->tkh", keys[..., size:].double(), queries[..., size:].double()) * scale
    expected = torch.exp(decay.double() * F.softplus(times.double())).unsqueeze(2).expand_as(gained)
    assert (gained / expected - 1).abs().max() < 2e-5
    assert_rows_alone(made, 13)


@pytest.mark.parametrize("implementation", implementations_of("subtract_heads"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_subtract_heads_rounds_once(implementation: str, dtype: torch.dtype) -> None:
    x = rand(13, 42, dtype=dtype)
    found = run(implementation, "subtract_heads", x, 0.375)
    assert torch.equal(found, (x[:, :21].float() - x[:, 21:].float() * 0.375).to(dtype))
    assert_rows_alone(lambda rows: run(implementation, "subtract_heads", x[rows], 0.375), 13)


@pytest.mark.parametrize("implementation", implementations_of("subtract_heads"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 33])
def test_clamped_gates_compute_each_row_by_itself(implementation: str, dtype: torch.dtype, size: int) -> None:
    both, gate = rand(13, 2 * size, dtype=dtype) * 4, ClampedGate(limit=1.5, slope=1.7, offset=1.0)
    opened, values = both.double().chunk(2, dim=1)
    opened, values = opened.clamp(max=1.5), values.clamp(-1.5, 1.5) + 1.0
    assert_close(run(implementation, "gated_activation", both, gate), opened * torch.sigmoid(1.7 * opened) * values)
    assert_rows_alone(lambda rows: run(implementation, "gated_activation", both[rows], gate), 13)

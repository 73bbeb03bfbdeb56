"""Elementwise ops in Triton. Tolerances are those of `implementations.TOLERANCE` where not said otherwise."""

from __future__ import annotations

import math

import pytest
import torch

from tests.ops.implementations import assert_close
from tests.ops.test_elementwise import ACTIVATIONS, GATES
from tests.ops.test_gemm import DTYPES
from tests.ops.triton.device import DEVICE, randoms

from quire.ops.triton import elementwise  # isort: skip  (device decides whether Triton can be imported)

SIZES = [1, 1030]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_scale_add_rounds_once(dtype: torch.dtype, size: int) -> None:
    x, residual = randoms(3, size, dtype=dtype), randoms(3, size, seed=1, dtype=dtype)
    assert torch.equal(elementwise.scale_add(x, 1.0, residual), x + residual)
    assert torch.equal(elementwise.scale_add(x, 5.65625), (x.double() * 5.65625).to(dtype))
    expected = (x.float() * -0.3 + residual.float()).to(dtype)
    assert torch.equal(elementwise.scale_add(x, -0.3, residual), expected)


def test_soft_cap_is_a_scaled_tanh() -> None:
    """Tolerance 1e-5 of a cap of 30."""
    logits = randoms(3, 1500) * 40
    logits[0, :6] = torch.tensor([0.0, 1e-6, -3e4, 3e4, -torch.inf, torch.nan])
    logits[1] /= 400  # the series near zero
    expected = 30 * torch.tanh(logits.double() / 30)
    elementwise.soft_cap(logits, 30.0)
    assert torch.allclose(logits.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert logits.isnan().sum() == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activate_computes_each_element(dtype: torch.dtype, size: int, activation: str) -> None:
    parameters, naive = ACTIVATIONS[activation]
    x = randoms(3, size, dtype=dtype) * 4
    x[0, 0], x[1, 0], x[2, 0] = math.nan, -200.0, -1e-3
    expected = naive(x.double())
    elementwise.activate(x, activation, parameters)
    assert x.isnan().nonzero().tolist() == [[0, 0]]
    assert_close(x.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
def test_clip_gate_and_scales(dtype: torch.dtype) -> None:
    x, gates = randoms(3, 66, dtype=dtype), randoms(3, 66, seed=1, dtype=dtype) * 5
    clipped, gated, scaled = x.clone(), x.clone(), x.clone()
    elementwise.clip(clipped, 0.5)
    assert torch.equal(clipped, x.clamp(-0.5, 0.5))
    elementwise.gate(gated, gates)
    assert_close(gated, x.double() * gates.double().sigmoid())
    by_head = x.clone()
    elementwise.gate(by_head, gates[:, :3].contiguous())
    assert_close(by_head, x.double() * gates[:, :3].double().sigmoid().repeat_interleave(22, dim=1))
    softly = x.clone()
    elementwise.gate(softly, gates * 5, "softplus")
    assert_close(softly, x.double() * torch.nn.functional.softplus((gates * 5).double()))
    weight = randoms(22, seed=2)
    elementwise.scale_heads(scaled.view(3, 3, 22), weight)
    assert torch.equal(scaled, (x.view(3, 3, 22).float() * weight).to(dtype).view(3, 66))
    scales, positions = randoms(9, seed=3), torch.tensor([8, 0, 3], device=DEVICE)
    scaled = x.clone()
    elementwise.scale_tokens(scaled.view(3, 3, 22), scales, positions)
    assert torch.equal(scaled, (x.float() * scales[positions].view(3, 1)).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", GATES)
def test_gated_activation_is_activated_gate_times_up(dtype: torch.dtype, size: int, activation: str) -> None:
    both = randoms(3, 2 * size, dtype=dtype) * 4
    both[1, 0] = math.nan
    gate, up = both.double().split(size, dim=1)
    actual = elementwise.gated_activation(both, activation)
    assert actual.isnan().nonzero().tolist() == [[1, 0]]
    assert_close(actual.nan_to_num(), (GATES[activation](gate) * up).nan_to_num())
    assert torch.equal(elementwise.gated_activation(both[2:], activation), actual[2:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_join_columns_puts_rows_beside_each_other(dtype: torch.dtype) -> None:
    parts = [randoms(3, size, seed=size, dtype=dtype) for size in (1, 40, 22)]
    joined = elementwise.join_columns(parts)
    assert torch.equal(joined, torch.cat(parts, dim=1))
    assert joined.is_contiguous()


def test_no_rows_are_no_work() -> None:
    none = randoms(0, 32)
    elementwise.activate(none, "quick_gelu")
    elementwise.gate(none, none)
    elementwise.soft_cap(none, 30.0)
    assert elementwise.scale_add(none, 2.0).shape == (0, 32)
    assert elementwise.gated_activation(none, "silu").shape == (0, 16)

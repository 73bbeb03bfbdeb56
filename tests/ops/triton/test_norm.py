"""Norms in Triton. Tolerances are those of `implementations.TOLERANCE`: float32 sums in another order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.ops.reference import norm as reference
from tests.ops.implementations import assert_close
from tests.ops.test_gemm import DTYPES
from tests.ops.triton.device import randoms

from quire.ops.triton import norm  # isort: skip  (device decides whether Triton can be imported)

SIZES = [1, 33, 1030]


def assert_rows_alone(compute: Callable[[slice], Tensor], num_rows: int) -> None:
    whole = compute(slice(0, num_rows))
    for rows in (slice(0, 1), slice(3, 4), slice(2, num_rows)):
        assert torch.equal(compute(rows), whole[rows]), rows


def cpu(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.cpu() for tensor in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm_is_that_of_the_reference(dtype: torch.dtype, size: int, with_residual: bool) -> None:
    x, weight = randoms(5, size, dtype=dtype), randoms(size, seed=1)
    x[1] *= 1e4 if dtype == torch.float16 else 1e15  # the sum of squares is near the end of float32
    residual = randoms(5, size, seed=2, dtype=dtype) if with_residual else None
    actual = norm.rms_norm(x, weight, 1e-5, residual=residual)
    own, weights, others = cpu(x, weight, residual)
    assert actual.dtype == dtype
    assert_close(actual.cpu(), reference.rms_norm(own, weights, 1e-5, residual=others))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_layer_norm_is_that_of_the_reference(dtype: torch.dtype, size: int, with_bias: bool) -> None:
    x, weight = randoms(5, size, dtype=dtype) + 3, randoms(size, seed=1)
    bias = randoms(size, seed=2) if with_bias else None
    actual = norm.layer_norm(x, weight, bias, 1e-5)
    own, weights, others = cpu(x, weight, bias)
    assert_close(actual.cpu(), reference.layer_norm(own, weights, others, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_see_each_other_nor_their_nan(dtype: torch.dtype) -> None:
    x, weight, bias = randoms(9, 100, dtype=dtype), randoms(100, seed=1), randoms(100, seed=2)
    residual = randoms(9, 100, seed=3, dtype=dtype)
    assert_rows_alone(lambda rows: norm.rms_norm(x[rows], weight, 1e-6, residual=residual[rows]), 9)
    assert_rows_alone(lambda rows: norm.layer_norm(x[rows], weight, bias, 1e-6), 9)
    alone = norm.rms_norm(x[4:5], weight, 1e-6)
    x[3, 7] = float("nan")
    out = norm.rms_norm(x, weight, 1e-6)
    assert torch.equal(out[4:5], alone)
    assert out.isnan().all(dim=1).tolist() == [row == 3 for row in range(9)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", [0, 7, 31])
def test_rms_norm_columns_is_rms_norm_of_a_part(dtype: torch.dtype, first: int) -> None:
    x, weight = randoms(4, 64, dtype=dtype), randoms(33, seed=1)
    expected = x.clone()
    expected[:, first : first + 33] = norm.rms_norm(x[:, first : first + 33].contiguous(), weight, 1e-5)
    norm.rms_norm_columns(x, weight, 1e-5, first=first)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_weights", "has_bias"), [(1, True), (1, False), (3, False), (3, True)])
def test_layer_norm_heads_is_layer_norm_of_each_head(dtype: torch.dtype, num_weights: int, has_bias: bool) -> None:
    size = 22
    x, weight = randoms(4, 5 * size, dtype=dtype), randoms(num_weights, size, seed=1)
    bias = randoms(num_weights, size, seed=2) if has_bias else None
    expected = x.clone()
    for head in range(3):
        own, begin = head % num_weights, (head + 1) * size
        part = x[:, begin : begin + size].contiguous()
        normed = norm.layer_norm(part, weight[own], None if bias is None else bias[own], 1e-5)
        expected[:, begin : begin + size] = normed
    norm.layer_norm_heads(x, weight, bias, 1e-5, first=size, num_heads=3)
    assert torch.equal(x, expected)


def test_norms_take_no_rows() -> None:
    x, weight = randoms(0, 32), randoms(32)
    assert norm.rms_norm(x, weight, 1e-5).shape == norm.layer_norm(x, weight, None, 1e-5).shape == (0, 32)
    norm.rms_norm_columns(x, weight, 1e-5, first=0)
    norm.layer_norm_heads(x, weight.view(1, -1), None, 1e-5, first=0, num_heads=1)

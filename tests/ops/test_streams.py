"""Ops on several hidden states of each token: values, and rows that do not depend on their neighbours."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.ops.implementations import assert_close, assert_rows_alone, implementations_of, ops, rand, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_implementation = pytest.mark.parametrize("implementation", implementations_of("mix_streams"))
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@each_implementation
@each_dtype
@pytest.mark.parametrize("size", [1, 60, 1000])
def test_match_rms_makes_rows_as_large_as_others(implementation: str, dtype: torch.dtype, size: int) -> None:
    x, like = rand(13, size, dtype=dtype), rand(13, size, seed=1, dtype=dtype) * 3
    x[5] = 1e-4  # counts as larger than it is

    def matched(rows: slice) -> Tensor:
        return run(implementation, "match_rms", x[rows], like[rows], 1e-5)

    def rms(rows: Tensor) -> Tensor:
        return rows.double().square().mean(-1, keepdim=True).sqrt()

    assert_close(matched(slice(0, 13)), x.double() * rms(like) / rms(x).clamp(min=math.sqrt(1e-5)))
    assert_rows_alone(matched, 13)


@each_implementation
@each_dtype
@pytest.mark.parametrize(("num_streams", "num_inputs", "offset"), [(1, 1, 0.0), (4, 4, 0.0), (3, 1, 1.0)])
def test_mix_streams_adds_what_each_token_is_routed_to(
    implementation: str, dtype: torch.dtype, num_streams: int, num_inputs: int, offset: float
) -> None:
    streams = [rand(21, 50, seed=index, dtype=dtype) for index in range(num_streams)]
    inputs = [rand(21, 50, seed=10 + index, dtype=dtype) for index in range(num_inputs)]
    routed, weight = rand(21, num_streams, seed=20) * 9, rand(num_streams * num_inputs, num_streams, seed=21)

    def mixed(rows: slice) -> Tensor:
        parts = [stream[rows] for stream in streams], [part[rows] for part in inputs]
        out = run(implementation, "mix_streams", *parts, routed[rows], weight, scale=0.1, offset=offset)
        return torch.stack(list(out), dim=1)

    coefficients = (torch.tanh(routed.double() * 0.1) @ weight.double().T + offset).view(21, num_streams, num_inputs)
    added = torch.einsum("tsi,tie->tse", coefficients, torch.stack(inputs, dim=1).double())
    assert_close(mixed(slice(0, 21)), torch.stack(streams, dim=1).double() + added)
    assert_rows_alone(mixed, 21)


@each_implementation
@each_dtype
@pytest.mark.parametrize("size", [1, 33, 1000])
def test_statistical_top_k_keeps_the_largest_of_the_first_columns(
    implementation: str, dtype: torch.dtype, size: int
) -> None:
    x = rand(21, 2 * size, dtype=dtype) + 2

    def kept(rows: slice) -> Tensor:
        part = x[rows].clone()
        ops(implementation)["statistical_top_k"](part, size, 0.8)
        return part

    found, gates = kept(slice(0, 21)), x[:, :size].double()
    least = gates.mean(-1, keepdim=True) + 0.8 * gates.std(-1, keepdim=True, unbiased=False)
    assert_close(found[:, :size], torch.relu(gates - least))
    assert torch.equal(found[:, size:], x[:, size:])
    assert_rows_alone(kept, 21)


@each_implementation
@each_dtype
def test_multiply_columns_rounds_once(implementation: str, dtype: torch.dtype) -> None:
    x, by = rand(13, 7, dtype=dtype), rand(13, 30, seed=1, dtype=dtype)
    expected = x * by[:, 20:27]
    ops(implementation)["multiply_columns"](x, by, first=20)
    assert torch.equal(x, expected)

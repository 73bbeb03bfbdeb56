"""rms_norm and layer_norm."""

import pytest
import torch

from tests.ops.implementations import assert_close, assert_rows_alone, implementations_of, rand, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [16, 33, 64, 100, 1024]


@pytest.mark.parametrize("implementation", implementations_of("rms_norm"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm_scales_by_the_root_mean_square(implementation: str, dtype: torch.dtype, with_residual: bool) -> None:
    x, weight = rand(5, 64, dtype=dtype), rand(64, seed=1)
    residual = rand(5, 64, seed=2, dtype=dtype) if with_residual else None
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    if residual is not None:
        expected += residual.double()
    actual = run(implementation, "rms_norm", x, weight, 1e-5, residual=residual)
    assert actual.dtype == dtype
    assert_close(actual, expected)


@pytest.mark.parametrize("implementation", implementations_of("rms_norm"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_rows_do_not_see_each_other(implementation: str, dtype: torch.dtype, size: int) -> None:
    x, weight, residual = rand(300, size, dtype=dtype), rand(size, seed=1), rand(300, size, seed=2, dtype=dtype)
    assert_rows_alone(lambda rows: run(implementation, "rms_norm", x[rows], weight, 1e-6, residual=residual[rows]), 300)


@pytest.mark.parametrize("implementation", implementations_of("layer_norm"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_layer_norm_centres_and_scales(implementation: str, dtype: torch.dtype, with_bias: bool) -> None:
    x, weight = rand(5, 64, dtype=dtype) + 3, rand(64, seed=1)
    bias = rand(64, seed=2) if with_bias else None
    expected = torch.nn.functional.layer_norm(
        x.double(), (64,), weight.double(), None if bias is None else bias.double(), 1e-5
    )
    actual = run(implementation, "layer_norm", x, weight, bias, 1e-5)
    assert actual.dtype == dtype
    assert_close(actual, expected)


@pytest.mark.parametrize("implementation", implementations_of("layer_norm"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_layer_norm_rows_do_not_see_each_other(implementation: str, dtype: torch.dtype, size: int) -> None:
    x, weight, bias = rand(300, size, dtype=dtype), rand(size, seed=1), rand(size, seed=2)
    assert_rows_alone(lambda rows: run(implementation, "layer_norm", x[rows], weight, bias, 1e-5), 300)


@pytest.mark.parametrize("implementation", implementations_of("rms_norm_columns"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", [0, 7, 31])
def test_rms_norm_columns_is_rms_norm_of_a_part(implementation: str, dtype: torch.dtype, first: int) -> None:
    x, weight = rand(40, 64, dtype=dtype), rand(33, seed=1)
    part = x[:, first : first + 33].contiguous()
    expected = x.clone()
    expected[:, first : first + 33] = run(implementation, "rms_norm", part, weight, 1e-5)
    run(implementation, "rms_norm_columns", x, weight, 1e-5, first=first)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("implementation", implementations_of("layer_norm_heads"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 22])
@pytest.mark.parametrize(("num_weights", "has_bias"), [(1, True), (1, False), (3, False), (3, True)])
def test_layer_norm_heads_is_layer_norm_of_each_head(
    implementation: str, dtype: torch.dtype, size: int, num_weights: int, has_bias: bool
) -> None:
    x, weight = rand(9, 5 * size, dtype=dtype), rand(num_weights, size, seed=1)
    bias = rand(num_weights, size, seed=2) if has_bias else None
    expected = x.clone()
    for head in range(3):
        own, begin = head % num_weights, (head + 1) * size
        part = x[:, begin : begin + size].contiguous()
        normed = run(implementation, "layer_norm", part, weight[own], None if bias is None else bias[own], 1e-5)
        expected[:, begin : begin + size] = normed

    def normed_rows(rows: slice) -> torch.Tensor:
        part = x[rows].clone()
        run(implementation, "layer_norm_heads", part, weight, bias, 1e-5, first=size, num_heads=3)
        return part

    assert_close(normed_rows(slice(0, 9)), expected)
    assert torch.equal(normed_rows(slice(0, 9))[:, :size], x[:, :size]), "other columns stay"
    assert_rows_alone(normed_rows, 9)

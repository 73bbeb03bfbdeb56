"""int8 and int4 weights against the products of what they stand for, and bit for bit in any batch."""

import pytest
import torch

from quire.ops.cpu import library

if not library.available():
    pytest.skip(str(library.unavailable_reason()), allow_module_level=True)

from quire.ops.contracts.operands import LinearWeight, QuantizedRows
from quire.ops.cpu.library import check
from quire.ops.cpu.products.gemm import gated_linear, linear
from quire.ops.cpu.products.quantized import FORMATS, pack_quantized, quantize_linear
from quire.ops.shared.dequantize import dequantize
from tests.ops.implementations import assert_close, rand

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def dequantized(weight: LinearWeight) -> torch.Tensor:
    """What a weight stands for, read out of the kernel itself: products with the unit vectors. [N, M]"""
    return linear(torch.eye(weight.in_features), weight).T.contiguous()


@pytest.mark.parametrize("format", FORMATS)
def test_quantised_weights_are_close_to_the_originals(format: str) -> None:
    dense = rand(70, 200)
    values = dequantized(quantize_linear([dense[:33], dense[33:]], format=format))
    step = dense.abs().max() / (8 if format.startswith("int4") else 127)
    assert (values - dense).abs().max() <= step * (1.01 if format.startswith("int4") else 0.51)
    assert (values - dense).square().mean().sqrt() < step * 0.4


def integers(rows: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What the formats mean, in torch: values [N, M] and scales [N, groups]."""
    if format == "int8":
        scales = rows.abs().amax(dim=1, keepdim=True).div(127).clamp(min=1e-30)
        return (rows / scales).round().to(torch.int8).contiguous(), scales
    count, width = rows.shape
    group = FORMATS[format][1]
    groups = torch.nn.functional.pad(rows, (0, -width % group)).view(count, -1, group)
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    scales = (largest / -8).half().float()
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    values = (groups * inverse).round().clamp(-8, 7).to(torch.int8)
    return values.view(count, -1)[:, :width], scales.squeeze(2)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
def test_numbers_become_the_integers_that_the_format_says(format: str, dtype: torch.dtype, transposed: bool) -> None:
    dense = rand(200, 70, dtype=dtype).T if transposed else rand(70, 200, dtype=dtype)
    dense[3] = 0
    dense[5, 0], dense[5, 1] = 4, -4  # a tie: the first one has the scale's sign
    dense[6] *= 1e-4
    found = quantize_linear([dense[:33], dense[33:]], format=format)
    values, scales = integers(dense.float(), format)
    if format == "int8":
        expected = torch.zeros_like(found.tensors["packed"])
        check(
            library.load().qr_pack_quantized(
                expected.data_ptr(), FORMATS[format][0], 70, 200, values.data_ptr(), 70, 200, 0
            )
        )
        assert torch.equal(found.tensors["scales"].view(-1)[:70], scales.view(-1))
    else:
        other = pack_quantized(
            [QuantizedRows(values=values, bits=4, scales=scales.float(), group_size=FORMATS[format][1])]
        )
        expected = other.tensors["packed"]
        assert torch.equal(found.tensors["scales"].view(torch.int16), other.tensors["scales"].view(torch.int16))
    assert torch.equal(found.tensors["packed"], expected)


def quantized_rows(x: torch.Tensor, group: int) -> torch.Tensor:
    """What the kernels make of activations; in float32, so that halves round as they do there."""
    rows, width = x.shape
    groups = torch.nn.functional.pad(x.float(), (0, -width % group)).view(rows, -1, group)
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, 127 / largest, 0)
    return ((groups * inverse).round().double() * (largest.double() / 127)).view(rows, -1)[:, :width]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 128), (70, 200), (33, 45)])
@pytest.mark.parametrize("rows", [1, 5, 16, 40])
def test_products_are_those_of_the_dequantised_weight(
    format: str, dtype: torch.dtype, shape: tuple[int, int], rows: int
) -> None:
    weight = quantize_linear([rand(*shape)], format=format)
    x, bias, residual = (
        rand(rows, shape[1], seed=1, dtype=dtype),
        rand(shape[0], seed=2),
        rand(rows, shape[0], dtype=dtype),
    )
    seen = quantized_rows(x, FORMATS[format][1] or 128)
    expected = torch.relu(seen @ dequantized(weight).double().T + bias) + residual
    assert_close(linear(x, weight, bias, activation="relu", residual=residual), expected)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("half", [64, 20])
def test_gated_products_are_gate_times_up(format: str, half: int) -> None:
    weight = quantize_linear([rand(half, 96), rand(half, 96, seed=1)], format=format)
    x = rand(9, 96, seed=2)
    seen = quantized_rows(x, FORMATS[format][1] or 128)
    gate, up = (seen @ dequantized(weight).double().T).chunk(2, dim=-1)
    assert_close(gated_linear(x, weight, activation="silu"), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch(format: str, dtype: torch.dtype) -> None:
    weight, x = quantize_linear([rand(100, 600)], format=format), rand(300, 600, seed=1, dtype=dtype)
    whole, threads = linear(x, weight), library.num_threads()
    try:
        for count in (1, 3):
            library.set_num_threads(count)
            for size in (1, 2, 13, 16, 17, 33, 100, 257):
                for start in (0, 41):
                    assert torch.equal(linear(x[start : start + size], weight), whole[start : start + size])
    finally:
        library.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_points_shift_the_values_of_their_group(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = QuantizedRows(
        values=torch.randint(-8, 8, (70, 192), generator=generator, dtype=torch.int8),
        bits=4,
        scales=(rand(70, 3).abs() + 0.1).half().float(),
        group_size=64,
        zero_points=torch.randint(-8, 8, (70, 3), generator=generator, dtype=torch.int8),
    )
    weight = pack_quantized([rows[:33], rows[33:]])
    x = rand(20, 192, seed=3, dtype=dtype)
    assert_close(linear(x, weight), quantized_rows(x, 64) @ dequantize(rows).double().T)
    assert torch.equal(linear(x[3:4], weight), linear(x, weight)[3:4])

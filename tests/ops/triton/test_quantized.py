"""Products with quantised weights in Triton, against the weights dequantised.

Tolerances are those of `implementations.TOLERANCE`: integers and float8 are exact in 16 bits, scales multiply float32
sums.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.config.memory.weights.formats import FLOAT4_LEVELS
from quire.errors import ConfigError
from quire.ops.contracts.operands import BlockRows, LinearWeight, QuantizedRows
from quire.ops.shared.blocks import NON_LINEAR
from quire.ops.shared.dequantize import dequantize
from tests.gguf.files import blocks_of
from tests.ops.implementations import assert_close, rand
from tests.ops.test_gemm import DTYPES
from tests.ops.triton.device import DEVICE, randoms

from quire.ops.triton import gemm, quantized  # isort: skip  (device decides whether Triton can be imported)


def made(
    rows: int,
    columns: int,
    *,
    bits: int,
    group: int,
    zeros: bool = False,
    offsets: bool = False,
    levels: tuple[int, ...] | None = None,
    seed: int = 0,
) -> QuantizedRows:
    """Random rows as a checkpoint brings them. bits: 0 for float8."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-columns // group)
    scales = torch.rand(rows, groups, generator=generator) / 50 + 0.001
    if bits == 0:
        values = (rand(rows, columns, seed=seed) * 40).to(torch.float8_e4m3fn)
        return QuantizedRows(values=values, bits=8, scales=scales, group_size=group)
    limit = 1 << (bits - 1)
    values = torch.randint(-limit, limit, (rows, columns), generator=generator, dtype=torch.int8)
    zero_points = torch.randint(-8, 8, (rows, groups), generator=generator, dtype=torch.int8) if zeros else None
    return QuantizedRows(
        values=values if levels is None else values + limit,
        bits=bits,
        scales=scales,
        group_size=group,
        zero_points=zero_points,
        offsets=rand(rows, groups, seed=seed + 50) / 20 if offsets else None,
        levels=levels,
    )


FORMATS = {
    "int8": {"bits": 8, "group": 200},
    "int8_g64": {"bits": 8, "group": 64},
    "int8_g32_zeros": {"bits": 5, "group": 32, "zeros": True},
    "int4": {"bits": 4, "group": 200},
    "int4_g32": {"bits": 4, "group": 32},
    "int4_g64_zeros": {"bits": 4, "group": 64, "zeros": True},
    "int4_g128": {"bits": 3, "group": 128},
    "int4_g128_zeros": {"bits": 4, "group": 128, "zeros": True},
    "int4_g224_zeros": {"bits": 4, "group": 200, "zeros": True},
    "int8_g16_offsets": {"bits": 6, "group": 16, "offsets": True},
    "int4_g16_offsets": {"bits": 2, "group": 16, "offsets": True},
    "int4_g32_offsets": {"bits": 4, "group": 32, "offsets": True},
    "levels_g32": {"bits": 4, "group": 32, "levels": NON_LINEAR},
    "levels_g64_offsets": {"bits": 4, "group": 64, "levels": FLOAT4_LEVELS, "offsets": True},
    "levels": {"bits": 4, "group": 200, "levels": NON_LINEAR},
    "float8": {"bits": 0, "group": 200},
    "float8_g128": {"bits": 0, "group": 128},
}
COLUMNS = 200
"""No multiple of a step, nor of two."""


def packed_and_wide(*parts: QuantizedRows) -> tuple[LinearWeight, Tensor]:
    """A weight, and the numbers that it stands for."""
    weight = quantized.pack_quantized(parts, device=DEVICE)
    return weight, torch.cat([dequantize(part) for part in parts]).double().to(DEVICE)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_rows", [3, 20])
def test_linear_is_the_product_with_what_the_codes_stand_for(name: str, num_rows: int) -> None:
    weight, wide = packed_and_wide(made(7, COLUMNS, **FORMATS[name]), made(13, COLUMNS, seed=1, **FORMATS[name]))
    assert (weight.format, weight.out_features, weight.in_features) == (name, 20, COLUMNS)
    assert weight.num_bytes == quantized.format_named(name).num_bytes_on_gpu(20, COLUMNS)
    x, bias = randoms(num_rows, COLUMNS, dtype=torch.bfloat16), randoms(20, seed=2)
    residual = randoms(num_rows, 20, seed=3, dtype=torch.bfloat16)
    actual = gemm.linear(x, weight, bias, activation="relu", residual=residual)
    assert_close(actual, torch.relu(x.double() @ wide.T + bias) + residual.double())


@pytest.mark.parametrize("name", ["int8", "int4_g64_zeros", "int4_g32_offsets", "float8_g128"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_linear_is_activated_gate_times_up(name: str, dtype: torch.dtype) -> None:
    weight, wide = packed_and_wide(made(38, COLUMNS, **FORMATS[name]))
    x, bias = randoms(5, COLUMNS, dtype=dtype) / 4, randoms(38, seed=2)
    gate, up = (x.double() @ wide.T + bias).chunk(2, dim=-1)
    actual = gemm.gated_linear(x, weight, bias, activation="silu")
    assert actual.dtype == dtype
    assert_close(actual, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("name", ["int8", "int4_g32", "int4_g32_offsets", "levels_g32", "float8_g128"])
def test_rows_do_not_see_each_other_nor_their_nan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _ = packed_and_wide(made(20, COLUMNS, **FORMATS[name]))
    x = randoms(70, COLUMNS, dtype=torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr("quire.ops.triton.tiles.PROGRAMS", 1)  # the largest tile
        whole = gemm.linear(x, weight)
    for rows in (slice(0, 1), slice(3, 19), slice(9, 60)):
        assert torch.equal(gemm.linear(x[rows], weight), whole[rows])
    x[2] = torch.nan
    out = gemm.linear(x, weight)
    assert out[2].isnan().all()
    assert torch.equal(torch.cat([out[:2], out[3:]]), torch.cat([whole[:2], whole[3:]]))


@pytest.mark.parametrize("name", ["int4_g32", "float8"])
def test_an_order_of_inputs_is_followed(name: str) -> None:
    order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(5)).to(torch.int32)
    weight, wide = packed_and_wide(replace(made(20, COLUMNS, **FORMATS[name]), order=order))
    x = randoms(3, COLUMNS, dtype=torch.float16)
    assert_close(gemm.linear(x, weight), x.double() @ wide.T)
    assert_close(quantized.dequantized(weight, torch.float32), wide)
    wrong = replace(made(20, COLUMNS, **FORMATS[name]), order=torch.zeros(COLUMNS, dtype=torch.int32))
    with pytest.raises(ConfigError, match="each of them once"):
        quantized.pack_quantized([wrong])


def test_parts_of_different_formats_lie_side_by_side() -> None:
    dense = rand(9, COLUMNS, seed=7).bfloat16()
    parts = (made(8, COLUMNS, **FORMATS["int8"]), dense, made(5, COLUMNS, **FORMATS["int4_g32"]))
    weight = quantized.pack_quantized(parts, device=DEVICE)
    wide = torch.cat([part.float() if isinstance(part, Tensor) else dequantize(part) for part in parts])
    wide, x, bias = wide.double().to(DEVICE), randoms(3, COLUMNS, dtype=torch.bfloat16), randoms(22, seed=2)
    residual = randoms(3, 22, seed=3, dtype=torch.bfloat16)
    assert (weight.format, len(weight.parts)) == ("mixed", 3)
    product = x.double() @ wide.T + bias
    assert_close(gemm.linear(x, weight, bias, residual=residual), product + residual.double())
    gate, up = product.chunk(2, dim=-1)
    assert_close(gemm.gated_linear(x, weight, bias, activation="relu"), torch.relu(gate) * up)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q2_K", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4", "TQ2_0"])
def test_blocks_of_gguf_are_what_they_stand_for(type_name: str) -> None:
    rounded = np.random.default_rng(1)
    blocks = torch.from_numpy(blocks_of(rounded.standard_normal((6, 256), np.float32), type_name, rounded))
    stored = BlockRows(type_name=type_name, blocks=blocks)
    weight, x = quantized.pack_quantized([stored, stored[2:4]], device=DEVICE), randoms(3, 256, dtype=torch.bfloat16)
    wide = dequantize(stored).double()
    assert_close(gemm.linear(x, weight), x.double() @ torch.cat((wide, wide[2:4])).T.to(DEVICE))


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_can_be_dequantised(name: str) -> None:
    weight, wide = packed_and_wide(made(5, COLUMNS, **FORMATS[name]))
    assert_close(quantized.dequantized(weight, torch.float32), wide)


def test_products_of_many_rows_may_go_to_the_library() -> None:
    weight, wide = packed_and_wide(made(20, COLUMNS, **FORMATS["int4_g64_zeros"]))
    x = randoms(6, COLUMNS, dtype=torch.bfloat16)
    assert_close(gemm.linear(x, weight, library_rows=6) / 2, x.double() @ wide.T / 2)


@pytest.mark.parametrize(("name", "levels"), [("int8", 127), ("int4_g32", 8), ("int4_g64", 8), ("int4_g128", 8)])
def test_quantize_linear_takes_the_nearest_numbers(name: str, levels: int) -> None:
    weight = rand(20, COLUMNS)
    weight[3] = 0
    packed = quantized.quantize_linear([weight[:7], weight[7:]], format=name, device=DEVICE)
    back = quantized.dequantized(packed, torch.float32).cpu()
    group = int(name.partition("_g")[2] or COLUMNS)
    for first in range(0, COLUMNS, group):
        own = slice(first, first + group)
        half_step = weight[:, own].abs().amax(dim=1, keepdim=True) / levels / 2
        # The largest value of int4 is -8: what would be 8 becomes 7.
        slack = 2.0 if levels == 8 else 1.0
        assert ((back[:, own] - weight[:, own]).abs() <= half_step * slack * 1.001).all()
    assert (packed.format, packed.out_features) == (name, 20)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"levels": tuple(range(16)), "zero_points": torch.zeros(4, 2, dtype=torch.int8)}, "levels"),
        ({"offsets": torch.zeros(4, 2), "zero_points": torch.zeros(4, 2, dtype=torch.int8)}, "offsets"),
        ({"group_size": 40, "scales": torch.ones(4, 2)}, "groups of 40"),
        ({"values": torch.zeros(4, 64, dtype=torch.int16)}, "int16"),
    ],
)
def test_formats_without_a_kernel_are_refused(change: dict[str, object], named: str) -> None:
    rows = replace(made(4, 64, bits=4, group=32), **change)
    with pytest.raises(ConfigError, match=named):
        quantized.pack_quantized([rows])


def test_damaged_rows_are_refused() -> None:
    rows = made(4, 64, bits=4, group=32)
    with pytest.raises(ConfigError, match="does not have"):
        quantized.pack_quantized([replace(rows, values=rows.values + 8)])
    rows.scales[1, 1] = torch.inf
    with pytest.raises(ConfigError, match="not finite"):
        quantized.pack_quantized([rows])
    nans = replace(made(4, 64, bits=0, group=64), values=torch.full((4, 64), torch.nan).to(torch.float8_e4m3fn))
    with pytest.raises(ConfigError, match="does not have"):
        quantized.pack_quantized([nans])

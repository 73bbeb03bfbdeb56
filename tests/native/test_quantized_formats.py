"""Every format of quantised weights against the products of what it stands for, in every company."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import pytest
import torch

from quire.ops.cpu import library

if not library.available():
    pytest.skip(str(library.unavailable_reason()), allow_module_level=True)

from quire.config.memory.weights.formats import BITS, BY_NAME, NESTED_BLOCK, Codes, Shift, WeightFormat
from quire.errors import ConfigError
from quire.ops.contracts.operands import LinearWeight, NestedScales, QuantizedRows
from quire.ops.cpu.products.gemm import gated_linear, linear
from quire.ops.cpu.products.quantized import pack_quantized
from quire.ops.cpu.runtime.graphs import Graphs
from quire.ops.cpu.runtime.weights import words_of
from quire.ops.shared.dequantize import dequantize
from quire.utils.math import round_up
from tests.ops.implementations import assert_close, rand

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(64, 128), (70, 200), (33, 45), (40, 1040)]
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class Made:
    """Rows of a format, and those of its activations that are rounded together."""

    rows: QuantizedRows
    group: int | None
    """None: activations are not rounded."""

    @cached_property
    def weight(self) -> torch.Tensor:
        """Shapes: [M, N] float64."""
        return dequantize(self.rows).double().T

    def products(self, x: torch.Tensor) -> torch.Tensor:
        """In double, of the activations as the kernels see them."""
        if self.group is None:
            return x.double() @ self.weight
        order = torch.arange(x.shape[1]) if self.rows.order is None else self.rows.order.long()
        seen = torch.empty(x.shape, dtype=torch.float64)
        seen[:, order] = rounded(x[:, order], self.group)
        return seen @ self.weight


def rounded(x: torch.Tensor, group: int) -> torch.Tensor:
    """What the kernels make of activations; in float32, so that halves round as they do there."""
    rows, width = x.shape
    groups = torch.nn.functional.pad(x.float(), (0, -width % group)).view(rows, -1, group)
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest, torch.zeros(()))
    return ((groups * inverse).round().double() * (largest.double() / 127)).view(rows, -1)[:, :width]


def make(format: WeightFormat, shape: tuple[int, int], *, in_order: bool = True, seed: int = 0) -> Made:
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=generator).to(torch.int8)

    rows, columns = shape
    group_size = format.group or columns
    groups = -(-columns // group_size)
    bits = BITS[format.codes]
    known = {Codes.LEVELS: (0, 16), Codes.FLOAT8: (-128, 127), Codes.INT2: (-1, 3)}
    low, high = known.get(format.codes, (-(1 << bits - 1), 1 << bits - 1))
    values = integers(low, high, rows, columns)
    if format.codes is Codes.FLOAT8:
        values[values == -1] = 3  # -1 is a NaN, and 127 was not drawn; 3 has no exponent
        values = values.view(torch.float8_e4m3fn)
    scales = (torch.rand(rows, groups, generator=generator) + 0.1).half().float()
    zero_points = integers(low, high, rows, groups) if format.shift is Shift.ZERO_POINTS else None
    offsets = torch.randn(rows, groups, generator=generator).half().float() if format.shift is Shift.OFFSETS else None
    nested = tuple(
        NestedScales(
            codes=integers(*((0, 64) if format.num_nested == 2 else (-128, 128)), rows, groups),
            units=(torch.randn(rows, -(-columns // NESTED_BLOCK), generator=generator) / 64).half().float(),
        )
        for _ in range(format.num_nested)
    )
    if nested:
        scales = nested[0].numbers(group_size)
        offsets = -low * scales - nested[1].numbers(group_size) if len(nested) == 2 else None
    made = QuantizedRows(
        values=values,
        bits=bits,
        scales=scales,
        group_size=group_size,
        zero_points=zero_points,
        offsets=offsets,
        levels=LEVELS if format.codes is Codes.LEVELS else None,
        nested=nested,
        order=None if in_order else torch.randperm(columns, generator=generator).to(torch.int32),
    )
    if format.codes is Codes.FLOAT8:
        return Made(made, None)
    whole = columns if format.codes is Codes.INT2 else 128
    return Made(made, NESTED_BLOCK if format.is_nested else format.group or whole)


def halves(made: Made) -> list[QuantizedRows | torch.Tensor]:
    return [made.rows[:33], made.rows[33:]] if made.rows.shape[0] > 33 else [made.rows]


@pytest.mark.parametrize("format", BY_NAME.values(), ids=lambda format: format.name)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_the_dequantised_weight(format: WeightFormat, shape: tuple[int, int]) -> None:
    shape = (shape[0], round_up(shape[1], NESTED_BLOCK) if format.is_nested else shape[1])
    made = make(format, shape)
    weight = pack_quantized(halves(made))
    if shape[1] > format.group:  # else a row has one scale, which may have a format of its own
        assert weight.format == format.name
    assert weight.num_bytes == BY_NAME[weight.format].num_bytes(*shape)
    for dtype, rows in itertools.product(DTYPES, (1, 2, 5, 16, 40)):
        x, bias, residual = rand(rows, shape[1], seed=1, dtype=dtype), rand(shape[0]), rand(rows, shape[0], dtype=dtype)
        expected = torch.relu(made.products(x) + bias) + residual
        assert_close(linear(x, weight, bias, activation="relu", residual=residual), expected)


@pytest.mark.parametrize("format", BY_NAME.values(), ids=lambda format: format.name)
def test_a_row_has_the_same_bits_in_every_batch(format: WeightFormat) -> None:
    weight, x = pack_quantized([make(format, (100, 768)).rows]), rand(300, 768, seed=1, dtype=torch.bfloat16)
    whole, threads = linear(x, weight), library.num_threads()
    try:
        for count, size, start in itertools.product((1, 3), (1, 2, 5, 16, 40, 257), (0, 41)):
            library.set_num_threads(count)
            assert torch.equal(linear(x[start : start + size], weight), whole[start : start + size])
    finally:
        library.set_num_threads(threads)


@pytest.mark.parametrize("format", BY_NAME.values(), ids=lambda format: format.name)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_a_number_fails_alone(format: WeightFormat, wrong: float) -> None:
    weight, x = pack_quantized([make(format, (40, 256)).rows]), rand(18, 256, dtype=torch.bfloat16)
    right = linear(x, weight)
    x[7, 150] = wrong
    found = linear(x, weight)
    others = torch.arange(18) != 7
    assert torch.equal(found[others], right[others])
    assert not found[7].isfinite().any()


@pytest.mark.parametrize("name", [name for name, format in BY_NAME.items() if format.codes is not Codes.FLOAT8])
def test_inputs_may_stand_in_another_order(name: str) -> None:
    made = make(BY_NAME[name], (70, 256), in_order=False)
    weight = pack_quantized(halves(made))
    assert weight.format == name
    for dtype in DTYPES:
        x = rand(9, 256, seed=1, dtype=dtype)
        assert_close(linear(x, weight), made.products(x))


@pytest.mark.parametrize(
    "name",
    [
        "int8_g16",
        "int6_g16_nested",
        "int5_g32_offsets",
        "int4_g32_offsets_nested",
        "int3_g16_nested",
        "int3_g64_zeros",
        "int2",
        "int2_g16_offsets_nested",
        "levels_g32",
        "float8_g128",
    ],
)
@pytest.mark.parametrize("half", [64, 20])
def test_gated_products_are_gate_times_up(name: str, half: int) -> None:
    made = make(BY_NAME[name], (2 * half, 256))
    x = rand(9, 256, seed=2)
    gate, up = made.products(x).chunk(2, dim=-1)
    assert_close(gated_linear(x, pack_quantized([made.rows]), activation="silu"), torch.nn.functional.silu(gate) * up)


MIXED = ("int5_g32_offsets", "int6_g16_nested", "int6_g16_nested", "float8", "int4_g128")
"""Formats of parts of 40, 7, 33, 48 and 64 rows."""


def mixed(columns: int) -> tuple[LinearWeight, list[Made], torch.Tensor]:
    parts = [
        make(BY_NAME[name], (rows, columns), in_order=rows != 64, seed=rows)
        for name, rows in zip(MIXED, (40, 7, 33, 48, 64), strict=True)
    ]
    dense = rand(32, columns, dtype=torch.bfloat16)
    return pack_quantized([*(part.rows for part in parts), dense]), parts, dense


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_parts_of_different_formats_are_computed_side_by_side(dtype: torch.dtype, rows: int) -> None:
    weight, parts, dense = mixed(256)
    assert [part.format for part in weight.parts] == [*MIXED[:2], *MIXED[3:], "dense"]
    x = rand(rows, 256, seed=1, dtype=dtype) / 256  # no product of gate and up is beyond float16
    bias, residual = rand(224), rand(rows, 224, dtype=dtype)
    products = torch.cat([*(part.products(x) for part in parts), x.double() @ dense.double().T], dim=1)
    assert_close(linear(x, weight, bias, activation="relu", residual=residual), torch.relu(products + bias) + residual)
    gate, up = products.chunk(2, dim=-1)
    assert_close(gated_linear(x, weight, activation="silu"), torch.nn.functional.silu(gate) * up)


def test_a_row_of_a_mixed_weight_has_the_same_bits_in_every_batch() -> None:
    weight, *_ = mixed(768)
    x = rand(300, 768, seed=1, dtype=torch.bfloat16)
    whole, gated = linear(x, weight), gated_linear(x, weight, activation="silu")
    for size, start in itertools.product((1, 2, 5, 16, 40, 257), (0, 41)):
        assert torch.equal(linear(x[start : start + size], weight), whole[start : start + size])
        assert torch.equal(
            gated_linear(x[start : start + size], weight, activation="silu"), gated[start : start + size]
        )


@pytest.mark.parametrize(
    "name",
    ["mixed", "int8_g16_zeros", "int6_g32", "int5_g32", "int3_g64", "int2", "int2_g64_zeros", "levels_g64", "float8"],
)
def test_graphs_replay_them(name: str) -> None:
    weight = mixed(256)[0] if name == "mixed" else pack_quantized([make(BY_NAME[name], (64, 256)).rows])
    x = rand(40, 256, dtype=torch.bfloat16)
    graph = Graphs().record(lambda: (linear(x, weight), gated_linear(x, weight, activation="silu")))
    x.copy_(rand(40, 256, seed=5, dtype=torch.bfloat16))
    found = [output.clone() for output in graph.replay()]
    assert torch.equal(found[0], linear(x, weight))
    assert torch.equal(found[1], gated_linear(x, weight, activation="silu"))


def scaled(made: Made, factor: float) -> Made:
    return replace(made, rows=made.rows.times(factor))


@pytest.mark.parametrize(
    "name", ["int4_g32", "int4_g32_offsets_nested", "int5_g32_offsets", "int6_g16", "int8_g16", "levels_g32"]
)
@pytest.mark.parametrize("factor", [2.0**-40, 2.0**30, 1e-9, 3e7])
def test_scales_that_float16_does_not_hold_keep_their_precision(name: str, factor: float) -> None:
    made = scaled(make(BY_NAME[name], (40, 256)), factor)
    x = rand(5, 256, seed=1)
    expected = made.products(x) / factor
    rounding = 0.0 if float(factor).hex().startswith("0x1.0000000000000p") else 2.0**-11
    found = linear(x, pack_quantized([made.rows])).double() / factor
    assert (found - expected).abs().max() <= (rounding + 1e-5) * expected.abs().max()


def test_nested_scales_become_plain_ones_where_inputs_are_not_whole_blocks() -> None:
    for name in ("int6_g16_nested", "int4_g32_offsets_nested"):
        made = make(BY_NAME[name], (40, 160))
        weight, x = pack_quantized([made.rows]), rand(5, 160)
        assert weight.format == name.removesuffix("_nested")
        expected = Made(made.rows, BY_NAME[name].group).products(x)
        assert (linear(x, weight).double() - expected).abs().max() <= 2.0**-10 * expected.abs().max()


def test_groups_become_smaller_ones_and_a_row_scale_many() -> None:
    made = make(BY_NAME["int4_g128"], (40, 384))
    for group_size, name in ((384, "int4_g128"), (192, "int4_g64"), (96, "int4_g32"), (48, "int4_g16")):
        groups = 384 // group_size
        rows = replace(made.rows, scales=made.rows.scales[:, :1].repeat(1, groups), group_size=group_size)
        weight = pack_quantized([rows])
        assert weight.format == name
        x = rand(5, 384)
        assert_close(linear(x, weight), Made(rows, BY_NAME[name].group).products(x))


def broken() -> Iterator[tuple[str, QuantizedRows]]:
    rows = make(BY_NAME["int4_g32"], (8, 64)).rows
    yield "not finite", replace(rows, scales=rows.scales * float("nan"))
    yield "not finite", replace(rows, scales=rows.scales * float("inf"))
    yield "name each of them once", replace(rows, order=torch.zeros(64, dtype=torch.int32))
    yield "does not have", replace(rows, values=rows.values + 1)
    yield "does not have", replace(rows, values=rows.values + 9, bits=5)
    yield "does not have", replace(rows, values=rows.values - 26, bits=6)
    yield "does not have", replace(rows, values=rows.values, levels=LEVELS)
    yield "no product", replace(rows, group_size=24, scales=torch.ones(8, 3))
    blocks = make(BY_NAME["int4_g32_offsets_nested"], (8, 256)).rows
    for code in (-1, 64):
        wrong = replace(blocks.nested[1], codes=torch.full_like(blocks.nested[1].codes, code))
        yield "not 0 to 63", replace(blocks, nested=(blocks.nested[0], wrong))
    floats = rows.values.to(torch.float8_e4m3fn)
    yield "no product", replace(rows, values=floats, group_size=24, scales=torch.ones(8, 3))
    nan = torch.full((8, 64), 127, dtype=torch.int8).view(torch.float8_e4m3fn)
    yield "does not have", replace(rows, values=nan, bits=8, group_size=64, scales=torch.ones(8, 1))


@pytest.mark.parametrize("case", list(broken()), ids=lambda case: case[0])
def test_what_the_kernels_cannot_compute_is_refused(case: tuple[str, QuantizedRows]) -> None:
    with pytest.raises(ConfigError, match=case[0]):
        pack_quantized([case[1]])


def test_an_expert_with_rows_of_different_formats_is_refused() -> None:
    with pytest.raises(ConfigError, match="must have the same format"):
        words_of(mixed(256)[0])

"""The kernels of products with quantised weights, which are widened in registers, step by step of the sum.

A step multiplies activations by the integers (or float8 numbers) themselves, less their zero points: 16 bits hold those
exactly. The scales multiply float32 sums, those of a group where groups have scales, else the whole. An offset of a
group multiplies the sum of a row's activations over the step, which `step_sums_kernel` has computed.

Codes: INT8 is a byte each, [N, M]. FLOAT8 is the bits of float8_e4m3fn, [N, M], whose scales are 256 times as large: as
the upper bits of a float16 they are numbers 256 times as small. INT4 is two values of a byte, each 8 more than it
stands for, [N, M / 2]: byte b of a block of `BLOCK_INPUTS` bytes holds columns b (lower half) and BLOCK_INPUTS + b.
LEVELS is packed the same: each value is the place of an integer in a table of sixteen.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from quire.config.memory.weights.formats import Codes, Shift, WeightFormat, gpu_step
from quire.ops.triton.alignment import in_models
from quire.ops.triton.kernels.arithmetic import ACTIVATION_CODES, INTERPRETED, floats_of, multiply_add, narrowed
from quire.ops.triton.kernels.dependent import await_inputs, dependent
from quire.ops.triton.kernels.products import finish, tile_of_program
from quire.ops.triton.tiles import WIDENED, WIDENED_SINGLE
from quire.ops.triton.variant import Variant, variant_of

INT8 = tl.constexpr(0)
FLOAT8 = tl.constexpr(1)
INT4 = tl.constexpr(2)
LEVELS = tl.constexpr(3)
"""From INT4 on a byte has two values."""
CODES = {Codes.INT8: 0, Codes.FLOAT8: 1, Codes.INT4: 2, Codes.LEVELS: 3}
SUMS = 16
"""Steps whose sums a program of `step_sums_kernel` computes."""


@triton.jit
def integers_of(codes, levels, half: tl.constexpr, CODES: tl.constexpr):
    """What codes stand for, as int16; of two values in a byte the lower or the upper one."""
    codes = codes.to(tl.int16)
    if CODES >= INT4:
        codes = (codes >> 4) if half else (codes & 15)
        if CODES == LEVELS:
            return tl.load(levels + codes.to(tl.int32)).to(tl.int16)
        return codes - 8
    return codes


@triton.jit
def values_of(codes, zero_points, levels, half: tl.constexpr, CODES: tl.constexpr, dtype: tl.constexpr):
    """The weights before scaling, [N, K] in a type of activations. zero_points: [N] int8, or None."""
    if CODES == FLOAT8:
        values = floats_of(codes).to(tl.float32)
    else:
        integers = integers_of(codes, levels, half, CODES)
        if zero_points is not None:
            integers -= zero_points.to(tl.int16)[:, None]
        values = integers.to(tl.float32)
    if INTERPRETED:
        return values
    return values.to(dtype)


@triton.jit
def add_step(
    total, x_tile, x_sums, codes, scales, zero_points, offsets, levels, places, is_feature,
    half: tl.constexpr, CODES: tl.constexpr, HAS_GROUPS: tl.constexpr,
):  # fmt: skip
    """total + one step of a product. scales, zero_points and offsets point to those of the step's group.

    Shapes: x_sums [T] of the step, where there are offsets; places: features [N].
    """
    zeros = None
    if zero_points is not None:
        zeros = tl.load(zero_points + places, mask=is_feature, other=0)
    values = values_of(codes, zeros, levels, half, CODES, x_tile.dtype)
    if HAS_GROUPS:
        part = multiply_add(tl.zeros_like(total), x_tile, values)
        total += part * tl.load(scales + places, mask=is_feature, other=0.0)[None, :]
        if offsets is not None:
            total += x_sums[:, None] * tl.load(offsets + places, mask=is_feature, other=0.0)[None, :]
        return total
    return multiply_add(total, x_tile, values)


@triton.jit
def quantized_totals(
    x, rows, is_row, sums, codes, scales, zero_points, offsets, levels, first_feature, num_features, num_inputs,
    num_codes, x_stride, sums_stride, scales_stride,
    GATED: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_FEATURES: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    """The products of rows of x and a tile of features, scaled: and, GATED, those of the up half.

    Shapes: rows [BLOCK_ROWS], of x and of sums; others as `quantized_kernel` has them.
    """
    features, inputs = tl.arange(0, BLOCK_FEATURES), tl.arange(0, BLOCK_INPUTS)
    is_feature = first_feature + features < num_features
    own, up_own = first_feature + features, num_features + first_feature + features
    up_codes = codes + (num_features + first_feature).to(tl.int64) * num_codes
    codes += first_feature.to(tl.int64) * num_codes
    total = tl.zeros((BLOCK_ROWS, BLOCK_FEATURES), tl.float32)
    up = total
    HALVES: tl.constexpr = 2 if CODES >= INT4 else 1
    for start in range(0, num_codes, BLOCK_INPUTS):
        bytes_ = start + inputs
        is_code = is_feature[:, None] & (bytes_ < num_codes)[None, :]
        places = features[:, None] * num_codes + bytes_[None, :]
        tile = tl.load(codes + places, mask=is_code, other=0)
        if GATED:
            up_tile = tl.load(up_codes + places, mask=is_code, other=0)
        for half in tl.static_range(HALVES):
            first = start * HALVES + half * BLOCK_INPUTS
            columns = first + inputs
            is_x = is_row[:, None] & (columns < num_inputs)[None, :]
            x_tile = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=is_x, other=0.0)
            shift = 0
            if GROUP:
                # Past the last column x is zero, and any group will do.
                shift = tl.minimum(first, num_inputs - 1) // GROUP * scales_stride
            zeros = None if zero_points is None else zero_points + shift
            raised = None if offsets is None else offsets + shift
            x_sums = None
            if offsets is not None:
                x_sums = tl.load(sums + rows * sums_stride + first // BLOCK_INPUTS, mask=is_row, other=0.0)
            total = add_step(
                total, x_tile, x_sums, tile, scales + shift, zeros, raised, levels, own, is_feature, half, CODES,
                GROUP > 0,
            )  # fmt: skip
            if GATED:
                up = add_step(
                    up, x_tile, x_sums, up_tile, scales + shift, zeros, raised, levels, up_own, is_feature, half, CODES,
                    GROUP > 0,
                )  # fmt: skip
    if not GROUP:
        total *= tl.load(scales + own, mask=is_feature, other=0.0)[None, :]
        if GATED:
            up *= tl.load(scales + up_own, mask=is_feature, other=0.0)[None, :]
    return total, up


@dependent(do_not_specialize=["num_rows"])
def quantized_kernel(
    x, sums, codes, scales, zero_points, offsets, levels, bias, residual, out, num_rows, num_features, num_inputs,
    num_codes, x_stride, sums_stride, scales_stride, residual_stride, out_stride,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_FEATURES: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """As `products.dense_kernel`, of a quantised weight.

    Shapes: codes [N, num_codes] bytes, scales and offsets [groups, N] float32, zero_points [groups, N] int8, levels
    [16] int8, sums [num_rows, steps] float32, where there are offsets. GROUP: inputs of a group, a multiple of
    BLOCK_INPUTS; 0 where a feature has one scale, which has nothing beside it.
    """
    await_inputs(PDL)
    row_tile, feature_tile = tile_of_program(num_rows, num_features, BLOCK_ROWS, BLOCK_FEATURES)
    first_row, first_feature = row_tile * BLOCK_ROWS, feature_tile * BLOCK_FEATURES
    rows = tl.arange(0, BLOCK_ROWS)
    if offsets is not None:
        sums += first_row.to(tl.int64) * sums_stride
    total, up = quantized_totals(
        x + first_row.to(tl.int64) * x_stride, rows, first_row + rows < num_rows, sums, codes, scales, zero_points,
        offsets, levels, first_feature, num_features, num_inputs, num_codes, x_stride, sums_stride, scales_stride,
        GATED, CODES, GROUP, BLOCK_ROWS, BLOCK_FEATURES, BLOCK_INPUTS,
    )  # fmt: skip
    finish(
        total, up, bias, residual, out, first_row, first_feature, num_rows, num_features, residual_stride, out_stride,
        ACTIVATION, GATED, BLOCK_ROWS, BLOCK_FEATURES,
    )  # fmt: skip


@dependent
def step_sums_kernel(
    x, sums, num_inputs, num_steps, x_stride, INPUTS: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr = False
):
    """The sums of x over each step of a product: program (row, STEPS steps of INPUTS). Shapes: sums [T, num_steps]."""
    await_inputs(PDL)
    row, steps = tl.program_id(0).to(tl.int64), tl.program_id(1) * STEPS + tl.arange(0, STEPS)
    columns = steps[:, None] * INPUTS + tl.arange(0, INPUTS)[None, :]
    values = tl.load(x + row * x_stride + columns, mask=columns < num_inputs, other=0.0).to(tl.float32)
    tl.store(sums + row * num_steps + steps, tl.sum(values, axis=1), mask=steps < num_steps)


@triton.jit
def dequantize_kernel(
    codes, scales, zero_points, offsets, levels, out, num_inputs, num_codes, scales_stride,
    CODES: tl.constexpr, GROUP: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    """The weight that codes stand for: program (feature, block of codes). Shapes: out [N, num_inputs]."""
    feature, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_INPUTS
    inputs = tl.arange(0, BLOCK_INPUTS)
    tile = tl.load(codes + feature * num_codes + start + inputs, mask=start + inputs < num_codes, other=0)
    HALVES: tl.constexpr = 2 if CODES >= INT4 else 1
    for half in tl.static_range(HALVES):
        columns = start * HALVES + half * BLOCK_INPUTS + inputs
        place = feature
        if GROUP:
            place += tl.minimum(start * HALVES + half * BLOCK_INPUTS, num_inputs - 1) // GROUP * scales_stride
        if CODES == FLOAT8:
            values = floats_of(tile).to(tl.float32)
        else:
            values = integers_of(tile, levels, half, CODES).to(tl.float32)
        if zero_points is not None:
            values -= tl.load(zero_points + place).to(tl.float32)
        values *= tl.load(scales + place)
        if offsets is not None:
            values += tl.load(offsets + place)
        places = feature * num_inputs + columns
        tl.store(out + places, narrowed(values, out.dtype.element_ty), mask=columns < num_inputs)


FORMATS = (
    WeightFormat(codes=Codes.INT8, group=0),
    WeightFormat(codes=Codes.INT8, group=128, shift=Shift.ZERO_POINTS),
    WeightFormat(codes=Codes.INT8, group=16),
    WeightFormat(codes=Codes.INT4, group=32),
    WeightFormat(codes=Codes.INT4, group=32, shift=Shift.OFFSETS),
    WeightFormat(codes=Codes.INT4, group=128, shift=Shift.ZERO_POINTS),
    WeightFormat(codes=Codes.LEVELS, group=32),
    WeightFormat(codes=Codes.FLOAT8, group=128),
)
"""What is compiled without a device. Those of GGUF: int8_g16 is Q6_K, int4_g32_offsets Q4_K, levels_g32 MXFP4."""
_TYPES = {"sums": "*fp32", "scales": "*fp32", "zero_points": "*i8", "offsets": "*fp32", "levels": "*i8"}
_TYPES |= {"bias": "*fp32"}


def absent_in(format: WeightFormat) -> list[str]:
    """Tensors that kernels are not given for weights of a format."""
    given = {Shift.NONE: (), Shift.ZERO_POINTS: ("zero_points",), Shift.OFFSETS: ("offsets", "sums")}[format.shift]
    levels = ("levels",) if format.codes is Codes.LEVELS else ()
    return [name for name in ("sums", "zero_points", "offsets", "levels") if name not in (*given, *levels)]


def constants_of(format: WeightFormat) -> dict[str, int]:
    """What kernels are compiled for."""
    return {"CODES": CODES[format.codes], "GROUP": format.group, "BLOCK_INPUTS": gpu_step(format.group)}


def _variants(dtype: str, formats: Sequence[WeightFormat] = FORMATS) -> list[Variant]:
    variants = []
    for format in formats:
        for is_gated in (False, True):
            absent = ("residual" if is_gated else "bias", *absent_in(format))
            types = _TYPES | {"x": dtype, "codes": code_type(format), "residual": dtype, "out": dtype}
            for tile in (WIDENED_SINGLE if dtype == "*fp32" else WIDENED).all():
                constants = {
                    "ACTIVATION": ACTIVATION_CODES["silu" if is_gated else None],
                    "GATED": is_gated,
                    "BLOCK_ROWS": tile.rows,
                    "BLOCK_FEATURES": tile.features,
                } | constants_of(format)
                variants.append(variant_of(quantized_kernel, types, constants, absent=absent, tile=tile))
    return variants


def code_type(format: WeightFormat) -> str:
    """Of a pointer to codes."""
    return "*i8" if format.codes is Codes.INT8 else "*u8"


def _dequantize_variants() -> list[Variant]:
    variants = []
    for format in FORMATS:
        types = _TYPES | {"codes": code_type(format), "out": "*bf16"}
        absent = [name for name in absent_in(format) if name != "sums"]
        variants.append(variant_of(dequantize_kernel, types, constants_of(format), absent=absent))
    return variants


def _sums_variant() -> Variant:
    return variant_of(step_sums_kernel, _TYPES | {"x": "*bf16"}, {"INPUTS": 32, "STEPS": SUMS})


VARIANTS: tuple[Variant, ...] = in_models(
    (
        *_variants("*bf16"),
        *_variants("*fp16", FORMATS[-1:]),
        *_variants("*fp32", FORMATS[-1:]),
        *_dequantize_variants(),
        _sums_variant(),
    )
)

"""The kernel of dense products, with what follows a product in the same pass."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.triton.alignment import in_models
from quire.ops.triton.hopper import GATED, PLAIN, HopperTiles
from quire.ops.triton.kernels.arithmetic import ACTIVATION_CODES, activated, multiply_add, narrowed
from quire.ops.triton.kernels.dependent import await_inputs, dependent
from quire.ops.triton.tiles import HALF, SINGLE, Tiles
from quire.ops.triton.variant import Variant

GROUP_ROWS = tl.constexpr(8)
"""Tiles of rows that are computed with one stretch of the weight before the next, so that caches serve both."""


@triton.jit
def tile_of_program(num_rows, num_features, BLOCK_ROWS: tl.constexpr, BLOCK_FEATURES: tl.constexpr):
    """The tile of rows and the tile of features of this program."""
    row_tiles, feature_tiles = tl.cdiv(num_rows, BLOCK_ROWS), tl.cdiv(num_features, BLOCK_FEATURES)
    program = tl.program_id(0)
    group = program // (GROUP_ROWS * feature_tiles)
    size = tl.minimum(row_tiles - group * GROUP_ROWS, GROUP_ROWS)
    within = program % (GROUP_ROWS * feature_tiles)
    return group * GROUP_ROWS + within % size, within // size


@triton.jit
def load(places, mask, WHOLE: tl.constexpr):
    """A tile, of which what is not in the mask is zero; the WHOLE of it needs none."""
    if WHOLE:
        return tl.load(places)
    return tl.load(places, mask=mask, other=0.0)


@triton.jit
def finish(
    total, up, bias, residual, out, first_row, first_feature, num_rows, num_features, residual_stride, out_stride,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_FEATURES: tl.constexpr,
):  # fmt: skip
    """Add the bias, activate, multiply by `up` if the product is gated, add the residual, round once, and store."""
    rows, features = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_FEATURES)
    is_feature = first_feature + features < num_features
    is_inside = (first_row + rows < num_rows)[:, None] & is_feature[None, :]
    if bias is not None:
        total += tl.load(bias + first_feature + features, mask=is_feature, other=0.0)[None, :]
    if GATED:
        if bias is not None:
            up += tl.load(bias + num_features + first_feature + features, mask=is_feature, other=0.0)[None, :]
        total = activated(total, ACTIVATION) * up
    else:
        total = activated(total, ACTIVATION)
    if residual is not None:
        residual += first_row.to(tl.int64) * residual_stride + first_feature
        places = rows[:, None] * residual_stride + features[None, :]
        total += tl.load(residual + places, mask=is_inside, other=0.0).to(tl.float32)
    out += first_row.to(tl.int64) * out_stride + first_feature
    places = rows[:, None] * out_stride + features[None, :]
    tl.store(out + places, narrowed(total, out.dtype.element_ty), mask=is_inside)


@dependent(do_not_specialize=["num_rows"])
def dense_kernel(
    x, weight, bias, residual, out, num_rows, num_features, num_inputs,
    x_stride, weight_stride, residual_stride, out_stride,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_FEATURES: tl.constexpr, BLOCK_INPUTS: tl.constexpr, WHOLE: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """`Ops.linear` or, GATED, `Ops.gated_linear`, whose up half begins `num_features` rows further.

    Shapes: x [num_rows, num_inputs], weight [num_features, num_inputs] (GATED: twice as many rows), bias as many
    numbers as the weight has rows, residual and out [num_rows, num_features]; strides are those of rows.
    WHOLE: the weight consists of whole tiles, so loads of it need no mask.
    """
    await_inputs(PDL)
    row_tile, feature_tile = tile_of_program(num_rows, num_features, BLOCK_ROWS, BLOCK_FEATURES)
    first_row, first_feature = row_tile * BLOCK_ROWS, feature_tile * BLOCK_FEATURES
    rows, features = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_FEATURES)
    inputs = tl.arange(0, BLOCK_INPUTS)
    is_row, is_feature = first_row + rows < num_rows, first_feature + features < num_features
    x += first_row.to(tl.int64) * x_stride
    up_weight = weight + (num_features + first_feature).to(tl.int64) * weight_stride
    weight += first_feature.to(tl.int64) * weight_stride
    total = tl.zeros((BLOCK_ROWS, BLOCK_FEATURES), tl.float32)
    up = total
    for start in range(0, num_inputs, BLOCK_INPUTS):
        columns = start + inputs
        is_input = columns < num_inputs
        x_places, places = (
            rows[:, None] * x_stride + columns[None, :],
            features[:, None] * weight_stride + columns[None, :],
        )
        is_weight = is_feature[:, None] & is_input[None, :]
        x_tile = tl.load(x + x_places, mask=is_row[:, None] & (is_input[None, :] | WHOLE), other=0.0)
        total = multiply_add(total, x_tile, load(weight + places, is_weight, WHOLE))
        if GATED:
            up = multiply_add(up, x_tile, load(up_weight + places, is_weight, WHOLE))
    finish(
        total, up, bias, residual, out, first_row, first_feature, num_rows, num_features, residual_stride, out_stride,
        ACTIVATION, GATED, BLOCK_ROWS, BLOCK_FEATURES,
    )  # fmt: skip


@dependent(do_not_specialize=["num_rows"])
def dense_tma_kernel(
    x, weight, bias, residual, out, num_rows, num_features, num_inputs, residual_stride, out_stride,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_FEATURES: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """`dense_kernel` of tiles that a copy engine brings to shared memory: Hopper's tensor memory accelerator.

    x and weight: their descriptors. What lies beyond their ends is read as zeros.
    """
    await_inputs(PDL)
    row_tile, feature_tile = tile_of_program(num_rows, num_features, BLOCK_ROWS, BLOCK_FEATURES)
    first_row, first_feature = row_tile * BLOCK_ROWS, feature_tile * BLOCK_FEATURES
    total = tl.zeros((BLOCK_ROWS, BLOCK_FEATURES), tl.float32)
    up = total
    for start in range(0, num_inputs, BLOCK_INPUTS):
        x_tile = x.load([first_row, start])
        total = multiply_add(total, x_tile, weight.load([first_feature, start]))
        if GATED:
            up = multiply_add(up, x_tile, weight.load([num_features + first_feature, start]))
    finish(
        total, up, bias, residual, out, first_row, first_feature, num_rows, num_features, residual_stride, out_stride,
        ACTIVATION, GATED, BLOCK_ROWS, BLOCK_FEATURES,
    )  # fmt: skip


def _variants(tiles: Tiles | HopperTiles, dtype: str, *, gated: bool, whole: bool) -> list[Variant]:
    pointers = {"x": f"*{dtype}", "weight": f"*{dtype}", "bias": "*fp32", "residual": f"*{dtype}", "out": f"*{dtype}"}
    sizes = ("num_rows", "num_features", "num_inputs", "x_stride", "weight_stride", "residual_stride", "out_stride")
    missing = "residual" if gated else "bias"
    variants = []
    for tile in tiles.all():
        kernel, types = dense_kernel, pointers | dict.fromkeys(sizes, "i32")
        if tile.tma:
            kernel = dense_tma_kernel
            types["x"] = f"tensordesc<{dtype}[{tile.rows},{tile.inputs}]>"
            types["weight"] = f"tensordesc<{dtype}[{tile.features},{tile.inputs}]>"
        variants.append(
            Variant(
                kernel=kernel,
                signature={k: v for k, v in types.items() if k != missing and k in kernel.arg_names},
                constants={
                    missing: None,
                    "ACTIVATION": ACTIVATION_CODES["silu" if gated else None],
                    "GATED": gated,
                    "BLOCK_ROWS": tile.rows,
                    "BLOCK_FEATURES": tile.features,
                    "BLOCK_INPUTS": tile.inputs,
                }
                | ({} if tile.tma else {"WHOLE": whole}),
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                targets=("sm_90",) if isinstance(tiles, HopperTiles) else None,
            )
        )
    return variants


VARIANTS: tuple[Variant, ...] = in_models(
    variant
    for dtype in ("bf16", "fp16", "fp32")
    for gated in (False, True)
    for tiles in ((SINGLE,) if dtype == "fp32" else (HALF, GATED if gated else PLAIN))
    for whole in (False, True)
    for variant in _variants(tiles, dtype, gated=gated, whole=whole)
)

"""The kernels around attention over latents: products of each head with a weight of its own, and all else of a row.

Shape letters as in `operands.LatentSpec`.
"""

from __future__ import annotations

import triton.language as tl

from quire.ops.triton.alignment import in_models
from quire.ops.triton.kernels.arithmetic import ACTIVATION_CODES, multiply_add, narrowed
from quire.ops.triton.kernels.dependent import await_inputs, dependent
from quire.ops.triton.kernels.experts import table_of
from quire.ops.triton.kernels.products import finish, tile_of_program
from quire.ops.triton.tiles import HALF, SINGLE, Tiles
from quire.ops.triton.variant import Variant, variant_of

HEADS_AT_ONCE = 16
"""Heads whose rotated features one program copies."""


@dependent(do_not_specialize=["num_rows"])
def head_products_kernel(
    x, weights, out, num_rows, num_features, num_inputs, x_stride, x_head_stride, weight_stride, out_stride,
    out_head_stride, ACTIVATION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_FEATURES: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """As `products.dense_kernel`, of heads that lie beside each other in the rows of x and out: program (tile, head).

    Shapes: weights: addresses of each head's [num_features, num_inputs], [H] int64.
    """
    await_inputs(PDL)
    head = tl.program_id(1)
    row_tile, feature_tile = tile_of_program(num_rows, num_features, BLOCK_ROWS, BLOCK_FEATURES)
    first_row, first_feature = row_tile * BLOCK_ROWS, feature_tile * BLOCK_FEATURES
    rows, features = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_FEATURES)
    inputs = tl.arange(0, BLOCK_INPUTS)
    is_row, is_feature = first_row + rows < num_rows, first_feature + features < num_features
    x += first_row.to(tl.int64) * x_stride + head * x_head_stride
    weight = table_of(weights, head, x.dtype.element_ty) + first_feature.to(tl.int64) * weight_stride
    total = tl.zeros((BLOCK_ROWS, BLOCK_FEATURES), tl.float32)
    for start in range(0, num_inputs, BLOCK_INPUTS):
        columns = start + inputs
        is_input = columns < num_inputs
        x_places = rows[:, None] * x_stride + columns[None, :]
        places = features[:, None] * weight_stride + columns[None, :]
        x_tile = tl.load(x + x_places, mask=is_row[:, None] & is_input[None, :], other=0.0)
        weight_tile = tl.load(weight + places, mask=is_feature[:, None] & is_input[None, :], other=0.0)
        total = multiply_add(total, x_tile, weight_tile)
    finish(
        total, total, None, None, out + head * out_head_stride, first_row, first_feature, num_rows, num_features, 0,
        out_stride, ACTIVATION, False, BLOCK_ROWS, BLOCK_FEATURES,
    )  # fmt: skip


@dependent
def latent_rows_kernel(
    query, compressed, norm, qkv, eps, query_stride, compressed_stride, qkv_stride,
    HEADS: tl.constexpr, ROPE: tl.constexpr, NOPE: tl.constexpr, LATENT: tl.constexpr, SIZE: tl.constexpr,
    PADDED_ROPE: tl.constexpr, PADDED_LATENT: tl.constexpr, PADDED_REST: tl.constexpr, HEADS_AT_ONCE: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """`Ops.latent_qkv` but for the products: program (token, tile of heads). The first tile has the key and the value.

    Shapes: query [T, HEADS * (NOPE + ROPE)], compressed [T, LATENT + ROPE], qkv [T, (HEADS + 2) * SIZE].
    """
    await_inputs(PDL)
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS_AT_ONCE
    heads = first + tl.arange(0, HEADS_AT_ONCE)
    rope, latents = tl.arange(0, PADDED_ROPE), tl.arange(0, PADDED_LATENT)
    rest = ROPE + LATENT + tl.arange(0, PADDED_REST)
    is_rope, is_rest = rope < ROPE, rest < SIZE
    query += token * query_stride
    compressed += token * compressed_stride
    qkv += token * qkv_stride
    dtype: tl.constexpr = qkv.dtype.element_ty

    # 1. each head's rotated features, and zeros behind its latents
    is_head = (heads < HEADS)[:, None]
    rotated = tl.load(
        query + heads[:, None] * (NOPE + ROPE) + NOPE + rope[None, :], mask=is_head & is_rope[None, :], other=0.0
    )
    tl.store(qkv + heads[:, None] * SIZE + rope[None, :], rotated, mask=is_head & is_rope[None, :])
    zeros = tl.zeros((HEADS_AT_ONCE, PADDED_REST), tl.float32).to(dtype)
    tl.store(qkv + heads[:, None] * SIZE + rest[None, :], zeros, mask=is_head & is_rest[None, :])

    # 2. key and value
    if first == 0:
        key = qkv + HEADS * SIZE
        value = key + SIZE
        is_latent = latents < LATENT
        latent = tl.load(compressed + latents, mask=is_latent, other=0.0).to(tl.float32)
        mean = tl.sum(latent * latent, axis=0) / LATENT
        latent = latent * tl.rsqrt(mean + eps) * tl.load(norm + latents, mask=is_latent, other=0.0)
        latent = narrowed(latent, dtype)
        shared = tl.load(compressed + LATENT + rope, mask=is_rope, other=0.0)
        tl.store(key + rope, shared, mask=is_rope)
        tl.store(value + rope, tl.zeros((PADDED_ROPE,), tl.float32).to(dtype), mask=is_rope)
        tl.store(key + ROPE + latents, latent, mask=is_latent)
        tl.store(value + ROPE + latents, latent, mask=is_latent)
        nothing = tl.zeros((PADDED_REST,), tl.float32).to(dtype)
        tl.store(key + rest, nothing, mask=is_rest)
        tl.store(value + rest, nothing, mask=is_rest)


def _product_variants(tiles: Tiles, dtype: str) -> list[Variant]:
    variants = []
    for tile in tiles.all():
        blocks = {"BLOCK_ROWS": tile.rows, "BLOCK_FEATURES": tile.features, "BLOCK_INPUTS": tile.inputs}
        types = {"x": dtype, "weights": "*i64", "out": dtype}
        variants.append(
            variant_of(head_products_kernel, types, {"ACTIVATION": ACTIVATION_CODES[None], **blocks}, tile=tile)
        )
    return variants


def _rows_variants() -> list[Variant]:
    """Of DeepSeek V3, and of V2 Lite."""
    sizes = {"ROPE": 64, "NOPE": 128, "LATENT": 512, "SIZE": 576}
    padded = {"PADDED_ROPE": 64, "PADDED_LATENT": 512, "PADDED_REST": 1, "HEADS_AT_ONCE": HEADS_AT_ONCE}
    types = dict.fromkeys(("query", "compressed", "qkv"), "*bf16") | {"norm": "*fp32", "eps": "fp32"}
    return [variant_of(latent_rows_kernel, types, {"HEADS": heads, **sizes, **padded}) for heads in (128, 16)]


VARIANTS: tuple[Variant, ...] = in_models(
    (*_product_variants(HALF, "*bf16"), *_product_variants(SINGLE, "*fp32"), *_rows_variants())
)

"""The kernel of `rotary.py`.

A head is held in three parts: the first and the second number of each pair that is rotated, and the rest. Arguments
`first_P`, `second_P` and `rest_P` are where those numbers stand in the head. Shapes here: T tokens of a tile, P numbers
of one part, padded to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.triton.kernels.dependent import await_inputs, dependent


@triton.jit
def load_parts(row_T, is_token_T, first_P, second_P, rest_P, is_pair_P, is_rest_P):
    """The parts of each row in float32."""
    is_pair = is_token_T[:, None] & is_pair_P[None, :]
    is_rest = is_token_T[:, None] & is_rest_P[None, :]
    first = tl.load(row_T[:, None] + first_P[None, :], mask=is_pair, other=0.0).to(tl.float32)
    second = tl.load(row_T[:, None] + second_P[None, :], mask=is_pair, other=0.0).to(tl.float32)
    rest = tl.load(row_T[:, None] + rest_P[None, :], mask=is_rest, other=0.0).to(tl.float32)
    return first, second, rest


@triton.jit
def store_parts(row_T, is_token_T, first_P, second_P, rest_P, is_pair_P, is_rest_P, first, second, rest):
    """The inverse of `load_parts`, rounded to what the row holds."""
    dtype: tl.constexpr = row_T.dtype.element_ty
    is_pair = is_token_T[:, None] & is_pair_P[None, :]
    is_rest = is_token_T[:, None] & is_rest_P[None, :]
    tl.store(row_T[:, None] + first_P[None, :], first.to(dtype), mask=is_pair)
    tl.store(row_T[:, None] + second_P[None, :], second.to(dtype), mask=is_pair)
    tl.store(row_T[:, None] + rest_P[None, :], rest.to(dtype), mask=is_rest)


@triton.jit
def norm_parts(norm, eps, SIZE: tl.constexpr, first_P, second_P, rest_P, is_pair_P, is_rest_P, first, second, rest):
    """Parts of heads that are RMS-normed, if there is a norm."""
    if norm is not None:
        squares = tl.sum(first * first + second * second, axis=1) + tl.sum(rest * rest, axis=1)
        factor = tl.rsqrt(squares / SIZE + eps)[:, None]
        first = first * factor * tl.load(norm + first_P, mask=is_pair_P, other=0.0)[None, :]
        second = second * factor * tl.load(norm + second_P, mask=is_pair_P, other=0.0)[None, :]
        rest = rest * factor * tl.load(norm + rest_P, mask=is_rest_P, other=0.0)[None, :]
    return first, second, rest


@triton.jit
def codes(x, per_scale, IS_FLOAT8: tl.constexpr):
    """x * per_scale as integers, or as the bits of float8_e4m3fn; half to even, those too large as the largest.

    Products and sums are of float32, never fused.
    """
    if IS_FLOAT8:
        rounded = float8_bits(tl.minimum(tl.maximum(x * per_scale, -448.0), 448.0))
    else:
        rounded = tl.minimum(tl.maximum(x * per_scale, -128.0), 127.0)
        rounded = (rounded + 12582912.0) - 12582912.0  # 1.5 * 2**23
    return rounded


@triton.jit
def float8_bits(x):
    """See `to_float8` of csrc/cpu/kernels/float8.h."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # 2**14, whose last bit is 2**-9
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960  # the biases 127 - 7, times 8
    return ((bits >> 24) & 0x80) | tl.where(magnitude < 0x3C800000, small, normal)


@triton.jit
def write_slots(
    kv_cache,
    scales,
    given,
    kind,
    slot_T,
    is_token_T,
    kv_head,
    half_stride,
    first_P,
    second_P,
    rest_P,
    is_pair_P,
    is_rest_P,
    first,
    second,
    rest,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys (kind 0) or values (kind 1) into the pages, in 8 bits where there are scales."""
    half_at = kind * half_stride.to(tl.int64)
    page = slot_T // SLOTS * BLOCK + kv_head * PAGE
    if scales is not None:
        IS_FLOAT8: tl.constexpr = kv_cache.dtype.element_ty == tl.uint8
        # the largest of numbers may pass over NaN, a sum does not: a broken token must stay so
        broken = tl.sum(first * 0.0 + second * 0.0, axis=1) + tl.sum(rest * 0.0, axis=1)
        if given is not None:
            scale = tl.load(given + kind * KV_HEADS + kv_head) + broken
            per_scale = tl.div_rn(1.0, scale)[:, None]
        else:
            TOP: tl.constexpr = 448.0 if IS_FLOAT8 else 127.0
            pairs = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
            largest = tl.maximum(pairs, tl.max(tl.abs(rest), axis=1)) + broken
            scale = tl.div_rn(largest, TOP)
            per_scale = tl.where(largest > 0, tl.div_rn(TOP, tl.where(largest > 0, largest, 1.0)), 0.0)[:, None]
        first = codes(first, per_scale, IS_FLOAT8)
        second = codes(second, per_scale, IS_FLOAT8)
        rest = codes(rest, per_scale, IS_FLOAT8)
        scale_at = half_at // 4 + page // 4 + SLOTS * SIZE // 4 + slot_T % SLOTS
        tl.store(scales + scale_at, scale, mask=is_token_T)
    row = kv_cache + half_at + page + slot_T % SLOTS * SIZE
    store_parts(row, is_token_T, first_P, second_P, rest_P, is_pair_P, is_rest_P, first, second, rest)


@dependent(do_not_specialize=["positions", "slot_mapping", "num_tokens"])
def rope_and_cache_kernel(
    query,
    qkv,
    positions,
    cos_sin,
    q_norm,
    k_norm,
    kv_cache,
    scales,
    given,
    half_stride,
    slot_mapping,
    num_tokens,
    eps,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SLOTS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PADDED_REST: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """One head of some tokens. Grid: tiles of tokens, heads of queries, keys and values."""
    await_inputs(PDL)
    # 1. where its numbers are
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    is_token = token < num_tokens
    pair = tl.arange(0, PADDED_HALF)
    is_pair = pair < HALF
    if INTERLEAVED:
        first_at = 2 * pair
        second_at = 2 * pair + 1
    else:
        first_at = pair
        second_at = pair + HALF
    rest_at = 2 * HALF + tl.arange(0, PADDED_REST)
    is_rest = rest_at < SIZE
    row = qkv + (token.to(tl.int64) * (HEADS + 2 * KV_HEADS) + head) * SIZE
    first, second, rest = load_parts(row, is_token, first_at, second_at, rest_at, is_pair, is_rest)

    # 2. norm and rotation of queries and keys
    if head < HEADS + KV_HEADS:
        if head < HEADS:
            first, second, rest = norm_parts(
                q_norm, eps, SIZE, first_at, second_at, rest_at, is_pair, is_rest, first, second, rest
            )
        else:
            first, second, rest = norm_parts(
                k_norm, eps, SIZE, first_at, second_at, rest_at, is_pair, is_rest, first, second, rest
            )
        if cos_sin is not None:
            position = tl.load(positions + token, mask=is_token, other=0).to(tl.int64)
            angle = cos_sin + position[:, None] * (2 * HALF) + pair[None, :]
            is_angle = is_token[:, None] & is_pair[None, :]
            cos = tl.load(angle, mask=is_angle, other=0.0)
            sin = tl.load(angle + HALF, mask=is_angle, other=0.0)
            turned = first * cos - second * sin
            second = second * cos + first * sin
            first = turned

    # 3. where they go
    if head < HEADS:
        row = query + (token.to(tl.int64) * HEADS + head) * SIZE
        store_parts(row, is_token, first_at, second_at, rest_at, is_pair, is_rest, first, second, rest)
    else:
        slot = tl.load(slot_mapping + token, mask=is_token, other=-1).to(tl.int64)
        kind = (head - HEADS) // KV_HEADS
        kv_head = (head - HEADS) % KV_HEADS
        write_slots(
            kv_cache,
            scales,
            given,
            kind,
            slot,
            slot >= 0,
            kv_head,
            half_stride,
            first_at,
            second_at,
            rest_at,
            is_pair,
            is_rest,
            first,
            second,
            rest,
            KV_HEADS,
            SIZE,
            SLOTS,
            PAGE,
            BLOCK,
        )

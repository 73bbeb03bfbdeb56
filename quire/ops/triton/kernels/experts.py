"""The kernels of a mixture of experts: who goes where, the products of all experts in one launch, and the sum."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.triton.kernels.arithmetic import multiply_add, narrowed, sigmoid
from quire.ops.triton.kernels.dependent import await_inputs, dependent
from quire.ops.triton.kernels.products import finish
from quire.ops.triton.kernels.quantized import INT8, quantized_totals
from quire.ops.triton.kernels.sampling import LAST_ID, MINUS_INFINITY, keys_of, value_of

NO_KEY = tl.constexpr(-(2**63))
SOFTMAX = tl.constexpr(0)
SIGMOID = tl.constexpr(1)
LOGITS = tl.constexpr(2)
LOGITS_SIGMOID = tl.constexpr(3)


@triton.jit
def softmax_of(values):
    """Over all numbers of a tensor of two dimensions."""
    shares = tl.exp(values - tl.max(tl.max(values, axis=1), axis=0))
    return shares / tl.sum(tl.sum(shares, axis=1), axis=0)


@triton.jit
def in_best_groups(keys, num_groups, GROUPS: tl.constexpr, NUM_BEST: tl.constexpr, NUM_CHOSEN_GROUPS: tl.constexpr):
    """The keys of the best groups, and `NO_KEY` for others. A group's score is the sum of its best. [GROUPS, SIZE]"""
    groups, left = tl.arange(0, GROUPS), keys
    totals = tl.zeros((GROUPS,), tl.float32)
    for _ in range(NUM_BEST):
        best = tl.max(left, axis=1)
        totals += value_of(best)
        left = tl.where(left == best[:, None], NO_KEY, left)
    of_groups = tl.where(groups < num_groups, keys_of(totals, groups), NO_KEY)
    is_chosen = groups < 0
    for _ in range(NUM_CHOSEN_GROUPS):
        is_best = of_groups == tl.max(of_groups, axis=0)
        is_chosen = is_chosen | is_best
        of_groups = tl.where(is_best, NO_KEY, of_groups)
    return tl.where(is_chosen[:, None], keys, NO_KEY)


@dependent
def route_kernel(
    logits, choice_bias, expert_scales, chosen, weights, stride, num_groups, group_size, least_sum, added_to_sum,
    factor, near,
    SCORES: tl.constexpr, NUM_CHOSEN: tl.constexpr, NUM_BEST: tl.constexpr, NUM_CHOSEN_GROUPS: tl.constexpr,
    RENORMALIZED: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, CHOICES: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """The experts of a row and their weights, in the order of the experts' indices; one program a row.

    A router without groups has one, and NUM_BEST 0. near: None unless logits choose one after the other, by SparseMixer
    (https://arxiv.org/abs/2409.12136) without its noise. Shapes: chosen [T, NUM_CHOSEN] int32, weights as many float32.
    """
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    groups, members = tl.arange(0, GROUPS)[:, None], tl.arange(0, SIZE)[None, :]
    ids = groups * group_size + members
    is_expert = (groups < num_groups) & (members < group_size)
    values = tl.load(logits + row * stride + ids, mask=is_expert, other=MINUS_INFINITY)
    scores = values
    if SCORES == SOFTMAX:
        scores = softmax_of(values)
    elif SCORES == SIGMOID:
        scores = sigmoid(values)
    ranked = scores
    if choice_bias is not None:
        ranked += tl.load(choice_bias + ids, mask=is_expert, other=0.0)
    keys = tl.where(is_expert, keys_of(ranked, ids), NO_KEY)
    if NUM_BEST > 0:
        keys = in_best_groups(keys, num_groups, GROUPS, NUM_BEST, NUM_CHOSEN_GROUPS)
    choices = tl.arange(0, CHOICES)
    picked, found = tl.zeros((CHOICES,), tl.float32), tl.full((CHOICES,), 1 << 30, tl.int32)
    for number in range(NUM_CHOSEN):
        best = tl.max(tl.max(keys, axis=1), axis=0)
        is_best = keys == best
        score = tl.sum(tl.sum(tl.where(is_best, scores, 0.0), axis=1), axis=0)
        if near is not None:
            is_far = (score - values) / tl.maximum(tl.abs(values), score) > near  # 0 / 0 is near
            shares = tl.where(is_far | (keys == NO_KEY), 0.0, tl.exp(values - score))
            score = 1.0 / tl.sum(tl.sum(shares, axis=1), axis=0)
        keys = tl.where(is_best, NO_KEY, keys)
        picked = tl.where(choices == number, score, picked)
        found = tl.where(choices == number, ((best & LAST_ID) ^ LAST_ID).to(tl.int32), found)
    is_choice = choices < NUM_CHOSEN
    if near is None:
        if SCORES == LOGITS:
            shares = tl.where(is_choice, picked, MINUS_INFINITY)
            shares = tl.exp(shares - tl.max(shares, axis=0))
            picked = shares / tl.sum(shares, axis=0)
        elif SCORES == LOGITS_SIGMOID:
            picked = tl.where(is_choice, sigmoid(picked), 0.0)
        if RENORMALIZED:
            picked = picked / (tl.maximum(tl.sum(picked, axis=0), least_sum) + added_to_sum)
        picked = picked * factor
    if expert_scales is not None:
        picked *= tl.load(expert_scales + found, mask=is_choice, other=0.0)
    place = tl.sum((found[None, :] < found[:, None]).to(tl.int32), axis=1)
    tl.store(chosen + row * NUM_CHOSEN + place, found, mask=is_choice)
    tl.store(weights + row * NUM_CHOSEN + place, picked, mask=is_choice)


@triton.jit
def rows_of_tile(starts, num_experts, tile, EXPERTS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """The expert of a tile, its first row and the end of its expert's rows; expert num_experts for a tile too many.

    The tiles of an expert's rows follow those of the one before, and there are no more than rows // BLOCK_ROWS +
    experts. Shapes: starts [num_experts + 1] int64.
    """
    experts = tl.arange(0, EXPERTS)
    is_expert = experts < num_experts
    begins = tl.load(starts + experts, mask=is_expert, other=0).to(tl.int32)
    ends = tl.load(starts + experts + 1, mask=is_expert, other=0).to(tl.int32)
    tiles = (ends - begins + BLOCK_ROWS - 1) // BLOCK_ROWS
    expert = tl.sum((tl.cumsum(tiles, axis=0) <= tile).to(tl.int32), axis=0)
    is_own = experts == expert
    number = tile - tl.sum(tl.where(experts < expert, tiles, 0), axis=0)
    first_row = tl.sum(tl.where(is_own, begins, 0), axis=0) + number * BLOCK_ROWS
    return expert, first_row, tl.sum(tl.where(is_own, ends, 0), axis=0)


@triton.jit
def table_of(addresses, expert, dtype: tl.constexpr):
    """A tensor of one expert, which begins at a multiple of 16 bytes."""
    return tl.multiple_of(tl.load(addresses + expert).to(tl.pointer_type(dtype)), 16)


@dependent
def grouped_kernel(
    x, order, scales, starts, weights, biases, out, num_experts, num_features, num_inputs, num_chosen,
    x_stride, weight_stride, out_stride,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_FEATURES: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """As `products.dense_kernel`, of experts that each have a stretch of the rows of out.

    Program (tile, tile of features). With `order`, row p of out is of pair order[p] and reads row order[p] //
    num_chosen of x, multiplied by scales[order[p]] if there are scales; else it reads row p.
    Shapes: weights and biases: addresses of each expert's, [num_experts] int64; starts as for `rows_of_tile`.
    """
    await_inputs(PDL)
    first_feature = tl.program_id(1) * BLOCK_FEATURES
    expert, first_row, end = rows_of_tile(starts, num_experts, tl.program_id(0), EXPERTS, BLOCK_ROWS)
    if expert < num_experts:
        rows, features = first_row + tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_FEATURES)
        inputs = tl.arange(0, BLOCK_INPUTS)
        is_row, is_feature = rows < end, first_feature + features < num_features
        if order is not None:
            pairs = tl.load(order + rows, mask=is_row, other=0)
            if scales is not None:
                own_scales = tl.load(scales + pairs, mask=is_row, other=0.0)[:, None]
            rows = pairs // num_chosen
        x_rows = x + rows.to(tl.int64)[:, None] * x_stride
        weight = table_of(weights, expert, x.dtype.element_ty)
        up_weight = weight + (num_features + first_feature).to(tl.int64) * weight_stride
        weight += first_feature.to(tl.int64) * weight_stride
        bias = None
        if biases is not None:
            bias = tl.load(biases + expert).to(tl.pointer_type(tl.float32))
        total = tl.zeros((BLOCK_ROWS, BLOCK_FEATURES), tl.float32)
        up = total
        for start in range(0, num_inputs, BLOCK_INPUTS):
            columns = start + inputs
            is_input = columns < num_inputs
            places = features[:, None] * weight_stride + columns[None, :]
            x_tile = tl.load(x_rows + columns[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
            if scales is not None:
                x_tile = narrowed(x_tile.to(tl.float32) * own_scales, x.dtype.element_ty)
            is_weight = is_feature[:, None] & is_input[None, :]
            total = multiply_add(total, x_tile, tl.load(weight + places, mask=is_weight, other=0.0))
            if GATED:
                up = multiply_add(up, x_tile, tl.load(up_weight + places, mask=is_weight, other=0.0))
        finish(
            total, up, bias, None, out, first_row, first_feature, end, num_features, 0, out_stride,
            ACTIVATION, GATED, BLOCK_ROWS, BLOCK_FEATURES,
        )  # fmt: skip


@dependent
def grouped_quantized_kernel(
    x, sums, order, starts, codes, scales, zero_points, offsets, levels, biases, out, num_experts, num_features,
    num_inputs, num_codes, num_chosen, x_stride, sums_stride, scales_stride, out_stride,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, EXPERTS: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_FEATURES: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """As `grouped_kernel`, of quantised weights: those of `quantized_products.quantized_kernel`.

    Shapes: codes, scales, zero_points, offsets and levels: addresses of each expert's, [num_experts] int64; sums of the
    rows of x.
    """
    await_inputs(PDL)
    first_feature = tl.program_id(1) * BLOCK_FEATURES
    expert, first_row, end = rows_of_tile(starts, num_experts, tl.program_id(0), EXPERTS, BLOCK_ROWS)
    if expert < num_experts:
        rows = first_row + tl.arange(0, BLOCK_ROWS)
        is_row = rows < end
        if order is not None:
            rows = tl.load(order + rows, mask=is_row, other=0) // num_chosen
        zeros = None if zero_points is None else table_of(zero_points, expert, tl.int8)
        raised = None if offsets is None else table_of(offsets, expert, tl.float32)
        known = None if levels is None else table_of(levels, expert, tl.int8)
        bias = None
        if biases is not None:
            bias = tl.load(biases + expert).to(tl.pointer_type(tl.float32))
        total, up = quantized_totals(
            x, rows.to(tl.int64), is_row, sums, table_of(codes, expert, tl.int8 if CODES == INT8 else tl.uint8),
            table_of(scales, expert, tl.float32), zeros, raised, known, first_feature, num_features, num_inputs,
            num_codes, x_stride, sums_stride, scales_stride, GATED, CODES, GROUP,
            BLOCK_ROWS, BLOCK_FEATURES, BLOCK_INPUTS,
        )  # fmt: skip
        finish(
            total, up, bias, None, out, first_row, first_feature, end, num_features, 0, out_stride,
            ACTIVATION, GATED, BLOCK_ROWS, BLOCK_FEATURES,
        )  # fmt: skip


@dependent
def sum_experts_kernel(
    parts, places, weights, shared, shared_logits, residual, out, shared_factor, num_columns, logits_stride,
    residual_stride, out_stride,
    NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Each token's parts in the order of its choices, then the shared expert's, then the residual; one program a row.

    Shapes: parts [T * NUM_CHOSEN, N] float32, part places[t, c] is of choice c, weights as places or None for ones,
    shared [T, N] float32, shared_logits: one of each row, whose sigmoid weighs it, residual and out [T, N].
    """
    await_inputs(PDL)
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < num_columns
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(NUM_CHOSEN):
        part = tl.load(places + row * NUM_CHOSEN + choice)
        value = tl.load(parts + part * num_columns + columns, mask=is_inside, other=0.0)
        if weights is not None:
            value *= tl.load(weights + row * NUM_CHOSEN + choice)
        total += value
    if shared is not None:
        scale = shared_factor
        if shared_logits is not None:
            scale = sigmoid(tl.load(shared_logits + row * logits_stride)) * shared_factor
        total += tl.load(shared + row * num_columns + columns, mask=is_inside, other=0.0) * scale
    if residual is not None:
        total += tl.load(residual + row * residual_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, narrowed(total, out.dtype.element_ty), mask=is_inside)

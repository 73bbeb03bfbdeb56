"""The kernels of paged attention; `attention.py` says what they compute and launches them.

Shape letters here: M rows of a tile (tokens times the heads of one kv head), U keys of a tile, D head size, padded to a
power of two. Exponents are to the base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.triton.kernels.arithmetic import add_product, floats_of, product
from quire.ops.triton.kernels.dependent import await_inputs, dependent

LOG2_E = tl.constexpr(1.4426950408889634)
MINUS_INFINITY = tl.constexpr(float("-inf"))
COLUMNS = tl.constexpr(16)
"""The fewest that a product has."""
STEP = ("query_start", "seq_lens", "num_sequences", "num_slots", "tables", "table_stride")
"""Arguments that differ from step to step: nothing is compiled anew for what they are multiples of."""


@triton.jit
def find_sequence(query_start, num_sequences, tile, TOKENS: tl.constexpr):
    """The sequence of a tile: sequence r owns tiles query_start[r] // TOKENS + r and following, enough for its tokens.

    So the number of tiles is bounded without a look at lengths. The last tiles of a sequence may be empty.
    """
    low = num_sequences * 0  # a tensor in the interpreter too
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def find_sequences(query_start, num_sequences, token_M):
    """The sequence of each token of the step. Shapes: -> [M]."""
    low_M = (token_M * 0).to(tl.int32)
    high_M = low_M + num_sequences
    width = num_sequences
    while width > 1:
        middle_M = (low_M + high_M) // 2
        is_above = tl.load(query_start + middle_M) <= token_M
        low_M = tl.where(is_above, middle_M, low_M)
        high_M = tl.where(is_above, high_M, middle_M)
        width = (width + 1) // 2
    return low_M


@triton.jit
def first_seen(position, window, chunk):
    """The first position of the context that a token at `position` sees."""
    first = position * 0
    if window is not None:
        first = tl.maximum(position - window + 1, 0)
    elif chunk is not None:
        first = position // chunk * chunk
    return first


@triton.jit
def merge_softmax(largest_M, total_M, values_MD, other_largest_M, other_total_M, other_values_MD):
    """One partial softmax after another one. Each is its largest exponent, the sum of powers, and that of values."""
    both = tl.maximum(largest_M, other_largest_M)
    base = tl.where(both == MINUS_INFINITY, 0.0, both)
    keep = tl.exp2(largest_M - base)
    take = tl.exp2(other_largest_M - base)
    total = tl.fma(total_M, keep, other_total_M * take)
    values = tl.fma(values_MD, tl.broadcast_to(keep[:, None], values_MD.shape), other_values_MD * take[:, None])
    return both, total, values


@triton.jit
def finish_softmax(largest_M, total_M, values_MD, sinks, head_M, is_row_M):
    """What attention gives for the rows, zero for those that saw nothing. Shapes: -> [M, D] float32."""
    if sinks is not None:
        sink = tl.load(sinks + head_M, mask=is_row_M, other=0.0) * LOG2_E
        both = tl.maximum(largest_M, sink)
        keep = tl.exp2(largest_M - both)
        total_M = tl.fma(total_M, keep, tl.exp2(sink - both))
        values_MD = values_MD * keep[:, None]
    return values_MD / tl.where(total_M == 0.0, 1.0, total_M)[:, None]


@triton.jit
def numbers_of(stored, dtype: tl.constexpr):
    """What a cache holds, before its scales; of 8-bit floats a 256th of it."""
    return floats_of(stored).to(dtype) if stored.dtype == tl.uint8 else stored.to(dtype)


@triton.jit
def attend_split(
    query_MD,
    kv_cache,
    scales,
    half_stride,
    table,
    slope_M,
    position_M,
    kv_head,
    begin,
    end,
    seen_from,
    scale,
    soft_cap,
    window,
    chunk,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The partial softmax of keys begin .. end, of which nothing before `seen_from` is read.

    Weights are added up by a product with ones, whose 16 columns are the same number: the matrix units add in an order
    that depends on no tile, and a sum over the threads of a program in one that does.
    """
    UNIT: tl.constexpr = 256.0 if kv_cache.dtype.element_ty == tl.uint8 else 1.0
    largest = tl.full([ROWS], MINUS_INFINITY, tl.float32)
    total_MN = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    ones_UN = tl.full([KEYS, COLUMNS], 1.0, query_MD.dtype)
    values = tl.full([ROWS, PADDED_SIZE], 0.0, tl.float32)
    dim = tl.arange(0, PADDED_SIZE)
    first_seen_M = first_seen(position_M, window, chunk)
    for first_key in range(begin, end, KEYS):
        key = first_key + tl.arange(0, KEYS)
        is_key = (key >= seen_from) & (key < end)
        if SLOTS % KEYS == 0:  # a tile lies in one page
            block = tl.load(table + first_key // SLOTS).to(tl.int64)
        else:
            block = tl.load(table + key // SLOTS, mask=is_key, other=0).to(tl.int64)
        page = block * BLOCK + kv_head * PAGE
        row = page + key % SLOTS * SIZE
        is_number = is_key[:, None] & (dim < SIZE)[None, :]

        # 1. scores [M, U]
        keys_UD = numbers_of(tl.load(kv_cache + row[:, None] + dim[None, :], mask=is_number, other=0), query_MD.dtype)
        scores = product(query_MD, tl.trans(keys_UD))
        if scales is not None:
            scale_at = page // 4 + SLOTS * SIZE // 4 + key % SLOTS
            scores = scores * (tl.load(scales + scale_at, mask=is_key, other=0.0) * UNIT)[None, :]
        scores = scores * scale
        if soft_cap is not None:  # tanh(x) = 1 - 2 / (exp(2 x) + 1), which neither end overflows
            scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E)) + 1.0))
        if slope_M is not None:
            scores = scores - slope_M[:, None] * (position_M[:, None] - key[None, :]).to(tl.float32)
        is_seen = is_key[None, :] & (key[None, :] <= position_M[:, None])
        if window is not None or chunk is not None:
            is_seen &= key[None, :] >= first_seen_M[:, None]
        scores = tl.where(is_seen, scores, MINUS_INFINITY)

        # 2. online softmax
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        base = tl.where(new_largest == MINUS_INFINITY, 0.0, new_largest)
        keep = tl.exp2(largest - base)
        weights = tl.exp2(scores - base[:, None]).to(query_MD.dtype)
        total_MN = add_product(total_MN * keep[:, None], weights, ones_UN)
        largest = new_largest

        # 3. weighted values
        values_UD = tl.load(kv_cache + half_stride + row[:, None] + dim[None, :], mask=is_number, other=0)
        if scales is not None:
            scale_of = tl.load(scales + half_stride // 4 + scale_at, mask=is_key, other=0.0) * UNIT
            values_UD = numbers_of(values_UD, tl.float32) * scale_of[:, None]
        values_UD = values_UD.to(query_MD.dtype)
        values = add_product(values * keep[:, None], weights, values_UD)
    return largest, tl.sum(total_MN, axis=1) * (1.0 / COLUMNS), values


@dependent(do_not_specialize=STEP)
def attend_kernel(
    out,
    partial_values,
    partial_sums,
    query,
    kv_cache,
    scales,
    half_stride,
    query_start,
    seq_lens,
    tables,
    table_stride,
    num_sequences,
    num_slots,
    slopes,
    sinks,
    scale,
    soft_cap,
    window,
    chunk,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Attention of one tile of rows over all of its splits, or over one of them where there are partial sums.

    Grid: tiles, kv heads times HEAD_TILES, splits that a tile may see. Each of the HEAD_TILES has as many of the query
    heads of a kv head. `num_slots` partial sums of a row lie beside each other, that of
    split s in slot s % num_slots.
    """
    await_inputs(PDL)
    GROUP: tl.constexpr = HEADS // (KV_HEADS * HEAD_TILES)
    TOKENS: tl.constexpr = ROWS // GROUP

    # 1. the rows
    tile = tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_TILES
    sequence = find_sequence(query_start, num_sequences, tile, TOKENS)
    start = tl.load(query_start + sequence)
    num_tokens = tl.load(query_start + sequence + 1) - start
    first_token = (tile - start // TOKENS - sequence) * TOKENS
    if first_token >= num_tokens:
        return
    before = tl.load(seq_lens + sequence) - num_tokens
    row = tl.arange(0, ROWS)
    token = first_token + row // GROUP
    is_row = (row < TOKENS * GROUP) & (token < num_tokens)
    head = tl.program_id(1) * GROUP + row % GROUP
    position = before + token
    table = tables + sequence.to(tl.int64) * table_stride

    # 2. what they see
    seen_from = first_seen(before + first_token, window, chunk)
    seen_to = before + tl.minimum(first_token + TOKENS, num_tokens)
    first_split = seen_from // SPLIT
    end_split = (seen_to - 1) // SPLIT + 1

    # 3. their queries
    dim = tl.arange(0, PADDED_SIZE)
    is_number = is_row[:, None] & (dim < SIZE)[None, :]
    index = (start + token).to(tl.int64) * HEADS + head
    query_MD = tl.load(query + index[:, None] * SIZE + dim[None, :], mask=is_number, other=0.0)
    if WIDE:
        query_MD = query_MD.to(tl.float32)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + head, mask=is_row, other=0.0) * LOG2_E

    # 4. attention
    if partial_sums is not None:
        split = first_split + tl.program_id(2)
        if split >= end_split:
            return
        begin = tl.maximum(split * SPLIT, seen_from // KEYS * KEYS)
        end = tl.minimum(split * SPLIT + SPLIT, seen_to)
        largest, total, values = attend_split(
            query_MD,
            kv_cache,
            scales,
            half_stride,
            table,
            slope,
            position,
            kv_head,
            begin,
            end,
            seen_from,
            scale,
            soft_cap,
            window,
            chunk,
            ROWS,
            KEYS,
            SIZE,
            PADDED_SIZE,
            KV_HEADS,
            SLOTS,
            PAGE,
            BLOCK,
        )
        slot = index * num_slots + split % num_slots
        tl.store(partial_sums + slot * 2, largest, mask=is_row)
        tl.store(partial_sums + slot * 2 + 1, total, mask=is_row)
        tl.store(partial_values + slot[:, None] * SIZE + dim[None, :], values, mask=is_number)
    else:
        largest = tl.full([ROWS], MINUS_INFINITY, tl.float32)
        total = tl.full([ROWS], 0.0, tl.float32)
        values = tl.full([ROWS, PADDED_SIZE], 0.0, tl.float32)
        for split in range(first_split, end_split):
            begin = tl.maximum(split * SPLIT, seen_from // KEYS * KEYS)
            end = tl.minimum(split * SPLIT + SPLIT, seen_to)
            other_largest, other_total, other_values = attend_split(
                query_MD,
                kv_cache,
                scales,
                half_stride,
                table,
                slope,
                position,
                kv_head,
                begin,
                end,
                seen_from,
                scale,
                soft_cap,
                window,
                chunk,
                ROWS,
                KEYS,
                SIZE,
                PADDED_SIZE,
                KV_HEADS,
                SLOTS,
                PAGE,
                BLOCK,
            )
            largest, total, values = merge_softmax(largest, total, values, other_largest, other_total, other_values)
        result = finish_softmax(largest, total, values, sinks, head, is_row)
        tl.store(out + index[:, None] * SIZE + dim[None, :], result.to(out.dtype.element_ty), mask=is_number)


@dependent(do_not_specialize=STEP[:4])
def merge_kernel(
    out,
    partial_values,
    partial_sums,
    query_start,
    seq_lens,
    num_sequences,
    num_slots,
    sinks,
    window,
    chunk,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """The splits of rows, which are heads of tokens, merged in the order of the context. Grid: tiles of rows.

    A split that a row does not see changes nothing of it, so rows of any sequences may share a program.
    """
    await_inputs(PDL)
    # 1. the rows, and the splits that each one sees
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    token = row // HEADS
    head = row % HEADS
    num_tokens = tl.load(query_start + num_sequences)
    is_row = token < num_tokens
    sequence = find_sequences(query_start, num_sequences, token)
    behind = tl.load(query_start + sequence + 1, mask=is_row, other=0) - token
    position = tl.load(seq_lens + sequence, mask=is_row, other=0) - behind
    first_split = first_seen(position, window, chunk) // SPLIT
    last_split = tl.where(is_row, position // SPLIT, -1)

    # 2. their sums
    dim = tl.arange(0, PADDED_SIZE)
    largest = tl.full([ROWS], MINUS_INFINITY, tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    values = tl.full([ROWS, PADDED_SIZE], 0.0, tl.float32)
    for split in tl.range(tl.min(first_split, axis=0), tl.max(last_split, axis=0) + 1, num_stages=4):
        is_seen = (split >= first_split) & (split <= last_split)
        slot = row * num_slots + split % num_slots
        is_number = is_seen[:, None] & (dim < SIZE)[None, :]
        other_largest = tl.load(partial_sums + slot * 2, mask=is_seen, other=MINUS_INFINITY)
        other_total = tl.load(partial_sums + slot * 2 + 1, mask=is_seen, other=0.0)
        other_values = tl.load(partial_values + slot[:, None] * SIZE + dim[None, :], mask=is_number, other=0.0)
        largest, total, values = merge_softmax(largest, total, values, other_largest, other_total, other_values)
    result = finish_softmax(largest, total, values, sinks, head, is_row)
    is_number = is_row[:, None] & (dim < SIZE)[None, :]
    tl.store(out + row[:, None] * SIZE + dim[None, :], result.to(out.dtype.element_ty), mask=is_number)

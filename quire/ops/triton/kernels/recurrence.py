"""The kernels of recurrent layers: convolution, scans of states, and what follows them.

A scan's program takes one sequence, and channels that no other one takes, through the step token by token, in float32
and always in the same order: no bit depends on how a sequence is cut into steps, or on its neighbours.

States [2, B, half]: number n of page b is at [n // half, b, n % half]. Page -1 holds zeros, whatever is
written there.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from quire.ops.triton.alignment import in_models
from quire.ops.triton.elementwise import exponential_less_one
from quire.ops.triton.kernels.arithmetic import narrowed, sigmoid, softplus
from quire.ops.triton.kernels.dependent import await_inputs, dependent
from quire.ops.triton.variant import Variant, variant_of

STEP = ("num_sequences", "half_stride")
"""Arguments for which nothing is compiled anew."""
BLOCK = 128
"""Channels of a program of the convolution and of the RG-LRU."""
ROWS = 32
"""Rows of a state that one program takes at most: a power of two."""
NUMBERS_AT_ONCE = 4096
"""Numbers of a state that the registers of one program hold."""
UNIT_EPS = tl.constexpr(1e-6)


def tile_of(numbers: int) -> dict[str, int]:
    """The rows that a program takes of a state with rows of so many numbers, which are padded."""
    padded = triton.next_power_of_2(numbers)
    return {"PADDED": padded, "ROWS": max(1, min(ROWS, NUMBERS_AT_ONCE // padded))}


@triton.jit
def sequence_of(query_start, num_sequences, token):
    """The sequence of a token of the step: the last one that begins at it or before it."""
    low = num_sequences * 0  # a tensor in the interpreter too
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) <= token:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def silu(x):
    """x * sigmoid(x)"""
    return x * sigmoid(x)


@triton.jit
def places_of(page, numbers, half, half_stride):
    """Where numbers of a page are. Shapes: numbers: any -> as numbers."""
    return (numbers // half).to(tl.int64) * half_stride + page.to(tl.int64) * half + numbers % half


@triton.jit
def load_numbers(states, page, numbers, half, half_stride, mask):
    """Numbers of a page, zeros where there is none."""
    is_there = mask & (numbers * 0 + page >= 0)
    return tl.load(states + places_of(page, numbers, half, half_stride), mask=is_there, other=0.0)


@triton.jit
def store_numbers(states, page, numbers, value, half, half_stride, mask):
    """Write numbers of a page, if there is one."""
    is_there = mask & (numbers * 0 + page >= 0)
    tl.store(states + places_of(page, numbers, half, half_stride), value, mask=is_there)


@triton.jit
def input_of(x, factors, row, channels, mask, x_stride):
    """What the convolution reads of a row of x: times that of `factors`, if there are any."""
    value = tl.load(x + row.to(tl.int64) * x_stride + channels, mask=mask, other=0.0).to(tl.float32)
    if factors is not None:
        value *= tl.load(factors + row.to(tl.int64) * x_stride + channels, mask=mask, other=0.0).to(tl.float32)
    return value


@dependent(do_not_specialize=STEP)
def convolve_kernel(
    x, factors, gates, weight, bias, out, states, query_start, reads, num_sequences, num_channels, half, half_stride,
    x_stride, out_stride, WIDTH: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """A causal convolution of each channel: program (token, tile of channels); silu of it, or times `gates`.

    Shapes: x, factors and gates [T, C] with the same stride, weight [C, WIDTH], bias [C], out [T, C].
    """
    await_inputs(PDL)
    token, channels = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channels < num_channels
    sequence = sequence_of(query_start, num_sequences, token)
    local, page = token - tl.load(query_start + sequence), tl.load(reads + sequence)
    total = tl.zeros((BLOCK,), tl.float32)
    if bias is not None:
        total += tl.load(bias + channels, mask=is_channel, other=0.0)
    for lag in tl.static_range(WIDTH - 1, -1, -1):
        if local >= lag:
            value = input_of(x, factors, token - lag, channels, is_channel, x_stride)
        else:
            numbers = (WIDTH - 1 + local - lag) * num_channels + channels
            value = load_numbers(states, page, numbers, half, half_stride, is_channel)
        total += value * tl.load(weight + channels * WIDTH + (WIDTH - 1 - lag), mask=is_channel, other=0.0)
    if SILU:
        total = silu(total)
    if gates is not None:
        total *= tl.load(gates + token.to(tl.int64) * x_stride + channels, mask=is_channel, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * out_stride + channels, narrowed(total, out.dtype.element_ty), mask=is_channel)


@dependent(do_not_specialize=STEP)
def keep_inputs_kernel(
    x, factors, states, query_start, reads, writes, num_sequences, num_channels, half, half_stride, x_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """The last WIDTH - 1 inputs of a convolution, oldest first: program (sequence, tile of channels)."""
    await_inputs(PDL)
    sequence, channels = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channels < num_channels
    start, end = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
    page, target = tl.load(reads + sequence), tl.load(writes + sequence)
    for index in tl.static_range(WIDTH - 1):
        row = end - (WIDTH - 1) + index
        if row >= start:
            value = input_of(x, factors, row, channels, is_channel, x_stride)
        else:
            numbers = (end - start + index) * num_channels + channels
            value = load_numbers(states, page, numbers, half, half_stride, is_channel)
        store_numbers(states, target, index * num_channels + channels, value, half, half_stride, is_channel)


@dependent(do_not_specialize=STEP)
def mamba_kernel(
    x, gate, times, time_bias, vectors, decay, skip, out, states, query_start, reads, writes, num_sequences,
    num_channels, half, half_stride, gate_stride, vectors_stride, FIRST: tl.constexpr, NUMBERS: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Steps 2 (from dt on) to 4 of `Ops.mamba`: program (sequence, tile of channels).

    Shapes: x and times [T, C] float32, gate and out [T, C], vectors [T, 2 * NUMBERS] float32: what writes, what reads.
    FIRST: the number of a page with which h begins.
    """
    await_inputs(PDL)
    sequence, channels = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    number = tl.arange(0, PADDED)
    is_channel, is_number = channels < num_channels, number < NUMBERS
    is_inside = is_channel[:, None] & is_number[None, :]
    places = FIRST + channels[:, None] * NUMBERS + number[None, :]
    state = load_numbers(states, tl.load(reads + sequence), places, half, half_stride, is_inside)
    rates = tl.load(decay + channels[:, None] * NUMBERS + number[None, :], mask=is_inside, other=0.0)
    bias = tl.load(time_bias + channels, mask=is_channel, other=0.0)
    share = tl.load(skip + channels, mask=is_channel, other=0.0)
    start, end = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
    token = start.to(tl.int64)
    for _ in range(start, end):
        value = tl.load(x + token * num_channels + channels, mask=is_channel, other=0.0)
        dt = softplus(tl.load(times + token * num_channels + channels, mask=is_channel, other=0.0) + bias)
        write = tl.load(vectors + token * vectors_stride + number, mask=is_number, other=0.0)
        read = tl.load(vectors + token * vectors_stride + NUMBERS + number, mask=is_number, other=0.0)
        state = state * tl.exp(dt[:, None] * rates) + (dt * value)[:, None] * write[None, :]
        result = tl.sum(state * read[None, :], axis=1) + value * share
        opened = silu(tl.load(gate + token * gate_stride + channels, mask=is_channel, other=0.0).to(tl.float32))
        result = narrowed(result * opened, out.dtype.element_ty)
        tl.store(out + token * num_channels + channels, result, mask=is_channel)
        token += 1
    store_numbers(states, tl.load(writes + sequence), places, state, half, half_stride, is_inside)


@dependent(do_not_specialize=STEP)
def mamba2_kernel(
    mixed, times, time_bias, decay, skip, out, states, query_start, reads, writes, num_sequences, half, half_stride,
    times_stride, FIRST: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    NUMBERS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Step 2 of `Ops.mamba2`, with the skip: program (sequence, head, tile of its channels).

    Shapes: mixed [T, HEADS * SIZE + 2 * GROUPS * NUMBERS] float32: x, what writes and what reads; times [T, HEADS], out
    [T, HEADS * SIZE] float32.
    """
    await_inputs(PDL)
    sequence, head = tl.program_id(0), tl.program_id(1)
    inner: tl.constexpr = HEADS * SIZE
    channels, number = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    is_channel, is_number = channels < SIZE, number < NUMBERS
    is_inside = is_channel[:, None] & is_number[None, :]
    places = FIRST + (head * SIZE + channels)[:, None] * NUMBERS + number[None, :]
    state = load_numbers(states, tl.load(reads + sequence), places, half, half_stride, is_inside)
    bias, rate, share = tl.load(time_bias + head), tl.load(decay + head), tl.load(skip + head)
    own = head * SIZE + channels
    vector = inner + head // (HEADS // GROUPS) * NUMBERS + number
    start, end = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
    token = start.to(tl.int64)
    for _ in range(start, end):
        row = mixed + token * (inner + 2 * GROUPS * NUMBERS)
        value = tl.load(row + own, mask=is_channel, other=0.0)
        dt = softplus(tl.load(times + token * times_stride + head).to(tl.float32) + bias)
        write = tl.load(row + vector, mask=is_number, other=0.0)
        read = tl.load(row + GROUPS * NUMBERS + vector, mask=is_number, other=0.0)
        state = state * tl.exp(dt * rate) + (value * dt)[:, None] * write[None, :]
        result = tl.sum(state * read[None, :], axis=1) + value * share
        tl.store(out + token * inner + own, result, mask=is_channel)
        token += 1
    store_numbers(states, tl.load(writes + sequence), places, state, half, half_stride, is_inside)


@dependent(do_not_specialize=STEP)
def gated_delta_kernel(
    mixed, rates, times, time_bias, decay, out, states, query_start, reads, writes, num_sequences, half, half_stride,
    rates_stride, times_stride, FIRST: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr,
    NUMBERS: tl.constexpr, MOST_RATE: tl.constexpr, BY_CHANNEL: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    BOUND: tl.constexpr = 0.0, PDL: tl.constexpr = False,
):  # fmt: skip
    """Steps 1 (from the convolution on) and 2 of `Ops.gated_delta`: program (sequence, head, tile of its channels).

    Shapes: mixed [T, 2 * KEYS * NUMBERS + HEADS * SIZE] float32: queries, keys and values; rates [T, HEADS], out
    [T, HEADS * SIZE] float32; times [T, HEADS] and time_bias [HEADS], or, BY_CHANNEL, NUMBERS for each head.
    """
    await_inputs(PDL)
    sequence, head = tl.program_id(0), tl.program_id(1)
    width: tl.constexpr = 2 * KEYS * NUMBERS + HEADS * SIZE
    root: tl.constexpr = NUMBERS**0.5
    channels, number = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    is_channel, is_number = channels < SIZE, number < NUMBERS
    is_inside = is_channel[:, None] & is_number[None, :]
    places = FIRST + (head * SIZE + channels)[:, None] * NUMBERS + number[None, :]
    state = load_numbers(states, tl.load(reads + sequence), places, half, half_stride, is_inside)
    factor = tl.load(decay + head)
    if BY_CHANNEL:
        bias = tl.load(time_bias + head * NUMBERS + number, mask=is_number, other=0.0)
    else:
        bias = tl.load(time_bias + head)
    own = head * SIZE + channels
    vector = head // (HEADS // KEYS) * NUMBERS + number
    start, end = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
    token = start.to(tl.int64)
    for _ in range(start, end):
        row = mixed + token * width
        query = tl.load(row + vector, mask=is_number, other=0.0)
        key = tl.load(row + KEYS * NUMBERS + vector, mask=is_number, other=0.0)
        query = query / tl.sqrt(tl.sum(query * query, axis=0) + UNIT_EPS) / root
        key = key / tl.sqrt(tl.sum(key * key, axis=0) + UNIT_EPS)
        value = tl.load(row + 2 * KEYS * NUMBERS + own, mask=is_channel, other=0.0)
        if BY_CHANNEL:
            time = tl.load(times + token * times_stride + head * NUMBERS + number, mask=is_number, other=0.0)
            time = time.to(tl.float32) + bias
            power = BOUND * sigmoid(-time * factor) if BOUND < 0 else softplus(time) * factor
            state = state * tl.exp(power)[None, :]
        else:
            dt = softplus(tl.load(times + token * times_stride + head).to(tl.float32) + bias)
            state = state * tl.exp(dt * factor)
        rate = MOST_RATE * sigmoid(tl.load(rates + token * rates_stride + head).to(tl.float32))
        change = (value - tl.sum(state * key[None, :], axis=1)) * rate
        state += change[:, None] * key[None, :]
        result = tl.sum(state * query[None, :], axis=1)
        tl.store(out + token * (HEADS * SIZE) + own, result, mask=is_channel)
        token += 1
    store_numbers(states, tl.load(writes + sequence), places, state, half, half_stride, is_inside)


@dependent(do_not_specialize=STEP)
def lightning_kernel(
    given, decay, out, states, query_start, reads, writes, num_sequences, half, half_stride, given_stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Steps 1 and 2 of `Ops.lightning_attention`: program (sequence, head, tile of its channels).

    Shapes: given [T, HEADS * 3 * SIZE]: query, key and value of each head before silu; out [T, HEADS * SIZE] float32.
    """
    await_inputs(PDL)
    sequence, head = tl.program_id(0), tl.program_id(1)
    channels, number = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    is_channel, is_number = channels < SIZE, number < SIZE
    is_inside = is_channel[:, None] & is_number[None, :]
    places = (head * SIZE + channels)[:, None] * SIZE + number[None, :]
    state = load_numbers(states, tl.load(reads + sequence), places, half, half_stride, is_inside)
    kept = tl.load(decay + head)
    start, end = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
    token = start.to(tl.int64)
    for _ in range(start, end):
        row = given + token * given_stride + head * 3 * SIZE
        query = silu(tl.load(row + number, mask=is_number, other=0.0).to(tl.float32))
        key = silu(tl.load(row + SIZE + number, mask=is_number, other=0.0).to(tl.float32))
        value = silu(tl.load(row + 2 * SIZE + channels, mask=is_channel, other=0.0).to(tl.float32))
        state = state * kept + value[:, None] * key[None, :]
        result = tl.sum(state * query[None, :], axis=1)
        tl.store(out + token * (HEADS * SIZE) + head * SIZE + channels, result, mask=is_channel)
        token += 1
    store_numbers(states, tl.load(writes + sequence), places, state, half, half_stride, is_inside)


@dependent(do_not_specialize=STEP)
def rg_lru_kernel(
    u, gates, decay, gate, out, states, query_start, reads, writes, num_sequences, num_channels, half, half_stride,
    gate_stride, FIRST: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Steps 1 (from the gates on) to 3 of `Ops.rg_lru`: program (sequence, tile of channels).

    Shapes: u [T, C] float32, gates [T, 2C] float32: of each BLOCK_SIZE channels those of the input, then those of the
    recurrence; gate and out [T, C].
    """
    await_inputs(PDL)
    sequence, channels = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channels < num_channels
    start, page = tl.load(query_start + sequence), tl.load(reads + sequence)
    state = load_numbers(states, page, FIRST + channels, half, half_stride, is_channel)
    rate = tl.load(decay + channels, mask=is_channel, other=0.0)
    own = channels // BLOCK_SIZE * (2 * BLOCK_SIZE) + channels % BLOCK_SIZE
    end = tl.load(query_start + sequence + 1)
    token = start.to(tl.int64)
    for _ in range(start, end):
        opened = sigmoid(tl.load(gates + token * 2 * num_channels + own, mask=is_channel, other=0.0))
        kept = sigmoid(tl.load(gates + token * 2 * num_channels + BLOCK_SIZE + own, mask=is_channel, other=0.0))
        logarithm = kept * rate
        share = tl.sqrt(-exponential_less_one(2.0 * logarithm))
        is_first = (token == start) & (page < 0)
        share = tl.where(is_first, 1.0, share)
        added = share * opened * tl.load(u + token * num_channels + channels, mask=is_channel, other=0.0)
        state = state * tl.exp(logarithm) + added
        result = state * tl.load(gate + token * gate_stride + channels, mask=is_channel, other=0.0).to(tl.float32)
        result = narrowed(result, out.dtype.element_ty)
        tl.store(out + token * num_channels + channels, result, mask=is_channel)
        token += 1
    store_numbers(states, tl.load(writes + sequence), FIRST + channels, state, half, half_stride, is_channel)


@dependent
def gate_norm_kernel(
    y, gate, weight, out, eps, num_columns, weight_stride, y_stride, gate_stride, out_stride,
    NORMED: tl.constexpr, GATED_FIRST: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """RMS norm of each group of columns, and a gate in front of it or behind it: program (row, group).

    Shapes: y [T, groups * num_columns] float32, gate and out as many; weight of each group, weight_stride from one to
    the next, which is 0 where all have the same. SILU: of the gate, else its sigmoid.
    """
    await_inputs(PDL)
    row, group, columns = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    is_inside = columns < num_columns
    first = group * num_columns
    value = tl.load(y + row * y_stride + first + columns, mask=is_inside, other=0.0)
    opened = tl.load(gate + row * gate_stride + first + columns, mask=is_inside, other=0.0).to(tl.float32)
    opened = silu(opened) if SILU else sigmoid(opened)
    if GATED_FIRST:
        value *= opened
    if NORMED:
        mean = tl.sum(tl.where(is_inside, value * value, 0.0), axis=0) / num_columns
        value = value / tl.sqrt(mean + eps)
        value *= tl.load(weight + group * weight_stride + columns, mask=is_inside, other=0.0)
    if not GATED_FIRST:
        value *= opened
    tl.store(out + row * out_stride + first + columns, narrowed(value, out.dtype.element_ty), mask=is_inside)


_STATES = dict.fromkeys(("query_start", "reads", "writes"), "*i32") | {"states": "*fp32"}
_FLOATS = ("weight", "bias", "time_bias", "decay", "skip", "vectors", "mixed", "y", "u", "gates")
_TYPES = _STATES | dict.fromkeys(_FLOATS, "*fp32") | {"eps": "fp32"}


def _variants(dtype: str) -> list[Variant]:
    """In the sizes of Mamba, Falcon-H1, Qwen3-Next, Kimi Linear, MiniMax, LFM2 and RecurrentGemma."""
    types = _TYPES | dict.fromkeys(("x", "gate", "given", "rates", "times"), dtype)
    conv = {"WIDTH": 4, "BLOCK": BLOCK}
    scan = {"FIRST": 4096}
    delta: dict[str, Any] = {"HEADS": 32, "SIZE": 128, "NUMBERS": 128, "MOST_RATE": 1.0}
    norm = {"NORMED": True, "GATED_FIRST": True, "SILU": True, "BLOCK": 4096}
    wide = types | {"x": "*fp32", "times": "*fp32", "out": dtype}
    short = types | {"factors": dtype, "gates": dtype, "out": dtype}
    return [
        variant_of(convolve_kernel, types | {"out": "*fp32"}, conv | {"SILU": True}, absent=("factors", "gates")),
        variant_of(convolve_kernel, short, {"WIDTH": 3, "SILU": False, "BLOCK": BLOCK}, absent=("bias",)),
        variant_of(keep_inputs_kernel, types, conv, absent=("factors",)),
        variant_of(mamba_kernel, wide, scan | {"NUMBERS": 16} | tile_of(16)),
        variant_of(
            mamba2_kernel,
            types | {"out": "*fp32"},
            scan | {"HEADS": 64, "GROUPS": 1, "SIZE": 64, "NUMBERS": 256} | tile_of(256),
        ),
        *(
            variant_of(
                gated_delta_kernel,
                types | {"out": "*fp32"},
                delta | {"KEYS": keys, "BY_CHANNEL": by_channel} | scan | tile_of(128),
            )
            for keys, by_channel in ((16, False), (32, True))
        ),
        variant_of(lightning_kernel, types | {"out": "*fp32"}, {"HEADS": 64, "SIZE": 128} | tile_of(128)),
        variant_of(rg_lru_kernel, types | {"out": dtype}, {"FIRST": 7680, "BLOCK_SIZE": 256, "BLOCK": BLOCK}),
        variant_of(gate_norm_kernel, types | {"out": dtype}, norm),
        *(
            variant_of(
                gate_norm_kernel, types | {"out": dtype}, norm | {"GATED_FIRST": False, "SILU": silu, "BLOCK": 128}
            )
            for silu in (True, False)
        ),
    ]


VARIANTS: tuple[Variant, ...] = in_models((*_variants("*bf16"), *_variants("*fp16"), *_variants("*fp32")))

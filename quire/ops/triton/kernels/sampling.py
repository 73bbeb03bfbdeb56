"""The kernels of `sampling`: a program for each chunk of each row, then one for each row or draw.

Everything that decides is an integer, so nothing depends on the order in which programs add up. A key is a logit's
place in the order of float32, over 22 bits of token id: larger keys are larger logits, or lower ids. NaN is above all.

How a draw is truncated without sorting. A weight w of 1 .. 2**40 has the distance d = 2**40 - w, of 40 bits. The order
of the contract is that of d, then of the token id. The distance at which a row is cut is found ten bits at a time, from
the highest: a pass counts the tokens, and adds up the weights, of each of 1024 digits; the next pass reads which digit
the cut is in, and looks only at tokens that agree so far (radix selection: Alabi et al. 2012,
https://doi.org/10.1145/2133803.2345676). The last digit, where most of the tokens of a row are, needs no counting: the
cut is there if it is in no other. Tokens at the cut stay from the lowest id on, as many as are needed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.triton.kernels.dependent import await_inputs, dependent

ID_BITS = tl.constexpr(22)
LAST_ID = tl.constexpr((1 << 22) - 1)
DIGIT_BITS = tl.constexpr(10)
DIGITS = tl.constexpr(1 << 10)
HIGHEST_WEIGHT = tl.constexpr(1 << 40)
MINUS_INFINITY = tl.constexpr(float("-inf"))
WEIGHT_ONE = tl.constexpr(2.0**40)
ROUNDER = tl.constexpr(2.0**52)
"""Added to a double below 2**51 and taken away, it leaves that rounded half to even."""


@triton.jit
def opposite(x):
    """The distance of a weight, or the weight of a distance. In the interpreter a constant cannot come first."""
    return -x + HIGHEST_WEIGHT


@triton.jit
def keys_of(values, ids):
    """Keys without ties. Shapes: values [n] float32, ids [n] int32 -> [n] int64."""
    bits = values.to(tl.int32, bitcast=True)
    bits = tl.where(values == 0.0, 0, bits)  # -0.0 ties with 0.0
    ordinals = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ordinals = tl.where(values == values, ordinals, 0x7FFFFFFF)
    return (ordinals.to(tl.int64) << ID_BITS) | (ids ^ LAST_ID).to(tl.int64)


@triton.jit
def value_of(key):
    """The logit of a key, a scalar; NaN has one form, and zero one sign."""
    ordinal = (key >> ID_BITS).to(tl.int32)
    return (ordinal ^ ((ordinal >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def largest_of(keys, row, num_chunks, CHUNKS: tl.constexpr):
    """The largest key of a row, of those of its chunks."""
    chunks = tl.arange(0, CHUNKS)
    return tl.max(tl.load(keys + row * num_chunks + chunks, mask=chunks < num_chunks, other=-(2**63)), axis=0)


@triton.jit
def load_values(logits, masks, mask, num_words, num_columns, ids):
    """Logits of a row; -inf past its end, and where a mask does not allow the token. mask: -1 allows all."""
    is_inside = ids < num_columns
    values = tl.load(logits + ids, mask=is_inside, other=MINUS_INFINITY)
    if masks is not None:
        words = tl.load(masks + tl.maximum(mask, 0) * num_words + ids // 32, mask=is_inside, other=0)
        bits = tl.where(mask < 0, 1, (words >> (ids % 32)) & 1)
        values = tl.where(bits != 0, values, MINUS_INFINITY)
    return values


@triton.jit
def mask_index(mask_of, row):
    """The mask of a row; where no table says so, that of its number."""
    index = row
    if mask_of is not None:
        index = tl.load(mask_of + row)
    return index


@dependent
def largest_kernel(
    logits,
    rows,
    mask_of,
    masks,
    keys,
    num_columns,
    stride,
    num_words,
    num_chunks,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """The largest key of each chunk. rows: which rows of logits to read; None for each its own. -> [R, num_chunks]"""
    await_inputs(PDL)
    index, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = index
    if rows is not None:
        row = tl.load(rows + index)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    values = load_values(logits + row * stride, masks, mask_index(mask_of, index), num_words, num_columns, ids)
    tl.store(keys + index * num_chunks + chunk, tl.max(keys_of(values, ids), axis=0))


@dependent
def largest_row_kernel(keys, values, ids, num_chunks, CHUNKS: tl.constexpr, PDL: tl.constexpr = False):
    """Value and token of each row's largest key. Shapes: values [R] float32, ids [R] int64."""
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    key = largest_of(keys, row, num_chunks, CHUNKS)
    tl.store(values + row, value_of(key))
    tl.store(ids + row, (key & LAST_ID) ^ LAST_ID)


@triton.jit
def logprob_parts_kernel(logits, chosen, largest, totals, ranks, num_columns, stride, num_chunks, CHUNK: tl.constexpr):
    """Of each chunk: its largest logit, the sum of exp(logit - that), and its tokens no worse than the chosen one."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    logits += row * stride
    values = tl.load(logits + ids, mask=ids < num_columns, other=MINUS_INFINITY)
    best = tl.max(values, axis=0)
    total = tl.sum(tl.where(values == MINUS_INFINITY, 0.0, tl.exp(values - best)), axis=0)
    token = tl.load(chosen + row)
    own = keys_of(tl.load(logits + token), token.to(tl.int32))
    is_better = (keys_of(values, ids) >= own) & (ids < num_columns)
    place = row * num_chunks + chunk
    tl.store(largest + place, best)
    tl.store(totals + place, total)
    tl.store(ranks + place, tl.sum(is_better.to(tl.int64), axis=0))


@triton.jit
def logprob_row_kernel(
    logits, chosen, largest, totals, parts_of_rank, normalizers, logprobs, ranks, stride, num_chunks,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """The logarithm of each row's sum of exponentials; log-probability and rank of its chosen token."""
    row, chunks = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    is_chunk, place = chunks < num_chunks, row * num_chunks + chunks
    largest_of_chunks = tl.load(largest + place, mask=is_chunk, other=MINUS_INFINITY)
    best = tl.max(largest_of_chunks, axis=0)
    shares = tl.where(largest_of_chunks == MINUS_INFINITY, 0.0, tl.exp(largest_of_chunks - best))
    total = tl.sum(tl.load(totals + place, mask=is_chunk, other=0.0) * shares, axis=0)
    normalizer = best + tl.log(total)
    tl.store(normalizers + row, normalizer)
    tl.store(logprobs + row, tl.load(logits + row * stride + tl.load(chosen + row)) - normalizer)
    tl.store(ranks + row, tl.sum(tl.load(parts_of_rank + place, mask=is_chunk, other=0), axis=0))


@triton.jit(do_not_specialize=["num_pairs"])
def penalties_kernel(
    logits, rows, token_ids, in_prompt, output_counts, repetition, presence, frequency, num_pairs, stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`Ops.apply_penalties`: a lane for each pair."""
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_pair = pairs < num_pairs
    row, token = tl.load(rows + pairs, mask=is_pair, other=0), tl.load(token_ids + pairs, mask=is_pair, other=0)
    count = tl.load(output_counts + pairs, mask=is_pair, other=0)
    is_seen = (tl.load(in_prompt + pairs, mask=is_pair, other=0) != 0) | (count > 0)
    factor = tl.where(is_seen, tl.load(repetition + row, mask=is_pair, other=1.0), 1.0)
    value = tl.load(logits + row * stride + token, mask=is_pair, other=0.0)
    value = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
    value -= tl.load(frequency + row, mask=is_pair, other=0.0) * count.to(tl.float32)
    value -= tl.load(presence + row, mask=is_pair, other=0.0) * (count > 0).to(tl.float32)
    tl.store(logits + row * stride + token, value, mask=is_pair)


@triton.jit
def weights_of(values, key, temperature, min_p):
    """round(2**40 * exp((value - largest) / temperature)), 0 below min-p. key: the row's largest. -> [n] int64"""
    exponents = (values.to(tl.float64) - value_of(key).to(tl.float64)) / temperature.to(tl.float64)
    weights = (tl.exp(exponents) * WEIGHT_ONE + ROUNDER) - ROUNDER
    is_out = (values == MINUS_INFINITY) | (weights < min_p.to(tl.float64) * WEIGHT_ONE)
    return tl.where(is_out, 0.0, weights).to(tl.int64)


@triton.jit
def load_weights(
    logits, keys, mask_of, masks, temperature, min_p, row, chunk, num_columns, stride, num_words, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Weights of a chunk, [CHUNK] int64; 0 past the end of the row."""
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    values = load_values(logits + row * stride, masks, mask_index(mask_of, row), num_words, num_columns, ids)
    key = largest_of(keys, row, num_chunks, CHUNKS)
    return weights_of(values, key, tl.load(temperature + row), tl.load(min_p + row))


@triton.jit
def narrow(state, histogram, row, BY_SUM: tl.constexpr):
    """What a pass has found out: the distance of the cut, as far as known, what is missing there, and the sum before.

    Shapes: state [R, 3] int64, of before the pass; histogram [R, 2, DIGITS] int64: counts, sums of weights.
    """
    known, missing, before = tl.load(state + row * 3), tl.load(state + row * 3 + 1), tl.load(state + row * 3 + 2)
    digits = tl.arange(0, DIGITS)
    counts = tl.load(histogram + row * 2 * DIGITS + digits)
    sums = tl.load(histogram + (row * 2 + 1) * DIGITS + digits)
    measures = sums if BY_SUM else counts
    digit = tl.sum((tl.cumsum(measures, axis=0) < missing).to(tl.int64), axis=0)
    digit = tl.minimum(digit, DIGITS - 1)
    missing -= tl.sum(tl.where(digits < digit, measures, 0), axis=0)
    before += tl.sum(tl.where(digits < digit, sums, 0), axis=0)
    return (known << DIGIT_BITS) | digit, missing, before


@triton.jit
def sum_to_reach(state, histogram, totals, row, top_k, top_p, num_columns, num_chunks, CHUNKS: tl.constexpr):
    """The share of weights that top-p asks for, of what top-k has left."""
    chunks = tl.arange(0, CHUNKS)
    total = tl.sum(tl.load(totals + row * num_chunks + chunks, mask=chunks < num_chunks, other=0), axis=0)
    if (top_k > 0) & (top_k < num_columns):
        distance, missing, before = narrow(state, histogram, row, False)
        # Fewer tokens than top-k may have a weight at all.
        total = tl.minimum(before + missing * opposite(distance), total)
    share = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    return tl.minimum(share, total)


@triton.jit(do_not_specialize=["shift"])
def count_digits_kernel(
    logits, keys, mask_of, masks, temperature, min_p, top_k, top_p, totals, state, histogram, next_state,
    next_histogram, shift, num_columns, stride, num_words, num_chunks,
    BY_SUM: tl.constexpr, FIRST: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One pass of selection by number (top-k) or, BY_SUM, by weight (top-p). shift: below the digit.

    state and histogram are those of the pass before; of the FIRST by weight, those of the last by number. The FIRST by
    number also stores the sum of each chunk. Mutates: next_state, next_histogram, totals.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    is_cut = (p < 1.0) if BY_SUM else (k > 0) & (k < num_columns)
    if (FIRST and not BY_SUM) or is_cut:
        weights = load_weights(
            logits, keys, mask_of, masks, temperature, min_p, row, chunk, num_columns, stride, num_words, num_chunks,
            CHUNK, CHUNKS,
        )  # fmt: skip
        if FIRST and not BY_SUM:
            tl.store(totals + row * num_chunks + chunk, tl.sum(weights, axis=0))
        if is_cut:
            known, before = row * 0, row * 0
            if not FIRST:
                known, missing, before = narrow(state, histogram, row, BY_SUM)
            elif BY_SUM:
                missing = sum_to_reach(state, histogram, totals, row, k, p, num_columns, num_chunks, CHUNKS)
            else:
                missing = k
            if chunk == 0:
                tl.store(next_state + row * 3, known)
                tl.store(next_state + row * 3 + 1, missing)
                tl.store(next_state + row * 3 + 2, before)
            distances = opposite(weights)
            digits = (distances >> shift) & (DIGITS - 1)
            is_near = (distances >> (shift + DIGIT_BITS)) == known
            is_counted = (weights > 0) & is_near & (digits < DIGITS - 1)
            own = next_histogram + row * 2 * DIGITS + digits
            tl.atomic_add(own, tl.full((CHUNK,), 1, tl.int64), mask=is_counted, sem="relaxed")
            tl.atomic_add(own + DIGITS, weights, mask=is_counted, sem="relaxed")


@triton.jit
def sum_kept_kernel(
    logits, keys, mask_of, masks, temperature, min_p, top_k, top_p, totals, k_state, k_histogram, p_state, p_histogram,
    cuts, ties, num_columns, stride, num_words, num_chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Where each row is cut, and of each chunk the sum of the weights before the cut and the number of tokens at it.

    Shapes: cuts [R, 2] int64: distance, tokens to keep there. Mutates: totals (to be those sums), ties [R, num_chunks].
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    distance, missing = opposite(row * 0), row * 0  # past all
    if p < 1.0:
        distance, missing, _ = narrow(p_state, p_histogram, row, True)
        weight = opposite(distance)
        missing = tl.maximum((missing + weight - 1) // weight, 1)
    elif (k > 0) & (k < num_columns):
        distance, missing, _ = narrow(k_state, k_histogram, row, False)
    if chunk == 0:
        tl.store(cuts + row * 2, distance)
        tl.store(cuts + row * 2 + 1, missing)
    place = row * num_chunks + chunk
    if missing == 0:
        tl.store(ties + place, 0)
    else:
        weights = load_weights(
            logits, keys, mask_of, masks, temperature, min_p, row, chunk, num_columns, stride, num_words, num_chunks,
            CHUNK, CHUNKS,
        )  # fmt: skip
        distances = opposite(weights)
        tl.store(totals + place, tl.sum(tl.where(distances < distance, weights, 0), axis=0))
        tl.store(ties + place, tl.sum(((distances == distance) & (weights > 0)).to(tl.int64), axis=0))


@triton.jit
def draw_kernel(
    logits, keys, mask_of, masks, temperature, min_p, totals, cuts, ties, uniforms, drawn, num_columns, num_draws,
    stride, num_words, num_chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """A token for each uniform number: program (row, draw) finds its chunk by the chunks' sums, then the token."""
    row, draw = tl.program_id(0).to(tl.int64), tl.program_id(1)
    distance, to_keep = tl.load(cuts + row * 2), tl.load(cuts + row * 2 + 1)
    chunks = tl.arange(0, CHUNKS)
    place, is_chunk = row * num_chunks + chunks, chunks < num_chunks
    ties_of = tl.load(ties + place, mask=is_chunk, other=0)
    left = tl.maximum(to_keep - (tl.cumsum(ties_of, axis=0) - ties_of), 0)  # when a chunk begins
    sums = tl.load(totals + place, mask=is_chunk, other=0)
    sums += tl.minimum(left, ties_of) * opposite(distance)
    total = tl.sum(sums, axis=0)
    target = (tl.load(uniforms + row * num_draws + draw) * total.to(tl.float64)).to(tl.int64)
    target = tl.minimum(target, total - 1)
    chunk = tl.sum((tl.cumsum(sums, axis=0) <= target).to(tl.int32), axis=0)
    before = tl.sum(tl.where(chunks < chunk, sums, 0), axis=0)
    left = tl.sum(tl.where(chunks == chunk, left, 0), axis=0)
    weights = load_weights(
        logits, keys, mask_of, masks, temperature, min_p, row, chunk, num_columns, stride, num_words, num_chunks,
        CHUNK, CHUNKS,
    )  # fmt: skip
    distances = opposite(weights)
    is_tie = (distances == distance) & (weights > 0)
    is_kept = (distances < distance) | (is_tie & (tl.cumsum(is_tie.to(tl.int64), axis=0) <= left))
    reached = before + tl.cumsum(tl.where(is_kept, weights, 0), axis=0)
    token = chunk * CHUNK + tl.sum((reached <= target).to(tl.int32), axis=0)
    tl.store(drawn + row * num_draws + draw, tl.where(total > 0, token, 0).to(tl.int64))

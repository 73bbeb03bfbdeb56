"""From logits to tokens, without a word from the device to the host but what `row_max` and `allowed_max` return.

Draws are those of the contract's integers. A weight is computed with the device's exponential of float64; an ulp of
that moves one weight in some thousands by one of 2**40, and so a draw with a probability of about 2**-40.

Row invariance: integers, and float32 sums over chunks of fixed length in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from quire.ops.triton.alignment import in_models
from quire.ops.triton.kernels import sampling as kernels
from quire.ops.triton.variant import Variant, parameters

CHUNK = 4096
"""Logits of a row that one program works on."""
PAIRS = 256
"""Of `apply_penalties`, that one program works on."""
ID_BITS = 22
LAST_ID = (1 << ID_BITS) - 1
PASSES = 4
DIGIT_BITS = 10
NUM_WARPS = 8


def row_max(logits: Tensor) -> tuple[list[float], list[int]]:
    """See `Ops.row_max`."""
    values, ids = row_max_tensors(logits)
    return values.tolist(), ids.tolist()


def allowed_max(logits: Tensor, rows: Tensor, masks: Tensor) -> tuple[list[float], list[int]]:
    """See `Ops.allowed_max`."""
    values, ids = _largest(logits, rows, masks)
    return values.tolist(), ids.tolist()


def row_max_tensors(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `Ops.row_max_tensors`."""
    return _largest(logits)


def _largest(logits: Tensor, rows: Tensor | None = None, masks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`row_max` or, with masks, `allowed_max` on the device. Shapes: -> [R] float32, [R] int64."""
    num_rows, num_chunks = len(logits if rows is None else rows), triton.cdiv(logits.shape[1], CHUNK)
    values, ids = logits.new_empty(num_rows), logits.new_empty(num_rows, dtype=torch.int64)
    if num_rows:
        keys = _largest_keys(logits, rows, None, masks, num_rows)
        kernels.largest_row_kernel[(num_rows,)](
            keys, values, ids, num_chunks, CHUNKS=triton.next_power_of_2(num_chunks)
        )
    return values, ids


def top_logprobs(logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `Ops.top_logprobs`. The k best are found by torch, among keys without ties."""
    num_rows, num_columns = logits.shape
    normalizers, logprobs = logits.new_empty(num_rows), logits.new_empty(num_rows)
    ranks = logits.new_empty(num_rows, dtype=torch.int64)
    if num_rows:
        _fill_logprobs(normalizers, logprobs, ranks, logits, chosen)
    bits = (logits + 0.0).view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << ID_BITS
    keys |= torch.arange(LAST_ID, LAST_ID - num_columns, -1, device=logits.device)
    top_ids = LAST_ID - (keys.topk(k, dim=-1).values & LAST_ID)
    return logprobs, ranks, top_ids, logits.gather(-1, top_ids) - normalizers.unsqueeze(-1)


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    in_prompt: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """See `Ops.apply_penalties`. Products and differences are rounded apart, as the reference rounds them."""
    num_pairs = len(rows)
    if num_pairs:
        kernels.penalties_kernel[(triton.cdiv(num_pairs, PAIRS),)](
            logits,
            rows,
            token_ids,
            in_prompt,
            output_counts,
            repetition,
            presence,
            frequency,
            num_pairs,
            logits.stride(0),
            BLOCK=PAIRS,
            enable_fp_fusion=False,
        )


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
    mask_of: Tensor | None = None,
    masks: Tensor | None = None,
) -> Tensor:
    """See `Ops.sample`. Rows that nothing truncates leave the passes of selection at once."""
    (num_rows, num_columns), num_draws = logits.shape, uniforms.shape[1]
    drawn = torch.empty_like(uniforms, dtype=torch.int64)
    if not drawn.numel():
        return drawn
    if mask_of is None or masks is None:
        mask_of = masks = None
    num_chunks = triton.cdiv(num_columns, CHUNK)
    sizes = (logits.stride(0), 0 if masks is None else masks.shape[1], num_chunks)
    constants: dict[str, int] = {"CHUNK": CHUNK, "CHUNKS": triton.next_power_of_2(num_chunks), "num_warps": NUM_WARPS}
    grid = (num_rows, num_chunks)
    source = (logits, _largest_keys(logits, None, mask_of, masks, num_rows), mask_of, masks, temperature, min_p)
    totals, ties = logits.new_empty(2, num_rows, num_chunks, dtype=torch.int64)
    # One pass more than there are: what the passes by number leave is the state of the first by weight.
    states = logits.new_empty(2, PASSES, num_rows, 3, dtype=torch.int64)
    histograms = logits.new_zeros(2, PASSES, num_rows, 2, 1 << DIGIT_BITS, dtype=torch.int64)
    state, histogram = states[0, 0], histograms[0, 0]
    for by_sum in (False, True):
        for number in range(PASSES):
            next_state, next_histogram = states[int(by_sum), number], histograms[int(by_sum), number]
            shift = DIGIT_BITS * (PASSES - 1 - number)
            kernels.count_digits_kernel[grid](
                *source, top_k, top_p, totals, state, histogram, next_state, next_histogram, shift, num_columns, *sizes,
                BY_SUM=by_sum, FIRST=number == 0, **constants,
            )  # fmt: skip
            state, histogram = next_state, next_histogram
    cuts = logits.new_empty(num_rows, 2, dtype=torch.int64)
    kernels.sum_kept_kernel[grid](
        *source, top_k, top_p, totals, states[0, -1], histograms[0, -1], states[1, -1], histograms[1, -1],
        cuts, ties, num_columns, *sizes, **constants,
    )  # fmt: skip
    kernels.draw_kernel[(num_rows, num_draws)](
        *source, totals, cuts, ties, uniforms, drawn, num_columns, num_draws, *sizes, **constants
    )
    return drawn


def _largest_keys(
    logits: Tensor, rows: Tensor | None, mask_of: Tensor | None, masks: Tensor | None, num_rows: int
) -> Tensor:
    """Of each chunk of each row. Shapes: -> [R, chunks] int64."""
    num_chunks = triton.cdiv(logits.shape[1], CHUNK)
    keys = logits.new_empty(num_rows, num_chunks, dtype=torch.int64)
    kernels.largest_kernel[(num_rows, num_chunks)](
        logits,
        rows,
        mask_of,
        masks,
        keys,
        logits.shape[1],
        logits.stride(0),
        0 if masks is None else masks.shape[1],
        num_chunks,
        CHUNK=CHUNK,
        num_warps=NUM_WARPS,
    )
    return keys


def _fill_logprobs(normalizers: Tensor, logprobs: Tensor, ranks: Tensor, logits: Tensor, chosen: Tensor) -> None:
    num_rows, num_columns = logits.shape
    num_chunks = triton.cdiv(num_columns, CHUNK)
    largest, totals = logits.new_empty(2, num_rows, num_chunks)
    parts_of_rank = logits.new_empty(num_rows, num_chunks, dtype=torch.int64)
    kernels.logprob_parts_kernel[(num_rows, num_chunks)](
        logits, chosen, largest, totals, parts_of_rank, num_columns, logits.stride(0), num_chunks,
        CHUNK=CHUNK, num_warps=NUM_WARPS,
    )  # fmt: skip
    kernels.logprob_row_kernel[(num_rows,)](
        logits, chosen, largest, totals, parts_of_rank, normalizers, logprobs, ranks, logits.stride(0), num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks),
    )  # fmt: skip


_TYPES = dict.fromkeys(("logits", "temperature", "min_p", "top_p", "values", "repetition", "presence"), "*fp32")
_TYPES |= dict.fromkeys(("frequency", "largest", "normalizers", "logprobs"), "*fp32")
_TYPES |= {"masks": "*i32", "uniforms": "*fp64", "in_prompt": "*i1"}
_LONGS = ("rows", "mask_of", "keys", "ids", "chosen", "ranks", "parts_of_rank", "token_ids", "output_counts", "top_k")
_TYPES |= dict.fromkeys((*_LONGS, "totals", "cuts", "ties", "drawn"), "*i64")
_STATES = ("state", "histogram", "next_state", "next_histogram", "k_state", "k_histogram", "p_state", "p_histogram")
_TYPES |= dict.fromkeys(_STATES, "*i64")
_CONSTANTS = {"CHUNK": CHUNK, "CHUNKS": 64, "BLOCK": PAIRS}
"""64 chunks: a vocabulary of 262,144 tokens."""


def _variant(kernel: Any, *absent: str, types: dict[str, str] | None = None, **constants: object) -> Variant:
    fixed: dict[str, object] = {name: value for name, value in _CONSTANTS.items() if name in kernel.arg_names}
    fixed |= constants | dict.fromkeys(absent)
    found = _TYPES | (types or {})
    return Variant(
        kernel=kernel,
        signature={name: found.get(name, "i32") for name in parameters(kernel) if name not in fixed},
        constants=fixed,
        num_warps=NUM_WARPS if "CHUNK" in fixed else 4,
        enable_fp_fusion=kernel is not kernels.penalties_kernel,
    )


VARIANTS: tuple[Variant, ...] = in_models(
    (
        _variant(kernels.largest_kernel, "rows", "mask_of", "masks"),
        _variant(kernels.largest_kernel, "mask_of"),
        _variant(kernels.largest_kernel, "rows"),
        _variant(kernels.largest_row_kernel),
        _variant(kernels.logprob_parts_kernel, types={"totals": "*fp32"}),
        _variant(kernels.logprob_row_kernel, types={"totals": "*fp32"}),
        _variant(kernels.penalties_kernel),
        *(
            _variant(kernels.count_digits_kernel, *absent, BY_SUM=by_sum, FIRST=first)
            for absent in ((), ("mask_of", "masks"))
            for by_sum in (False, True)
            for first in (True, False)
        ),
        _variant(kernels.sum_kept_kernel),
        _variant(kernels.sum_kept_kernel, "mask_of", "masks"),
        _variant(kernels.draw_kernel),
        _variant(kernels.draw_kernel, "mask_of", "masks"),
    )
)

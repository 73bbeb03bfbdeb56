"""From logits to tokens; `csrc/cpu/sampling.cpp`. Draws are the reference's: both decide by the same integers."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from quire.ops.cpu.library import check, load

lib = load()


def row_max(logits: Tensor) -> tuple[list[float], list[int]]:
    """See `Ops.row_max`."""
    rows, vocab_size = logits.shape
    values, ids = array("f", bytes(4 * rows)), array("q", bytes(8 * rows))
    check(lib.qr_row_max(values.buffer_info()[0], ids.buffer_info()[0], logits.data_ptr(), rows, vocab_size))
    return values.tolist(), ids.tolist()


def row_max_tensors(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `Ops.row_max_tensors`."""
    rows, vocab_size = logits.shape
    values, ids = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    check(lib.qr_row_max(values.data_ptr(), ids.data_ptr(), logits.data_ptr(), rows, vocab_size))
    return values, ids


def allowed_max(logits: Tensor, rows: Tensor, masks: Tensor) -> tuple[list[float], list[int]]:
    """See `Ops.allowed_max`."""
    count = len(rows)
    values, ids = array("f", bytes(4 * count)), array("q", bytes(8 * count))
    check(
        lib.qr_allowed_max(
            values.buffer_info()[0],
            ids.buffer_info()[0],
            logits.data_ptr(),
            logits.shape[0],
            logits.shape[1],
            rows.data_ptr(),
            masks.data_ptr(),
            count,
        )
    )
    return values.tolist(), ids.tolist()


def top_logprobs(logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `Ops.top_logprobs`."""
    rows, vocab_size = logits.shape
    chosen_logprobs, ranks = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    top_ids, top = torch.empty((rows, k), dtype=torch.int64), torch.empty((rows, k))
    check(
        lib.qr_top_logprobs(
            chosen_logprobs.data_ptr(),
            ranks.data_ptr(),
            top_ids.data_ptr(),
            top.data_ptr(),
            logits.data_ptr(),
            chosen.data_ptr(),
            rows,
            vocab_size,
            k,
        )
    )
    return chosen_logprobs, ranks, top_ids, top


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
    """See `Ops.apply_penalties`."""
    check(
        lib.qr_apply_penalties(
            logits.data_ptr(),
            logits.shape[0],
            logits.shape[1],
            rows.data_ptr(),
            token_ids.data_ptr(),
            in_prompt.data_ptr(),
            output_counts.data_ptr(),
            rows.shape[0],
            repetition.data_ptr(),
            presence.data_ptr(),
            frequency.data_ptr(),
        )
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
    """See `Ops.sample`."""
    rows, vocab_size = logits.shape
    drawn = torch.empty(uniforms.shape, dtype=torch.int64)
    check(
        lib.qr_sample(
            drawn.data_ptr(),
            logits.data_ptr(),
            rows,
            vocab_size,
            temperature.data_ptr(),
            top_k.data_ptr(),
            top_p.data_ptr(),
            min_p.data_ptr(),
            uniforms.data_ptr(),
            uniforms.shape[1],
            None if mask_of is None else mask_of.data_ptr(),
            None if masks is None else masks.data_ptr(),
            0 if masks is None else len(masks),
        )
    )
    return drawn

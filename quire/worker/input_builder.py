"""From a step's instruction to the arrays the model reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.attention.context import AttentionMetadata, ForwardContext
from quire.messages.step import SchedulerOutputs
from quire.utils.math import cdiv
from quire.worker.input_batch import InputBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """One step's input."""

    token_ids: Tensor
    """[T] int64."""
    context: ForwardContext
    last_rows: list[int]
    """Per scheduled sequence: the index of its last token among the step's tokens."""


def build_inputs(plan: SchedulerOutputs, batch: InputBatch, kv_caches: list[Tensor], block_size: int) -> StepInputs:
    """Lay the scheduled tokens side by side, sequence after sequence."""
    computed = np.asarray(plan.num_computed_tokens, dtype=np.int64)
    counts = np.asarray(plan.num_scheduled_tokens, dtype=np.int64)
    seq_lens = computed + counts
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    row_of = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(starts[-1]) - (starts[:-1] - computed)[row_of]
    table = batch.block_table(plan.seq_ids, cdiv(int(seq_lens.max()), block_size))
    slots = table[row_of, positions // block_size].astype(np.int64) * block_size + positions % block_size
    return StepInputs(
        token_ids=torch.from_numpy(_token_ids(plan, batch)),
        context=ForwardContext(
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slots),
            attention=AttentionMetadata(
                query_start=torch.from_numpy(starts),
                seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
                block_tables=torch.from_numpy(table),
                block_size=block_size,
                max_query_len=int(counts.max()),
                max_seq_len=int(seq_lens.max()),
            ),
            kv_caches=kv_caches,
        ),
        last_rows=(starts[1:] - 1).tolist(),
    )


def _token_ids(plan: SchedulerOutputs, batch: InputBatch) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    token_ids: list[int] = []
    for seq_id, first, count in zip(plan.seq_ids, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True):
        known = batch.rows[seq_id].token_ids
        if count == 1:
            token_ids.append(known[first])
        else:
            token_ids += known[first : first + count]
    return np.asarray(token_ids, dtype=np.int64)

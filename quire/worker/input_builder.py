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
    """One step's input, in the builder's buffers: what stands there changes with the next step, not where it stands."""

    token_ids: Tensor
    """[T] int64."""
    context: ForwardContext
    sampled_rows: Tensor
    """[R] int64: the rows of the step whose logits are wanted, in order."""
    last_rows: list[int]
    """Per scheduled sequence: the index of its last token among the step's tokens."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Tokens, sequences, sampled rows: steps of one shape differ in the contents of their buffers only."""
        return len(self.token_ids), len(self.last_rows), len(self.sampled_rows)


class InputBuilder:
    """Lays the scheduled tokens of a step side by side, sequence after sequence."""

    def __init__(
        self, kv_caches: list[Tensor], *, block_size: int, max_num_tokens: int, max_num_seqs: int, max_num_blocks: int
    ) -> None:
        self._kv_caches = kv_caches
        self._block_size = block_size
        self._token_ids = np.zeros(max_num_tokens, dtype=np.int64)
        self._positions = np.zeros(max_num_tokens, dtype=np.int64)
        self._slots = np.zeros(max_num_tokens, dtype=np.int64)
        self._starts = np.zeros(max_num_seqs + 1, dtype=np.int32)
        self._seq_lens = np.zeros(max_num_seqs, dtype=np.int32)
        self._sampled = np.zeros(max_num_seqs, dtype=np.int64)
        self._tables = np.zeros((max_num_seqs, max_num_blocks), dtype=np.int32)

    def build(self, plan: SchedulerOutputs, batch: InputBatch) -> StepInputs:
        """Write the step into the buffers."""
        computed = np.asarray(plan.num_computed_tokens, dtype=np.int64)
        counts = np.asarray(plan.num_scheduled_tokens, dtype=np.int64)
        num_seqs, num_tokens = len(counts), int(counts.sum())
        starts, seq_lens = self._starts[: num_seqs + 1], self._seq_lens[:num_seqs]
        positions, slots = self._positions[:num_tokens], self._slots[:num_tokens]
        np.cumsum(counts, out=starts[1:])
        np.add(computed, counts, out=seq_lens, casting="same_kind")
        row_of = np.repeat(np.arange(num_seqs), counts)
        np.subtract(np.arange(num_tokens), (starts[:-1] - computed)[row_of], out=positions)
        num_blocks = cdiv(int(seq_lens.max()), self._block_size)
        table = self._tables[:num_seqs, :num_blocks]
        table[:] = batch.block_table(plan.seq_ids, num_blocks)
        slots[:] = table[row_of, positions // self._block_size]
        slots *= self._block_size
        slots += positions % self._block_size
        self._write_token_ids(plan, batch)
        last_rows = (starts[1:] - 1).tolist()
        sampled = [row for row, samples in zip(last_rows, plan.samples, strict=True) if samples]
        self._sampled[: len(sampled)] = sampled
        return self._view(num_tokens, last_rows, len(sampled))

    def one_token(self, *, token_id: int, position: int) -> StepInputs:
        """One sampled token at a position of the first block, whatever came before it."""
        self._token_ids[0] = token_id
        self._positions[0] = self._slots[0] = position
        self._starts[:2] = 0, 1
        self._seq_lens[0] = position + 1
        self._tables[0, 0] = self._sampled[0] = 0
        return self._view(1, [0], 1)

    def _view(self, num_tokens: int, last_rows: list[int], num_sampled: int) -> StepInputs:
        num_seqs = len(last_rows)
        return StepInputs(
            token_ids=torch.from_numpy(self._token_ids[:num_tokens]),
            context=ForwardContext(
                positions=torch.from_numpy(self._positions[:num_tokens]),
                slot_mapping=torch.from_numpy(self._slots[:num_tokens]),
                attention=AttentionMetadata(
                    query_start=torch.from_numpy(self._starts[: num_seqs + 1]),
                    seq_lens=torch.from_numpy(self._seq_lens[:num_seqs]),
                    block_tables=torch.from_numpy(self._tables[:num_seqs]),
                    block_size=self._block_size,
                ),
                kv_caches=self._kv_caches,
            ),
            sampled_rows=torch.from_numpy(self._sampled[:num_sampled]),
            last_rows=last_rows,
        )

    def _write_token_ids(self, plan: SchedulerOutputs, batch: InputBatch) -> None:
        token_ids: list[int] = []
        for seq_id, first, count in zip(plan.seq_ids, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True):
            known = batch.rows[seq_id].token_ids
            if count == 1:
                token_ids.append(known[first])
            else:
                token_ids += known[first : first + count]
        self._token_ids[: len(token_ids)] = token_ids

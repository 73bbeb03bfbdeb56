"""From a step's instruction to the arrays the model reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.attention.context import AttentionMetadata, ForwardContext, GroupContext, StateMetadata
from quire.messages.kv import KVLayout
from quire.messages.step import SchedulerOutputs
from quire.ops.contract import Ops
from quire.sampling.row import ON_DEVICE
from quire.utils.math import cdiv
from quire.worker.input_batch import InputBatch
from quire.worker.last_tokens import LastTokens


class StepShape(NamedTuple):
    """Steps of one shape differ in the contents of the builder's buffers only."""

    num_tokens: int
    num_seqs: int
    num_sampled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """One step's input, in the builder's buffers: what stands there changes with the next step, not where it stands."""

    token_ids: Tensor
    """[T] int64."""
    context: ForwardContext
    sampled_rows: Tensor
    """[R] int64: the rows of the step whose logits are wanted, in order."""


class InputBuilder:
    """Lays the scheduled tokens of a step side by side, sequence after sequence.

    In lists that are copied as a whole: beside weights that have just streamed through the caches, each kind of call
    into numpy costs more than all sequences do.
    """

    def __init__(
        self, ops: Ops, kv_caches: list[Tensor], batch: InputBatch, *, layout: KVLayout, max_num_tokens: int
    ) -> None:
        self._ops = ops
        self._kv_caches = kv_caches
        self._batch = batch
        self._block_size = layout.block_size
        self._state_groups = layout.state_groups
        self._slot_groups = [index for index in range(len(layout.groups)) if index not in layout.state_groups]
        self._group_of_layer = layout.group_of_layer
        num_groups, max_num_seqs, _ = batch.block_tables.shape
        self.last_tokens = LastTokens(ops, max_num_seqs)
        """Tokens that steps have drawn, for those after them."""
        self._token_ids = np.zeros(max_num_tokens, dtype=np.int64)
        host = torch.from_numpy(self._token_ids)
        self._tokens_on_device = ops.on_device(host)
        """What the model reads: the same memory where ops read the host's."""
        self._copies_tokens = self._tokens_on_device is not host
        self._positions = np.zeros(max_num_tokens, dtype=np.int64)
        self._slots = np.zeros((num_groups, max_num_tokens), dtype=np.int64)
        self._reads = np.full((num_groups, max_num_seqs), -1, dtype=np.int32)
        self._writes = np.zeros((num_groups, max_num_seqs), dtype=np.int32)
        self._starts = np.zeros(max_num_seqs + 1, dtype=np.int32)
        self._seq_lens = np.zeros(max_num_seqs, dtype=np.int32)
        self._sampled = np.zeros(max_num_seqs, dtype=np.int64)

    def build(self, plan: SchedulerOutputs) -> StepShape:
        """Write the step into the buffers."""
        rows = self._batch.rows
        self._batch.arrange(plan.seq_ids)
        token_ids: list[int] = []
        positions: list[int] = []
        starts, seq_lens, sampled = [0], [], []
        for seq_id, first, count, num_draws in zip(
            plan.seq_ids, plan.num_computed_tokens, plan.num_scheduled_tokens, plan.num_draws, strict=True
        ):
            end = first + count
            if count == 1:
                token_ids.append(rows[seq_id].token_ids[first])
                positions.append(first)
            else:
                token_ids += rows[seq_id].token_ids[first:end]
                positions += range(first, end)
            starts.append(len(positions))
            seq_lens.append(end)
            if num_draws:
                sampled.append(len(positions) - 1)
        shape = StepShape(len(positions), len(seq_lens), len(sampled))
        self._bring(token_ids)
        if plan.pending_tokens:
            self._take_drawn(plan, starts)
        self._positions[: shape.num_tokens] = positions
        for group in self._slot_groups:
            table = self._batch.block_tables[group]
            self._slots[group, : shape.num_tokens] = self._slots_in(table, plan.num_computed_tokens, seq_lens)
        if self._state_groups:
            self._place_states(plan.num_computed_tokens)
        self._starts[: shape.num_seqs + 1] = starts
        self._seq_lens[: shape.num_seqs] = seq_lens
        self._sampled[: shape.num_sampled] = sampled
        return shape

    def _bring(self, token_ids: list[int]) -> None:
        """Write tokens to where the model reads them."""
        count = len(token_ids)
        self._token_ids[:count] = token_ids
        if self._copies_tokens:
            self._tokens_on_device[:count].copy_(torch.from_numpy(self._token_ids[:count]), non_blocking=True)

    def _take_drawn(self, plan: SchedulerOutputs, starts: list[int]) -> None:
        """Complete the step by the tokens that only the device has."""
        missing = [
            (start, self._batch.slots[seq_id], first)
            for start, seq_id, first in zip(starts, plan.seq_ids, plan.num_computed_tokens, strict=False)
            if self._token_ids[start] == ON_DEVICE
        ]
        if missing:
            places, slots, positions = zip(*missing, strict=True)
            places_on_device = self._ops.on_device(torch.tensor(places))
            self._tokens_on_device.index_copy_(0, places_on_device, self.last_tokens.take(slots, positions))

    def _place_states(self, firsts: list[int]) -> None:
        """Which pages the sequences' states are read from and written to; those that begin read none."""
        begin = np.array(firsts) == 0
        for group in self._state_groups:
            table = self._batch.block_tables[group, : len(firsts)]
            self._reads[group, : len(firsts)] = np.where(begin, -1, table[:, 0])
            self._writes[group, : len(firsts)] = table[:, 1]

    def one_token(self, *, token_id: int, position: int) -> StepShape:
        """One sampled token at a position of the first block, while the batch is empty; states go to the last block."""
        self._bring([token_id])
        self._positions[0] = self._slots[:, 0] = position
        if self._state_groups:
            self._reads[:, 0], self._writes[:, 0] = -1, self._kv_caches[0].shape[1] - 1
        self._starts[:2] = 0, 1
        self._seq_lens[0] = position + 1
        self._sampled[0] = 0
        return StepShape(1, 1, 1)

    def inputs(self, shape: StepShape) -> StepInputs:
        """The buffers, as far as a step of this shape fills them."""
        return StepInputs(
            token_ids=self._tokens_on_device[: shape.num_tokens],
            context=ForwardContext(
                positions=self._on_device(self._positions[: shape.num_tokens]),
                groups=[self._group(index, shape) for index in range(len(self._slots))],
                group_of_layer=self._group_of_layer,
                kv_caches=self._kv_caches,
            ),
            sampled_rows=self._on_device(self._sampled[: shape.num_sampled]),
        )

    def _group(self, index: int, shape: StepShape) -> GroupContext:
        return GroupContext(
            slot_mapping=self._on_device(self._slots[index, : shape.num_tokens]),
            attention=AttentionMetadata(
                query_start=self._on_device(self._starts[: shape.num_seqs + 1]),
                seq_lens=self._on_device(self._seq_lens[: shape.num_seqs]),
                block_tables=self._on_device(self._batch.block_tables[index, : shape.num_seqs]),
                block_size=self._block_size,
            ),
            state=self._state(index, shape) if index in self._state_groups else None,
        )

    def _state(self, group: int, shape: StepShape) -> StateMetadata:
        return StateMetadata(
            query_start=self._on_device(self._starts[: shape.num_seqs + 1]),
            reads=self._on_device(self._reads[group, : shape.num_seqs]),
            writes=self._on_device(self._writes[group, : shape.num_seqs]),
        )

    def _on_device(self, array: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
        return self._ops.on_device(torch.from_numpy(array))

    def _slots_in(self, table: NDArray[np.int32], firsts: list[int], ends: list[int]) -> list[int]:
        """Where in a group's pages the tokens [first, end) of each sequence go."""
        size = self._block_size
        slots: list[int] = []
        for row, (first, end) in enumerate(zip(firsts, ends, strict=True)):
            if end - first == 1:
                slots.append(table.item(row, first // size) * size + first % size)
                continue
            blocks = table[row, first // size : cdiv(end, size)].tolist()
            whole = [slot for block in blocks for slot in range(block * size, (block + 1) * size)]
            slots += whole[first % size :][: end - first]
        return slots

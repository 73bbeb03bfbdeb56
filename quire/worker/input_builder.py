"""From a step's instruction to the arrays the model reads."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.attention.context import AttentionMetadata, ForwardContext, GroupContext, StateMetadata
from quire.messages.kv import KVLayout
from quire.messages.step import SchedulerOutputs
from quire.ops.contracts.ops import Ops
from quire.sampling.row import ON_DEVICE
from quire.utils.math import cdiv
from quire.worker.device_link import Link
from quire.worker.input_batch import InputBatch
from quire.worker.last_tokens import LastTokens
from quire.worker.step_buffers import HostArray, StepArrays, StepBuffers


class StepShape(NamedTuple):
    """Steps of one shape differ in the contents of the builder's buffers only."""

    num_tokens: int
    num_seqs: int
    num_sampled: int
    only_largest: bool = False
    """Of the logits of the sampled rows, the largest of each is wanted and no other."""
    only_sampled: bool = False
    """Of the hidden states, those of the sampled rows are wanted and no other."""

    def padded(self, sizes: Sequence[int]) -> StepShape:
        """The shape with so many sequences that graphs were captured for: the next of `sizes`, which ascend.

        Only of steps in which each sequence computes one token and is sampled; others, and larger ones, stay. All
        logits are computed then: graphs of one kind only are captured.
        """
        if not sizes or not 0 < self.num_tokens == self.num_seqs == self.num_sampled <= sizes[-1]:
            return self
        size = sizes[bisect_left(sizes, self.num_seqs)]
        return StepShape(size, size, size)


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
        self,
        ops: Ops,
        kv_caches: list[Tensor],
        batch: InputBatch,
        *,
        layout: KVLayout,
        max_num_tokens: int,
        link: Link | None = None,
        graph_sizes: Sequence[int] = (),
    ) -> None:
        """`link`: to a device with memory of its own. `graph_sizes`: what steps are padded to, see
        `StepShape.padded`."""
        self.graph_sizes = graph_sizes
        self._kv_caches = kv_caches
        self._batch = batch
        self._block_size = layout.block_size
        self._state_groups = layout.state_groups
        self._slot_groups = [index for index in range(len(layout.groups)) if index not in layout.state_groups]
        self._group_of_layer = layout.group_of_layer
        max_num_seqs = batch.block_tables.shape[1]
        self._buffers = StepBuffers(
            batch.block_tables, max_num_seqs=max_num_seqs, max_num_tokens=max_num_tokens, link=link
        )
        self._last_tokens = LastTokens(ops, max_num_seqs)
        """Tokens that steps have drawn, for those after them."""

    def build(self, plan: SchedulerOutputs, *, keeps_tokens: bool = False) -> StepShape:
        """Write the step into the buffers. `keeps_tokens`: `keep` follows, with the tokens that it draws."""
        host, rows = self._buffers.begin(), self._batch.rows
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
        host.token_ids[: shape.num_tokens] = token_ids
        host.positions[: shape.num_tokens] = positions
        for group in self._slot_groups:
            table = self._batch.block_tables[group]
            host.slots[group, : shape.num_tokens] = self._slots_in(table, plan.num_computed_tokens, seq_lens)
        if self._state_groups:
            self._place_states(host, plan.num_computed_tokens)
        host.starts[: shape.num_seqs + 1] = starts
        host.seq_lens[: shape.num_seqs] = seq_lens
        host.sampled[: shape.num_sampled] = sampled
        num_missing = self._place_drawn(host, plan, token_ids, starts) if plan.pending_tokens else 0
        if keeps_tokens:
            drawing = zip(plan.seq_ids, seq_lens, plan.num_draws, strict=True)
            places = [self._place(seq_id, end) for seq_id, end, num_draws in drawing if num_draws]
            host.kept[: shape.num_sampled] = places
        padded = shape.padded(self.graph_sizes)
        if padded != shape:
            self._pad(host, shape.num_seqs, padded.num_seqs)
        self._buffers.send(padded.num_seqs)
        if num_missing:
            self._take_drawn(num_missing)
        return shape

    def padding(self, num_seqs: int) -> StepShape:
        """A step of nobody's, which writes to no page, for so many sequences with a token each."""
        host = self._buffers.begin()
        host.starts[0] = 0
        self._pad(host, 0, num_seqs)
        self._buffers.send(num_seqs)
        return StepShape(num_seqs, num_seqs, num_seqs)

    def _pad(self, host: StepArrays[HostArray], first: int, end: int) -> None:
        """Rows `first` .. `end` are nobody's: they see nothing, and what they compute is written nowhere.

        Their block tables are those of some other time, whose blocks all exist.
        """
        host.token_ids[first:end] = host.positions[first:end] = host.seq_lens[first:end] = 0
        host.slots[:, first:end] = host.reads[:, first:end] = host.writes[:, first:end] = -1
        host.sampled[first:end] = range(first, end)
        host.starts[first + 1 : end + 1] = range(first + 1, end + 1)

    def keep(self, token_ids: Tensor) -> None:
        """Leave what the step has drawn on the device, for steps that follow. Shapes: [R] int64, of sampled rows."""
        self._last_tokens.put(self._buffers.device.kept[: len(token_ids)], token_ids)

    def _place_drawn(
        self, host: StepArrays[HostArray], plan: SchedulerOutputs, token_ids: list[int], starts: list[int]
    ) -> int:
        """Say where the tokens are that only the device has. Gives their number."""
        missing = [
            (start, self._place(seq_id, first))
            for start, seq_id, first in zip(starts, plan.seq_ids, plan.num_computed_tokens, strict=False)
            if token_ids[start] == ON_DEVICE
        ]
        if missing:
            host.taken_to[: len(missing)], host.taken[: len(missing)] = zip(*missing, strict=True)
        return len(missing)

    def _take_drawn(self, count: int) -> None:
        """Complete the step by so many tokens that only the device has."""
        arrays = self._buffers.device
        arrays.token_ids.index_copy_(0, arrays.taken_to[:count], self._last_tokens.take(arrays.taken[:count]))

    def _place(self, seq_id: int, position: int) -> int:
        return self._last_tokens.place(self._batch.slots[seq_id], position)

    def _place_states(self, host: StepArrays[HostArray], firsts: list[int]) -> None:
        """Which pages the sequences' states are read from and written to; those that begin read none."""
        begin = np.array(firsts) == 0
        for group in self._state_groups:
            table = self._batch.block_tables[group, : len(firsts)]
            host.reads[group, : len(firsts)] = np.where(begin, -1, table[:, 0])
            host.writes[group, : len(firsts)] = table[:, 1]

    def one_token(self, *, token_id: int, position: int) -> StepShape:
        """One sampled token at a position of the first block, while the batch is empty; states go to the last block."""
        host = self._buffers.begin()
        host.token_ids[0] = token_id
        host.positions[0] = host.slots[:, 0] = position
        if self._state_groups:
            host.reads[:, 0], host.writes[:, 0] = -1, self._kv_caches[0].shape[1] - 1
        host.starts[:2] = 0, 1
        host.seq_lens[0] = position + 1
        host.sampled[0] = 0
        self._buffers.send(1)
        return StepShape(1, 1, 1)

    def inputs(self, shape: StepShape) -> StepInputs:
        """The buffers that ops read, as far as a step of this shape fills them."""
        arrays = self._buffers.device
        return StepInputs(
            token_ids=arrays.token_ids[: shape.num_tokens],
            context=ForwardContext(
                positions=arrays.positions[: shape.num_tokens],
                groups=[self._group(index, shape) for index in range(len(arrays.slots))],
                group_of_layer=self._group_of_layer,
                kv_caches=self._kv_caches,
                wanted=arrays.sampled[: shape.num_sampled] if shape.only_sampled else None,
            ),
            sampled_rows=arrays.sampled[: shape.num_sampled],
        )

    def _group(self, index: int, shape: StepShape) -> GroupContext:
        arrays = self._buffers.device
        return GroupContext(
            slot_mapping=arrays.slots[index, : shape.num_tokens],
            attention=AttentionMetadata(
                query_start=arrays.starts[: shape.num_seqs + 1],
                seq_lens=arrays.seq_lens[: shape.num_seqs],
                block_tables=self._buffers.tables[index, : shape.num_seqs],
                block_size=self._block_size,
            ),
            state=self._state(index, shape) if index in self._state_groups else None,
        )

    def _state(self, group: int, shape: StepShape) -> StateMetadata:
        arrays = self._buffers.device
        return StateMetadata(
            query_start=arrays.starts[: shape.num_seqs + 1],
            reads=arrays.reads[group, : shape.num_seqs],
            writes=arrays.writes[group, : shape.num_seqs],
        )

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

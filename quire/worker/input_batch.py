"""`InputBatch`: what the worker remembers of each sequence between steps: its tokens and its block table.

Every change is an assignment, never an increment, so that applying the same instruction twice is harmless.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.messages.step import NewSequenceData, SchedulerOutputs
from quire.sampling.batch import SamplingRow


class InputBatch:
    """Rows of live sequences: `rows[seq_id]` for tokens, `block_table(seq_ids)` for blocks."""

    def __init__(self, max_num_seqs: int, max_num_blocks: int) -> None:
        self.rows: dict[int, SamplingRow] = {}
        self.to_fork: dict[int, int] = {}
        """Tokens to draw when the prompt is complete, for sequences that will fork."""
        self._table = np.zeros((max_num_seqs, max_num_blocks), dtype=np.int32)
        self._slot_of: dict[int, int] = {}
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    def apply(self, plan: SchedulerOutputs) -> None:
        """Forget removed sequences, learn new ones, write changed blocks."""
        for seq_id in plan.removed_seq_ids:
            if self.rows.pop(seq_id, None) is not None:
                self._free_slots.append(self._slot_of.pop(seq_id))
                self.to_fork.pop(seq_id, None)
        for new in plan.new_sequences:
            self._add(new)
        for seq_id, (first, block_ids) in plan.new_block_ids.items():
            self._table[self._slot_of[seq_id], first : first + len(block_ids)] = block_ids

    def _add(self, new: NewSequenceData) -> None:
        if new.seq_id not in self._slot_of:
            self._slot_of[new.seq_id] = self._free_slots.pop()
        self.rows[new.seq_id] = SamplingRow(
            request=new.request,
            branch=new.branch,
            num_prompt_tokens=new.num_prompt_tokens,
            token_ids=list(new.token_ids),
        )
        if new.num_branches > 1:
            self.to_fork[new.seq_id] = new.num_branches
        self._table[self._slot_of[new.seq_id], : len(new.block_ids)] = new.block_ids

    def block_table(self, seq_ids: list[int], num_blocks: int) -> NDArray[np.int32]:
        """The first `num_blocks` columns of these sequences' tables. Shapes: -> [R, num_blocks]."""
        return self._table[[self._slot_of[seq_id] for seq_id in seq_ids], :num_blocks]

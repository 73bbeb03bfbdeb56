"""`InputBatch`: what the worker remembers of each sequence between steps: its tokens and its block tables.

Every change is an assignment, never an increment, so that applying the same instruction twice is harmless.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import numpy as np

from quire.messages.request import EngineCoreRequest
from quire.messages.step import BlockChange, NewSequenceData, SchedulerOutputs
from quire.sampling.batch import SamplingRow
from quire.sampling.controls import Controls


class InputBatch:
    """Live sequences: `rows[seq_id]` for tokens, `block_tables` for blocks."""

    def __init__(self, max_num_seqs: int, max_num_blocks: int, num_groups: int = 1) -> None:
        self.rows: dict[int, SamplingRow] = {}
        self._controls: WeakValueDictionary[str, Controls] = WeakValueDictionary()
        """By request id, as long as a row holds them."""
        self.to_fork: dict[int, int] = {}
        """Tokens to draw when the prompt is complete, for sequences that will fork."""
        self.to_score: dict[int, int] = {}
        """Candidates to report for each token of the prompt, for sequences that asked."""
        self.block_tables = np.zeros((num_groups, max_num_seqs, max_num_blocks), dtype=np.int32)
        """What attention reads, by KV group; which row is whose, `arrange` decides. Entries that no query reads, behind
        a window or past the end, are those of some other time: always blocks that there are."""
        self._row_of: dict[int, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def apply(self, plan: SchedulerOutputs) -> None:
        """Forget removed sequences, learn new ones, write changed blocks."""
        for seq_id in plan.removed_seq_ids:
            if self.rows.pop(seq_id, None) is not None:
                self._free_rows.append(self._row_of.pop(seq_id))
                self.to_fork.pop(seq_id, None)
                self.to_score.pop(seq_id, None)
        for new in plan.new_sequences:
            self._add(new)
        for seq_id, changes in plan.new_block_ids.items():
            self._write(seq_id, changes)

    def _add(self, new: NewSequenceData) -> None:
        if new.seq_id not in self._row_of:
            self._row_of[new.seq_id] = self._free_rows.pop()
        self.rows[new.seq_id] = SamplingRow(
            request=new.request,
            branch=new.branch,
            num_prompt_tokens=new.num_prompt_tokens,
            token_ids=list(new.token_ids),
            controls=self._controls_of(new.request),
        )
        if new.num_branches > 1:
            self.to_fork[new.seq_id] = new.num_branches
        num_candidates = new.request.sampling_params.prompt_logprobs
        if num_candidates is not None:
            self.to_score[new.seq_id] = num_candidates
        self._write(new.seq_id, new.block_ids)

    def _write(self, seq_id: int, changes: list[BlockChange]) -> None:
        row = self._row_of[seq_id]
        for table, (first, block_ids) in zip(self.block_tables, changes, strict=True):
            table[row, first : first + len(block_ids)] = block_ids

    def _controls_of(self, request: EngineCoreRequest) -> Controls:
        """Those of its other branches, or new ones."""
        controls = self._controls.get(request.request_id)
        if controls is None or controls.request is not request:
            controls = self._controls[request.request_id] = Controls(request)
        return controls

    def arrange(self, seq_ids: list[int]) -> None:
        """Let row i of the block tables be that of the i-th of these sequences, as it is already until others come."""
        rows, top = [self._row_of[seq_id] for seq_id in seq_ids], list(range(len(seq_ids)))
        if rows == top:
            return
        sources = [*rows, *set(top).difference(rows)]
        targets = [*top, *set(rows).difference(top)]
        self.block_tables[:, targets] = self.block_tables[:, sources]
        moved = dict(zip(sources, targets, strict=True))
        self._row_of = {seq_id: moved.get(row, row) for seq_id, row in self._row_of.items()}
        self._free_rows = [moved.get(row, row) for row in self._free_rows]

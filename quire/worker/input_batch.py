"""`InputBatch`: what the worker remembers between steps: requests, and each sequence's tokens and block tables.

Every change is an assignment, never an increment, so that applying the same instruction twice is harmless.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.messages.step import BlockChange, NewSequenceData, SchedulerOutputs
from quire.sampling.batch import SamplingRow
from quire.sampling.controls import Controls
from quire.sampling.row import ON_DEVICE
from quire.structured.backend import Matcher
from quire.structured.grammar import Grammar


class InputBatch:
    """Live sequences: `rows[seq_id]` for tokens, `block_tables` for blocks."""

    def __init__(
        self,
        max_num_seqs: int,
        max_num_blocks: int,
        num_groups: int = 1,
        make_matcher: Callable[[Grammar], Matcher] | None = None,
    ) -> None:
        """`make_matcher` is for requests with a grammar."""
        self._make_matcher = make_matcher
        self.rows: dict[int, SamplingRow] = {}
        self.num_matchers = 0
        """Live sequences that follow a grammar."""
        self._controls: dict[str, Controls] = {}
        """Of each request, by its id: its branches share them."""
        self.to_score: dict[int, tuple[int, int]] = {}
        """(the first position whose row is scored, candidates to report for each), for sequences that asked."""
        self.block_tables = np.zeros((num_groups, max_num_seqs, max_num_blocks), dtype=np.int32)
        """What attention reads, by KV group; which row is whose, `arrange` decides. Entries that no query reads, behind
        a window or past the end, are those of some other time: always blocks that there are."""
        self._row_of: dict[int, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.slots: dict[int, int] = {}
        """Where in `LastTokens` those of each sequence are."""
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    def apply(self, plan: SchedulerOutputs) -> None:
        """Forget what is removed, learn what is new, write changed blocks and tokens."""
        for seq_id in plan.removed_seq_ids:
            row = self.rows.pop(seq_id, None)
            if row is not None:
                self.num_matchers -= row.matcher is not None
                self._free_rows.append(self._row_of.pop(seq_id))
                self._free_slots.append(self.slots.pop(seq_id))
                self.to_score.pop(seq_id, None)
        for request_id in plan.removed_request_ids:
            self._controls.pop(request_id, None)
        for request in plan.new_requests:
            self._controls[request.request_id] = Controls(request, self._make_matcher)
        for new in plan.new_sequences:
            self._add(new)
        for seq_id, changes in plan.new_block_ids.items():
            self._write(seq_id, changes)
        for seq_id, (position, token_ids) in plan.new_token_ids.items():
            self.rows[seq_id].assign(position, token_ids)
        for seq_id, position in plan.pending_tokens.items():
            row = self.rows[seq_id]
            assert row.drawn != ON_DEVICE or not row.reads_tokens, seq_id
            row.assign(position, [row.drawn])

    def _add(self, new: NewSequenceData) -> None:
        if new.seq_id not in self._row_of:
            self._row_of[new.seq_id] = self._free_rows.pop()
            self.slots[new.seq_id] = self._free_slots.pop()
        controls = self._controls[new.request_id]
        request = controls.request
        known = self.rows.get(new.seq_id)
        row = self.rows[new.seq_id] = SamplingRow(
            request=request,
            branch=new.branch,
            num_prompt_tokens=len(request.prompt_token_ids),
            token_ids=[*request.prompt_token_ids, *new.output_token_ids],
            controls=controls,
        )
        self.num_matchers += (row.matcher is not None) - (known is not None and known.matcher is not None)
        if request.sampling_params.prompt_logprobs is not None:
            self.to_score[new.seq_id] = new.num_prompt_logprobs, request.sampling_params.prompt_logprobs
        self._write(new.seq_id, new.block_ids)

    def _write(self, seq_id: int, changes: list[BlockChange]) -> None:
        row = self._row_of[seq_id]
        for table, (first, block_ids) in zip(self.block_tables, changes, strict=True):
            table[row, first : first + len(block_ids)] = block_ids

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

"""`PlanWriter`: writes the instruction for a step, and remembers what the worker knows already.

The worker is told of a request once, of a sequence when it starts or comes back, and then only of what has changed: its
new blocks and its new tokens. It never appends a token by itself, so there is one list of tokens that counts.

The columns of an instruction, which say the same of every sequence, are written when the whole step is decided.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.core.sequence import Sequence, SequenceGroup
from quire.messages.step import NewSequenceData, SchedulerOutputs


class PlanWriter:
    """What the worker knows, and the instruction that is being written."""

    def __init__(self) -> None:
        self.plan = SchedulerOutputs()
        self._sequences: list[Sequence] = []
        """Those in the instruction, in order."""
        self._known_requests: set[str] = set()
        self._removed_seqs: list[int] = []
        self._removed_requests: list[str] = []
        self._preempted: list[int] = []

    def begin(self) -> SchedulerOutputs:
        """Start a new instruction."""
        self.plan, self._sequences = SchedulerOutputs(), []
        return self.plan

    def add(self, seq: Sequence, num_tokens: int, copies: list[tuple[int, int]] | None) -> None:
        """Schedule the next tokens of a sequence. `copies` make blocks its own; None: its tables have not changed."""
        if copies:
            self.plan.blocks_to_copy += copies
        if not seq.is_known:
            self._introduce(seq)
        elif copies is not None:
            self.plan.new_block_ids[seq.seq_id] = seq.unsent_blocks()
        self._sequences.append(seq)
        self.plan.num_scheduled_tokens.append(num_tokens)

    def _introduce(self, seq: Sequence) -> None:
        seq.is_known = True
        seq.num_tokens_sent = len(seq.token_ids)
        group = seq.group
        if group.request_id not in self._known_requests:
            self._known_requests.add(group.request_id)
            self.plan.new_requests.append(group.request)
        self.plan.new_sequences.append(
            NewSequenceData(
                seq_id=seq.seq_id,
                request_id=group.request_id,
                branch=seq.branch,
                output_token_ids=seq.output_token_ids,
                block_ids=seq.unsent_blocks(),
                num_prompt_logprobs=group.num_prompt_logprobs,
            )
        )

    def _write_columns(self, plan: SchedulerOutputs) -> None:
        """What is said of each sequence."""
        sequences = self._sequences
        plan.seq_ids = [seq.seq_id for seq in sequences]
        plan.num_computed_tokens = [seq.num_computed_tokens for seq in sequences]
        plan.num_draws = [
            seq.num_draws if num_tokens == len(seq.token_ids) + seq.num_pending - seq.num_computed_tokens else 0
            for seq, num_tokens in zip(sequences, plan.num_scheduled_tokens, strict=True)
        ]
        plan.num_batched_tokens = sum(plan.num_scheduled_tokens)

    def _tell_tokens(self, plan: SchedulerOutputs) -> None:
        """What each sequence has drawn since the worker was last told, and what it draws in a step in flight."""
        told = plan.new_token_ids
        for seq in self._sequences:
            first, num_tokens = seq.num_tokens_sent, len(seq.token_ids)
            if first < num_tokens:
                told[seq.seq_id] = first, seq.token_ids[first:]
                seq.num_tokens_sent = num_tokens
            if seq.num_pending:
                plan.pending_tokens[seq.seq_id] = seq.num_computed_tokens
                seq.num_tokens_sent = seq.num_computed_tokens + 1

    def end(self) -> SchedulerOutputs:
        """The finished instruction."""
        plan = self.plan
        self._write_columns(plan)
        self._tell_tokens(plan)
        plan.removed_seq_ids, self._removed_seqs = self._removed_seqs, []
        plan.removed_request_ids, self._removed_requests = self._removed_requests, []
        plan.preempted_seq_ids, self._preempted = self._preempted, []
        return plan

    def lost(self, plans: Iterable[SchedulerOutputs]) -> None:
        """Nobody knows what the worker has applied of these instructions: it forgets everything."""
        for plan in (*plans, self.plan):
            self._removed_seqs += plan.removed_seq_ids
            self._removed_requests += plan.removed_request_ids
        self._removed_requests += self._known_requests
        self._known_requests.clear()

    def preempt(self, seq: Sequence) -> None:
        """Let the worker forget a sequence that will come back."""
        if seq.is_known:
            self._preempted.append(seq.seq_id)
        self.forget(seq)

    def forget(self, seq: Sequence) -> None:
        """Let the worker forget a sequence, if it knows it."""
        if seq.is_known:
            self._removed_seqs.append(seq.seq_id)
            seq.is_known = False

    def forget_request(self, group: SequenceGroup) -> None:
        """Let the worker forget a request that has ended, if it knows it."""
        if group.request_id in self._known_requests:
            self._known_requests.remove(group.request_id)
            self._removed_requests.append(group.request_id)

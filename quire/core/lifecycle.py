"""The life of requests and their sequences: queued, running, preempted, forked, finished.

Each change of state does all that belongs to it: seats, blocks, what the worker is told, the timeline. When a change
happens is decided by others: `scheduler` before a step, `results` after it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

from quire.core.kv.block_manager import BlockManager
from quire.core.order.policy import Policy
from quire.core.order.queue import RequestQueue, rank_of
from quire.core.plan_writer import PlanWriter
from quire.core.record.statistics import Totals
from quire.core.record.timeline import Timelines
from quire.core.sequence import Sequence, SequenceGroup, SequenceStatus
from quire.messages.request import AbortRequest, EngineCoreRequest
from quire.observability.flight_recorder import Outcome


class Lifecycle:
    """All unfinished requests, and what they hold."""

    def __init__(
        self,
        blocks: BlockManager,
        policy: Policy,
        *,
        max_num_seqs: int,
        max_credit: int,
        clock: Callable[[], float],
    ) -> None:
        """`max_num_seqs` seats; `max_credit` as for `RequestQueue`."""
        self.blocks = blocks
        self.policy = policy
        self.max_num_seqs = max_num_seqs
        self.groups: dict[str, SequenceGroup] = {}
        self.waiting = RequestQueue(max_credit=max_credit)
        self.running: list[Sequence] = []
        """In order of rank."""
        self.writer = PlanWriter()
        self.totals = Totals()
        self.timelines = Timelines(clock)
        self.num_slots = 0
        """Seats taken by running sequences; one that will fork counts all its branches from the start."""
        self.num_added = 0
        """Requests that were queued, since the start."""
        self.num_searches = 0
        """Unfinished requests that are beam searches."""
        self._next_seq_id = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: EngineCoreRequest) -> None:
        """Queue a request, new or with progress. Its id must be new (the engine sees to it)."""
        assert request.request_id not in self.groups, request.request_id
        rank = self.policy.rank(request, self.num_added)
        self.num_added += 1
        group = SequenceGroup(request, self.waiting.enter(request.tenant), rank)
        branches = request.progress.branches if request.progress else {}
        for branch, output in (branches or {0: []}).items():
            seq = Sequence(self._new_seq_id(), group, branch, [*request.prompt_token_ids, *output])
            seq.num_to_fork = 1 if branches else request.sampling_params.num_sequences
            group.sequences[branch] = seq
            self.waiting.add(seq)
        self.groups[request.request_id] = group
        self.num_searches += group.beams is not None
        self.timelines.added(group)

    def withdraw(self, request_id: str) -> EngineCoreRequest:
        """Take an unfinished request out, in the form in which it can be added again."""
        group = self.groups[request_id]
        self.timelines.leaves(group, Outcome.SET_ASIDE)
        request = group.so_far()
        for seq in list(group.sequences.values()):
            self.finish(seq)
        return request

    def abort(self, abort: AbortRequest) -> bool:
        """Drop a request, or one branch of it; False when it is not (or no longer) here."""
        group = self.groups.get(abort.request_id)
        if group is None:
            return False
        whole = abort.branch is None or group.beams is not None
        branches = list(group.sequences) if whole else [abort.branch]
        if whole:
            self.timelines.leaves(group, Outcome.ABORTED)
        found = [group.sequences[b] for b in branches if b in group.sequences]
        for seq in found:
            self.finish(seq)
        return bool(found)

    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return bool(self.groups)

    # -- sequences -----------------------------------------------------------------------------------------------

    def has_seats(self, seq: Sequence) -> bool:
        """Whether the sequence and its branches-to-be could run beside all others."""
        return self.num_slots + seq.num_to_fork <= self.max_num_seqs

    def admit(self, seq: Sequence, matched: list[list[int]], now: float) -> None:
        """A waiting sequence runs, from the end of its cached prefix."""
        group = seq.group
        self.waiting.remove(seq)
        self.blocks.allocate_prefix(seq, matched)
        seq.status = SequenceStatus.RUNNING
        insort(self.running, seq, key=rank_of)
        self.num_slots += seq.num_to_fork
        if group.num_cached_tokens < 0:
            group.num_cached_tokens = seq.num_computed_tokens
            group.stats.scheduled_at = group.stats.scheduled_at or now
        self.timelines.admitted(seq)

    def preempt(self, seq: Sequence) -> None:
        """A running sequence loses its blocks; it waits in its place in the queue and is recomputed."""
        self._stop_running(seq)
        self.writer.preempt(seq)
        self.blocks.free(seq)
        seq.status = SequenceStatus.WAITING
        seq.group.stats.num_preemptions += 1
        self.timelines.preempted(seq)
        self.waiting.add(seq)
        self.totals.num_preemptions += 1

    def fork(self, parent: Sequence, num_branches: int) -> list[Sequence]:
        """All branches, each in its place among the running; the worker hears of the new ones when they run."""
        return [parent, *(self.branch_off(parent, branch) for branch in range(1, num_branches))]

    def branch_off(self, parent: Sequence, branch: int) -> Sequence:
        """One more branch with the tokens of `parent`. It runs and shares the blocks of a parent that runs if there is
        a seat: one that the parent has for it, or a free one. Else it waits."""
        has_seat = parent.num_to_fork > 1 or self.num_slots < self.max_num_seqs
        if parent.status is SequenceStatus.RUNNING and has_seat:
            child = parent.fork(self._new_seq_id(), branch)
            if parent.num_to_fork > 1:
                parent.num_to_fork -= 1
            else:
                self.num_slots += 1
            self.blocks.share_blocks(parent, child)
            insort(self.running, child, key=rank_of)
            self.timelines.forked(parent.group, 1)
        else:
            child = Sequence(self._new_seq_id(), parent.group, branch, list(parent.token_ids))
            self.waiting.add(child)
        parent.group.sequences[branch] = child
        return child

    def finish(self, seq: Sequence) -> None:
        """A sequence gives back all it holds; the group goes with its last branch."""
        was_running = seq.status is SequenceStatus.RUNNING
        if was_running:
            self._stop_running(seq)
        else:
            self.waiting.remove(seq)
        self.writer.forget(seq)
        self.blocks.free(seq)
        seq.status = SequenceStatus.FINISHED
        group = seq.group
        del group.sequences[seq.branch]
        self.timelines.finished(seq, was_running=was_running)
        if not group.sequences:
            del self.groups[group.request_id]
            self.num_searches -= group.beams is not None
            self.writer.forget_request(group)
            self.waiting.leave(group.tenant)

    def _stop_running(self, seq: Sequence) -> None:
        del self.running[bisect_left(self.running, seq.rank, key=rank_of)]
        self.num_slots -= seq.num_to_fork

    def _new_seq_id(self) -> int:
        self._next_seq_id += 1
        return self._next_seq_id - 1

    def check(self) -> None:
        """Verify every invariant of sequences and pool.

        Raises: AssertionError.
        """
        holders: dict[int, int] = {}
        live = [seq for group in self.groups.values() for seq in group.sequences.values()]
        for seq in live:
            for block_id in (block_id for table in seq.tables for block_id in table.held):
                holders[block_id] = holders.get(block_id, 0) + 1
        self.blocks.check(holders)
        assert sorted(id(s) for s in live) == sorted(id(s) for s in [*self.running, *self.waiting])
        assert self.num_slots == sum(seq.num_to_fork for seq in self.running) <= self.max_num_seqs
        assert all(not seq.tables and not seq.num_computed_tokens and not seq.num_pending for seq in self.waiting)
        for seq in self.running:
            is_in_flight = seq.num_committed_tokens < seq.num_computed_tokens
            assert is_in_flight or (seq.is_idle and not seq.num_left) or seq.num_left > 0, seq
        assert sum(tenant.num_groups for tenant in self.waiting.tenants.values()) == len(self.groups)
        assert all(seq.num_own_blocks >= 0 for seq in live)
        for queue in (self.running, *(tenant.waiting for tenant in self.waiting.tenants.values())):
            assert queue == sorted(queue, key=rank_of)

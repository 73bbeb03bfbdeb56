"""Room for sequences that wait: seats and memory beside what is promised to others, and who gives way for them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Many
from itertools import chain

from quire.core.kv.block_manager import BlockManager
from quire.core.lifecycle import Lifecycle
from quire.core.order.budget import StepBudget
from quire.core.order.fairness import Shares
from quire.core.order.queue import rank_of
from quire.core.sequence import Sequence, SequenceStatus


class Room:
    """What is left of seats and blocks."""

    def __init__(self, lives: Lifecycle) -> None:
        self._lives = lives
        self.promised = 0
        """Blocks that admitted sequences still need for the tokens they have."""

    @property
    def _blocks(self) -> BlockManager:
        return self._lives.blocks

    def for_waiting(self, seq: Sequence) -> list[list[int]] | None:
        """The cached prefix of a waiting sequence if the rest of it fits beside what is promised."""
        matched = self._blocks.match_prefix(seq)
        fits = self._blocks.num_new_blocks(seq, matched) + self.promised <= self._blocks.pool.num_free
        return matched if fits else None

    def is_ready(self, seq: Sequence) -> bool:
        """Whether its grammar is there and no other branch computes the same prompt now; else its blocks can be shared
        some steps later.

        Branches that wait by themselves are those of a request that came from another core, or was preempted.
        """
        others = seq.group.sequences
        if seq.is_idle or seq.group.is_preparing:
            return False
        if len(others) == 1 or not self._blocks.reads_cache(seq):
            return True
        prompt = seq.group.num_prompt_tokens
        return not any(
            other.status is SequenceStatus.RUNNING and other.num_computed_tokens < prompt for other in others.values()
        )

    def make_room(self, budget: StepBudget, shares: Shares) -> None:
        """Preempt sequences beyond their tenants' shares for the next one in the queue whose tenant is below."""
        candidates = self._lives.waiting.candidates(self.is_ready)
        seq = next((seq for seq in candidates if shares.may_hold(seq, self._blocks.most_blocks(seq))), None)
        if seq is None:
            return
        while not self._lives.has_seats(seq):
            latest = shares.latest_beyond(self._lives.running, seq.group.tenant, slots=True)
            if latest is None:
                return
            self.preempt(latest, budget)
        matched = self._blocks.match_prefix(seq)
        while not self._blocks.can_allocate(seq, matched):
            latest = shares.latest_beyond(self._lives.running, seq.group.tenant, slots=False)
            if latest is None:
                return
            self.preempt(latest, budget)

    def make_way(self, budget: StepBudget) -> None:
        """Preempt for the first in each tenant's queue those that give way to it, if that lets it start.

        Tenants come in the order in which they are served: the seat promised to a later one would keep the first out.
        Where steps are short it is one sequence of each tenant, else as many as this step could compute.
        """
        self.count_promised()
        one_each = budget.shares is not None or budget.portions is not None
        for first in list(self._lives.waiting.candidates(self.is_ready)):
            for seq in filter(self.is_ready, list(first.group.tenant.waiting)):
                if self._blocks.reads_cache(seq) and any(one.group is seq.group for one in budget.urgent):
                    continue  # when that one has started, this one is ready no more
                if not self._makes_way(seq, budget) or one_each or budget.is_full_of_urgent():
                    break

    def _gives_way(self, one: Sequence, seq: Sequence, shares: Shares | None) -> bool:
        """Whether a running sequence is preempted for one that waits. Idle beams are: what they have reported is kept,
        and if they held on to what others wait for, searches would wait for each other."""
        if one.group.tenant is not seq.group.tenant:
            return one.is_idle and (shares is None or shares.may_hold(seq, self._blocks.most_blocks(seq)))
        if one.rank > seq.rank:
            return self._lives.policy.preempts or one.is_idle
        return one.group is seq.group and one.is_idle

    def _makes_way(self, seq: Sequence, budget: StepBudget) -> bool:
        """Whether a waiting sequence is to start before some that run; those of them in its way are preempted."""
        position = bisect_left(self._lives.running, seq.rank, key=rank_of)
        later = [one for one in self._lives.running if self._gives_way(one, seq, budget.shares)]
        if not later or not self._could_score(seq, position, budget) or not self._fits(seq, budget, later):
            return False
        for victim in self._in_the_way(seq, budget, later):
            if not self._fits(seq, budget):  # a branch alone does not copy the block it shared with the one before
                self.preempt(victim, budget)
        budget.urgent.append(seq)
        self.promised += self._blocks.num_new_blocks(seq, self._blocks.match_prefix(seq))
        return True

    def _in_the_way(self, seq: Sequence, budget: StepBudget, later: list[Sequence]) -> list[Sequence]:
        """Those, the last first, that must be preempted so that a waiting sequence can start, and none besides."""
        victims: list[Sequence] = []
        while not self._fits(seq, budget, victims):
            victims.append(later.pop())
        for one in reversed(victims):
            others = [victim for victim in victims if victim is not one]
            if self._fits(seq, budget, others):
                victims = others
        return victims

    def _could_score(self, seq: Sequence, position: int, budget: StepBudget) -> bool:
        """Whether those that run before a waiting sequence leave it some of the prompt logprobs of this step."""
        if budget.num_scored is None or not seq.num_unscored:
            return True
        before = chain(self._lives.running[:position], budget.urgent)
        return sum(one.num_unscored for one in before) < budget.num_scored

    def _fits(self, seq: Sequence, budget: StepBudget, without: Many[Sequence] = ()) -> bool:
        """Whether a waiting sequence has a seat and memory beside those that are to start, if these were preempted."""
        num_slots = self._lives.num_slots - sum(one.num_to_fork for one in without)
        num_slots += sum(one.num_to_fork for one in budget.urgent)
        if num_slots + seq.num_to_fork > self._lives.max_num_seqs:
            return False
        shares = budget.shares
        if shares is not None and not shares.may_hold(seq, self._blocks.most_blocks(seq), without):
            return False
        return self.has_memory(seq, without)

    def has_memory(self, seq: Sequence, without: Many[Sequence]) -> bool:
        """Whether a waiting sequence would fit beside what is promised, if these were preempted."""
        matched = self._blocks.match_prefix(seq)
        promised = self.promised - sum(map(self._blocks.still_needed, without))
        missing = self._blocks.num_new_blocks(seq, matched) + promised - self._blocks.pool.num_free
        return missing <= 0 or (bool(without) and missing <= self._blocks.num_freed(without, matched))

    def count_promised(self) -> None:
        """Count `promised` anew."""
        self.promised = sum(map(self._blocks.still_needed, self._lives.running))

    def preempt(self, seq: Sequence, budget: StepBudget) -> None:
        """Take the blocks of a running sequence, which is not part of this step."""
        if seq.num_left == 1:
            budget.num_single = max(0, budget.num_single - 1)
        if budget.shares is not None:
            budget.shares.stopped(seq)
        branches = [one for one in seq.group.sequences.values() if one.status is SequenceStatus.RUNNING]
        self.promised -= sum(map(self._blocks.still_needed, branches))
        self._lives.preempt(seq)
        self.promised += sum(self._blocks.still_needed(one) for one in branches if one is not seq)

"""Who runs: decides each step, from one budget and without phases.

Sequences are served in order of rank (`policy`): of arrival, unless requests have priorities. Running ones come first;
those that need a single token are guaranteed it before anybody's long prompt takes the rest of the budget (`budget`
says how prompts share it). Waiting ones are admitted when the whole of what they have fits beside what admitted ones
still need; one that does not fit is overtaken only by those without which it would not fit either. If memory runs out,
the last in order gives its blocks back and is recomputed later; the first always makes progress, so every request ends.

That is for one tenant. While several are active (`fairness`), each gets its share: steps are short and sequences take
turns, the tenant that was served least is admitted first, and who holds more than its share gives way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Many
from itertools import chain, islice

from quire.core.block_manager import BlockManager
from quire.core.budget import CROWDED_S, MAX_SCORED_TOKENS, Portions, StepBudget, StepCost
from quire.core.fairness import Shares
from quire.core.lifecycle import Lifecycle
from quire.core.policy import Policy
from quire.core.queue import rank_of
from quire.core.results import Results
from quire.core.sequence import Sequence, SequenceStatus
from quire.messages.output import EngineCoreOutput
from quire.messages.request import EngineCoreRequest
from quire.messages.stats import Constraint, StepStats
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs

MOST_OVERTAKERS = 16
"""Sequences behind one that waits for memory that are looked at in one step."""
CREDIT_STEPS = 2
"""Full steps by which one tenant's service may be behind another's and be caught up with."""


class Scheduler:
    """Decides every step over the unfinished requests, and hands its results on."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_chunk_tokens: int,
        clock: Callable[[], float],
        policy: Policy,
        cost: StepCost,
    ) -> None:
        """Limits in sequences and tokens; `max_chunk_tokens` bounds what one sequence gets in one step."""
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_chunk_tokens = max_chunk_tokens
        self.clock = clock
        self.policy = policy
        self.cost = cost
        self.lives = Lifecycle(
            blocks, policy, max_num_seqs=max_num_seqs, max_credit=CREDIT_STEPS * max_num_batched_tokens, clock=clock
        )
        self.running, self.waiting = self.lives.running, self.lives.waiting
        self._results = Results(self.lives, max_model_len=max_model_len)
        self.stepped_at = 0.0
        """When the last step was learnt from."""
        self._step_started_at = 0.0
        self._scheduled: dict[int, Sequence] = {}
        self._promised = 0
        """Blocks that admitted sequences still need for the tokens they have."""
        self._crowded_until = 0.0
        """Further short requests are expected until then."""

    @property
    def num_preemptions(self) -> int:
        """Sequences that lost their blocks, since the start."""
        return self.lives.totals.num_preemptions

    def add(self, request: EngineCoreRequest) -> None:
        """Queue a request, new or with progress."""
        self.lives.add(request)
        if self.cost.work(0, len(request.prompt_token_ids)) <= self.max_num_batched_tokens:
            self._crowded_until = self.clock() + CROWDED_S

    def schedule(self) -> SchedulerOutputs:
        """Decide one step."""
        self.lives.writer.begin()
        self._step_started_at = self.clock()
        self.lives.timelines.step_started(self.lives.totals.num_steps + 1, self._step_started_at, self.waiting)
        if self._scheduled or self.blocks.is_moving:
            self._start_over()
        budget = self._budget()
        if budget.shares is not None:
            self._make_room(budget, budget.shares)
        if (self.policy.preempts or self.lives.num_searches) and self.waiting:
            self._make_way(budget)
        num_preemptions = self.num_preemptions
        self._schedule_running(budget)
        constraint = Constraint.KV_CACHE
        if self.num_preemptions == num_preemptions:
            constraint = self._schedule_waiting(budget)
        self.lives.totals.constraint_steps[constraint] += 1
        plan = self.lives.writer.end()
        self.blocks.write_moves(plan)
        if budget.shares is None and self.running:
            self.waiting.charge(self.running[0].group.tenant, plan.num_batched_tokens)
        self.lives.timelines.step_planned(plan, constraint, self.waiting, len(self.running), self.blocks.pool)
        return plan

    def _start_over(self) -> None:
        """The last step was interrupted before `update`: what the worker did of it is unknown, so all is recomputed."""
        self._scheduled = {}
        self.lives.writer.lost()
        self.blocks.moves_interrupted()
        while self.running:
            self._preempt(self.running[-1], StepBudget(0))

    def _budget(self) -> StepBudget:
        """What the step may take on. Shares need nothing set aside: whoever came too late comes first in the next."""
        budget = StepBudget(self.max_num_batched_tokens)
        if any(not seq.num_unscored for seq in chain(self.running, self.waiting.candidates(self._is_ready))):
            budget.num_scored = MAX_SCORED_TOKENS
        if len(self.waiting.tenants) > 1 and len(self.waiting.active()) > 1:
            budget.shares = Shares(
                self.waiting,
                self.running,
                max_num_seqs=self.max_num_seqs,
                num_blocks=self.blocks.pool.num_blocks,
                max_num_tokens=self.max_num_batched_tokens,
                step=self.lives.totals.num_steps + 1,
            )
            return budget
        left = [len(seq.token_ids) - seq.num_computed_tokens for seq in self.running]
        prompts = [seq for seq, num_left in zip(self.running, left, strict=True) if num_left > 1]
        budget.num_single = left.count(1)
        budget.portions = self._portions(prompts) if prompts else None
        return budget

    def _portions(self, prompts: list[Sequence]) -> Portions | None:
        """How prompts share a short step; None while no long one runs, or short ones are not expected."""
        if self._step_started_at >= self._crowded_until:
            return None
        most = self.max_num_batched_tokens
        long = [seq for seq in prompts if self.cost.work(seq.num_computed_tokens, seq.num_left) > most]
        others = [seq for seq in prompts if seq not in long]
        return Portions(long, others, self.cost, somebody_waits=bool(self.waiting)) if long else None

    def _make_room(self, budget: StepBudget, shares: Shares) -> None:
        """Preempt sequences beyond their tenants' shares for the next one in the queue whose tenant is below."""
        candidates = self.waiting.candidates(self._is_ready)
        seq = next((seq for seq in candidates if shares.may_hold(seq, self.blocks.most_blocks(seq))), None)
        if seq is None:
            return
        while not self.lives.has_seats(seq):
            latest = shares.latest_beyond(self.running, seq.group.tenant, slots=True)
            if latest is None:
                return
            self._preempt(latest, budget)
        matched = self.blocks.match_prefix(seq)
        while not self.blocks.can_allocate(seq, matched):
            latest = shares.latest_beyond(self.running, seq.group.tenant, slots=False)
            if latest is None:
                return
            self._preempt(latest, budget)

    def _make_way(self, budget: StepBudget) -> None:
        """Preempt for the first in each tenant's queue those that give way to it, if that lets it start.

        Where steps are short it is one sequence of each tenant, else as many as this step could compute.
        """
        self._count_promised()
        one_each = budget.shares is not None or budget.portions is not None
        for tenant in self.waiting.tenants.values():
            for seq in filter(self._is_ready, list(tenant.waiting)):
                if any(one.group is seq.group for one in budget.urgent):
                    continue  # when that one has started, this one is ready no more
                if not self._makes_way(seq, budget) or one_each or budget.is_full_of_urgent():
                    break

    def _gives_way(self, one: Sequence, seq: Sequence, shares: Shares | None) -> bool:
        """Whether a running sequence is preempted for one that waits. Idle beams are: what they have reported is kept,
        and if they held on to what others wait for, searches would wait for each other."""
        if one.group.tenant is not seq.group.tenant:
            return one.is_idle and (shares is None or shares.may_hold(seq, self.blocks.most_blocks(seq)))
        if one.rank > seq.rank:
            return self.policy.preempts or one.is_idle
        return one.group is seq.group and one.is_idle

    def _makes_way(self, seq: Sequence, budget: StepBudget) -> bool:
        """Whether a waiting sequence is to start before some that run; those of them in its way are preempted."""
        position = bisect_left(self.running, seq.rank, key=rank_of)
        later = [one for one in self.running if self._gives_way(one, seq, budget.shares)]
        if not later or not self._could_score(seq, position, budget) or not self._fits(seq, budget, later):
            return False
        for victim in self._in_the_way(seq, budget, later):
            self._preempt(victim, budget)
        budget.urgent.append(seq)
        self._promised += self.blocks.num_new_blocks(seq, self.blocks.match_prefix(seq))
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
        before = chain(self.running[:position], budget.urgent)
        return sum(one.num_unscored for one in before) < budget.num_scored

    def _fits(self, seq: Sequence, budget: StepBudget, without: Many[Sequence] = ()) -> bool:
        """Whether a waiting sequence has a seat and memory beside those that are to start, if these were preempted."""
        num_slots = self.lives.num_slots - sum(one.num_to_fork for one in without)
        num_slots += sum(one.num_to_fork for one in budget.urgent)
        if num_slots + seq.num_to_fork > self.max_num_seqs:
            return False
        shares = budget.shares
        if shares is not None and not shares.may_hold(seq, self.blocks.most_blocks(seq), without):
            return False
        return self._has_memory(seq, without)

    def _has_memory(self, seq: Sequence, without: Many[Sequence]) -> bool:
        """Whether a waiting sequence would fit beside what is promised, if these were preempted."""
        matched = self.blocks.match_prefix(seq)
        promised = self._promised - sum(map(self.blocks.still_needed, without))
        missing = self.blocks.num_new_blocks(seq, matched) + promised - self.blocks.pool.num_free
        return missing <= 0 or (bool(without) and missing <= self.blocks.num_freed(without, matched))

    def _count_promised(self) -> None:
        self._promised = sum(map(self.blocks.still_needed, self.running))

    def _schedule_running(self, budget: StepBudget) -> None:
        shares = budget.shares
        for seq in self.running if shares is None else shares.in_turn(self.running):
            if budget.num_tokens <= 0:
                return
            num_tokens = self._share_of(seq, budget)
            if num_tokens > 0 and (self.blocks.can_append(seq, num_tokens) or self._free(seq, num_tokens, budget)):
                self._schedule(seq, num_tokens, budget)

    def _free(self, seq: Sequence, num_tokens: int, budget: StepBudget) -> bool:
        """Preempt until the sequence has room for its tokens; False when it had to go itself."""
        while not self.blocks.can_append(seq, num_tokens):
            shares = budget.shares
            victim = self.running[-1] if shares is None else shares.victim(self.running, self._scheduled)
            self._preempt(victim, budget)
            if victim is seq:
                return False
        return True

    def _schedule_waiting(self, budget: StepBudget) -> Constraint:
        """Start who fits; what keeps the next one out."""
        if not self.waiting:
            return Constraint.ARRIVALS if budget.for_many() > 0 else Constraint.TOKEN_BUDGET
        self._count_promised()
        while self.waiting and budget.may_start_more():
            seq, constraint = self._next_waiting(budget)
            if seq is None:
                return constraint
            if not self.lives.has_seats(seq):
                return Constraint.MAX_NUM_SEQS
            matched = self._room_for(seq)
            if matched is None:
                seq, matched = self._overtaker(seq, budget)
            if seq is None:
                return Constraint.KV_CACHE
            self._start(seq, matched, budget)
        return Constraint.TOKEN_BUDGET if self.waiting or not budget.may_start_more() else Constraint.ARRIVALS

    def _start(self, seq: Sequence, matched: list[list[int]], budget: StepBudget) -> None:
        if budget.shares is not None:
            budget.shares.started(seq, self.blocks.most_blocks(seq))
        self.lives.admit(seq, matched, self._step_started_at)
        if budget.shares is None and budget.portions is None:
            budget.portions = self._portions([seq])
        if self.blocks.is_loading(seq):
            self.lives.timelines.loading(seq)  # it is computed from the next step on
        else:
            self._schedule(seq, max(1, self._share_of(seq, budget)), budget)
        self._promised += self.blocks.still_needed(seq)

    def _room_for(self, seq: Sequence) -> list[list[int]] | None:
        """The cached prefix of a waiting sequence if the rest of it fits beside what is promised."""
        matched = self.blocks.match_prefix(seq)
        fits = self.blocks.num_new_blocks(seq, matched) + self._promised <= self.blocks.pool.num_free
        return matched if fits else None

    def _overtaker(self, first: Sequence, budget: StepBudget) -> tuple[Sequence | None, list[list[int]]]:
        """One that may start before `first`, which waits for memory, and its cached prefix.

        There is none once `first` would fit without those that have overtaken it.
        """
        overtakers = self.running[bisect_left(self.running, first.rank, key=rank_of) :]
        if not self._has_memory(first, overtakers):
            for seq in islice(first.group.tenant.waiting, MOST_OVERTAKERS):
                if seq is not first and self._may_be_next(seq, budget) and self.lives.has_seats(seq):
                    matched = self._room_for(seq)
                    if matched is not None and (budget.shares is None or self._may_start(seq, budget.shares)):
                        return seq, matched
        return None, []

    def _next_waiting(self, budget: StepBudget) -> tuple[Sequence | None, Constraint]:
        """Who is to start next; without anybody, what keeps them out."""
        shares, constraint = budget.shares, Constraint.TOKEN_BUDGET
        for seq in self.waiting.candidates(lambda seq: self._may_be_next(seq, budget)):
            if shares is None:
                return seq, constraint
            if self._may_start(seq, shares):
                return seq, constraint
            if not shares.may_hold(seq, self.blocks.most_blocks(seq)):
                constraint = Constraint.MAX_NUM_SEQS
            self.lives.timelines.refused(seq.group.tenant)
        return None, constraint

    def _may_start(self, seq: Sequence, shares: Shares) -> bool:
        """Whether its tenant's share has room for a sequence, and tokens in this step."""
        return shares.may_hold(seq, self.blocks.most_blocks(seq)) and bool(shares.tokens_for(seq, 1))

    def _may_be_next(self, seq: Sequence, budget: StepBudget) -> bool:
        """Whether a waiting sequence could use this step; those that need prompt logprobs wait until some are left."""
        return budget.may_score(seq) and self._is_ready(seq)

    def _is_ready(self, seq: Sequence) -> bool:
        """Whether no other branch is computing the same prompt now; else its blocks can be shared some steps later.

        Branches that wait by themselves are those of a request that came from another core, or was preempted.
        """
        others = seq.group.sequences
        if seq.is_idle:
            return False
        if len(others) == 1 or not self.blocks.reads_cache(seq):
            return True
        prompt = seq.group.num_prompt_tokens
        return not any(
            other.status is SequenceStatus.RUNNING and other.num_computed_tokens < prompt for other in others.values()
        )

    def _share_of(self, seq: Sequence, budget: StepBudget) -> int:
        wanted = len(seq.token_ids) - seq.num_computed_tokens
        if not wanted:
            return 0  # a beam that waits for others
        if budget.shares is not None:
            if seq.status is not SequenceStatus.RUNNING:
                return 0  # preempted a moment ago
            wanted = min(wanted, budget.beside_urgent(seq, budget.shares.tokens_for(seq, self.max_num_batched_tokens)))
        if wanted == 1 and seq.is_known:
            return 1
        if budget.portions is not None:
            wanted = budget.portions.tokens_for(seq, wanted)
        wanted = budget.unscored_for(seq, wanted)
        if wanted <= 1:
            return min(wanted, budget.num_tokens)
        return min(wanted, self.max_chunk_tokens, budget.beside_urgent(seq, budget.for_many()))

    def _schedule(self, seq: Sequence, num_tokens: int, budget: StepBudget) -> None:
        wanted = len(seq.token_ids) - seq.num_computed_tokens
        group = seq.group
        if wanted > 1 or not group.stats.first_token_at:
            group.effort.num_prefill_steps += 1
            group.effort.num_computed_tokens += num_tokens
            group.effort_is_news = True
            self.lives.timelines.chunk(
                seq, num_tokens, is_last=num_tokens == wanted, is_shared=budget.shares is not None
            )
        self.lives.writer.add(seq, num_tokens, self.blocks.append(seq, num_tokens))
        self._scheduled[seq.seq_id] = seq
        budget.charge(seq, num_tokens)

    def _preempt(self, seq: Sequence, budget: StepBudget) -> None:
        """Take the blocks of a running sequence that is not part of this step."""
        assert seq.seq_id not in self._scheduled, seq
        if len(seq.token_ids) - seq.num_computed_tokens == 1:
            budget.num_single = max(0, budget.num_single - 1)
        if budget.shares is not None:
            budget.shares.stopped(seq)
        self._promised -= self.blocks.still_needed(seq)
        self.lives.preempt(seq)

    def update(self, plan: SchedulerOutputs, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take in the result of a step. Gives what is new."""
        now = self.stepped_at = self.clock()
        self.lives.timelines.step_executed(now, result)
        self.lives.writer.arrived(plan)
        if self.blocks.is_moving:
            self._end_moves(result.failed_loads)
        outputs = self._results.take_in(self._scheduled, plan, result, now)
        self.lives.totals.add_step(plan, result, now - self._step_started_at)
        self.lives.timelines.step_ended()
        return outputs

    def _end_moves(self, failed_loads: list[int]) -> None:
        """Pages have been moved; who should have had one of these waits again, and finds a shorter prefix."""
        self.blocks.moves_ended(failed_loads)
        lost = set(failed_loads)
        for seq in [seq for seq in self.running if any(not lost.isdisjoint(table.held) for table in seq.tables)]:
            self.lives.preempt(seq)
            if not seq.group.stats.first_token_at:
                seq.group.num_cached_tokens = -1  # as it is told at the next start

    def stats(self, plan: SchedulerOutputs) -> StepStats:
        """How full the engine is after a step."""
        return self.lives.totals.after(plan, self.blocks, len(self.running), len(self.waiting))

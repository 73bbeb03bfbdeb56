"""Who runs: decides each step, from one budget and without phases.

Sequences are served in order of rank (`policy`): of arrival, unless requests have priorities. Running ones come first;
those that need a single token are guaranteed it before anybody's long prompt takes the rest of the budget (`budget`
says how prompts share it). Waiting ones are admitted when the whole of what they have fits beside what admitted ones
still need; one that does not fit is overtaken only by those without which it would not fit either. If memory runs out,
the last in order gives its blocks back and is recomputed later; the first always makes progress, so every request ends.

That is for one tenant. While several are active (`fairness`), each gets its share: steps are short and sequences take
turns, the tenant that was served least is admitted first, and who holds more than its share gives way.

A step can be decided while others are in flight, with the tokens that they will have drawn: it does what is certain,
and whatever depends on their results, above all who gives way to whom, waits until they have ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice

from quire.core.kv.block_manager import BlockManager
from quire.core.lifecycle import Lifecycle
from quire.core.order.budget import CROWDED_S, MAX_SCORED_TOKENS, Portions, StepBudget, StepCost
from quire.core.order.fairness import Shares
from quire.core.order.policy import Policy
from quire.core.order.queue import rank_of
from quire.core.order.room import Room
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


@dataclass(slots=True)
class StepInFlight:
    """A step that was decided and not learnt from yet."""

    plan: SchedulerOutputs
    sequences: list[Sequence]
    """In order."""
    started_at: float
    moves_pages: bool
    is_counted: bool = False
    """Whether its sequences' `num_pending` says what it draws."""


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
        self._room = Room(self.lives)
        self._results = Results(self.lives, max_model_len=max_model_len)
        self.stepped_at = 0.0
        """When the last step was learnt from."""
        self._step_started_at = 0.0
        self._scheduled: dict[int, Sequence] = {}
        """In the step that is being decided."""
        self._in_flight: deque[StepInFlight] = deque()
        self._is_short = False
        """Somebody has to give way, which waits until no step is in flight."""
        self._max_model_len = max_model_len
        self._paused = False
        """Long prompts paused in the last step."""
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
        """Decide one step. While others are in flight, `may_go_ahead` was asked before."""
        self.lives.writer.begin()
        self._scheduled, self._is_short = {}, False
        self._step_started_at = self.clock()
        number = self.lives.totals.num_steps + len(self._in_flight) + 1
        self.lives.timelines.step_started(number, self._step_started_at, self.waiting)
        budget = self._budget()
        if not self._in_flight:
            self._give_way(budget)
        num_preemptions = self.num_preemptions
        self._schedule_running(budget)
        constraint = Constraint.KV_CACHE
        if self.num_preemptions == num_preemptions and not self._is_short:
            constraint = self._schedule_waiting(budget)
        self._end_pause(budget)
        self.lives.totals.constraint_steps[constraint] += 1
        plan = self.lives.writer.end()
        self.blocks.write_moves(plan)
        if budget.shares is None and self.running:
            self.waiting.charge(self.running[0].group.tenant, plan.num_batched_tokens)
        self.lives.timelines.step_planned(plan, constraint, self.waiting, len(self.running), self.blocks.pool)
        self._depart(plan)
        return plan

    def _give_way(self, budget: StepBudget) -> None:
        """Preempt for those that wait and come first."""
        if budget.shares is not None:
            self._room.make_room(budget, budget.shares)
        if (self.policy.preempts or self.lives.num_searches) and self.waiting:
            self._room.make_way(budget)

    def _depart(self, plan: SchedulerOutputs) -> None:
        """The step is in flight."""
        sequences = list(self._scheduled.values())
        for seq, num_tokens in zip(sequences, plan.num_scheduled_tokens, strict=True):
            seq.num_computed_tokens += num_tokens
        self._in_flight.append(StepInFlight(plan, sequences, self._step_started_at, self.blocks.is_moving))

    def may_go_ahead(self) -> bool:
        """Whether there is a step to decide before those in flight have ended: something to compute, and no decision
        that depends on them."""
        if self._is_short or self.blocks.is_moving:
            return False
        if self.waiting and (self.lives.num_searches or len(self.waiting.active()) > 1 or self._some_may_give_way()):
            return False
        for step in self._in_flight:
            if not step.is_counted:
                self._count_drawn(step)
        return any(seq.num_left for seq in self.running)

    def _some_may_give_way(self) -> bool:
        """Whether one that waits comes before one that runs, by a policy that preempts for it."""
        first = next(iter(self.waiting))
        return self.policy.preempts and bool(self.running) and first.rank < self.running[-1].rank

    def _count_drawn(self, step: StepInFlight) -> None:
        """Let sequences that go on have the token that a step in flight draws for them."""
        step.is_counted = True
        for seq, num_draws in zip(step.sequences, step.plan.num_draws, strict=True):
            is_decoding = num_draws == 1 and seq.status is SequenceStatus.RUNNING and seq.group.beams is None
            if is_decoding and seq.num_tokens + 1 < min(seq.group.max_num_tokens, self._max_model_len):
                seq.num_pending += 1

    def interrupted(self) -> None:
        """Steps in flight will not be learnt from: what the worker did of them is unknown, so all is recomputed."""
        self.lives.writer.lost(step.plan for step in self._in_flight)
        self.lives.timelines.steps_interrupted()
        self._in_flight.clear()
        self._scheduled = {}
        self.blocks.moves_interrupted()
        while self.running:
            self._room.preempt(self.running[-1], StepBudget(0))

    def _budget(self) -> StepBudget:
        """What the step may take on. Shares need nothing set aside: whoever came too late comes first in the next."""
        budget = StepBudget(self.max_num_batched_tokens)
        if any(not seq.num_unscored for seq in chain(self.running, self.waiting.candidates(self._room.is_ready))):
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
        left = [len(seq.token_ids) + seq.num_pending - seq.num_computed_tokens for seq in self.running]
        budget.num_single = left.count(1)
        if budget.num_single < len(left):
            prompts = [seq for seq, num_left in zip(self.running, left, strict=True) if num_left > 1]
            budget.portions = self._portions(prompts) if prompts else None
        return budget

    def _portions(self, prompts: list[Sequence]) -> Portions | None:
        """How prompts share a short step; None while no long one runs, or short ones are not expected."""
        if self._step_started_at >= self._crowded_until:
            return None
        most = self.max_num_batched_tokens
        long = [seq for seq in prompts if self.cost.work(seq.num_computed_tokens, seq.num_left) > most]
        others = [seq for seq in prompts if seq not in long]
        if not long:
            return None
        next_waiting = next(iter(self.waiting), None)
        return Portions(long, others, self.cost, next_waiting=next_waiting, may_pause=not self._paused)

    def _schedule_running(self, budget: StepBudget) -> None:
        shares, can_append = budget.shares, self.blocks.can_append
        for seq in self.running if shares is None else shares.in_turn(self.running):
            if budget.num_tokens <= 0:
                return
            num_tokens = self._share_of(seq, budget)
            if num_tokens > 0 and (can_append(seq, num_tokens) or self._free(seq, num_tokens, budget)):
                self._schedule(seq, num_tokens, budget)

    def _end_pause(self, budget: StepBudget) -> None:
        """Note whether long prompts paused; let them go on if nobody else could, so that no step is empty."""
        self._paused = budget.portions is not None and budget.portions.is_paused
        if budget.portions is not None and self._paused and not self._scheduled and not self.blocks.is_moving:
            self._paused = False
            budget.portions.resume()
            self._schedule_running(budget)

    def _free(self, seq: Sequence, num_tokens: int, budget: StepBudget) -> bool:
        """Preempt until the sequence has room for its tokens; False when it had to go itself, or nobody can go now."""
        if self._in_flight:
            self._is_short = True
            return False
        while not self.blocks.can_append(seq, num_tokens):
            shares = budget.shares
            victim = self.running[-1] if shares is None else shares.victim(self.running, self._scheduled)
            assert victim.seq_id not in self._scheduled, victim
            self._room.preempt(victim, budget)
            if victim is seq:
                return False
        return True

    def _schedule_waiting(self, budget: StepBudget) -> Constraint:
        """Start who fits; what keeps the next one out."""
        if not self.waiting:
            return Constraint.ARRIVALS if budget.for_many() > 0 else Constraint.TOKEN_BUDGET
        self._room.count_promised()
        while self.waiting and budget.may_start_more():
            seq, constraint = self._next_waiting(budget)
            if seq is None:
                return constraint
            if not self.lives.has_seats(seq):
                return Constraint.MAX_NUM_SEQS
            matched = self._room.for_waiting(seq)
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
        self._room.promised += self.blocks.still_needed(seq)

    def _overtaker(self, first: Sequence, budget: StepBudget) -> tuple[Sequence | None, list[list[int]]]:
        """One that may start before `first`, which waits for memory, and its cached prefix.

        There is none once `first` would fit without those that have overtaken it.
        """
        overtakers = self.running[bisect_left(self.running, first.rank, key=rank_of) :]
        if not self._room.has_memory(first, overtakers):
            for seq in islice(first.group.tenant.waiting, MOST_OVERTAKERS):
                if seq is not first and self._may_be_next(seq, budget) and self.lives.has_seats(seq):
                    matched = self._room.for_waiting(seq)
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
        return budget.may_score(seq) and self._room.is_ready(seq)

    def _share_of(self, seq: Sequence, budget: StepBudget) -> int:
        """How many of its tokens a sequence computes in this step, if it has room for them."""
        num_tokens = self._granted(seq, budget)
        return num_tokens if num_tokens <= 1 else self.blocks.up_to_checkpoint(seq, num_tokens)

    def _granted(self, seq: Sequence, budget: StepBudget) -> int:
        """How many of its tokens a sequence has in the budget."""
        wanted = len(seq.token_ids) + seq.num_pending - seq.num_computed_tokens
        shares = budget.shares
        if not wanted:
            return 0  # a beam that waits for others, or a sequence whose last token is being drawn
        if shares is not None:
            if seq.status is not SequenceStatus.RUNNING:
                return 0  # preempted a moment ago
            wanted = min(wanted, budget.beside_urgent(seq, shares.tokens_for(seq, self.max_num_batched_tokens)))
        if wanted == 1 and seq.is_known and not seq.num_unscored:
            return 1
        if budget.portions is not None:
            wanted = budget.portions.tokens_for(seq, wanted)
        wanted = budget.unscored_for(seq, wanted)
        if wanted <= 1:
            return min(wanted, budget.num_tokens)
        return min(wanted, self.max_chunk_tokens, budget.beside_urgent(seq, budget.for_many()))

    def _schedule(self, seq: Sequence, num_tokens: int, budget: StepBudget) -> None:
        wanted = len(seq.token_ids) + seq.num_pending - seq.num_computed_tokens
        group = seq.group
        if wanted > 1 or not (group.stats.first_token_at or seq.num_pending):
            group.effort.num_prefill_steps += 1
            group.effort.num_computed_tokens += num_tokens
            group.effort_is_news = True
            self.lives.timelines.chunk(
                seq, num_tokens, is_last=num_tokens == wanted, is_shared=budget.shares is not None
            )
        self.lives.writer.add(seq, num_tokens, self.blocks.append(seq, num_tokens))
        self._scheduled[seq.seq_id] = seq
        budget.charge(seq, num_tokens)

    def update(self, plan: SchedulerOutputs, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take in the result of the first of the steps in flight. Gives what is new."""
        step = self._in_flight.popleft()
        assert step.plan is plan, "steps end in their order"
        before, now = self.stepped_at, self.clock()
        self.stepped_at = now
        self.lives.timelines.step_executed(now, result)
        if step.moves_pages:
            self._end_moves(result.failed_loads)
        outputs = self._results.take_in(step.sequences, plan, result, now)
        self.lives.totals.add_step(plan, result, now - max(step.started_at, before))
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

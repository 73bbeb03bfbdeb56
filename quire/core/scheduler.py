"""Who runs: admits, schedules, preempts, and learns from the results.

One token budget per step and no phases. Running sequences come first, in order of arrival; those that need a single
token are guaranteed it before anybody's long prompt takes the rest of the budget. Waiting ones are admitted first come,
first served, when the whole of what they have fits. If memory runs out, the last to arrive gives its blocks back and is
recomputed later; the first always makes progress, so every request ends.

That is for one tenant. While several are active (`fairness`), each gets its share: steps are short and sequences take
turns, the tenant that was served least is admitted first, and who holds more than its share gives way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.core.block_manager import BlockManager
from quire.core.fairness import Shares
from quire.core.plan_writer import PlanWriter
from quire.core.queue import RequestQueue
from quire.core.sequence import Sequence, SequenceGroup, SequenceStatus
from quire.core.statistics import Totals
from quire.core.stop import finish_of
from quire.core.timeline import Timelines
from quire.messages.output import EngineCoreOutput, Failure, FinishReason, PositionLogprobs
from quire.messages.request import AbortRequest, EngineCoreRequest
from quire.messages.stats import Constraint, StepStats
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.observability.flight_recorder import Outcome

CREDIT_STEPS = 2
"""Full steps by which one tenant's service may be behind another's and be caught up with."""


@dataclass(slots=True)
class StepBudget:
    """What a step may still take on."""

    num_tokens: int
    num_single: int
    """Running sequences that need one token and have not been given it yet: theirs is set aside."""
    shares: Shares | None = None
    """What each tenant may have of it, while there are several."""

    def for_many(self) -> int:
        """Tokens available to a sequence that wants more than one."""
        return self.num_tokens - self.num_single


class Scheduler:
    """Owns the life of every request in the core."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_chunk_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        """Limits in sequences and tokens; `max_chunk_tokens` bounds what one sequence gets in one step."""
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.max_chunk_tokens = max_chunk_tokens
        self.clock = clock
        self.groups: dict[str, SequenceGroup] = {}
        self.waiting = RequestQueue(max_credit=CREDIT_STEPS * max_num_batched_tokens)
        self.running: list[Sequence] = []
        self.writer = PlanWriter()
        self.totals = Totals()
        self.timelines = Timelines(clock)
        self.stepped_at = 0.0
        """When the last step was learnt from."""
        self._step_started_at = 0.0
        self._num_slots = 0
        """Places taken by running sequences; one that will fork counts all its branches from the start."""
        self._next_seq_id = 0
        self._scheduled: dict[int, Sequence] = {}

    @property
    def num_preemptions(self) -> int:
        """Sequences that lost their blocks, since the start."""
        return self.totals.num_preemptions

    def add(self, request: EngineCoreRequest) -> None:
        """Queue a request, new or with progress. Its id must be new (the engine sees to it)."""
        assert request.request_id not in self.groups, request.request_id
        group = SequenceGroup(request, self.waiting.enter(request.tenant))
        branches = request.progress.branches if request.progress else {}
        for branch, output in (branches or {0: []}).items():
            seq = Sequence(self._new_seq_id(), group, branch, [*request.prompt_token_ids, *output])
            seq.num_to_fork = 1 if branches else request.sampling_params.n
            group.sequences[branch] = seq
            self.waiting.append(seq)
        self.groups[request.request_id] = group
        self.timelines.added(group)

    def withdraw(self, request_id: str) -> EngineCoreRequest:
        """Take an unfinished request out, in the form in which it can be added again."""
        group = self.groups[request_id]
        self.timelines.leaves(group, Outcome.SET_ASIDE)
        request = group.so_far()
        for seq in list(group.sequences.values()):
            self._finish(seq)
        return request

    def abort(self, abort: AbortRequest) -> bool:
        """Drop a request, or one branch of it; False when it is not (or no longer) here."""
        group = self.groups.get(abort.request_id)
        if group is None:
            return False
        branches = list(group.sequences) if abort.branch is None else [abort.branch]
        if abort.branch is None:
            self.timelines.leaves(group, Outcome.ABORTED)
        found = [group.sequences[b] for b in branches if b in group.sequences]
        for seq in found:
            self._finish(seq)
        return bool(found)

    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return bool(self.groups)

    def schedule(self) -> SchedulerOutputs:
        """Decide one step."""
        self.writer.begin()
        self._step_started_at = self.clock()
        self.timelines.step_started(self.totals.num_steps + 1, self._step_started_at, self.waiting)
        if self._scheduled:
            self._start_over()
        budget = self._budget()
        if budget.shares is not None:
            self._make_room(budget, budget.shares)
        num_preemptions = self.num_preemptions
        self._schedule_running(budget)
        constraint = Constraint.KV_CACHE
        if self.num_preemptions == num_preemptions:
            constraint = self._schedule_waiting(budget)
        self.totals.constraint_steps[constraint] += 1
        plan = self.writer.end()
        if budget.shares is None and self.running:
            self.waiting.charge(self.running[0].group.tenant, plan.num_batched_tokens)
        self.timelines.step_planned(plan, constraint, self.waiting, len(self.running), self.blocks.pool)
        return plan

    def _start_over(self) -> None:
        """The last step was interrupted before `update`: what the worker did of it is unknown, so all is recomputed."""
        self._scheduled = {}
        self.writer.lost()
        while self.running:
            self._preempt(self.running[-1], StepBudget(0, 0))

    def _budget(self) -> StepBudget:
        """What the step may take on. Shares need nothing set aside: whoever came too late comes first in the next."""
        if len(self.waiting.tenants) > 1 and len(self.waiting.active()) > 1:
            shares = Shares(
                self.waiting,
                self.running,
                max_num_seqs=self.max_num_seqs,
                num_blocks=self.blocks.pool.num_blocks,
                max_num_tokens=self.max_num_batched_tokens,
                step=self.totals.num_steps + 1,
            )
            return StepBudget(self.max_num_batched_tokens, 0, shares)
        num_single = sum(len(seq.token_ids) - seq.num_computed_tokens == 1 for seq in self.running)
        return StepBudget(self.max_num_batched_tokens, num_single)

    def _make_room(self, budget: StepBudget, shares: Shares) -> None:
        """Preempt sequences beyond their tenants' shares for the next one in the queue whose tenant is below."""
        candidates = self.waiting.candidates(self._is_ready)
        seq = next((seq for seq in candidates if shares.may_hold(seq, self.blocks.most_blocks(seq))), None)
        if seq is None:
            return
        while self._num_slots + seq.num_to_fork > self.max_num_seqs:
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
        while self.waiting and budget.for_many() > 0:
            seq, constraint = self._next_waiting(budget.shares)
            if seq is None:
                return constraint
            if self._num_slots + seq.num_to_fork > self.max_num_seqs:
                return Constraint.MAX_NUM_SEQS
            matched = self.blocks.match_prefix(seq)
            if not self.blocks.can_allocate(seq, matched):
                return Constraint.KV_CACHE
            self.waiting.remove(seq)
            self.blocks.allocate_prefix(seq, matched)
            self._admit(seq, budget.shares)
            self._schedule(seq, max(1, self._share_of(seq, budget)), budget)
        return Constraint.TOKEN_BUDGET if self.waiting or budget.for_many() <= 0 else Constraint.ARRIVALS

    def _next_waiting(self, shares: Shares | None) -> tuple[Sequence | None, Constraint]:
        """Who is to start next; without anybody, what keeps them out."""
        constraint = Constraint.TOKEN_BUDGET
        for seq in self.waiting.candidates(self._is_ready):
            if shares is None:
                return seq, constraint
            if not shares.may_hold(seq, self.blocks.most_blocks(seq)):
                constraint = Constraint.MAX_NUM_SEQS
            elif shares.tokens_for(seq, 1):
                return seq, constraint
            self.timelines.refused(seq.group.tenant)
        return None, constraint

    def _is_ready(self, seq: Sequence) -> bool:
        """Whether no other branch is computing the same prompt now; else its blocks can be shared some steps later.

        Branches that wait by themselves are those of a request that came from another core, or was preempted.
        """
        others = seq.group.sequences
        if len(others) == 1 or not self.blocks.reads_cache(seq):
            return True
        prompt = seq.group.num_prompt_tokens
        return not any(
            other.status is SequenceStatus.RUNNING and other.num_computed_tokens < prompt for other in others.values()
        )

    def _share_of(self, seq: Sequence, budget: StepBudget) -> int:
        wanted = len(seq.token_ids) - seq.num_computed_tokens
        if budget.shares is not None:
            if seq.status is not SequenceStatus.RUNNING:
                return 0  # preempted a moment ago
            wanted = budget.shares.tokens_for(seq, wanted)
        if wanted == 1 and seq.is_known:
            return 1
        return min(wanted, self.max_chunk_tokens, budget.num_tokens if wanted == 1 else budget.for_many())

    def _admit(self, seq: Sequence, shares: Shares | None) -> None:
        group = seq.group
        if shares is not None:
            shares.started(seq, self.blocks.most_blocks(seq))
        seq.status = SequenceStatus.RUNNING
        self.running.append(seq)
        self._num_slots += seq.num_to_fork
        if group.num_cached_tokens < 0:
            group.num_cached_tokens = seq.num_computed_tokens
            group.stats.scheduled_at = group.stats.scheduled_at or self._step_started_at
        self.timelines.admitted(seq)

    def _schedule(self, seq: Sequence, num_tokens: int, budget: StepBudget) -> None:
        wanted = len(seq.token_ids) - seq.num_computed_tokens
        group = seq.group
        if wanted > 1 or not group.stats.first_token_at:
            group.effort.num_prefill_steps += 1
            group.effort.num_computed_tokens += num_tokens
            group.effort_is_news = True
            self.timelines.chunk(seq, num_tokens, is_last=num_tokens == wanted, is_shared=budget.shares is not None)
        self.writer.add(seq, num_tokens, self.blocks.append(seq, num_tokens))
        self._scheduled[seq.seq_id] = seq
        if budget.shares is not None:
            budget.shares.charge(seq, num_tokens)
        budget.num_tokens -= num_tokens
        if wanted == 1:
            budget.num_single = max(0, budget.num_single - 1)

    def _preempt(self, seq: Sequence, budget: StepBudget) -> None:
        """Take the blocks of a running sequence; it waits at the head of its tenant's queue and is recomputed."""
        assert seq.seq_id not in self._scheduled, seq
        if len(seq.token_ids) - seq.num_computed_tokens == 1:
            budget.num_single = max(0, budget.num_single - 1)
        if budget.shares is not None:
            budget.shares.stopped(seq)
        if self.running[-1] is seq:
            self.running.pop()
        else:
            self.running.remove(seq)
        self._num_slots -= seq.num_to_fork
        self.writer.preempt(seq)
        self.blocks.free(seq)
        seq.status = SequenceStatus.WAITING
        seq.group.stats.num_preemptions += 1
        self.timelines.preempted(seq)
        self.waiting.append_first(seq)
        self.totals.num_preemptions += 1

    def update(self, plan: SchedulerOutputs, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take in the result of a step: append tokens, index full blocks, fork, stop, free. Gives what is new."""
        outputs: list[EngineCoreOutput] = []
        now = self.stepped_at = self.clock()
        self.timelines.step_executed(now, result)
        self.writer.arrived(plan)
        for seq_id, num_tokens, drawn in zip(plan.seq_ids, plan.num_scheduled_tokens, result.token_ids, strict=True):
            seq = self._scheduled.pop(seq_id)
            if seq.status is not SequenceStatus.RUNNING:
                continue  # aborted while the step ran
            if seq_id in result.errors:
                outputs += self._fail(seq, result.errors[seq_id])
                continue
            seq.num_computed_tokens += num_tokens
            self.blocks.retire(seq)
            prompt_logprobs = self._unreported(seq, num_tokens, result) if result.prompt_logprobs else None
            runs = [drawn] if drawn else [[token_id] for token_id in result.forks.get(seq_id, ())]
            if runs:
                logprobs = result.logprobs.get(seq_id) if result.logprobs else None
                outputs += self._append_tokens(seq, runs, logprobs, prompt_logprobs, now)
            elif prompt_logprobs:
                outputs.append(self._output(seq, [], prompt_logprobs))
        self.totals.add_step(plan, result, now - self._step_started_at)
        self.timelines.step_ended()
        return outputs

    def _unreported(self, seq: Sequence, num_tokens: int, result: ModelRunnerOutput) -> list[PositionLogprobs] | None:
        """The prompt logprobs of this step without those that an earlier, preempted pass has reported."""
        entries = result.prompt_logprobs.get(seq.seq_id)
        if not entries:
            return None
        group, first = seq.group, seq.num_computed_tokens - num_tokens
        entries = entries[max(0, group.num_prompt_logprobs - first) :]
        group.num_prompt_logprobs += len(entries)
        return entries or None

    def _append_tokens(
        self,
        seq: Sequence,
        runs: list[list[int]],
        logprobs: list[PositionLogprobs] | None,
        prompt_logprobs: list[PositionLogprobs] | None,
        now: float,
    ) -> list[EngineCoreOutput]:
        """`runs`: the tokens that follow, for each branch; the sequence forks when there are several branches."""
        assert len(runs) == seq.num_to_fork, (seq, runs)
        stats = seq.group.stats
        if not stats.first_token_at:
            stats.first_token_at = now
            self.totals.add_first_token(stats)
        stats.last_token_at = now
        outputs = []
        for branch, run in zip([seq] if len(runs) == 1 else self._fork(seq, len(runs)), runs, strict=True):
            output = self._output(branch, [], prompt_logprobs if branch is seq else None)
            self._extend(branch, run, output)
            if logprobs is not None:
                output.new_logprobs, logprobs = logprobs[: len(output.new_token_ids)], logprobs[len(run) :]
            outputs.append(output)
        return outputs

    def _extend(self, seq: Sequence, run: list[int], output: EngineCoreOutput) -> None:
        """Append tokens as far as the sequence goes on, and say so in the output."""
        stats = seq.group.stats
        for token_id in run:
            seq.token_ids.append(token_id)
            output.new_token_ids.append(token_id)
            stats.num_generation_tokens += 1
            finish = finish_of(seq, self.max_model_len)
            if finish is not None:
                output.finish_reason, output.stop_reason = finish
                output.stats = stats
                self._finish(seq)
                return

    def _fork(self, parent: Sequence, num_branches: int) -> list[Sequence]:
        """All branches, the children beside their parent among the running; the worker hears of them when they run."""
        parent.num_to_fork = 1
        branches = [parent]
        for branch in range(1, num_branches):
            child = parent.fork(self._new_seq_id(), branch)
            self.blocks.share_blocks(parent, child)
            parent.group.sequences[branch] = child
            self.running.insert(self.running.index(parent) + branch, child)
            branches.append(child)
        self.timelines.forked(parent.group, num_branches - 1)
        return branches

    def _fail(self, seq: Sequence, error: Failure) -> list[EngineCoreOutput]:
        outputs = []
        for branch in range(seq.branch, seq.branch + seq.num_to_fork):
            output = self._output(seq, [])
            output.branch, output.finish_reason, output.error = branch, FinishReason.ERROR, error
            outputs.append(output)
        self.timelines.leaves(seq.group, Outcome.FAILED)
        self._finish(seq)
        return outputs

    def _finish(self, seq: Sequence) -> None:
        """Release everything a sequence holds; the group goes with its last branch."""
        was_running = seq.status is SequenceStatus.RUNNING
        if was_running:
            self.running.remove(seq)
            self._num_slots -= seq.num_to_fork
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
            self.writer.forget_request(group)
            self.waiting.leave(group.tenant)

    def _output(
        self, seq: Sequence, token_ids: list[int], prompt_logprobs: list[PositionLogprobs] | None = None
    ) -> EngineCoreOutput:
        group = seq.group
        output = EngineCoreOutput(group.request_id, seq.branch, token_ids, None, prompt_logprobs)
        output.num_cached_tokens = max(group.num_cached_tokens, 0)
        if group.effort_is_news:
            group.effort_is_news = False
            output.stats, output.effort = group.stats, group.effort
        return output

    def stats(self, plan: SchedulerOutputs) -> StepStats:
        """How full the engine is after a step."""
        return self.totals.after(plan, self.blocks, len(self.running), len(self.waiting))

    def check(self) -> None:
        """Verify every invariant of scheduler and pool.

        Raises: AssertionError.
        """
        holders: dict[int, int] = {}
        live = [seq for group in self.groups.values() for seq in group.sequences.values()]
        for seq in live:
            for block_id in (block_id for table in seq.tables for block_id in table.held):
                holders[block_id] = holders.get(block_id, 0) + 1
        self.blocks.pool.check(holders)
        assert sorted(id(s) for s in live) == sorted(id(s) for s in [*self.running, *self.waiting])
        assert self._num_slots == sum(seq.num_to_fork for seq in self.running) <= self.max_num_seqs
        assert all(not seq.tables and not seq.num_computed_tokens for seq in self.waiting)
        assert all(seq.num_computed_tokens < seq.num_tokens for seq in self.running)
        assert sum(tenant.num_groups for tenant in self.waiting.tenants.values()) == len(self.groups)
        assert all(seq.num_own_blocks >= 0 for seq in live)

    def _new_seq_id(self) -> int:
        self._next_seq_id += 1
        return self._next_seq_id - 1

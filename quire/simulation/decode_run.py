"""`DecodeRun`: steps in which nothing happens but that each running sequence gets one more token.

Most steps of a simulation are such steps. Deciding them one by one gives nothing new, so a run of them is computed at
once: the times at which its steps end when it is planned, the state of scheduler and blocks when it is committed. All
of it, down to which block a sequence gets and the last bit of each time, is what stepping gives
(`tests/simulation/test_decode_run.py`). Where that would be difficult, there is no run, and the steps are made.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from operator import itemgetter

from quire.core.scheduler import Scheduler
from quire.core.sequence import Sequence
from quire.messages.stats import Constraint
from quire.simulation.cost_model import Batches, CostModel, StepShape
from quire.simulation.executor import token_of
from quire.simulation.usage import Usage

SHORTEST = 2
"""Steps; fewer are as quickly made."""
LONGEST = 64
"""Steps; what is planned beyond an interruption is lost work."""


@dataclass(slots=True)
class DecodeRun:
    """A number of steps that could follow now. Until it is committed nothing has changed."""

    scheduler: Scheduler
    ends: list[float]
    """The present moment, and when each step ends."""
    num_steps: int
    """How many of them there will be."""

    @property
    def ends_at(self) -> float:
        """When the last step ends."""
        return self.ends[self.num_steps]

    def interrupt(self, moment: float) -> None:
        """Something comes at a moment: the step in progress is the last one."""
        self.num_steps = min(self.num_steps, max(1, bisect_left(self.ends, moment)))

    def commit(self, usage: Usage) -> None:
        """Let the steps have happened."""
        if self.num_steps == 0:
            return
        running = self.scheduler.running
        before = sum(seq.num_computed_tokens for seq in running)
        held = self._extend(running)
        tokens = before
        for (began_at, ended_at), num_blocks in zip(pairwise(self.ends[: self.num_steps + 1]), held, strict=True):
            tokens += len(running)
            usage.add(num_blocks, tokens, ended_at - began_at)
        self._count()

    def _extend(self, running: list[Sequence]) -> list[int]:
        """Append the tokens, and take and index blocks in the order in which steps would. Gives the blocks that are
        held in each step."""
        blocks, num_steps, ended_at = self.scheduler.blocks, self.num_steps, self.ends_at
        first = [seq.num_computed_tokens for seq in running]
        events = _block_ends(running, num_steps, blocks.block_size)
        for seq in running:
            seq.token_ids.extend([token_of(seq.seq_id)] * num_steps)
            seq.num_tokens_sent = len(seq.token_ids) - 1
            stats = seq.group.stats
            stats.num_generation_tokens += num_steps
            stats.last_token_at = ended_at
        held: list[int] = []
        for step, found in groupby(events, key=itemgetter(0)):
            held.extend([blocks.pool.num_blocks - blocks.pool.num_free] * (step - len(held)))
            sequences = [(running[index], first[index]) for _, index in found]
            for seq, num_computed in sequences:
                seq.num_computed_tokens = seq.num_committed_tokens = num_computed + step
                blocks.retire(seq)
            for seq, _ in sequences:
                blocks.append(seq, 1)
                seq.unsent_blocks()
        held.extend([blocks.pool.num_blocks - blocks.pool.num_free] * (num_steps - len(held)))
        for seq, num_computed in zip(running, first, strict=True):
            seq.num_computed_tokens = seq.num_committed_tokens = num_computed + num_steps
            if blocks.enable_prefix_caching:
                blocks.retire(seq)
        return held

    def _count(self) -> None:
        """The scheduler's own counts."""
        scheduler, num_steps, num_seqs = self.scheduler, self.num_steps, len(self.scheduler.running)
        totals, ends = scheduler.lives.totals, self.ends
        for began_at, ended_at in pairwise(ends[: num_steps + 1]):
            totals.step_time_s += ended_at - began_at
        totals.num_steps += num_steps
        totals.num_computed_tokens += num_steps * num_seqs
        totals.num_generation_tokens += num_steps * num_seqs
        totals.constraint_steps[Constraint.ARRIVALS] += num_steps
        bound = 1 << (num_seqs - 1).bit_length()
        totals.steps_by_tokens[bound] = totals.steps_by_tokens.get(bound, 0) + num_steps
        scheduler.waiting.charge(scheduler.running[0].group.tenant, num_steps * num_seqs)
        scheduler.lives.timelines.step_started(totals.num_steps, ends[num_steps - 1], scheduler.waiting)
        scheduler.stepped_at = ends[num_steps]


def plan_run(
    scheduler: Scheduler, cost: CostModel, batches: Batches, max_model_len: int, now: float
) -> DecodeRun | None:
    """The longest run that could follow now; None where the next step is another one, or decides something."""
    running, blocks = scheduler.running, scheduler.blocks
    if not running or scheduler.waiting or len(scheduler.waiting.tenants) > 1:
        return None
    if len(running) >= scheduler.max_num_batched_tokens or any(group.trims for group in blocks.groups):
        return None
    num_steps = LONGEST
    for seq in running:
        num_steps = min(num_steps, _num_plain_steps(seq, max_model_len))
        if num_steps < SHORTEST:
            return None
    while not _has_blocks(scheduler, num_steps):
        num_steps //= 2
        if num_steps < SHORTEST:
            return None
    return DecodeRun(scheduler, list(accumulate(_seconds(running, cost, batches, num_steps), initial=now)), num_steps)


def _seconds(running: list[Sequence], cost: CostModel, batches: Batches, num_steps: int) -> Iterator[float]:
    """Of each of the steps that follow now."""
    num_seqs = len(running)
    context = sum(seq.num_computed_tokens for seq in running) + num_seqs
    num_alike = batches.num_alike([seq.seq_id for seq in running], has_prompt=False)
    is_recorded = batches.is_recorded(num_seqs, num_seqs, num_seqs)
    next_s = cost.base_s(StepShape(num_seqs, 0, 0, num_seqs, num_seqs))
    old_s = cost.base_s(StepShape(num_seqs, 0, 0, num_seqs, num_seqs, is_recorded=is_recorded))
    for step in range(num_steps):
        base_s = old_s + cost.new_batch_s / (num_alike + step)
        num_tokens = context + step * num_seqs
        yield (base_s + num_tokens * cost.context_token_s) * cost.factor(batches.num_steps + step, has_prompt=False)
        old_s = next_s


def _num_plain_steps(seq: Sequence, max_model_len: int) -> int:
    """Steps in which the sequence does nothing but draw a token after which it goes on; 0 if the next one is not."""
    group, num_tokens = seq.group, len(seq.token_ids)
    is_decoding = seq.is_known and group.stats.first_token_at and num_tokens - seq.num_computed_tokens == 1
    if not is_decoding or seq.num_writable_tokens < seq.num_computed_tokens:
        return 0
    return min(group.max_num_tokens, max_model_len) - num_tokens - 1


def _block_ends(running: list[Sequence], num_steps: int, block_size: int) -> list[tuple[int, int]]:
    """(step, index) in order: before which step of a run which sequence takes a block, its last one being full."""
    ends = []
    for index, seq in enumerate(running):
        step = seq.num_writable_tokens - seq.num_computed_tokens
        while step < num_steps:
            ends.append((step, index))
            step += block_size
    ends.sort()
    return ends


def _has_blocks(scheduler: Scheduler, num_steps: int) -> bool:
    """Whether so many steps find the blocks that they take."""
    blocks, running = scheduler.blocks, scheduler.running
    size, num_groups, num_free = blocks.block_size, len(blocks.groups), blocks.pool.num_free
    if num_groups * len(running) * (num_steps // size + 1) <= num_free:
        return True
    return num_groups * len(_block_ends(running, num_steps, size)) <= num_free

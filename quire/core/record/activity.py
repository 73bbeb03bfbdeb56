"""What one tenant has in the scheduler: a bounded report for people who watch. Nothing is kept between reports."""

from __future__ import annotations

from bisect import bisect
from dataclasses import replace
from itertools import islice

from quire.core.kv.block_pool import BlockPool
from quire.core.record.timeline import Timelines
from quire.core.scheduler import Scheduler
from quire.core.sequence import Sequence, SequenceGroup, SequenceStatus
from quire.messages.stats import ActiveRequest, ActiveSequence, Activity

MAX_SEQUENCES = 100
"""Of one report; the others are counted."""


def activity_of(scheduler: Scheduler, tenant: str) -> Activity:
    """What a tenant's unfinished requests do now: the running ones first, then the queue in its order."""
    running = [seq for seq in scheduler.running if seq.group.tenant.name == tenant]
    known = scheduler.waiting.tenants.get(tenant)
    waiting = known.waiting if known else ()
    shown = [*running[:MAX_SEQUENCES], *islice(waiting, max(0, MAX_SEQUENCES - len(running)))]
    by_request: dict[str, list[Sequence]] = {}
    for seq in shown:
        by_request.setdefault(seq.group.request_id, []).append(seq)
    pool, timelines = scheduler.blocks.pool, scheduler.lives.timelines
    return Activity(
        taken_at=scheduler.clock(),
        num_running=len(running),
        num_waiting=len(waiting),
        num_tenants=sum(one.num_groups > 0 for one in scheduler.waiting.tenants.values()),
        requests=[_request(sequences[0].group, sequences, pool, timelines) for sequences in by_request.values()],
    )


def _request(group: SequenceGroup, sequences: list[Sequence], pool: BlockPool, timelines: Timelines) -> ActiveRequest:
    return ActiveRequest(
        request_id=group.request_id,
        num_branches=group.request.sampling_params.num_sequences,
        num_prompt_tokens=group.num_prompt_tokens,
        num_cached_tokens=group.num_cached_tokens,
        max_tokens=group.request.max_tokens,
        stats=replace(group.stats),
        effort=replace(group.effort, held_steps=timelines.held_steps(group)),
        sequences=[_sequence(seq, pool) for seq in sequences],
    )


def _sequence(seq: Sequence, pool: BlockPool) -> ActiveSequence:
    return ActiveSequence(
        branch=seq.branch,
        is_running=seq.status is SequenceStatus.RUNNING,
        num_computed_tokens=seq.num_computed_tokens,
        num_output_tokens=seq.num_output_tokens,
        num_blocks=sum(len(table.held) for table in seq.tables),
        num_own_blocks=sum(len(table.held) - _num_shared(table.held, pool) for table in seq.tables),
    )


def _num_shared(block_ids: list[int], pool: BlockPool) -> int:
    """Leading blocks that others use, too. What is shared is a prefix, so that a search by halves finds its end."""
    return bisect(block_ids, -1, key=lambda block_id: -min(pool.blocks[block_id].ref_count, 2) + 1)

"""What happens to each request, and when: its phases, what it waited for, the steps of its prompt.

The scheduler says what it does; here it becomes the phases in `RequestEffort` and the records of the flight recorder. A
request costs some ten records, a step one; a generated token costs nothing.

Why a request waits is counted for its tenant, not for itself: each step adds its seconds to the reason for which the
tenant's queue stood still. A request looks at the sums when it begins to wait and when it stops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.messages.stats import COMPUTING, Constraint, Phase, Span, Wait
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.observability.finished import FinishedRequests
from quire.observability.flight_recorder import FlightRecorder, Outcome

if TYPE_CHECKING:
    from quire.core.kv.block_pool import BlockPool
    from quire.core.order.queue import RequestQueue, Tenant
    from quire.core.sequence import Sequence, SequenceGroup

_WAIT_OF = {
    Constraint.ARRIVALS: Wait.STEP,
    Constraint.KV_CACHE: Wait.KV_CACHE,
    Constraint.MAX_NUM_SEQS: Wait.MAX_NUM_SEQS,
    Constraint.TOKEN_BUDGET: Wait.TOKEN_BUDGET,
}


@dataclass(slots=True)
class Waits:
    """Why a tenant's queue stands still, and for how long it has, by reason, since the start."""

    reason: Wait = Wait.STEP
    """In the present step."""
    refused_in: int = 0
    """The last step in which the tenant had its share."""
    steps: dict[Wait, int] = field(default_factory=dict)
    seconds: dict[Wait, float] = field(default_factory=dict)

    def add_step(self, seconds: float) -> None:
        """Count a step that has passed."""
        self.steps[self.reason] = self.steps.get(self.reason, 0) + 1
        self.seconds[self.reason] = self.seconds.get(self.reason, 0.0) + seconds


@dataclass(slots=True)
class _Chunks:
    """Steps that follow one another and have equal parts of a prompt."""

    span: Span
    slot: int
    """Of its record."""
    num_tokens: int
    """In each of them."""


class _Live:
    """A request that is in the scheduler."""

    __slots__ = (
        "chunk",
        "chunk_step",
        "computing",
        "group",
        "last_chunk_at",
        "num_running",
        "number",
        "outcome",
        "slot",
        "steps_before",
        "waited",
        "waits_before",
    )

    def __init__(self, group: SequenceGroup, number: int) -> None:
        self.group = group
        self.number = number
        """Of its record."""
        self.slot = -1
        """Of the record of the present phase; -1 while chunks have records of their own."""
        self.chunk: _Chunks | None = None
        """The steps of its prompt, as long as one follows the other."""
        self.chunk_step = 0
        """The last step with some of its prompt."""
        self.last_chunk_at = 0.0
        """When that step ended."""
        self.num_running = 0
        """Running sequences."""
        self.computing: set[int] = set()
        """Sequences with tokens to compute before they generate."""
        self.steps_before: dict[Wait, int] = {}
        self.waits_before: dict[Wait, float] = {}
        """The tenant's sums when it began to wait."""
        self.waited: dict[Wait, float] = {}
        """Seconds of the present phase, by what it waits for."""
        self.outcome = Outcome.FINISHED

    def remember_waits(self) -> None:
        """Begin to wait."""
        waits = self.group.tenant.waits
        self.steps_before, self.waits_before = dict(waits.steps), dict(waits.seconds)

    def computing_s(self, now: float) -> float:
        """Seconds spent on tokens that the request has already."""
        seconds = self.group.effort.seconds(now)
        return sum(seconds.get(phase, 0.0) for phase in COMPUTING)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some of a prompt, in the present step."""

    live: _Live
    seq_id: int
    num_tokens: int
    is_last: bool
    chunks: _Chunks


@dataclass(frozen=True, slots=True)
class _Planned:
    """A step in flight."""

    step: int
    slot: int
    """Of its record."""
    chunks: list[_Chunk]


class Timelines:
    """The timelines of the requests in a scheduler."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.recorder = FlightRecorder()
        self.finished_requests = FinishedRequests(clock)
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._arrived: list[_Live] = []
        """Requests that no step has seen yet."""
        self._chunks: list[_Chunk] = []
        """Of the step that is being decided."""
        self._branch_waits: dict[int, tuple[float, float]] = {}
        """By sequence, where one waits while other branches run: since when, and `computing_s` of the request then."""
        self._loading: set[int] = set()
        """Sequences whose prefix is loaded in this step."""
        self._step = 0
        self._step_at = 0.0
        self._executed_at = 0.0
        self._num_failed = 0
        self._in_flight: deque[_Planned] = deque()

    # -- steps ---------------------------------------------------------------------------------------------------

    def step_started(self, step: int, now: float, queue: RequestQueue) -> None:
        """Step number `step` is about to be decided."""
        elapsed_s = now - self._step_at
        for tenant in queue.tenants.values():
            if tenant.waiting:
                tenant.waits.add_step(elapsed_s)
        self._step, self._step_at = step, now
        for live in self._arrived:
            self._seen(live)
        self._arrived = []

    def refused(self, tenant: Tenant) -> None:
        """The tenant gets no more of this step than it has."""
        tenant.waits.refused_in = self._step

    def step_planned(
        self, plan: SchedulerOutputs, bound_by: Constraint, queue: RequestQueue, num_running: int, pool: BlockPool
    ) -> None:
        """The step is decided."""
        num_waiting = 0
        for tenant in queue.tenants.values():
            if tenant.waiting:
                num_waiting += len(tenant.waiting)
                is_refused = tenant.waits.refused_in == self._step
                tenant.waits.reason = Wait.TENANT_SHARE if is_refused else _WAIT_OF[bound_by]
        slot = self.recorder.step_planned(
            self._step,
            self._step_at,
            self._clock(),
            num_tokens=plan.num_batched_tokens,
            num_sequences=len(plan.seq_ids),
            num_running=num_running,
            num_waiting=num_waiting,
            num_used_blocks=pool.num_blocks - pool.num_free,
            num_total_blocks=pool.num_blocks,
            num_preempted=len(plan.preempted_seq_ids),
            bound_by=bound_by,
        )
        self._in_flight.append(_Planned(self._step, slot, self._chunks))
        self._chunks = []

    def step_executed(self, now: float, result: ModelRunnerOutput) -> None:
        """The first of the steps in flight has been computed."""
        planned = self._in_flight[0]
        self._executed_at, self._num_failed = now, len(result.errors)
        self.recorder.step_ended(planned.slot, now, 0.0, self._num_failed)
        for chunk in planned.chunks:
            self._computed(chunk, planned.step, now)

    def step_ended(self) -> None:
        """Its results have been taken in."""
        slot = self._in_flight.popleft().slot
        self.recorder.step_ended(slot, self._executed_at, self._clock(), self._num_failed)

    def steps_interrupted(self) -> None:
        """The steps in flight never end."""
        self._in_flight.clear()

    # -- requests ------------------------------------------------------------------------------------------------

    def added(self, group: SequenceGroup) -> None:
        """A request is queued."""
        live = self._live[group.request_id] = _Live(group, self.recorder.add_request())
        effort = group.effort
        if not effort.phase_at:
            effort.phase_at = group.request.arrived_at
        live.remember_waits()
        self._arrived.append(live)
        self._record(live)
        self._open(live)

    def admitted(self, seq: Sequence) -> None:
        """A sequence is given its first blocks, or blocks again."""
        live = self._live[seq.group.request_id]
        live.num_running += 1
        if live.num_running == 1:
            self._end_wait(live, self._step_at)
            for other in seq.group.sequences.values():
                if other is not seq:
                    self._branch_waits[other.seq_id] = self._step_at, live.computing_s(self._step_at)
        else:
            self._end_branch_wait(live, seq)
        if seq.num_tokens - seq.num_computed_tokens > 1 or not seq.group.stats.first_token_at:
            live.computing.add(seq.seq_id)
        self._enter(live, self._running_phase(live), self._step_at)
        seq.group.effort_is_news = True

    def loading(self, seq: Sequence) -> None:
        """The step loads blocks of a sequence that was just admitted, and computes none of its tokens."""
        self._loading.add(seq.seq_id)

    def held_steps(self, group: SequenceGroup) -> dict[Wait, int]:
        """Steps that have gone by while the request was queued, by what bound them."""
        live, held = self._live[group.request_id], dict(group.effort.held_steps)
        if group.effort.phase in (Phase.QUEUED, Phase.PREEMPTED):
            for name, count in group.tenant.waits.steps.items():
                num_steps = count - live.steps_before.get(name, 0)
                if num_steps:
                    held[name] = held.get(name, 0) + num_steps
        return held

    def chunk(self, seq: Sequence, num_tokens: int, *, is_last: bool, is_shared: bool) -> None:
        """The step computes some of a sequence's prompt, or of what it had before it was preempted."""
        live = self._live[seq.group.request_id]
        before, last_step, live.chunk_step = live.chunk, live.chunk_step, self._step
        if before is not None and last_step == self._step:  # another branch has opened the span
            self._chunks.append(_Chunk(live, seq.seq_id, num_tokens, is_last, before))
            return
        if seq.seq_id in self._loading:
            self._loading.discard(seq.seq_id)
            if before is None:
                self._stalled(live, Wait.LOADING)
        if before is not None and last_step < self._step - 1:
            self._stalled(live, Wait.TENANT_SHARE if is_shared else Wait.TOKEN_BUDGET)
            before = None
        if before is None or before.num_tokens != num_tokens:
            span = Span(self._running_phase(live), self._step_at, 0.0, self._step)
            seq.group.effort.keep(span)
            before = live.chunk = _Chunks(span, self.recorder.add_span(), num_tokens)
        self._record_chunks(live, before)
        self._chunks.append(_Chunk(live, seq.seq_id, num_tokens, is_last, before))

    def preempted(self, seq: Sequence) -> None:
        """A running sequence has lost its blocks, while a step is decided."""
        live = self._live[seq.group.request_id]
        live.computing.discard(seq.seq_id)
        self._loading.discard(seq.seq_id)
        live.num_running -= 1
        if live.num_running:
            self._branch_waits[seq.seq_id] = self._step_at, live.computing_s(self._step_at)
            self._enter(live, self._running_phase(live), self._step_at)
        else:
            self._enter(live, Phase.PREEMPTED, self._step_at)
            live.remember_waits()

    def forked(self, group: SequenceGroup, num_new: int) -> None:
        """A running sequence has become several."""
        self._live[group.request_id].num_running += num_new

    def leaves(self, group: SequenceGroup, outcome: Outcome) -> None:
        """A request is about to be taken out before it is complete."""
        live = self._live[group.request_id]
        live.outcome = outcome
        if outcome is Outcome.SET_ASIDE:
            now = self._clock()
            if group.effort.phase in (Phase.QUEUED, Phase.PREEMPTED):
                self._end_wait(live, now)
            self._enter(live, Phase.TRIAL, now)

    def finished(self, seq: Sequence, *, was_running: bool) -> None:
        """A sequence has ended; the request has, too, if it was the last one."""
        live = self._live[seq.group.request_id]
        live.num_running -= was_running
        live.computing.discard(seq.seq_id)
        self._loading.discard(seq.seq_id)
        self._branch_waits.pop(seq.seq_id, None)
        if not seq.group.sequences:
            self._left(live)
        elif was_running and not live.num_running and live.outcome is Outcome.FINISHED:
            self._enter(live, Phase.PREEMPTED, self._clock())
            live.remember_waits()

    def _seen(self, live: _Live) -> None:
        """The first step that could have had the request is decided."""
        group, now = live.group, self._step_at
        if not group.sequences:
            return
        if group.effort.phase is Phase.QUEUED:
            self._waited(live, {Wait.STEP: now - group.effort.phase_at})
        else:
            self._enter(live, Phase.PREEMPTED if group.stats.first_token_at else Phase.QUEUED, now)
        live.remember_waits()

    def _running_phase(self, live: _Live) -> Phase:
        if not live.computing:
            return Phase.DECODE
        return Phase.RECOMPUTE if live.group.stats.first_token_at else Phase.PREFILL

    def _computed(self, chunk: _Chunk, step: int, now: float) -> None:
        """A step with some of a prompt has been computed."""
        live, span = chunk.live, chunk.chunks.span
        if live.chunk is None or live.group.request_id not in self._live:
            return
        span.num_steps = step - span.first_step + 1
        span.num_tokens += chunk.num_tokens
        span.ended_at = live.last_chunk_at = now
        self._record_chunks(live, chunk.chunks)
        if chunk.is_last:
            live.computing.discard(chunk.seq_id)
            if not live.computing:
                self._enter(live, Phase.DECODE, now)

    def _stalled(self, live: _Live, wait: Wait) -> None:
        """Steps went by without a prompt that is partly computed."""
        effort = live.group.effort
        began_at, now = max(live.last_chunk_at, effort.phase_at), self._step_at
        phase = effort.enter(Phase.STALLED, began_at)
        effort.enter(phase, now)
        effort.held_s[wait] = effort.held_s.get(wait, 0.0) + now - began_at
        effort.keep(Span(Phase.STALLED, began_at, now, waited_for={wait: now - began_at}))
        self.recorder.put_span(self.recorder.add_span(), live.number, Phase.STALLED, began_at, now, wait=wait)

    def _end_wait(self, live: _Live, now: float) -> None:
        """Say for what the request has waited: what its tenant's queue did in the meantime."""
        waits, effort = live.group.tenant.waits, live.group.effort
        effort.held_steps = self.held_steps(live.group)
        seconds = {name: total - live.waits_before.get(name, 0.0) for name, total in waits.seconds.items()}
        waited_s = now - effort.phase_at - sum(live.waited.values())
        self._waited(live, _scaled(seconds, waited_s))

    def _waited(self, live: _Live, seconds: dict[Wait, float]) -> None:
        held_s = live.group.effort.held_s
        for name, waited_s in seconds.items():
            held_s[name] = held_s.get(name, 0.0) + waited_s
            live.waited[name] = live.waited.get(name, 0.0) + waited_s

    def _end_branch_wait(self, live: _Live, seq: Sequence) -> None:
        began_at, computing_s = self._branch_waits.pop(seq.seq_id, (self._step_at, 0.0))
        waited_s = self._step_at - began_at
        for_branch_s = min(waited_s, live.computing_s(self._step_at) - computing_s)
        reasons = {Wait.BRANCH: for_branch_s, seq.group.tenant.waits.reason: waited_s - for_branch_s}
        found = {name: seconds for name, seconds in reasons.items() if seconds > 0}
        span = Span(Phase.PREEMPTED, began_at, self._step_at, waited_for=found, branch=seq.branch)
        live.group.effort.keep(span)
        self.recorder.put_span(
            self.recorder.add_span(),
            live.number,
            span.phase,
            began_at,
            self._step_at,
            branch=seq.branch,
            wait=_longest(found),
        )

    def _enter(self, live: _Live, phase: Phase, now: float) -> None:
        """Close the present phase and begin another one."""
        effort = live.group.effort
        if effort.phase is phase:
            return
        began_at, ended = effort.phase_at, effort.enter(phase, now)
        if ended not in COMPUTING:  # whose steps are spans already
            if now > began_at:
                effort.keep(Span(ended, began_at, now, waited_for=live.waited))
            self.recorder.put_span(live.slot, live.number, ended, began_at, now, wait=_longest(live.waited))
            live.waited = {}
        self._end_chunk(live, now)
        self._open(live)

    def _end_chunk(self, live: _Live, now: float) -> None:
        if live.chunk is not None and not live.chunk.span.ended_at:  # its step was interrupted
            live.chunk.span.ended_at = now
            self._record_chunks(live, live.chunk)
        live.chunk = None

    def _open(self, live: _Live) -> None:
        """Record the present phase, which has not ended."""
        effort = live.group.effort
        if effort.phase not in COMPUTING:
            live.slot = self.recorder.add_span()
            self.recorder.put_span(live.slot, live.number, effort.phase, effort.phase_at)

    def _record_chunks(self, live: _Live, chunks: _Chunks) -> None:
        span = chunks.span
        chunks.slot = self.recorder.put_span(
            chunks.slot,
            live.number,
            span.phase,
            span.started_at,
            span.ended_at,
            first_step=span.first_step,
            num_steps=span.num_steps,
            num_tokens=span.num_tokens,
        )

    def _left(self, live: _Live) -> None:
        del self._live[live.group.request_id]
        effort, now = live.group.effort, self._clock()
        if effort.phase not in COMPUTING:
            self.recorder.put_span(live.slot, live.number, effort.phase, effort.phase_at, now)
        self._end_chunk(live, now)
        self._record(live, now, live.outcome)
        if live.outcome is not Outcome.SET_ASIDE:
            self.finished_requests.add(
                live.group.request.arrived_at,
                live.group.num_prompt_tokens,
                live.group.num_cached_tokens,
                live.group.stats.num_generation_tokens,
                live.group.request.sampling_params.num_sequences,
                live.outcome,
            )

    def _record(self, live: _Live, left_at: float = 0.0, outcome: Outcome = Outcome.RUNNING) -> None:
        group, request = live.group, live.group.request
        self.recorder.put_request(
            live.number,
            group.request_id,
            request.received_at,
            request.arrived_at,
            left_at=left_at,
            num_prompt_tokens=group.num_prompt_tokens,
            num_output_tokens=group.stats.num_generation_tokens,
            num_preemptions=group.stats.num_preemptions,
            num_branches=request.sampling_params.num_sequences,
            outcome=outcome,
        )


def _longest(waited: dict[Wait, float]) -> Wait | None:
    return max(waited, key=lambda name: waited[name], default=None)


def _scaled(seconds: dict[Wait, float], total_s: float) -> dict[Wait, float]:
    """The same shares of another total: the tenant's sums are of whole steps."""
    known_s = sum(seconds.values())
    if known_s <= 0:
        return {Wait.STEP: total_s} if total_s > 0 else {}
    return {name: part * total_s / known_s for name, part in seconds.items() if part > 0}

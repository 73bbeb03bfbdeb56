"""A flight recorder's records as a trace in the JSON format that ui.perfetto.dev and chrome://tracing open.

Two processes are shown: the core with its steps, and the requests, each on a track of its own. Times are whole
microseconds since the first event, so that what ends when another thing begins does so in the trace as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import msgspec

from quire import __version__
from quire.observability.flight_recorder import (
    NUM_STEPS,
    Outcome,
    Recording,
    RequestRecord,
    SpanRecord,
    StepRecord,
    read_recording,
)
from quire.utils.cancellation import check_cancelled

_EVENTS_AT_ONCE = 400
CORE, REQUESTS = 1, 2
"""Process ids in the trace."""
STEPS_TRACK = 3
"""Thread ids are none of the process ids, which would mark a main thread; those of requests follow this one."""
Event = dict[str, Any]
Trace = dict[str, Any]


def chrome_trace(memory: bytes, *, now: float, num_steps: int = NUM_STEPS, reason: str = "asked for") -> Trace:
    """The trace of a recorder's memory: the last steps, and the requests that were here meanwhile.

    `now` ends what has not ended, by `time.monotonic()`; `reason` is why the trace is made.
    """
    recording = read_recording(memory)
    steps = recording.steps[-num_steps:]
    since = steps[0].started_at if num_steps < len(recording.steps) else 0.0
    tracks = _tracks(recording, since, now)
    starts = [step.started_at for step in steps] + [track.began_at for track in tracks]
    clock = _Clock(min(starts, default=now), now)
    events = [*_names(tracks), *_step_events(steps, clock)]
    for track in tracks:
        check_cancelled()
        events += _request_events(track, clock)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "quire": __version__,
            "reason": reason,
            "starts_at": _wall_time(recording, clock.origin),
            "num_steps": len(steps),
            "num_requests": len(tracks),
        },
    }


def encoded(trace: Trace) -> list[bytes]:
    """The JSON text of a trace, in pieces none of which takes long."""
    encode = msgspec.json.Encoder().encode
    events: list[Event] = trace["traceEvents"]
    pieces = [b'{"traceEvents":[']
    for begin in range(0, len(events), _EVENTS_AT_ONCE):
        check_cancelled()
        pieces.append(encode(events[begin : begin + _EVENTS_AT_ONCE])[1:-1])
        pieces.append(b",")
    rest = encode({name: value for name, value in trace.items() if name != "traceEvents"})
    pieces[-1] = b"],"
    return [*pieces, rest[1:]]


@dataclass(frozen=True, slots=True)
class _Clock:
    origin: float
    now: float

    def at(self, moment: float) -> int:
        """Microseconds of the trace."""
        return round((min(moment, self.now) - self.origin) * 1e6)

    def slice(self, name: str, began_at: float, ended_at: float, pid: int, tid: int, args: Event) -> Event:
        """A complete event; one that has not ended ends now, and says so."""
        begin = self.at(began_at)
        end = self.at(ended_at or self.now)
        args = args if ended_at else {**args, "unfinished": True}
        return {"ph": "X", "name": name, "ts": begin, "dur": max(0, end - begin), "pid": pid, "tid": tid, "args": args}


@dataclass(frozen=True, slots=True)
class _Track:
    """One request and the parts of its time that are known."""

    number: int
    request: RequestRecord | None
    """None where its record has left the ring."""
    spans: list[SpanRecord]

    @property
    def name(self) -> str:
        return f"request {self.number}" if self.request is None else self.request.request_id

    @property
    def began_at(self) -> float:
        if self.request is not None:
            return self.request.received_at or self.request.arrived_at
        return min(span.started_at for span in self.spans)

    @property
    def ended_at(self) -> float:
        """0 when it has not."""
        if self.request is not None:
            return self.request.left_at
        return 0.0 if any(not span.ended_at for span in self.spans) else max(span.ended_at for span in self.spans)


def _tracks(recording: Recording, since: float, now: float) -> list[_Track]:
    """The requests that were here since a moment."""
    spans: dict[int, list[SpanRecord]] = {number: [] for number in recording.requests}
    for span in recording.spans:
        spans.setdefault(span.request, []).append(span)
    tracks = [_Track(number, recording.requests.get(number), spans[number]) for number in sorted(spans)]
    return [track for track in tracks if track.began_at <= now and (track.ended_at or now) >= since]


def _names(tracks: Iterable[_Track]) -> Iterator[Event]:
    def name(kind: str, pid: int, tid: int, value: str) -> Event:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": value}}

    yield name("process_name", CORE, 0, "core")
    yield name("thread_name", CORE, STEPS_TRACK, "steps")
    yield name("process_name", REQUESTS, 0, "requests")
    for track in tracks:
        yield name("thread_name", REQUESTS, _tid(track), track.name)


def _tid(track: _Track) -> int:
    return STEPS_TRACK + 1 + track.number


def _step_events(steps: list[StepRecord], clock: _Clock) -> Iterator[Event]:
    for step in steps:
        check_cancelled()
        yield clock.slice(f"step {step.number}", step.started_at, step.ended_at, CORE, STEPS_TRACK, _step_args(step))
        moments = (step.started_at, step.planned_at, step.executed_at, step.ended_at)
        for name, (began_at, ended_at) in zip(("schedule", "execute", "update"), pairwise(moments), strict=True):
            if began_at:
                yield clock.slice(name, began_at, ended_at, CORE, STEPS_TRACK, {})
        begin = clock.at(step.started_at)
        yield _counter("sequences", begin, {"running": step.num_running, "waiting": step.num_waiting})
        yield _counter("kv blocks", begin, {"used": step.num_used_blocks})
        yield _counter("tokens", begin, {"batched": step.num_tokens})


def _step_args(step: StepRecord) -> Event:
    return {
        "step": step.number,
        "tokens": step.num_tokens,
        "sequences": step.num_sequences,
        "running": step.num_running,
        "waiting": step.num_waiting,
        "blocks_used": step.num_used_blocks,
        "blocks_total": step.num_total_blocks,
        "preempted": step.num_preempted,
        "failed": step.num_failed,
        "bound_by": step.bound_by.value,
    }


def _counter(name: str, begin: int, values: Event) -> Event:
    return {"ph": "C", "name": name, "ts": begin, "pid": CORE, "tid": STEPS_TRACK, "args": values}


def _request_events(track: _Track, clock: _Clock) -> Iterator[Event]:
    tid, request, ended_at = _tid(track), track.request, track.ended_at
    if request is not None:
        args = _request_args(request)
        yield clock.slice(f"request {request.request_id}", track.began_at, ended_at, REQUESTS, tid, args)
        if request.received_at:
            yield clock.slice("front", request.received_at, request.arrived_at, REQUESTS, tid, {})
        if request.outcome is Outcome.FAILED:
            failed: Event = {"ph": "i", "s": "t", "name": "quarantined", "ts": clock.at(ended_at), "args": {}}
            yield failed | {"pid": REQUESTS, "tid": tid}
    for span in track.spans:
        if span.branch < 0:
            end = span.ended_at or ended_at  # what was open when the request left
            yield clock.slice(span.phase.value, span.started_at, end, REQUESTS, tid, _span_args(span))
        else:
            yield from _branch_events(span, tid, clock)


def _branch_events(span: SpanRecord, tid: int, clock: _Clock) -> Iterator[Event]:
    """The wait of one branch, which other parts of the request may overlap: a pair of async events."""
    head: Event = {"cat": "branch", "name": f"branch {span.branch} waits", "pid": REQUESTS, "tid": tid}
    head["id2"] = {"local": f"{span.request}.{span.branch}"}
    yield {"ph": "b", "ts": clock.at(span.started_at), "args": _span_args(span), **head}
    yield {"ph": "e", "ts": clock.at(span.ended_at or clock.now), "args": {}, **head}


def _request_args(request: RequestRecord) -> Event:
    return {
        "id": request.request_id,
        "prompt_tokens": request.num_prompt_tokens,
        "output_tokens": request.num_output_tokens,
        "branches": request.num_branches,
        "preemptions": request.num_preemptions,
        "outcome": request.outcome.name.lower(),
    }


def _span_args(span: SpanRecord) -> Event:
    args: Event = {}
    if span.first_step:
        args |= {"first_step": span.first_step, "steps": span.num_steps, "tokens": span.num_tokens}
    if span.wait is not None:
        args["waited_for"] = span.wait.value
    return args


def _wall_time(recording: Recording, moment: float) -> str | None:
    """ISO 8601, or nothing where the recorder's own clock cannot be right."""
    try:
        return datetime.fromtimestamp(recording.wall_at + moment - recording.clock_at, UTC).isoformat()
    except (ValueError, OverflowError, OSError):
        return None

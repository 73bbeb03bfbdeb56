"""The flight recorder: what the last steps of a core did, and what happened to their requests, in a block of memory.

Always on. The memory has a fixed size and three rings in it: steps, requests, and spans (parts of a request's time).
Records are written in place, open ones first, so the memory can be read at any moment, also by another process after
this one was killed. It holds ids, counts and times; no token and no text.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from dataclasses import dataclass
from enum import IntEnum
from math import isfinite

from quire.messages.stats import Constraint, Phase, Wait

NUM_STEPS = 4096
NUM_REQUESTS = 2048
NUM_SPANS = 8192
ID_BYTES = 64
"""Of a request's id; longer ones are cut."""

_MAGIC = b"quire-f1"
_HEADER = struct.Struct("<8sdd3Q")
"""Magic, one moment by the wall clock and by the monotonic one, records written: steps, requests, spans."""
_COUNT = struct.Struct("<Q")
_COUNTS_AT = _HEADER.size - 3 * _COUNT.size
_STEP = struct.Struct("<Q4d7IHBx")
_TIMES = struct.Struct("<2d")
_EXECUTED_AT = 8 + 2 * 8
_FAILED_AT = _STEP.size - 4
_FAILED = struct.Struct("<H")
_REQUEST = struct.Struct(f"<{ID_BYTES}s3d3IHBx")
_SPAN = struct.Struct("<Q2dQ2IhBBI")
_STEPS_AT = 64
_REQUESTS_AT = _STEPS_AT + NUM_STEPS * _STEP.size
_SPANS_AT = _REQUESTS_AT + NUM_REQUESTS * _REQUEST.size
SIZE = _SPANS_AT + NUM_SPANS * _SPAN.size
"""Bytes of the memory."""
_MAX_U16, _MAX_U32 = (1 << 16) - 1, (1 << 32) - 1

CONSTRAINTS, PHASES, WAITS = tuple(Constraint), tuple(Phase), tuple(Wait)
_CONSTRAINT_CODES = {name: code for code, name in enumerate(CONSTRAINTS)}
_PHASE_CODES = {name: code for code, name in enumerate(PHASES)}
_WAIT_CODES = {name: code for code, name in enumerate(WAITS)}
_NO_WAIT = 255


class Outcome(IntEnum):
    """How a request has left a core."""

    RUNNING = 0
    """It has not."""
    FINISHED = 1
    FAILED = 2
    ABORTED = 3
    SET_ASIDE = 4
    """It is out of the queue while another one runs alone."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. Times are seconds of `time.monotonic()`, 0 until they happen."""

    number: int
    started_at: float
    planned_at: float
    executed_at: float
    ended_at: float
    num_tokens: int
    num_sequences: int
    """Sequences in the step."""
    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_total_blocks: int
    num_preempted: int
    num_failed: int
    bound_by: Constraint


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request."""

    request_id: str
    received_at: float
    arrived_at: float
    """When it went to the core."""
    left_at: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_branches: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One part of the time of request number `request`."""

    request: int
    phase: Phase
    started_at: float
    ended_at: float
    """0: it has not ended."""
    first_step: int
    num_steps: int
    num_tokens: int
    branch: int
    wait: Wait | None
    """What it waited for longest."""


class FlightRecorder:
    """Writes the records. A record's index counts on for ever; the ring keeps the last ones."""

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        """`memory` is shared with whoever wants to read it; it has `SIZE` bytes."""
        self._memory = mmap.mmap(-1, SIZE) if memory is None else memory
        self._num_steps = self._num_requests = self._num_spans = 0
        _HEADER.pack_into(self._memory, 0, _MAGIC, time.time(), time.monotonic(), 0, 0, 0)

    def snapshot(self) -> bytes:
        """The memory as it is now."""
        return self._memory[:]

    def step_planned(
        self,
        number: int,
        started_at: float,
        planned_at: float,
        *,
        num_tokens: int,
        num_sequences: int,
        num_running: int,
        num_waiting: int,
        num_used_blocks: int,
        num_total_blocks: int,
        num_preempted: int,
        bound_by: Constraint,
    ) -> int:
        """Record a step that is about to run; where its record is, for `step_ended`."""
        offset = _STEPS_AT + self._num_steps % NUM_STEPS * _STEP.size
        _STEP.pack_into(
            self._memory,
            offset,
            number,
            started_at,
            planned_at,
            0.0,
            0.0,
            num_tokens,
            num_sequences,
            num_running,
            num_waiting,
            num_used_blocks,
            num_total_blocks,
            num_preempted,
            0,
            _CONSTRAINT_CODES[bound_by],
        )
        self._num_steps += 1
        _COUNT.pack_into(self._memory, _COUNTS_AT, self._num_steps)
        return offset

    def step_ended(self, slot: int, executed_at: float, ended_at: float, num_failed: int) -> None:
        """Complete a step; `ended_at` is 0 while its results are taken in."""
        _TIMES.pack_into(self._memory, slot + _EXECUTED_AT, executed_at, ended_at)
        if num_failed:
            _FAILED.pack_into(self._memory, slot + _FAILED_AT, min(num_failed, _MAX_U16))

    def add_request(self) -> int:
        """Make room for a request; its number."""
        self._num_requests += 1
        return self._num_requests - 1

    def put_request(
        self,
        index: int,
        request_id: str,
        received_at: float,
        arrived_at: float,
        *,
        left_at: float = 0.0,
        num_prompt_tokens: int,
        num_output_tokens: int = 0,
        num_preemptions: int = 0,
        num_branches: int = 1,
        outcome: Outcome = Outcome.RUNNING,
    ) -> None:
        """Write a request's record; one that is older than the ring is left out."""
        if index < self._num_requests - NUM_REQUESTS:
            return
        _REQUEST.pack_into(
            self._memory,
            _REQUESTS_AT + index % NUM_REQUESTS * _REQUEST.size,
            request_id.encode(errors="replace")[:ID_BYTES],
            received_at,
            arrived_at,
            left_at,
            min(num_prompt_tokens, _MAX_U32),
            min(num_output_tokens, _MAX_U32),
            min(num_preemptions, _MAX_U32),
            min(num_branches, _MAX_U16),
            outcome,
        )
        _COUNT.pack_into(self._memory, _COUNTS_AT + _COUNT.size, self._num_requests)

    def add_span(self) -> int:
        """Make room for a span; its index."""
        self._num_spans += 1
        return self._num_spans - 1

    def put_span(
        self,
        index: int,
        request: int,
        phase: Phase,
        started_at: float,
        ended_at: float = 0.0,
        *,
        first_step: int = 0,
        num_steps: int = 0,
        num_tokens: int = 0,
        branch: int = -1,
        wait: Wait | None = None,
    ) -> int:
        """Write a span; its index, a new one if it has fallen out of the ring."""
        if index < self._num_spans - NUM_SPANS:
            index = self.add_span()
        _SPAN.pack_into(
            self._memory,
            _SPANS_AT + index % NUM_SPANS * _SPAN.size,
            request,
            started_at,
            ended_at,
            first_step,
            num_steps,
            min(num_tokens, _MAX_U32),
            branch,
            _PHASE_CODES[phase],
            _NO_WAIT if wait is None else _WAIT_CODES[wait],
            0,
        )
        _COUNT.pack_into(self._memory, _COUNTS_AT + 2 * _COUNT.size, self._num_spans)
        return index


@dataclass(frozen=True, slots=True)
class Recording:
    """What a flight recorder's memory held when it was read, oldest first."""

    wall_at: float
    """A moment in seconds since 1970; the same moment in the records' clock is `clock_at`."""
    clock_at: float
    steps: list[StepRecord]
    requests: dict[int, RequestRecord]
    """By their number."""
    spans: list[SpanRecord]


def read_recording(memory: bytes) -> Recording:
    """The records in a recorder's memory. Whoever wrote it may have been killed, so records that make no sense are
    left out."""
    magic, wall_at, clock_at, *counts = _HEADER.unpack_from(memory) if len(memory) == SIZE else (b"", 0.0, 0.0, 0, 0, 0)
    if magic != _MAGIC or not (isfinite(wall_at) and isfinite(clock_at)):
        return Recording(0.0, 0.0, [], {}, [])
    num_steps, num_requests, num_spans = counts
    steps = [_step(memory, index) for index in _window(num_steps, NUM_STEPS)]
    requests = {index: _request(memory, index) for index in _window(num_requests, NUM_REQUESTS)}
    spans = [_span(memory, index) for index in _window(num_spans, NUM_SPANS)]
    return Recording(
        wall_at,
        clock_at,
        [step for step in steps if step is not None],
        {index: request for index, request in requests.items() if request is not None},
        [span for span in spans if span is not None],
    )


def _window(count: int, capacity: int) -> range:
    return range(max(0, count - capacity), count)


def _step(memory: bytes, index: int) -> StepRecord | None:
    values = _STEP.unpack_from(memory, _STEPS_AT + index % NUM_STEPS * _STEP.size)
    if not _in_order(*values[1:5]) or values[-1] >= len(CONSTRAINTS):
        return None
    fields = [*values[:-1], CONSTRAINTS[values[-1]]]
    return StepRecord(*fields)


def _request(memory: bytes, index: int) -> RequestRecord | None:
    values = _REQUEST.unpack_from(memory, _REQUESTS_AT + index % NUM_REQUESTS * _REQUEST.size)
    if not _in_order(*values[1:4]) or values[-1] >= len(Outcome):
        return None
    name = values[0].rstrip(b"\0").decode(errors="replace")
    fields = [name, *values[1:-1], Outcome(values[-1])]
    return RequestRecord(*fields)


def _span(memory: bytes, index: int) -> SpanRecord | None:
    values = _SPAN.unpack_from(memory, _SPANS_AT + index % NUM_SPANS * _SPAN.size)
    request, started_at, ended_at, first_step, num_steps, num_tokens, branch, phase, wait, _ = values
    known = phase < len(PHASES) and (wait == _NO_WAIT or wait < len(WAITS))
    if not known or not _in_order(started_at, ended_at):
        return None
    return SpanRecord(
        request,
        PHASES[phase],
        started_at,
        ended_at,
        first_step,
        num_steps,
        num_tokens,
        branch,
        None if wait == _NO_WAIT else WAITS[wait],
    )


def _in_order(*moments: float) -> bool:
    """Whether these can be moments in this order; 0 stands for what has not happened."""
    happened = [moment for moment in moments if moment]
    return all(map(isfinite, moments)) and min(moments) >= 0 and happened == sorted(happened)


def create_memory() -> int:
    """The descriptor of memory for a recorder, which other processes can map; it ends with the last that has it.

    Where files may not be that large (`ulimit -f`) each process has zeros of its own: then nothing outlives a core.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("quire-flight-recorder")
    else:
        with tempfile.TemporaryFile() as file:  # has no name either
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, SIZE)
    except OSError:
        os.close(descriptor)
        return os.open("/dev/zero", os.O_RDWR)
    return descriptor


def map_memory(descriptor: int) -> mmap.mmap:
    """The memory behind a descriptor of `create_memory`."""
    return mmap.mmap(descriptor, SIZE)

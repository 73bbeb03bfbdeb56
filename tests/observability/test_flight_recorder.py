"""The flight recorder: complete, bounded, and readable whatever happened to its writer."""

from __future__ import annotations

import os
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.messages.stats import Phase
from quire.observability import flight_recorder
from quire.observability.chrome_trace import chrome_trace, encoded
from quire.observability.flight_recorder import (
    NUM_REQUESTS,
    NUM_SPANS,
    NUM_STEPS,
    SIZE,
    FlightRecorder,
    Outcome,
    create_memory,
    map_memory,
    read_recording,
)
from tests.fakes import FakeCore
from tests.observability.traces import checked, slices, tracks


def recorder_of(core: FakeCore) -> FlightRecorder:
    return core.lives.timelines.recorder


def trace_of(core: FakeCore, **options: int) -> dict[str, object]:
    return chrome_trace(recorder_of(core).snapshot(), now=core.scheduler.clock(), **options)


def busy_core(seed: int = 0, num_requests: int = 12) -> FakeCore:
    """A core that has queued, cut into chunks, forked, preempted, aborted and set aside requests."""
    core = FakeCore(num_blocks=24, max_num_batched_tokens=8, max_chunk_tokens=6, max_num_seqs=6, max_model_len=64)
    rng = random.Random(seed)
    for index in range(num_requests):
        prompt = [rng.randrange(40) for _ in range(rng.randrange(1, 40))]
        now = core.scheduler.clock()
        core.submit(
            f"r{index}",
            prompt,
            max_tokens=rng.randrange(1, 12),
            params={"n": rng.choice((1, 1, 2, 4))},
            received_at=now,
            arrived_at=now + 0.5,
            tenant=rng.choice("ab"),
        )
        if index % 5 == 3:
            core.abort(f"r{index}")
        if index % 5 == 4:
            core.lives.add(core.lives.withdraw(f"r{index}"))
        for _ in range(rng.randrange(5)):
            core.step()
    return core


@pytest.mark.parametrize("seed", range(8))
def test_every_step_and_every_request_is_in_the_trace_once_and_slices_nest(seed: int) -> None:
    core = busy_core(seed)
    core.run()
    events = checked(trace_of(core))
    steps = slices(events, "step")
    assert [each["args"]["step"] for each in steps] == [*range(1, core.lives.totals.num_steps + 1)]
    assert [each["ts"] for each in steps] == sorted(each["ts"] for each in steps)
    assert sum(each["args"]["preempted"] for each in steps) <= core.scheduler.num_preemptions
    assert sum(each["args"]["tokens"] for each in steps) == core.lives.totals.num_computed_tokens
    for name in ("schedule", "execute", "update"):
        assert len(slices(events, name)) == len(steps)
    requests = slices(events, "request")
    ids = [each["args"]["id"] for each in requests]
    assert set(ids) == {f"r{index}" for index in range(12)}
    outcomes = {each["args"]["id"]: each["args"]["outcome"] for each in requests}
    assert outcomes["r3"] == "aborted"
    assert "set_aside" in {each["args"]["outcome"] for each in requests}
    assert not any("unfinished" in each.get("args", {}) for each in events)


def test_the_steps_of_a_prompt_are_where_the_trace_says() -> None:
    core = FakeCore(num_blocks=32, max_num_batched_tokens=8, max_chunk_tokens=8)
    core.submit("long", list(range(36)), max_tokens=3)
    core.run()
    events = checked(trace_of(core))
    chunks = slices(events, "prefill")
    assert [each["args"] for each in chunks] == [
        {"first_step": 1, "steps": 4, "tokens": 32},
        {"first_step": 5, "steps": 1, "tokens": 4},
    ]
    by_number = {each["args"]["step"]: each for each in slices(events, "step")}
    assert chunks[0]["ts"] == by_number[1]["ts"]
    assert by_number[4]["ts"] < chunks[0]["ts"] + chunks[0]["dur"] <= by_number[4]["ts"] + by_number[4]["dur"]
    (decode,) = slices(events, "decode")
    assert decode["ts"] == chunks[1]["ts"] + chunks[1]["dur"]


def test_what_has_not_ended_ends_now_and_says_so() -> None:
    core = FakeCore(max_num_seqs=1, max_num_batched_tokens=8)
    core.scheduler.clock()  # 0, which stands for "not yet"
    core.submit("runs", list(range(12)), max_tokens=3)
    core.submit("waits", [1, 2], max_tokens=3)
    core.step()
    core.scheduler.schedule()  # the step that runs
    trace = trace_of(core)
    events = checked(trace)
    step = slices(events, "step")[-1]
    assert step["args"]["unfinished"]
    assert slices(events, "execute")[-1]["args"] == {"unfinished": True}
    assert [each["args"]["unfinished"] for each in slices(events, "request")] == [True, True]
    (queued,) = [each for each in slices(events, "queued") if "unfinished" in each["args"]]
    assert queued["tid"] == tracks(events)["waits"]
    assert trace["otherData"]["num_steps"] == 2  # type: ignore[index]


def test_a_request_that_failed_is_marked() -> None:
    core = FakeCore()
    core.executor.fail_on = lambda request_id: request_id == "bad"
    core.submit("bad", [1, 2])
    core.submit("good", [3, 4])
    core.run()
    events = checked(trace_of(core))
    assert next(each["args"]["failed"] for each in slices(events, "step")) == 1
    (mark,) = [each for each in events if each["ph"] == "i"]
    assert (mark["name"], mark["tid"]) == ("quarantined", tracks(events)["bad"])


def test_the_last_steps_are_kept_and_memory_does_not_grow() -> None:
    core = FakeCore(num_blocks=64, block_size=4)
    size = len(recorder_of(core).snapshot())
    num = 0
    while core.lives.totals.num_steps <= NUM_STEPS + 50:
        core.submit(f"r{num}", [num % 40, 2], max_tokens=2)
        num += 1
        core.step()
    core.run()
    assert len(recorder_of(core).snapshot()) == size == SIZE
    recording = read_recording(recorder_of(core).snapshot())
    last = core.lives.totals.num_steps
    assert [step.number for step in recording.steps] == [*range(last - NUM_STEPS + 1, last + 1)]
    assert [record.request_id for record in recording.requests.values()] == [
        f"r{index}" for index in range(num - NUM_REQUESTS, num)
    ]
    assert len(recording.spans) == NUM_SPANS
    events = checked(chrome_trace(recorder_of(core).snapshot(), now=core.scheduler.clock(), num_steps=3))
    assert [each["args"]["step"] for each in slices(events, "step")] == [last - 2, last - 1, last]
    assert len(slices(events, "request")) < 12, "requests that ended before the first step shown"


def test_a_phase_that_outlives_the_ring_is_there_when_it_ends() -> None:
    recorder = FlightRecorder()
    first = recorder.put_span(recorder.add_span(), 0, Phase.DECODE, 1.0)
    for _ in range(NUM_SPANS):
        recorder.put_span(recorder.add_span(), 1, Phase.PREFILL, 2.0, 3.0)
    assert all(span.request == 1 for span in read_recording(recorder.snapshot()).spans)
    recorder.put_span(first, 0, Phase.DECODE, 1.0, 9.0)
    assert read_recording(recorder.snapshot()).spans[-1].request == 0


def test_long_ids_and_large_numbers_are_cut() -> None:
    recorder = FlightRecorder()
    recorder.put_request(
        recorder.add_request(), "ä" * 500, 0.0, 1.0, num_prompt_tokens=1 << 40, num_branches=1 << 20, left_at=2.0
    )
    (record,) = read_recording(recorder.snapshot()).requests.values()
    assert record.request_id == "ä" * 32
    assert (record.num_prompt_tokens, record.num_branches) == ((1 << 32) - 1, (1 << 16) - 1)
    assert record.outcome is Outcome.RUNNING


@pytest.mark.parametrize("has_memfd", [True, False])
def test_another_mapping_of_the_memory_sees_what_is_written(has_memfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_memfd:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    descriptor = create_memory()
    ours, theirs = map_memory(descriptor), map_memory(descriptor)
    os.close(descriptor)
    assert read_recording(ours[:]).steps == []
    core = FakeCore()
    core.lives.timelines.recorder = FlightRecorder(theirs)
    core.submit("a", [1, 2, 3], max_tokens=2)
    core.run()
    assert len(read_recording(ours[:]).steps) == 2


def test_no_token_is_recorded() -> None:
    core = FakeCore(num_blocks=64)
    marker = [1_234_567, 7_654_321]
    core.submit("a", marker, max_tokens=2)
    core.run()
    memory = recorder_of(core).snapshot()
    for token in marker:
        assert struct.pack("<I", token) not in memory
        assert str(token).encode() not in b"".join(encoded(chrome_trace(memory, now=99.0)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_damage_gives_a_trace_of_what_is_left(data: st.DataObject) -> None:
    memory = bytearray(DAMAGED)
    for _ in range(data.draw(st.integers(1, 40))):
        offset = data.draw(st.integers(0, SIZE - 8) | st.integers(0, 2000))
        memory[offset : offset + 8] = data.draw(st.binary(min_size=8, max_size=8))
    trace = chrome_trace(bytes(memory), now=500.0)
    assert b"".join(encoded(trace)).startswith(b'{"traceEvents":[')


@pytest.mark.parametrize("fill", [b"\0", b"\xff", b"\x7f", b"a"])
def test_memory_that_was_never_written_or_is_something_else_holds_nothing(fill: bytes) -> None:
    for memory in (fill * SIZE, fill * 100, b""):
        trace = chrome_trace(memory, now=1.0)
        assert trace["otherData"]["num_steps"] == 0
        checked(trace)


def test_counts_beyond_the_rings_are_taken_as_they_are() -> None:
    memory = bytearray(DAMAGED)
    struct.pack_into("<3Q", memory, flight_recorder._COUNTS_AT, 2**64 - 1, 2**64 - 1, 2**64 - 1)
    chrome_trace(bytes(memory), now=500.0)


def _damaged() -> bytes:
    core = busy_core()
    core.run()
    return recorder_of(core).snapshot()


DAMAGED = _damaged()
"""The memory of a recorder, before the damage."""

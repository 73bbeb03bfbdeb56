"""The status line: rates and the constraint that binds."""

from __future__ import annotations

import logging

import pytest

from quire.messages.stats import Constraint, StepStats
from quire.observability.console import StatusLine, binding_constraint, status_line
from tests.fakes import FakeCore


def totals(core: FakeCore) -> StepStats:
    return core.scheduler.stats(core.last_plan)


def bound(core: FakeCore, num_steps: int) -> Constraint:
    before = totals(core)
    for _ in range(num_steps):
        core.step()
    return binding_constraint(before, totals(core))


def test_nothing_waits() -> None:
    core = FakeCore()
    core.submit("a", [1, 2, 3], max_tokens=8)
    assert bound(core, 4) is Constraint.ARRIVALS


def test_places_are_taken() -> None:
    core = FakeCore(max_num_seqs=1)
    for name in "ab":
        core.submit(name, [1, 2, 3], max_tokens=8)
    assert bound(core, 4) is Constraint.MAX_NUM_SEQS


def test_blocks_are_taken() -> None:
    core = FakeCore(num_blocks=4, block_size=4)
    core.submit("a", list(range(10)), max_tokens=4)
    core.submit("b", list(range(20, 30)), max_tokens=4)
    assert bound(core, 3) is Constraint.KV_CACHE


def test_the_budget_is_spent() -> None:
    core = FakeCore(num_blocks=64, max_num_batched_tokens=4)
    core.submit("a", list(range(30)), max_tokens=4)
    assert bound(core, 3) is Constraint.TOKEN_BUDGET


def test_a_queued_request_knows_what_it_waited_for() -> None:
    core = FakeCore(max_num_seqs=1)
    core.submit("a", [1, 2, 3], max_tokens=6)
    core.submit("b", [4, 5, 6], max_tokens=2)
    efforts = {}
    while core.lives.has_work():
        for output in core.step():
            if output.effort is not None:
                efforts[output.request_id] = output.effort
    assert efforts["a"].held_steps == {}
    assert efforts["b"].held_steps == {Constraint.MAX_NUM_SEQS: 6}
    assert (efforts["b"].num_prefill_steps, efforts["b"].num_computed_tokens) == (1, 3)


def test_effort_counts_what_is_computed_again() -> None:
    core = FakeCore(num_blocks=4, block_size=4, enable_prefix_caching=False)
    core.submit("first", list(range(8)), max_tokens=8)
    core.submit("second", [9, 8, 7, 6], max_tokens=8)
    efforts = {}
    while core.lives.has_work():
        for output in core.step():
            if output.effort is not None:
                efforts[output.request_id] = output.effort
    assert core.scheduler.num_preemptions
    assert efforts["second"].num_prefill_steps == 1 + core.scheduler.num_preemptions
    assert efforts["second"].num_computed_tokens > 4 + 4


def test_rates_count_prompt_and_output_tokens() -> None:
    core = FakeCore(enable_prefix_caching=False)
    before = totals(core)
    core.submit("a", list(range(10)), max_tokens=5)
    core.submit("b", list(range(6)), max_tokens=3)
    core.run()
    line = status_line(before, totals(core), 2.0)
    assert line.startswith("running=0 waiting=0 in=8 tok/s out=4 tok/s kv=0% prefix_hits=- preempted=0 bound by: ")


def test_a_line_comes_when_it_is_due_and_pauses_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire")
    now = 0.0
    status = StatusLine(5.0, lambda: now)
    state = StepStats()

    def steps(*times: float) -> int:
        nonlocal now
        for moment in times:
            now = moment
            status.tick(lambda: state)
        return len(caplog.records)

    assert steps(1, 4.9) == 0
    assert steps(5, 6, 9) == 1
    now = 100.0
    status.resume(lambda: state)
    assert steps(100, 101, 104) == 1
    state = StepStats(num_generation_tokens=50)
    assert steps(105) == 2
    assert "out=10 tok/s" in caplog.records[-1].getMessage()

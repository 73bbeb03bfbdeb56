"""Where the time of a request went: its phases cover it without a gap, and name what it waited for."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from quire.core.sequence import SequenceGroup
from quire.messages.stats import MAX_SPANS, Phase, RequestEffort, Span, Wait
from tests.fakes import FakeCore

WAITING = (Phase.QUEUED, Phase.PREEMPTED, Phase.STALLED)


class Watched(FakeCore):
    """A core whose requests arrive at the time of its clock, which ticks once each time somebody looks."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self.groups: dict[str, SequenceGroup] = {}

    def submit(self, request_id: str, prompt: list[int], **fields: Any) -> None:
        super().submit(request_id, prompt, arrived_at=self.scheduler.clock(), **fields)
        self.groups[request_id] = self.lives.groups[request_id]

    def effort(self, request_id: str) -> RequestEffort:
        """The effort of a request that has ended."""
        group = self.groups[request_id]
        return group.effort.ended(group.stats.last_token_at)

    def spans(self, request_id: str, *phases: Phase) -> list[Span]:
        return [span for span in self.effort(request_id).spans if span.phase in phases]


def assert_complete(core: Watched, request_id: str, num_lost_tokens: int = 0) -> None:
    """The phases add up to the request's time in the core, and the reasons to the phases in which it waited."""
    group, effort = core.groups[request_id], core.effort(request_id)
    assert sum(effort.phase_s.values()) == pytest.approx(group.stats.last_token_at - group.request.arrived_at)
    assert all(seconds >= 0 for seconds in effort.phase_s.values()), effort.phase_s
    waited_s = sum(effort.phase_s.get(phase, 0.0) for phase in WAITING)
    assert sum(effort.held_s.values()) == pytest.approx(waited_s), (effort.held_s, effort.phase_s)
    whole = [span for span in effort.spans if span.branch < 0]
    assert all(span.started_at <= span.ended_at for span in effort.spans)
    if not effort.num_more_spans:
        assert all(before.ended_at <= after.started_at for before, after in pairwise(whole)), whole
        assert sum(span.num_tokens for span in whole) == effort.num_computed_tokens - num_lost_tokens
        assert sum(sum(span.waited_for.values()) for span in whole) == pytest.approx(waited_s)
        for phase in (*WAITING, Phase.DECODE):
            seconds = sum(span.ended_at - span.started_at for span in whole if span.phase is phase)
            assert seconds == pytest.approx(effort.phase_s.get(phase, 0.0))


def submit_anything(core: Watched, rng: random.Random, name: str) -> None:
    core.submit(
        name,
        [rng.randrange(40) for _ in range(rng.randrange(1, 40))],
        max_tokens=rng.randrange(1, 9),
        params={"n": rng.choice((1, 1, 1, 2, 3))},
        tenant=rng.choice("ab") if rng.random() < 0.7 else "",
    )


@pytest.mark.parametrize("seed", range(30))
def test_the_phases_of_any_request_cover_its_time(seed: int) -> None:
    rng = random.Random(seed)
    blocks = rng.choice((16, 20, 64))
    core = Watched(
        num_blocks=blocks,
        max_model_len=48,
        max_num_seqs=rng.choice((3, 8)),
        max_num_batched_tokens=rng.choice((8, 16, 64)),
        max_chunk_tokens=rng.choice((4, 64)),
        enable_prefix_caching=rng.random() < 0.5,
    )
    aborted = set()
    for index in range(25):
        submit_anything(core, rng, str(index))
        if rng.random() < 0.1:
            name = str(rng.randrange(index + 1))
            aborted.add(name)
            core.abort(name)
        if rng.random() < 0.1 and str(index) in core.lives.groups:
            core.lives.add(core.lives.withdraw(str(index)))
        for _ in range(rng.randrange(4)):
            core.step()
    core.run()
    for name in core.groups.keys() - aborted:
        assert_complete(core, name)
    timelines = core.lives.timelines
    assert not timelines._live
    assert not timelines._branch_waits
    assert not timelines._arrived
    assert not timelines._chunks


def test_a_request_that_waits_for_nothing_waits_for_the_next_step_only() -> None:
    core = Watched()
    core.submit("a", [1, 2, 3], max_tokens=4)
    core.run()
    assert_complete(core, "a")
    assert set(core.effort("a").held_s) == {Wait.STEP}
    assert [span.phase for span in core.effort("a").spans] == [Phase.QUEUED, Phase.PREFILL, Phase.DECODE]


def test_seats_and_blocks_are_told_apart() -> None:
    for limits, wait in (({"max_num_seqs": 1}, Wait.MAX_NUM_SEQS), ({"num_blocks": 4}, Wait.KV_CACHE)):
        core = Watched(**limits)
        core.submit("a", list(range(9)), max_tokens=6)
        core.submit("b", list(range(20, 29)), max_tokens=2)
        core.run()
        assert_complete(core, "b")
        effort = core.effort("b")
        assert max(effort.held_s, key=lambda name: effort.held_s[name]) is wait
        assert effort.held_steps == {wait: 6}


def test_the_chunks_of_a_prompt_are_counted_with_their_steps() -> None:
    core = Watched(num_blocks=32, max_num_batched_tokens=8, max_chunk_tokens=8)
    core.submit("long", list(range(36)), max_tokens=2)
    core.submit("second", list(range(40, 50)), max_tokens=2)  # more than a step: nobody short is expected
    core.run()
    chunks = [(span.first_step, span.num_steps, span.num_tokens) for span in core.spans("long", Phase.PREFILL)]
    assert chunks == [(1, 4, 32), (5, 1, 4)]
    assert core.effort("second").held_steps == {Wait.TOKEN_BUDGET: 4}
    assert_complete(core, "long")
    assert_complete(core, "second")


def test_a_preempted_request_says_how_long_it_was_away_and_what_was_computed_again() -> None:
    core = Watched(num_blocks=4, enable_prefix_caching=False)
    core.submit("first", list(range(8)), max_tokens=8)
    core.submit("second", [9, 8, 7, 6], max_tokens=8)
    core.run()
    assert core.groups["second"].stats.num_preemptions
    (away,) = core.spans("second", Phase.PREEMPTED)
    assert set(away.waited_for) == {Wait.KV_CACHE}
    again = core.spans("second", Phase.RECOMPUTE)
    assert sum(span.num_tokens for span in again) == core.effort("second").num_computed_tokens - 4
    assert len(core.spans("second", Phase.DECODE)) == 2
    assert_complete(core, "second")


def test_a_tenant_that_has_its_share_waits_for_that() -> None:
    core = Watched(num_blocks=64, max_num_seqs=4)
    for index in range(6):
        core.submit(f"busy{index}", [index, 7, 8], max_tokens=12, tenant="busy")
    core.submit("other", [1, 2], max_tokens=30, tenant="other")
    core.run()
    for name in core.groups:
        assert_complete(core, name)
    assert core.effort("busy5").held_s[Wait.TENANT_SHARE] > 0
    assert Wait.TENANT_SHARE not in core.effort("other").held_s


def test_a_prompt_that_steps_pass_over_has_stalled() -> None:
    core = Watched(num_blocks=256, max_num_batched_tokens=8, max_chunk_tokens=4, max_num_seqs=16)
    core.submit("long", list(range(60)), max_tokens=2)
    core.submit("many", [1, 2, 3], max_tokens=5, params={"n": 8})  # eight branches fill each step
    core.run()
    (stalled,) = core.spans("long", Phase.STALLED)
    assert set(stalled.waited_for) == {Wait.TOKEN_BUDGET}
    for name in core.groups:
        assert_complete(core, name)


def test_a_branch_that_waits_for_the_prompt_of_another_says_so() -> None:
    core = Watched(num_blocks=64, max_num_batched_tokens=8, max_chunk_tokens=8)
    core.submit("a", list(range(30)), max_tokens=8, params={"n": 3})
    while not core.tokens.get(("a", 2)):
        core.step()
    request = core.lives.withdraw("a")
    core.blocks.pool.forget_all()
    core.lives.add(request)
    core.groups["a"] = core.lives.groups["a"]
    core.run()
    waits = [span for span in core.effort("a").spans if span.branch >= 0]
    assert {span.branch for span in waits} == {1, 2}
    assert all(max(span.waited_for, key=lambda name: span.waited_for[name]) is Wait.BRANCH for span in waits)
    assert core.effort("a").phase_s[Phase.TRIAL] > 0
    assert_complete(core, "a")


def test_what_is_kept_of_a_request_is_bounded() -> None:
    core = Watched(num_blocks=1024, max_num_batched_tokens=50, max_chunk_tokens=44, max_num_seqs=64)
    core.submit("long", list(range(3000)), max_tokens=2)
    rng = random.Random(1)
    while core.lives.has_work():
        if len(core.groups) < 100:  # so that chunks of the long prompt differ in size
            core.submit(f"short{len(core.groups)}", [3] * 2, max_tokens=rng.randrange(2, 5), params={"n": 12})
        core.step()
    effort = core.effort("long")
    assert len(effort.spans) == MAX_SPANS
    assert effort.num_more_spans > 0
    assert_complete(core, "long")


def test_an_interrupted_step_leaves_no_gap() -> None:
    core = Watched(num_blocks=64, max_num_batched_tokens=8, max_chunk_tokens=8)
    core.submit("a", list(range(30)), max_tokens=4)
    core.step()
    core.interrupt()
    core.run()
    assert_complete(core, "a", num_lost_tokens=8)
    assert core.groups["a"].stats.num_preemptions == 1
    assert len(core.spans("a", Phase.PREFILL)) == 3

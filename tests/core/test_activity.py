"""What people who watch are told about one tenant's requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.core.record.activity import MAX_SEQUENCES, activity_of
from quire.messages.codec import Codec, FrameReader
from quire.messages.stats import Activity, Wait
from tests.fakes import FakeCore


def told(core: FakeCore, tenant: str = "") -> Activity:
    """The report, after a trip through the codec."""
    codec = Codec((Activity,))
    (activity,) = FrameReader(codec).feed(codec.encode(activity_of(core.scheduler, tenant)))
    assert activity == replace(activity_of(core.scheduler, tenant), taken_at=activity.taken_at)
    return activity  # type: ignore[no-any-return]


def progress(activity: Activity) -> list[Any]:
    return [
        (request.request_id, seq.branch, seq.is_running, seq.num_computed_tokens, seq.num_output_tokens)
        for request in activity.requests
        for seq in request.sequences
    ]


def test_a_prompt_is_followed_chunk_by_chunk_and_then_its_output() -> None:
    core = FakeCore(num_blocks=16, max_num_batched_tokens=8, max_chunk_tokens=8)
    core.submit("a", list(range(20)), max_tokens=3)
    seen = [progress(told(core))]
    while core.lives.has_work():
        core.step()
        seen.append(progress(told(core)))
    assert seen == [
        [("a", 0, False, 0, 0)],
        [("a", 0, True, 8, 0)],
        [("a", 0, True, 16, 0)],
        [("a", 0, True, 20, 1)],
        [("a", 0, True, 21, 2)],
        [],
    ]


def test_sizes_and_what_held_a_request_up_are_told_while_it_waits() -> None:
    core = FakeCore(max_num_seqs=1)
    core.submit("runs", [1, 2, 3], max_tokens=9)
    core.submit("waits", [4, 5], max_tokens=7, params={"n": 2})
    for _ in range(3):
        core.step()
    runs, waits = told(core).requests
    assert (runs.num_prompt_tokens, runs.max_tokens, runs.num_branches, runs.num_cached_tokens) == (3, 9, 1, 0)
    assert (waits.num_prompt_tokens, waits.max_tokens, waits.num_branches, waits.num_cached_tokens) == (2, 7, 2, -1)
    assert waits.effort.held_steps == {Wait.MAX_NUM_SEQS: 2}, "the present one is not over"
    assert (waits.stats.scheduled_at, runs.stats.num_generation_tokens) == (0, 3)
    core.step()
    assert runs.stats.num_generation_tokens == 3, "a report is a copy"


def test_a_preempted_sequence_waits_again_and_keeps_its_times() -> None:
    core = FakeCore(num_blocks=4, block_size=2)
    core.submit("first", [1, 2], max_tokens=6)
    core.submit("second", [3, 4], max_tokens=6)
    while core.lives.totals.num_preemptions == 0:
        core.step()
    second = told(core).requests[-1]
    assert (second.request_id, second.stats.num_preemptions) == ("second", 1)
    assert not second.sequences[0].is_running
    assert second.stats.first_token_at > second.stats.scheduled_at
    assert (second.sequences[0].num_blocks, second.sequences[0].num_computed_tokens) == (0, 0)
    assert second.sequences[0].num_output_tokens > 0


def test_blocks_that_no_other_sequence_uses_add_up_with_the_shared_ones() -> None:
    core = FakeCore(num_blocks=64, block_size=4)
    core.submit("forks", list(range(10)), max_tokens=9, params={"n": 3})
    core.step()
    core.step()
    core.submit("same start", [*range(8), 99, 98], max_tokens=9)
    core.step()
    activity = told(core)
    sequences = [seq for request in activity.requests for seq in request.sequences]
    pool = core.blocks.pool
    assert pool.num_shared == 2
    assert sum(seq.num_own_blocks for seq in sequences) + pool.num_shared == pool.num_blocks - pool.num_free
    assert {seq.num_blocks - seq.num_own_blocks for seq in sequences} == {2}


def test_other_tenants_are_counted_and_nothing_else() -> None:
    core = FakeCore(num_blocks=64, max_num_seqs=2)
    for number, tenant in enumerate(("mine", "theirs", "theirs", "mine")):
        core.submit(f"{tenant}-{number}", [number, 1], max_tokens=9, tenant=tenant)
    core.step()
    activity = told(core, "mine")
    assert {request.request_id for request in activity.requests} == {"mine-0", "mine-3"}
    assert (activity.num_running, activity.num_waiting, activity.num_tenants) == (1, 1, 2)
    stranger = told(core, "stranger")
    assert (stranger.requests, stranger.num_running, stranger.num_waiting, stranger.num_tenants) == ([], 0, 0, 2)


def test_a_report_is_bounded_and_the_rest_is_counted() -> None:
    core = FakeCore(num_blocks=512, max_num_seqs=MAX_SEQUENCES + 20, max_num_batched_tokens=MAX_SEQUENCES - 40)
    for number in range(MAX_SEQUENCES + 50):
        core.submit(str(number), [number], max_tokens=9)
    core.step()
    few = told(core)
    assert (few.num_running, few.num_waiting) == (MAX_SEQUENCES - 40, 90)
    assert [request.request_id for request in few.requests] == [str(number) for number in range(MAX_SEQUENCES)]
    core.step()
    many = told(core)
    assert many.num_running + many.num_waiting == MAX_SEQUENCES + 50
    assert len(progress(many)) == MAX_SEQUENCES

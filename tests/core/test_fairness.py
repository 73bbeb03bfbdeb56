"""Tenants share slots, blocks and steps; counted in steps and tokens, never in time."""

from __future__ import annotations

import pytest

from quire.core.order.fairness import CATCH_UP_WORK, SHARED_STEP_WORK, URGENT_PART
from quire.core.order.queue import RequestQueue, Tenant
from tests.fakes import FakeCore, expected_tokens


def prompt_of(number: int, length: int) -> list[int]:
    """A prompt that shares no block with others."""
    return [number % 50, *[(number * 7 + i) % 50 for i in range(length - 1)]]


def submit_many(core: FakeCore, tenant: str, count: int, *, length: int = 4, max_tokens: int = 40) -> None:
    for i in range(count):
        core.submit(f"{tenant}{i}", prompt_of(i, length), max_tokens=max_tokens, tenant=tenant)


def num_running(core: FakeCore, tenant: str) -> int:
    return sum(seq.group.tenant.name == tenant for seq in core.scheduler.running)


def computed(core: FakeCore, tenant: str) -> int:
    """Tokens of the tenant in the last step."""
    plan = core.last_plan
    executor = core.executor
    counts = zip(plan.seq_ids, plan.num_scheduled_tokens, strict=True)
    tenants = {seq_id: executor.requests[seq.request_id].tenant for seq_id, seq in executor.sequences.items()}
    return sum(count for seq_id, count in counts if tenants[seq_id] == tenant)


@pytest.mark.parametrize("params", [{}, {"n": 4}])
def test_a_tenant_that_fills_slots_and_queue_does_not_delay_another(params: dict[str, int]) -> None:
    core = FakeCore(num_blocks=256, max_num_seqs=8)
    for i in range(30):
        core.submit(f"greedy{i}", prompt_of(i, 6), max_tokens=60, tenant="greedy", params=params)
    for _ in range(5):
        core.step()
    assert num_running(core, "greedy") == 8
    core.submit("modest", [1, 2, 3], max_tokens=4, tenant="modest")
    core.step()
    assert ("modest", 0) in core.tokens
    core.run()
    for i in range(30):
        assert core.tokens[f"greedy{i}", 0] == expected_tokens(prompt_of(i, 6), 0, 60)


def test_a_tenant_that_fills_the_kv_cache_gives_blocks_back() -> None:
    core = FakeCore(num_blocks=24, max_num_seqs=8, max_model_len=64, max_num_batched_tokens=64)
    submit_many(core, "greedy", 6, length=8, max_tokens=50)
    while core.blocks.pool.num_free:
        core.step()
    core.submit("modest", prompt_of(9, 30), max_tokens=3, tenant="modest")
    core.step()
    assert ("modest", 0) in core.tokens
    core.run()
    assert core.tokens["modest", 0] == expected_tokens(prompt_of(9, 30), 0, 3)


def test_a_large_prompt_of_one_tenant_does_not_lengthen_the_steps_of_another() -> None:
    core = FakeCore(num_blocks=2048, max_num_batched_tokens=1024, max_chunk_tokens=1024)
    core.submit("modest", [1, 2], max_tokens=30, tenant="modest")
    core.step()
    submit_many(core, "greedy", 4, length=1500, max_tokens=2)
    for _ in range(20):
        core.step()
        assert 0 < computed(core, "greedy") <= SHARED_STEP_WORK // 2 + 1024 // 64
        assert computed(core, "modest") == 1
    core.run()


def test_a_prompt_of_the_tenant_served_less_is_computed_in_few_steps() -> None:
    core = FakeCore(num_blocks=2048, max_num_batched_tokens=1024, max_chunk_tokens=1024)
    submit_many(core, "greedy", 8, length=900, max_tokens=30)
    for _ in range(4):
        core.step()
    core.submit("modest", prompt_of(9, 700), max_tokens=1, tenant="modest")
    core.step()
    assert computed(core, "modest") == CATCH_UP_WORK
    assert 0 < computed(core, "greedy") <= SHARED_STEP_WORK // 2 // URGENT_PART
    for _ in range(700 // CATCH_UP_WORK):
        core.step()
        assert computed(core, "modest") <= CATCH_UP_WORK
    assert ("modest", 0) in core.finished
    core.run()


def test_sequences_of_a_tenant_take_turns_while_steps_are_short() -> None:
    core = FakeCore(num_blocks=128, max_num_seqs=16, max_num_batched_tokens=8)
    submit_many(core, "greedy", 8, max_tokens=60)
    while num_running(core, "greedy") < 8:
        core.step()
    core.submit("modest", [1, 2], max_tokens=200, tenant="modest")
    before = [len(core.tokens.get((f"greedy{i}", 0), [])) for i in range(8)]
    for _ in range(50):
        core.step()
    gained = [len(core.tokens[f"greedy{i}", 0]) - count for i, count in enumerate(before)]
    assert max(gained[1:]) - min(gained[1:]) <= 3, gained
    assert min(gained) >= 8
    assert gained[0] == 50, "the oldest of all waits for nobody"
    core.run()


def test_tenants_with_work_for_all_get_the_same() -> None:
    core = FakeCore(num_blocks=512, max_num_seqs=8, max_num_batched_tokens=16)
    submit_many(core, "one", 60, length=4, max_tokens=12)
    submit_many(core, "other", 60, length=12, max_tokens=4)
    for _ in range(120):
        core.step()
    one, other = (core.scheduler.waiting.tenants[name].virtual_time for name in ("one", "other"))
    assert abs(one - other) <= 32
    core.run()


def test_nobody_is_preempted_again_and_again() -> None:
    core = FakeCore(num_blocks=512, max_num_seqs=8)
    submit_many(core, "one", 40, max_tokens=20)
    core.step()
    core.step()
    submit_many(core, "other", 40, max_tokens=20)
    core.run()
    assert core.scheduler.num_preemptions <= 4, "more than the slots beyond the first tenant's share"


def test_a_tenant_that_stays_away_for_long_leaves_the_engine_to_the_others() -> None:
    core = FakeCore(num_blocks=512, max_num_seqs=8)
    core.submit("modest", [1, 2], max_tokens=2, tenant="modest")
    submit_many(core, "greedy", 200, max_tokens=40)
    for _ in range(20):
        core.step()
    assert num_running(core, "greedy") == 4
    while "modest" in core.scheduler.waiting.tenants:
        core.step()
    core.step()
    assert num_running(core, "greedy") == 8
    core.run()


def test_a_sequence_larger_than_its_tenants_share_ends_beside_a_busy_tenant() -> None:
    core = FakeCore(num_blocks=16, block_size=4, max_num_seqs=8)
    submit_many(core, "busy", 40, length=4, max_tokens=8)
    core.step()
    core.submit("large", prompt_of(7, 40), max_tokens=12, tenant="large")
    while ("large", 0) not in core.finished:
        core.step()
    assert any(request.startswith("busy") for request in core.lives.groups), "it had to wait for the last of all"
    core.run()


def test_one_tenant_is_served_as_if_there_were_none() -> None:
    plans = []
    for tenant in ("", "key"):
        core = FakeCore(num_blocks=12, max_num_seqs=4, max_num_batched_tokens=12)
        for i in range(9):
            core.submit(str(i), prompt_of(i, 3 + i), max_tokens=5 + i, tenant=tenant, params={"n": 1 + i % 3})
        plans.append([])
        while core.lives.has_work():
            core.step()
            plans[-1].append((core.last_plan.seq_ids, core.last_plan.num_scheduled_tokens))
    assert plans[0] == plans[1]


def test_credit_of_a_tenant_that_asked_for_nothing_is_bounded() -> None:
    queue = RequestQueue(max_credit=100)
    busy = queue.enter("busy")
    queue.charge(busy, 5000)
    assert queue.enter("new").virtual_time == 4900
    assert {tenant.name for tenant in queue.active()} == {"busy", "new"}


def test_a_tenant_without_requests_is_forgotten_after_a_while() -> None:
    queue = RequestQueue(max_credit=100)
    busy, idle = queue.enter("busy"), queue.enter("idle")
    queue.leave(idle)
    queue.charge(busy, 1600)
    assert len(queue.active()) == 2
    queue.charge(busy, 1)
    assert queue.active() == [busy]
    assert isinstance(busy, Tenant)

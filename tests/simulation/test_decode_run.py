"""Runs of steps that are computed at once give what the steps give: the same state, the same times to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.scheduler import Scheduler
from quire.simulation.replica import Finished, Replica
from quire.simulation.routing import LeastLoaded
from quire.simulation.run import Outcome, simulate
from quire.simulation.synthetic import synthetic_trace
from quire.simulation.trace import TraceRequest
from quire.simulation.workload import Workload
from tests.simulation import engines
from tests.simulation.engines import engine_config, request

COST = replace(engines.COST, spread=(0.5, 0.9, 1.0, 1.1, 3.0), prompt_spread=(0.8, 1.5))

WORKLOAD = Workload(
    num_requests=60, rate=12.0, prompt_len=60, output_len=60, lengths="lognormal", sigma=0.8, max_model_len=1024
)

PREEMPTIONS: tuple[dict[str, Any], dict[str, Any]] = ({"rate": 60.0}, {"num_gpu_blocks_override": 64})
"""A workload and options with which memory is short."""


class CountingReplica(Replica):
    """Counts how often it was woken."""

    num_wakes = 0

    def wake(self) -> list[Finished]:
        self.num_wakes += 1
        return super().wake()


def state_of(scheduler: Scheduler) -> tuple[Any, ...]:
    """All that later decisions depend on."""
    blocks, lives = scheduler.blocks, scheduler.lives
    pool = blocks.pool
    return (
        [(block.ref_count, block.group, block.content) for block in pool.blocks],
        list(pool._free),
        pool.num_evictable,
        (blocks.num_queried_tokens, blocks.num_hit_tokens),
        lives.totals,
        [(tenant.name, tenant.virtual_time, tenant.waits) for tenant in lives.waiting.tenants.values()],
        scheduler.stepped_at,
    )


def both(requests: Sequence[TraceRequest], **options: Any) -> tuple[Outcome, Outcome]:
    """A trace on two replicas: with runs, and step by step."""
    config = engine_config(**options)
    with_runs, by_step = (
        simulate(
            config,
            COST,
            requests,
            LeastLoaded(),
            num_replicas=2,
            skips_steps=skips,
            replica_type=CountingReplica,
        )
        for skips in (True, False)
    )
    return with_runs, by_step


def assert_equal(requests: Sequence[TraceRequest], **options: Any) -> tuple[int, int]:
    """Both ways give the same. Gives how often replicas were woken in each."""
    with_runs, by_step = both(requests, **options)
    assert with_runs.results == by_step.results
    for one, other in zip(with_runs.replicas, by_step.replicas, strict=True):
        assert state_of(one.scheduler) == state_of(other.scheduler)
        assert one.usage == other.usage
        one.scheduler.lives.check()
    wakes = [
        sum(replica.num_wakes for replica in outcome.replicas if isinstance(replica, CountingReplica))
        for outcome in (with_runs, by_step)
    ]
    return wakes[0], wakes[1]


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        pytest.param({}, {}, id="plain"),
        pytest.param(*PREEMPTIONS, id="preemptions"),
        pytest.param({"n": 3, "rate": 5.0}, {}, id="branches"),
        pytest.param({"n": 3, "rate": 30.0}, {"num_gpu_blocks_override": 64}, id="branches that are preempted"),
        pytest.param({"num_prefixes": 3, "prefix_len": 48}, {"num_gpu_blocks_override": 90}, id="prefixes"),
        pytest.param({}, {"enable_prefix_caching": False}, id="no cache"),
        pytest.param({"rate": float("inf")}, {"max_num_seqs": 4}, id="all at once"),
        pytest.param({"burstiness": 0.1}, {"max_num_batched_tokens": 16}, id="small steps"),
        pytest.param({}, {"max_model_len": 128}, id="context ends"),
    ],
)
def test_runs_give_what_steps_give(changes: dict[str, Any], options: dict[str, Any]) -> None:
    length = options.get("max_model_len", 1024)
    requests = synthetic_trace(replace(WORKLOAD, max_model_len=length, **changes), seed=1)
    few, many = assert_equal(requests, **options)
    assert few < many


def test_most_steps_are_not_made() -> None:
    requests = [request(0.1 * i, prompt=10, output=300) for i in range(10)]
    few, many = assert_equal(requests)
    assert few < many / 10


def test_preemptions_happen_where_they_are_tested() -> None:
    changes, options = PREEMPTIONS
    with_runs, _ = both(synthetic_trace(replace(WORKLOAD, **changes), seed=1), **options)
    assert sum(replica.scheduler.num_preemptions for replica in with_runs.replicas) > 0


def test_windows_give_blocks_back_step_by_step() -> None:
    window = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 64}
    few, many = assert_equal(synthetic_trace(WORKLOAD, seed=1), hf_overrides=window)
    assert few == many


def test_tenants_take_turns_step_by_step() -> None:
    requests = [request(0.02 * i, prompt=40, output=50, tenant="ab"[i % 2]) for i in range(40)]
    assert_equal(requests)


@settings(max_examples=30, deadline=None)
@given(
    arrivals=st.lists(st.sampled_from([0.0, 0.004, 0.01, 0.1, 0.5, 0.5001, 2.0]), min_size=1, max_size=12),
    lengths=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 120), st.integers(1, 3)), min_size=12, max_size=12),
    num_blocks=st.sampled_from([64, 66, 80, 400]),
    max_num_seqs=st.sampled_from([3, 5, 16]),
)
def test_runs_give_what_steps_give_for_any_requests(
    arrivals: list[float], lengths: list[tuple[int, int, int]], num_blocks: int, max_num_seqs: int
) -> None:
    requests = [
        request(arrival_s, prompt, output, n=n)
        for arrival_s, (prompt, output, n) in zip(sorted(arrivals), lengths, strict=False)
    ]
    assert_equal(requests, num_gpu_blocks_override=num_blocks, max_num_seqs=max_num_seqs)

"""Times follow from the cost model, steps and arrivals, and from nothing else."""

from __future__ import annotations

import pytest

from quire.simulation.cost_model import StepShape
from quire.simulation.report import report
from quire.simulation.routing import LeastLoaded, RoundRobin
from quire.simulation.run import Outcome, simulate
from quire.simulation.trace import TraceRequest
from tests.simulation.engines import COST, engine_config, request


def run(*requests: TraceRequest, num_replicas: int = 1) -> Outcome:
    return simulate(engine_config(), COST, requests, RoundRobin(), num_replicas=num_replicas)


def test_a_request_alone_takes_its_steps() -> None:
    (result,) = run(request(5.0, prompt=20, output=4)).results
    prefill = COST.step_s(StepShape(20, 20, 20 * 21 // 2, 1, 1, is_after_idle=True, is_recorded=True))
    decode = [
        COST.step_s(StepShape(1, 20 + number, 0, 1, 1, num_alike=number, is_recorded=number == 1))
        for number in (1, 2, 3)
    ]
    assert result.ttft == pytest.approx(prefill)
    assert result.tpot == pytest.approx(sum(decode) / 3)
    assert result.e2el == pytest.approx(prefill + sum(decode))
    assert result.num_output_tokens == 4


def test_a_request_of_one_token_has_no_time_per_token() -> None:
    (result,) = run(request(0.0, output=1)).results
    assert result.tpot is None
    assert result.ttft == result.e2el


def test_an_arrival_waits_for_the_end_of_the_step() -> None:
    first, second = run(request(0.0, prompt=200, output=50), request(0.001, prompt=20, output=2)).results
    step_s = COST.step_s(StepShape(200, 200, 200 * 201 // 2, 1, 1, is_after_idle=True, is_recorded=True))
    next_s = COST.step_s(StepShape(21, 201 + 20, 20 * 21 // 2, 2, 2, is_recorded=True))
    assert second.first_token_at == pytest.approx(step_s + next_s)
    assert first.first_token_at == pytest.approx(step_s)


def test_requests_of_one_moment_share_a_step() -> None:
    results = run(*(request(1.0, prompt=10, output=3) for _ in range(4))).results
    assert len({result.first_token_at for result in results}) == 1


def test_replicas_are_apart() -> None:
    alone = run(request(0.0)).results[0]
    outcome = run(request(0.0), request(0.0), request(0.0), num_replicas=3)
    assert [result.replica for result in outcome.results] == [0, 1, 2]
    assert {result.e2el for result in outcome.results} == {alone.e2el}


def test_the_least_loaded_is_known_when_requests_end() -> None:
    requests = [request(0.0, output=100), request(0.0, output=2), request(0.001, output=2), request(0.4, output=2)]
    outcome = simulate(engine_config(), COST, requests, LeastLoaded(), num_replicas=2)
    assert [result.replica for result in outcome.results] == [0, 1, 0, 1]


def test_figures_add_up() -> None:
    requests = [request(0.1 * i, prompt=64, output=20, prefix_id=i % 2, prefix_tokens=48) for i in range(10)]
    outcome = simulate(engine_config(), COST, requests, RoundRobin())
    figures = report(outcome, num_prompt_tokens=640, num_output_tokens=200, goodput={"ttft": 1e9})
    assert figures["prefix_cache_queries"] == 640
    assert figures["prefix_cache_hits"] == 8 * 48
    assert figures["request_goodput"] == figures["request_throughput"]
    assert figures["output_throughput"] * figures["duration"] == pytest.approx(200)
    assert 0 < figures["kv_usage_mean"] <= figures["kv_usage_max"] <= 1
    none_good = report(outcome, num_prompt_tokens=640, num_output_tokens=200, goodput={"e2el": 0.0})
    assert none_good["request_goodput"] == 0
    assert figures["p50_ttft_ms"] <= figures["p95_ttft_ms"] <= figures["p99_ttft_ms"]


def test_progress_is_told_to_the_end() -> None:
    seen: list[tuple[int, int, int]] = []
    requests = [request(0.0, prompt=20, output=10) for _ in range(3)]
    simulate(engine_config(), COST, requests, RoundRobin(), on_progress=lambda *counts: seen.append(counts))
    assert seen[-1] == (3, 60, 30)

"""The PagedAttention paper's figures, from few requests: what `benchmarks/simulation_paged.py` says at length."""

from __future__ import annotations

import pytest

from benchmarks.simulated_models import OPT_13B, engine_on
from benchmarks.simulation_paged import (
    NUM_BLOCKS,
    Beams,
    Bench,
    OrcaMax,
    OrcaOracle,
    OrcaPow2,
    RequestLevel,
    Sharing,
    bench_of,
    latency,
    most_token_share,
    saved,
    token_share,
)
from quire.simulation.replica import Replica
from tests.simulation.engines import request


@pytest.fixture(scope="module")
def bench() -> Bench:
    config, cost = engine_on("a100-40gb", OPT_13B, num_gpu_blocks_override=NUM_BLOCKS, enable_prefix_caching=False)
    return Bench(config, cost, 60)


def test_blocks_hold_tokens(bench: Bench) -> None:
    shares = [token_share(bench.run("ShareGPT", 2.0, system)) for system in (Replica, OrcaOracle, OrcaPow2, OrcaMax)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] >= 0.96
    assert shares[3] <= 0.38


def test_latency_is_lower_the_less_is_reserved(bench: Bench) -> None:
    times = [latency(bench.run("ShareGPT", 4.0, system)) for system in (Replica, OrcaPow2, OrcaMax, RequestLevel)]
    assert times == sorted(times)
    assert times[0] < times[2] / 2


def test_samples_share_their_prompt(bench: Bench) -> None:
    outcome = bench.run("Alpaca", 4.0, Sharing, n=4, skips=False)
    assert 0.06 <= saved(outcome) <= 0.2


def test_beams_share_more_the_more_there_are(bench: Bench) -> None:
    shares = [saved(bench.run("Alpaca", 4.0, Beams, n=n, skips=False)) for n in (2, 4)]
    assert 0.3 <= shares[0] <= shares[1] <= 0.75, "four beams share three of four blocks at most"


def test_memory_that_holds_tokens_is_all_but_the_rest_of_last_blocks() -> None:
    requests = [request(0.0, prompt=3, output=3)]
    assert most_token_share(requests, 4) == pytest.approx((4 + 5) / (4 + 8))
    for block_size in (8, 32):
        bench = bench_of(60, block_size)
        share = token_share(bench.run("Alpaca", 4.0, Replica), block_size)
        assert share == pytest.approx(most_token_share(bench.trace("Alpaca", 4.0), block_size), abs=0.02)

"""The PagedAttention paper's figures, from few requests: what `benchmarks/simulation_paged.py` says at length."""

from __future__ import annotations

import pytest

from benchmarks.simulated_models import OPT_13B, engine_on
from benchmarks.simulation_paged import (
    NUM_BLOCKS,
    Bench,
    OrcaMax,
    OrcaOracle,
    OrcaPow2,
    RequestLevel,
    Sharing,
    latency,
    token_share,
)
from quire.simulation.replica import Replica


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
    (replica,) = outcome.replicas
    assert isinstance(replica, Sharing)
    assert 0.06 <= 1 - replica.usage.block_seconds / replica.unshared_block_seconds <= 0.2

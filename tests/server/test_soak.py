"""The benchmark's soak for some seconds: what it asks of ten minutes with 256 clients, without the times."""

from __future__ import annotations

from benchmarks.soak import soak_once


def test_a_short_soak_leaves_nothing_behind() -> None:
    soak, rules = soak_once(num_clients=32, seconds=4, num_rounds=2, write_timeout_s=1)
    assert not soak.errors
    assert [rule for rule in rules if not rule.holds and not rule.is_time] == []
    for kind in ("stream: 200", "texts compared", "burst: 200", "storm, left", "slow readers", "requests broken off"):
        assert soak.counts[kind] > 0, kind

"""Some of the benchmark's expensive bodies, without its times: nobody else notices, and memory is bounded."""

from __future__ import annotations

from benchmarks.front_fuzz import measure, rules


def test_expensive_bodies_change_nobodys_tokens_and_are_all_answered() -> None:
    alone, disturbed, answers = measure(40, num_senders=4, seed=1, undisturbed_s=2.0)
    assert [rule for rule in rules(alone, disturbed, answers) if not rule.holds and not rule.is_time] == []
    assert disturbed.num_streams > 0
    assert answers["200"] > 0
    assert answers["400"] + answers["413"] > 0

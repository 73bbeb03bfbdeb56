"""The queue at the door is bounded by requests and by tokens, and says how long to stay away."""

from __future__ import annotations

import pytest

from quire.engine.front.admission import Admission, AdmissionLimits
from quire.errors import ConfigError, EngineOverloaded


def test_requests_beyond_the_limit_are_refused_until_one_leaves() -> None:
    door = Admission(AdmissionLimits(max_queued_requests=2))
    door.enter("a")
    door.enter("b")
    with pytest.raises(EngineOverloaded, match=r"the queue is full: it holds 2 requests.*--max-queued-requests"):
        door.enter("c")
    door.leave("a")
    door.leave("a")
    door.enter("c")
    assert len(door) == 2


def test_tokens_beyond_the_limit_are_refused_but_one_prompt_may_be_longer() -> None:
    door = Admission(AdmissionLimits(max_queued_tokens=100))
    door.enter("a")
    door.charge("a", 150)
    door.enter("b")
    with pytest.raises(EngineOverloaded, match=r"150 tokens.*--max-queued-tokens"):
        door.charge("b", 1)
    door.leave("a")
    door.charge("b", 100)
    assert door.num_tokens == 100
    door.leave("b")
    assert (len(door), door.num_tokens) == (0, 0)


def test_a_request_that_left_meanwhile_is_not_charged() -> None:
    door = Admission(AdmissionLimits())
    door.enter("a")
    door.leave("a")
    door.charge("a", 10)
    assert door.num_tokens == 0


def test_retry_after_is_what_the_oldest_has_waited() -> None:
    now = 100.0
    door = Admission(AdmissionLimits(max_queued_requests=1), clock=lambda: now)
    door.enter("a")
    for waited, expected in ((0.2, 1), (7.4, 7)):
        now = 100 + waited
        with pytest.raises(EngineOverloaded) as caught:
            door.enter("b")
        assert caught.value.retry_after == expected


def test_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match="max_queued_requests must be at least 1"):
        AdmissionLimits(max_queued_requests=0)


def test_a_tenant_that_filled_the_queue_is_refused_and_another_is_not() -> None:
    door = Admission(AdmissionLimits(max_queued_requests=4))
    for name in "abcd":
        door.enter(name, "greedy")
    with pytest.raises(EngineOverloaded, match=r"it holds 4 requests"):
        door.enter("e", "greedy")
    door.enter("f", "modest")
    door.enter("g", "modest")
    with pytest.raises(EngineOverloaded, match=r"6 requests.*2 keys share it"):
        door.enter("h", "modest")
    for name in "abcdfg":
        door.leave(name)
    assert len(door) == 0
    for name in "abcd":
        door.enter(name, "modest")


def test_sequences_and_tokens_are_shared_like_requests() -> None:
    door = Admission(AdmissionLimits(max_queued_sequences=100, max_queued_tokens=1000))
    door.enter("a", "greedy", 100)
    door.charge("a", 900)
    with pytest.raises(EngineOverloaded, match=r"100 sequences.*--max-queued-sequences"):
        door.enter("b", "greedy")
    door.enter("c", "modest", 40)
    door.charge("c", 400)
    door.enter("d", "modest", 10)
    with pytest.raises(EngineOverloaded, match=r"1300 tokens.*--max-queued-tokens"):
        door.charge("d", 101)
    door.charge("d", 100)
    assert (door.num_sequences, door.num_tokens) == (150, 1400)
    for name in "acd":
        door.leave(name)
    assert (door.num_sequences, door.num_tokens) == (0, 0)


def test_a_request_may_wait_alone_with_more_sequences_than_the_limit() -> None:
    door = Admission(AdmissionLimits(max_queued_sequences=10))
    door.enter("a", "key", 64)
    with pytest.raises(EngineOverloaded):
        door.enter("b", "key")
    door.enter("c", "other", 64)


def test_requests_that_belong_together_are_refused_before_the_first_is_queued() -> None:
    door = Admission(AdmissionLimits(max_queued_requests=4))
    door.check("key", num_requests=4)
    with pytest.raises(EngineOverloaded, match="try again in 1 s"):
        door.check("key", num_requests=5)
    assert len(door) == 0

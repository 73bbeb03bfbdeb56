"""The queue at the door is bounded by requests and by tokens, and says how long to stay away."""

from __future__ import annotations

import pytest

from quire.engine.admission import Admission, AdmissionLimits
from quire.errors import ConfigError, EngineOverloaded


def test_requests_beyond_the_limit_are_refused_until_one_leaves() -> None:
    door = Admission(AdmissionLimits(max_queued_requests=2))
    door.enter("a")
    door.enter("b")
    with pytest.raises(EngineOverloaded, match=r"2 requests are waiting already.*--max-queued-requests"):
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

"""Which replica gets a request."""

from __future__ import annotations

from quire.simulation.routing import MAX_LOAD_GAP, LeastLoaded, PrefixAware, RoundRobin
from tests.simulation.engines import request

PLAIN = request(0.0)


def test_round_robin_takes_turns() -> None:
    router = RoundRobin()
    assert [router.choose(PLAIN, [9, 0, 0]) for _ in range(4)] == [0, 1, 2, 0]


def test_the_least_loaded_is_chosen_the_first_of_equal_ones() -> None:
    assert LeastLoaded().choose(PLAIN, [3, 1, 1]) == 1


def test_a_prefix_stays_where_it_is() -> None:
    router = PrefixAware()
    one, other = (request(0.0, prefix_id=name, prefix_tokens=16) for name in "ab")
    assert router.choose(one, [0, 0]) == 0
    assert router.choose(other, [1, 0]) == 1
    assert [router.choose(one, [9, 0]), router.choose(other, [0, 9])] == [0, 1]


def test_a_prefix_moves_away_from_a_replica_that_is_overloaded() -> None:
    router = PrefixAware()
    shared = request(0.0, prefix_id="a", prefix_tokens=16)
    assert router.choose(shared, [0, 0]) == 0
    assert router.choose(shared, [MAX_LOAD_GAP, 0]) == 0
    assert router.choose(shared, [MAX_LOAD_GAP + 1, 0]) == 1
    assert router.choose(shared, [MAX_LOAD_GAP + 1, 2]) == 1, "it has two homes now"
    assert router.choose(shared, [1000, 999]) == 1
    assert router.choose(shared, [100 + MAX_LOAD_GAP, 100]) == 1


def test_requests_without_a_prefix_go_to_the_least_loaded() -> None:
    router = PrefixAware()
    router.choose(request(0.0, prefix_id="a", prefix_tokens=16), [0, 0])
    assert router.choose(PLAIN, [1, 0]) == 1

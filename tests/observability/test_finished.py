"""Pages of finished requests: each request is in one of them, or is counted as missed."""

from __future__ import annotations

import random

import pytest

from quire.observability.finished import CAPACITY, FinishedRequest, FinishedRequests, finished_since
from quire.observability.flight_recorder import Outcome


def requests_of(count: int) -> FinishedRequests:
    made = FinishedRequests(lambda: 77.0)
    add(made, 0, count)
    return made


def add(made: FinishedRequests, first: int, count: int) -> None:
    for number in range(first, first + count):
        made.add(float(number), number + 1, -1, 3 * number, 1, Outcome.FINISHED)


def numbers(requests: list[FinishedRequest]) -> list[int]:
    return [int(request.arrived_at) for request in requests]


def test_a_page_has_what_was_taken_down() -> None:
    made = requests_of(0)
    start = finished_since(made.snapshot(), "", 9)
    assert (start.requests, start.num_missed, start.now) == ([], 0, 77.0)
    made.add(5.25, 1 << 40, 16, 40, 4, Outcome.ABORTED)
    (request,) = finished_since(made.snapshot(), start.cursor, 9).requests
    assert request == FinishedRequest(5.25, (1 << 32) - 1, 16, 40, 4, Outcome.ABORTED)


def test_nothing_is_found_twice_and_nothing_is_lost() -> None:
    rng = random.Random(2)
    made = requests_of(7)
    cursor, total, seen = finished_since(made.snapshot(), "", 1).cursor, 7, list[int]()
    for _ in range(300):
        count = rng.randrange(6)
        add(made, total, count)
        total += count
        page = finished_since(made.snapshot(), cursor, rng.randrange(1, 5))
        assert page.num_missed == 0
        cursor = page.cursor
        seen += numbers(page.requests)
    while page.requests:
        page = finished_since(made.snapshot(), cursor, 100)
        cursor = page.cursor
        seen += numbers(page.requests)
    assert seen == list(range(7, total))


def test_what_is_kept_no_more_is_counted() -> None:
    made = requests_of(10)
    cursor = finished_since(made.snapshot(), "", 1).cursor
    add(made, 10, CAPACITY + 5)
    page = finished_since(made.snapshot(), cursor, 3)
    assert (page.num_missed, numbers(page.requests)) == (5, [15, 16, 17])
    again = finished_since(made.snapshot(), page.cursor, 3)
    assert (again.num_missed, numbers(again.requests)) == (0, [18, 19, 20])


def test_another_core_begins_at_its_start_and_says_that_it_is_another() -> None:
    cursor = finished_since(requests_of(10).snapshot(), "", 1).cursor
    page = finished_since(requests_of(4).snapshot(), cursor, 9)
    assert (page.num_missed, numbers(page.requests)) == (None, [0, 1, 2, 3])


@pytest.mark.parametrize("cursor", ["0", "-", "x" * 16 + "-1", "0" * 16 + "-", "0" * 16 + "--1", "0" * 16 + "-1\n"])
def test_what_is_no_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(ValueError, match="no cursor"):
        finished_since(requests_of(1).snapshot(), cursor, 1)


def test_a_cursor_ahead_of_the_core_is_refused() -> None:
    made = requests_of(3)
    core = finished_since(made.snapshot(), "", 1).cursor.partition("-")[0]
    with pytest.raises(ValueError, match="ahead of the 3 requests"):
        finished_since(made.snapshot(), f"{core}-4", 1)

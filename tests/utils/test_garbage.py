"""All objects are looked at when that does not take long."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator

import pytest

from quire.utils import garbage


def collections(is_busy: Callable[[], bool], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many there are in some hundred looks."""
    found: list[int] = []
    monkeypatch.setattr(garbage, "COLLECT_S", 0.0)
    monkeypatch.setattr(garbage, "LOOK_S", 0.0)
    monkeypatch.setattr(gc, "get_threshold", lambda: (garbage.YOUNG, garbage.MIDDLE, garbage.NEVER))
    monkeypatch.setattr(gc, "collect", lambda: found.append(1))

    async def main() -> None:
        task = asyncio.create_task(garbage.collect_now_and_then(is_busy))
        for _ in range(200):
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(main())
    return len(found)


def test_while_large_bodies_are_alive_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert collections(lambda: True, monkeypatch) == 0


def test_one_moment_without_them_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([True] * 50 + [False])
    assert collections(lambda: next(looks, True), monkeypatch) == 1


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "PATIENCE_S", 0.0)
    assert collections(lambda: True, monkeypatch) > 10


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()


def test_what_is_made_while_nothing_is_collected_is_old_at_once(nothing_frozen: None) -> None:
    with garbage.none_collected():
        assert not gc.isenabled()
        made = [[number] for number in range(100_000)]
    assert gc.isenabled()
    assert {id(item) for item in made} <= {id(item) for item in gc.get_objects(generation=2)}
    assert gc.get_freeze_count() == 0


def test_what_was_frozen_and_disabled_stays_so(nothing_frozen: None) -> None:
    gc.freeze()
    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError), garbage.none_collected():
            raise ZeroDivisionError
        assert not gc.isenabled()
        assert gc.get_freeze_count()
    finally:
        gc.enable()

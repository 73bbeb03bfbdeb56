"""All objects are looked at when that does not take long."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

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

"""What the fronts of a server know of each other, so that each can answer for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Protocol

from quire.server.http.errors import ApiError
from quire.server.processes.link import Ask, FrontReport, ParentLink, Reports
from quire.server.processes.shared_counts import SharedCounts

TIMEOUT_S = 5.0


class Peers(Protocol):
    """The other fronts of the server."""

    counts: SharedCounts
    """Requests of all fronts, this one included."""

    async def reports(self) -> list[FrontReport]:
        """What the others say, those that have ended included.

        Raises: ApiError 503 when they cannot be asked.
        """

    def answer_with(self, report: Callable[[], FrontReport]) -> None:
        """What to say when another front asks; called in the event loop."""


class Alone:
    """There are no others."""

    def __init__(self, num_keys: int = 0) -> None:
        self.counts = SharedCounts(1, num_keys)

    async def reports(self) -> list[FrontReport]:
        """See `Peers`."""
        return []

    def answer_with(self, report: Callable[[], FrontReport]) -> None:
        """See `Peers`."""


class LinkedPeers:
    """The others are reached through the parent, which remembers what those said that have ended."""

    def __init__(self, link: ParentLink, counts: SharedCounts) -> None:
        self.counts = counts
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._asked: dict[int, asyncio.Future[list[FrontReport]]] = {}
        self._call_ids = itertools.count()
        self._say: Callable[[], None] = link.on_ask
        link.on_reports = self._hear

    async def reports(self) -> list[FrontReport]:
        """See `Peers`."""
        call_id = next(self._call_ids)
        answer = self._asked[call_id] = self._loop.create_future()
        self._link.tell(Ask(call_id=call_id))
        try:
            others: list[FrontReport] = await asyncio.wait_for(answer, TIMEOUT_S)
        except TimeoutError:
            raise ApiError(
                503, "engine_unavailable", "The other processes of this server cannot be asked; try again."
            ) from None
        finally:
            del self._asked[call_id]
        self._say()  # what this front is about to say the parent must know: if it ends, sums must not fall
        return others

    def answer_with(self, report: Callable[[], FrontReport]) -> None:
        """See `Peers`. A front whose event loop hangs gives no answer, so that the parent knows."""
        self._say = lambda: self._link.tell(report())
        self._link.on_ask = lambda: self._on_loop(self._say)

    def _hear(self, reports: Reports) -> None:
        self._on_loop(self._answer, reports)

    def _on_loop(self, callback: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(callback, *args)

    def _answer(self, reports: Reports) -> None:
        answer = self._asked.get(reports.call_id)
        if answer is not None and not answer.done():
            answer.set_result(reports.reports)

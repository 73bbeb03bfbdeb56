"""Which replica gets a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from quire.simulation.trace import TraceRequest

MAX_LOAD_GAP = 32
"""Unfinished requests by which a replica that has a prefix may exceed the least loaded one, and still be preferred."""
MAX_LOAD_RATIO = 1.5
"""The same as a ratio. Both must be exceeded, as in the cache-aware policy of SGLang's router."""


class Router(Protocol):
    """Chooses replicas. `loads` are the unfinished requests of each, kept up to date by the caller."""

    def choose(self, request: TraceRequest, loads: list[int]) -> int:
        """The replica for a request."""


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: TraceRequest, loads: list[int]) -> int:
        """See `Router`."""
        chosen, self._next = self._next, (self._next + 1) % len(loads)
        return chosen


class LeastLoaded:
    """The replica with the fewest unfinished requests, the first of several."""

    def choose(self, request: TraceRequest, loads: list[int]) -> int:
        """See `Router`."""
        return loads.index(min(loads))


class PrefixAware:
    """A replica that had the request's prefix before, unless it has much more to do than the least loaded one."""

    def __init__(self) -> None:
        self._homes: dict[str | int, list[int]] = {}

    def choose(self, request: TraceRequest, loads: list[int]) -> int:
        """See `Router`."""
        least = loads.index(min(loads))
        if request.prefix_id is None:
            return least
        homes = self._homes.setdefault(request.prefix_id, [])
        home = min(homes, key=lambda replica: loads[replica], default=least)
        is_busy = loads[home] - loads[least] > MAX_LOAD_GAP and loads[home] > MAX_LOAD_RATIO * loads[least]
        chosen = least if is_busy else home
        if chosen not in homes:
            homes.append(chosen)
        return chosen


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
}

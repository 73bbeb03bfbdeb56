"""Who waits: a queue in order of rank for each tenant, and how much each tenant has been served.

A tenant is an API key; without keys there is one. Service is counted in tokens of work, as in the virtual token counter
of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). Knows no slots and no blocks: `fairness` does.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from quire.core.record.timeline import Waits
from quire.core.sequence import Sequence

rank_of = attrgetter("rank")


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant with requests here, or that had some a short while ago."""

    name: str
    virtual_time: float = 0.0
    """Work done for it, plus what it did not ask for while it had nothing here."""
    waiting: list[Sequence] = field(default_factory=list)
    """In order of rank."""
    num_groups: int = 0
    """Requests that are not finished."""
    left_at: float = 0.0
    """Work done for all tenants when its last request ended."""
    waits: Waits = field(default_factory=Waits)
    """Why its queue stands still."""


class RequestQueue:
    """The waiting sequences of all tenants."""

    def __init__(self, *, max_credit: int) -> None:
        """`max_credit`: how far, in tokens of work, one tenant may be behind the one that was served most."""
        self.tenants: dict[str, Tenant] = {}
        self.num_served = 0.0
        """Work done for all tenants."""
        self._max_credit = max_credit
        self._memory = 16 * max_credit
        """Work after which a tenant without requests is forgotten."""

    def __len__(self) -> int:
        return sum(len(tenant.waiting) for tenant in self.tenants.values())

    def __iter__(self) -> Iterator[Sequence]:
        for tenant in self.tenants.values():
            yield from tenant.waiting

    def enter(self, name: str) -> Tenant:
        """Count a request of a tenant. One that comes, or comes back, has at most the credit of `max_credit`."""
        tenant = self.tenants.get(name)
        if tenant is None:
            tenant = self.tenants[name] = Tenant(name)
        tenant.num_groups += 1
        self._bound_credit()
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """A request of the tenant has ended."""
        tenant.num_groups -= 1
        tenant.left_at = self.num_served

    def add(self, seq: Sequence) -> None:
        """Queue a sequence."""
        insort(seq.group.tenant.waiting, seq, key=rank_of)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out."""
        waiting = seq.group.tenant.waiting
        del waiting[bisect_left(waiting, seq.rank, key=rank_of)]

    def charge(self, tenant: Tenant, work: float) -> None:
        """Count work that was done for a tenant."""
        tenant.virtual_time += work
        self.num_served += work

    def active(self) -> list[Tenant]:
        """Tenants with requests, and those that had some a short while ago and may send more at any moment."""
        self._bound_credit()
        tenants = list(self.tenants.values())
        for tenant in tenants:
            if not tenant.num_groups and self.num_served - tenant.left_at > self._memory:
                del self.tenants[tenant.name]
        return list(self.tenants.values())

    def candidates(self, is_ready: Callable[[Sequence], bool]) -> Iterator[Sequence]:
        """The first sequence of each tenant that is ready; the tenant that was served least comes first."""
        waiting = [tenant for tenant in self.tenants.values() if tenant.waiting]
        for tenant in sorted(waiting, key=lambda tenant: tenant.virtual_time) if len(waiting) > 1 else waiting:
            seq = next(filter(is_ready, tenant.waiting), None)
            if seq is not None:
                yield seq

    def _bound_credit(self) -> None:
        least = max(tenant.virtual_time for tenant in self.tenants.values()) - self._max_credit
        for tenant in self.tenants.values():
            tenant.virtual_time = max(tenant.virtual_time, least)

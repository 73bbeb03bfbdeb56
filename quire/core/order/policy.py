"""In which order requests are served.

A request gets its rank when it is queued, and keeps it: lower ranks are admitted first, run first, and give way last.
So whoever has the lowest rank always gets on, and every request ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from quire.messages.request import EngineCoreRequest


class Policy(ABC):
    """A total order over requests."""

    preempts: ClassVar[bool]
    """Whether one that waits takes the seat and the memory of a running one of higher rank."""

    @abstractmethod
    def rank(self, request: EngineCoreRequest, number: int) -> tuple[float, int]:
        """The rank of the `number`-th request that was queued."""


class FirstComeFirstServed(Policy):
    """In order of arrival."""

    preempts = False

    def rank(self, request: EngineCoreRequest, number: int) -> tuple[float, int]:
        """See `Policy.rank`."""
        return 0.0, number


class ByPriority(Policy):
    """Lower `priority` first; equal ones in order of arrival.

    One that has waited `ageing_s` seconds longer counts as much as one of a priority that is lower by one. Since all
    age alike, that is a fixed order: time of arrival, in units of `ageing_s`, is added to the priority.
    """

    preempts = True

    def __init__(self, ageing_s: float) -> None:
        """`ageing_s` 0: requests do not age, and those of a high priority may wait for ever."""
        self._ageing_s = ageing_s

    def rank(self, request: EngineCoreRequest, number: int) -> tuple[float, int]:
        """See `Policy.rank`."""
        age = request.arrived_at / self._ageing_s if self._ageing_s else 0.0
        return request.priority + age, number


def policy_of(name: str, ageing_s: float) -> Policy:
    """The policy that `--scheduling-policy` names."""
    return ByPriority(ageing_s) if name == "priority" else FirstComeFirstServed()

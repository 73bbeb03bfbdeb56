"""Which requests may have ended a core, and which one did.

A request is *suspect* when a core crashed while it had the request, or when two cores in a row ended, in whatever way,
before it got another token. Suspects run one at a time, each alone until it has a new token, which clears it. Whoever
is alone in a core that crashes is guilty; a core that is killed from outside proves less and counts half, so that
somebody who kills cores at random does not make a request guilty.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

GUILTY = 2


@dataclass(slots=True)
class _Record:
    num_deaths: int = 0
    crashed: bool = False
    alone: int = 0
    """Evidence from cores that ran nothing else."""


class Suspects:
    """The requests of one front that had a core end under them and have no token since."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._on_trial: str | None = None

    def try_alone(self, request_id: str | None) -> None:
        """The core says that it runs this request alone from now on; None ends that."""
        self._on_trial = request_id

    def clear(self, request_id: str) -> None:
        """The request has a new token, or has ended."""
        if self._records:
            self._records.pop(request_id, None)
            if request_id == self._on_trial:
                self._on_trial = None

    def core_ended(self, request_ids: Iterable[str], *, crashed: bool) -> list[str]:
        """A core ended that had these requests; gives those that are guilty."""
        for request_id in request_ids:
            record = self._records.setdefault(request_id, _Record())
            record.num_deaths += 1
            record.crashed |= crashed
            if request_id == self._on_trial:
                record.alone += 2 if crashed else 1
        self._on_trial = None
        return [request_id for request_id, record in self._records.items() if record.alone >= GUILTY]

    def is_suspect(self, request_id: str) -> bool:
        """Whether the request must run alone first."""
        record = self._records.get(request_id)
        return record is not None and (record.crashed or record.num_deaths >= 2)

"""Which requests may have crashed a core, and which one did.

When a core crashes, every request it had is *suspect*. Suspects run one at a time, each alone until it has a new token,
which clears it: a replayed request goes on at exactly the token that was next, so what crashed once crashes at once.
Whoever is alone in a core that crashes is guilty. A core that is killed from outside proves nothing about anybody.
"""

from __future__ import annotations

from collections.abc import Iterable


class Suspects:
    """The requests of one front that had a core crash under them and have no token since."""

    def __init__(self) -> None:
        self._suspects: set[str] = set()
        self._on_trial: str | None = None

    def __len__(self) -> int:
        return len(self._suspects)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._suspects

    def try_alone(self, request_id: str | None) -> None:
        """The core says that it runs this request alone from now on; None ends that."""
        self._on_trial = request_id

    def clear(self, request_id: str) -> None:
        """The request has a new token, or has ended."""
        self._suspects.discard(request_id)
        if request_id == self._on_trial:
            self._on_trial = None

    def core_ended(self, request_ids: Iterable[str], *, crashed: bool) -> str | None:
        """A core ended that had these requests; gives the one that is guilty, if any is."""
        tried, self._on_trial = self._on_trial, None
        if not crashed:
            return None
        self._suspects.update(request_ids)
        return tried

"""How much may wait at the door: requests without their first token, and the prompt tokens they bring."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.config.knobs import knob, read_knobs
from quire.errors import EngineOverloaded
from quire.utils.math import cdiv


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Beyond these a request is refused at once instead of waiting long.

    Raises: ConfigError.
    """

    max_queued_requests: int = knob(
        2048, "Requests that may wait for their first token.", least=1, aliases=("max_num_queued_reqs",)
    )
    max_queued_tokens: int = knob(
        1 << 22, "Prompt tokens of such requests, all together.", least=1, aliases=("max_num_queued_tokens",)
    )

    def __post_init__(self) -> None:
        read_knobs(self)

    def divided(self, num_fronts: int) -> AdmissionLimits:
        """The share of each of several fronts, rounded up."""
        return AdmissionLimits(
            max_queued_requests=cdiv(self.max_queued_requests, num_fronts),
            max_queued_tokens=cdiv(self.max_queued_tokens, num_fronts),
        )


@dataclass(slots=True)
class _Queued:
    entered_at: float
    num_tokens: int = 0


class Admission:
    """The requests of one front that have no token yet."""

    def __init__(self, limits: AdmissionLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.num_tokens = 0
        self._clock = clock
        self._queued: dict[str, _Queued] = {}

    def __len__(self) -> int:
        return len(self._queued)

    def enter(self, request_id: str) -> None:
        """Let a request in.

        Raises: EngineOverloaded.
        """
        if len(self._queued) >= self.limits.max_queued_requests:
            raise self._overloaded(f"{len(self._queued)} requests", "--max-queued-requests")
        self._queued[request_id] = _Queued(self._clock())

    def charge(self, request_id: str, num_tokens: int) -> None:
        """Count a request's prompt, once it is tokenised. One prompt may wait alone, however long.

        Raises: EngineOverloaded.
        """
        queued = self._queued.get(request_id)
        if queued is None:
            return  # it was aborted in the meantime
        if self.num_tokens and self.num_tokens + num_tokens > self.limits.max_queued_tokens:
            raise self._overloaded(f"prompts of {self.num_tokens} tokens", "--max-queued-tokens")
        queued.num_tokens = num_tokens
        self.num_tokens += num_tokens

    def leave(self, request_id: str) -> None:
        """The request has its first token, or has ended; harmless when called again."""
        queued = self._queued.pop(request_id, None)
        if queued is not None:
            self.num_tokens -= queued.num_tokens

    def _overloaded(self, what: str, flag: str) -> EngineOverloaded:
        """The oldest request's wait so far is what the next one must expect at least."""
        oldest = next(iter(self._queued.values()))
        seconds = max(1, round(self._clock() - oldest.entered_at))
        return EngineOverloaded(
            f"{what} are waiting already, which is the limit ({flag}); try again in {seconds} s", retry_after=seconds
        )

"""How much may wait at the door: requests without their first token, and the prompt tokens they bring."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.config.flags.knobs import knob, read_knobs
from quire.errors import EngineOverloaded, counted
from quire.utils.math import cdiv, keeps_share


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Beyond these a request is refused at once instead of waiting long.

    Raises: ConfigError.
    """

    max_queued_requests: int = knob(
        2048, "Requests that may wait for their first token.", least=1, aliases=("max_num_queued_reqs",)
    )
    max_queued_sequences: int = knob(4096, "Sequences of such requests: n of each.", least=1)
    max_queued_tokens: int = knob(
        1 << 22, "Prompt tokens of such requests, all together.", least=1, aliases=("max_num_queued_tokens",)
    )

    def __post_init__(self) -> None:
        read_knobs(self)

    def divided(self, num_fronts: int) -> AdmissionLimits:
        """The share of each of several fronts, rounded up."""
        return AdmissionLimits(
            max_queued_requests=cdiv(self.max_queued_requests, num_fronts),
            max_queued_sequences=cdiv(self.max_queued_sequences, num_fronts),
            max_queued_tokens=cdiv(self.max_queued_tokens, num_fronts),
        )


@dataclass(slots=True)
class _Queued:
    entered_at: float
    tenant: str
    num_sequences: int
    num_tokens: int = 0


@dataclass(slots=True)
class _Held:
    """What waits of one tenant, or of all."""

    num_requests: int = 0
    num_sequences: int = 0
    num_tokens: int = 0


class Admission:
    """The requests of one front that have no token yet.

    A tenant is refused when it holds its share of a limit: all of it while nobody else waits, else an equal part. A
    queue that one tenant has filled has room for the part of another.
    """

    def __init__(self, limits: AdmissionLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._queued: dict[str, _Queued] = {}
        self._all = _Held()
        self._tenants: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._queued)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that wait."""
        return self._all.num_tokens

    @property
    def num_sequences(self) -> int:
        """Sequences that wait."""
        return self._all.num_sequences

    def check(self, tenant: str, *, num_requests: int = 0, num_sequences: int = 0, num_tokens: int = 0) -> None:
        """Whether so much more of a tenant may wait. One request may, however many sequences and tokens it has.

        Raises: EngineOverloaded.
        """
        own, limits = self._tenants.get(tenant, _Held()), self.limits
        num_active = len(self._tenants) + (tenant not in self._tenants)

        def keeps(limit: int, mine: int, everybodys: int, more: int) -> bool:
            return not more or keeps_share(limit, own=mine + more, total=everybodys + more, num_active=num_active)

        held = self._all
        if not keeps(limits.max_queued_requests, own.num_requests, held.num_requests, num_requests):
            raise self._overloaded(counted(held.num_requests, "request"), "--max-queued-requests", tenant)
        alone = not own.num_requests
        if not alone and not keeps(limits.max_queued_sequences, own.num_sequences, held.num_sequences, num_sequences):
            raise self._overloaded(counted(held.num_sequences, "sequence"), "--max-queued-sequences", tenant)
        alone = not own.num_tokens
        if not alone and not keeps(limits.max_queued_tokens, own.num_tokens, held.num_tokens, num_tokens):
            raise self._overloaded(f"prompts of {counted(held.num_tokens, 'token')}", "--max-queued-tokens", tenant)

    def enter(self, request_id: str, tenant: str = "", num_sequences: int = 1) -> None:
        """Let a request in.

        Raises: EngineOverloaded.
        """
        self.check(tenant, num_requests=1, num_sequences=num_sequences)
        self._queued[request_id] = _Queued(self._clock(), tenant, num_sequences)
        for held in (self._all, self._tenants.setdefault(tenant, _Held())):
            held.num_requests += 1
            held.num_sequences += num_sequences

    def charge(self, request_id: str, num_tokens: int) -> None:
        """Count a request's prompt, once it is tokenised.

        Raises: EngineOverloaded.
        """
        queued = self._queued.get(request_id)
        if queued is None:
            return  # it was aborted in the meantime
        self.check(queued.tenant, num_tokens=num_tokens)
        queued.num_tokens = num_tokens
        for held in (self._all, self._tenants[queued.tenant]):
            held.num_tokens += num_tokens

    def leave(self, request_id: str) -> None:
        """The request has its first token, or has ended. Idempotent."""
        queued = self._queued.pop(request_id, None)
        if queued is None:
            return
        own = self._tenants[queued.tenant]
        for held in (own, self._all):
            held.num_requests -= 1
            held.num_sequences -= queued.num_sequences
            held.num_tokens -= queued.num_tokens
        if not own.num_requests:
            del self._tenants[queued.tenant]

    def _overloaded(self, what: str, flag: str, tenant: str) -> EngineOverloaded:
        """The tenant's oldest request's wait so far is what its next one must expect at least."""
        of_tenant = (queued for queued in self._queued.values() if queued.tenant == tenant)
        oldest = next(of_tenant, next(iter(self._queued.values()), None))
        seconds = max(1, round(self._clock() - oldest.entered_at)) if oldest is not None else 1
        share = f", and {len(self._tenants)} keys share it" if len(self._tenants) > 1 else ""
        return EngineOverloaded(
            f"the queue is full: it holds {what} ({flag}){share}; try again in {seconds} s",
            retry_after=seconds,
        )

"""Plain numbers about requests and steps; no metrics library here."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from enum import StrEnum


class Constraint(StrEnum):
    """What keeps a step from holding more."""

    ARRIVALS = "arrivals"
    """Nothing: all that has come is in it."""
    KV_CACHE = "kv cache"
    """The next in the queue finds too few free blocks, or running sequences had to be preempted."""
    MAX_NUM_SEQS = "max_num_seqs"
    TOKEN_BUDGET = "token budget"
    """max_num_batched_tokens."""


class Wait(StrEnum):
    """What a request waits for. Those that are a `Constraint` as well have its name."""

    STEP = "next step"
    """The beginning of the next step: one ran when it arrived."""
    KV_CACHE = "kv cache"
    MAX_NUM_SEQS = "max_num_seqs"
    TOKEN_BUDGET = "token budget"
    TENANT_SHARE = "tenant share"
    """Its tenant has its share of the engine, while others are active."""
    BRANCH = "another branch"
    """Another branch of the request computes the prompt that both share."""
    LOADING = "loading"
    """Blocks of its prefix are loaded from memory or a file."""


class Phase(StrEnum):
    """What a request is doing in the core. At each moment it is in one phase."""

    QUEUED = "queued"
    """Waits for its first step."""
    PREFILL = "prefill"
    """Its prompt is computed."""
    STALLED = "stalled"
    """Its prompt is partly computed, and steps go by without it."""
    DECODE = "decode"
    """Tokens are generated."""
    PREEMPTED = "preempted"
    """It has lost its blocks and waits to go on."""
    RECOMPUTE = "recompute"
    """After that, what it had is computed again."""
    TRIAL = "trial"
    """Set aside while a request that may have ended a core runs alone."""
    RESTART = "restart"
    """Its core has ended: from the last token known to the queue of the next core."""


COMPUTING = (Phase.PREFILL, Phase.STALLED, Phase.RECOMPUTE)
"""Phases in which tokens are computed that the request has already."""


@dataclass(slots=True)
class Span:
    """One phase, or a part of one. Times are seconds of `time.monotonic()`."""

    phase: Phase
    started_at: float
    ended_at: float
    first_step: int = 0
    """Number of the first step in it; 0: none is known."""
    num_steps: int = 0
    """Consecutive steps that computed some of the prompt."""
    num_tokens: int = 0
    """Computed in those steps."""
    waited_for: dict[Wait, float] = field(default_factory=dict)
    """Seconds by what it waited for."""
    branch: int = -1
    """Set where one branch waited while others went on; -1: the request as a whole."""


MAX_SPANS = 32
"""Kept of a request. Further ones are counted, and their seconds are in `phase_s`."""


@dataclass(slots=True)
class RequestEffort:
    """What it took to compute a request's prompt, and why it waited. Sent when it has changed, not with every token."""

    num_prefill_steps: int = 0
    """Steps in which prompt tokens were computed, or output tokens computed again after a preemption."""
    num_computed_tokens: int = 0
    """In those steps."""
    held_steps: dict[Wait, int] = field(default_factory=dict)
    """Steps that went by while it was queued, by what bound them."""
    num_replays: int = 0
    """Times it went on in another core because its own had ended."""
    held_s: dict[Wait, float] = field(default_factory=dict)
    """Seconds in which it was queued, preempted or stalled, by what it waited for."""
    phase: Phase = Phase.QUEUED
    """The present one, since `phase_at`."""
    phase_at: float = 0.0
    phase_s: dict[Phase, float] = field(default_factory=dict)
    """Seconds in phases that have ended. With the present one they cover all time since the arrival."""
    spans: list[Span] = field(default_factory=list)
    """What happened when: the first `MAX_SPANS` parts."""
    num_more_spans: int = 0
    """Parts beyond those."""

    def enter(self, phase: Phase, now: float) -> Phase:
        """End the present phase; the one that has ended."""
        ended, self.phase = self.phase, phase
        self.phase_s[ended] = self.phase_s.get(ended, 0.0) + now - self.phase_at
        self.phase_at = now
        return ended

    def keep(self, span: Span) -> None:
        """Remember a part, as long as there is room."""
        if len(self.spans) < MAX_SPANS:
            self.spans.append(span)
        else:
            self.num_more_spans += 1

    def ended(self, now: float) -> RequestEffort:
        """The effort of a request that has ended; the core may go on counting."""
        ended_at = max(now, self.phase_at)
        copy = replace(
            self,
            held_steps=dict(self.held_steps),
            held_s=dict(self.held_s),
            phase_s=self.seconds(ended_at),
            phase_at=ended_at,
            spans=list(self.spans),
        )
        if ended_at > self.phase_at and self.phase not in COMPUTING:  # whose steps are spans already
            copy.keep(Span(self.phase, self.phase_at, ended_at))
        return copy

    def seconds(self, now: float) -> dict[Phase, float]:
        """Seconds by phase, the present one up to now."""
        present = self.phase_s.get(self.phase, 0.0) + max(0.0, now - self.phase_at)
        return {**self.phase_s, self.phase: present}


@dataclass(slots=True)
class RequestStats:
    """When what happened to a request. Times are seconds of the core's monotonic clock, 0 until they happen.

    The properties have the names of vLLM's `RequestStateStats`.
    """

    received_at: float = 0.0
    """When it came in, before it was read and tokenised."""
    arrived_at: float = 0.0
    """When it was read and tokenised, and went to the core."""
    scheduled_at: float = 0.0
    """When the first step began that computed some of it."""
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    num_generation_tokens: int = 0
    num_preemptions: int = 0

    @property
    def arrival_time(self) -> float:
        """When it came in, in seconds since 1970."""
        return time.time() - (time.monotonic() - self.received_at)

    @property
    def queued_ts(self) -> float:
        """When it went to the core."""
        return self.arrived_at

    @property
    def scheduled_ts(self) -> float:
        """When its first step began."""
        return self.scheduled_at

    @property
    def first_token_ts(self) -> float:
        """When its first token was there."""
        return self.first_token_at

    @property
    def last_token_ts(self) -> float:
        """When its last token was there."""
        return self.last_token_at

    @property
    def first_token_latency(self) -> float:
        """Seconds from the time it came in to its first token; 0 without one."""
        return self.first_token_at - self.received_at if self.first_token_at else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveSequence:
    """How far one branch of an unfinished request is."""

    branch: int
    is_running: bool
    """False while it waits: for its first turn, or after a preemption."""
    num_computed_tokens: int
    num_output_tokens: int
    num_blocks: int
    num_own_blocks: int
    """Those of them that no other sequence uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveRequest:
    """An unfinished request: sizes, times and progress, no text and no tokens."""

    request_id: str
    num_branches: int
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache; -1 before they were looked up."""
    max_tokens: int
    """Of each branch."""
    stats: RequestStats
    effort: RequestEffort
    sequences: list[ActiveSequence]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What one tenant has in a core. Sent when somebody asks."""

    taken_at: float
    """By the core's clock."""
    num_running: int
    """Its sequences, whether they are in `requests` or not."""
    num_waiting: int
    num_tenants: int
    """Tenants with unfinished requests."""
    requests: list[ActiveRequest]
    """The running ones first; bounded."""


@dataclass(slots=True)
class StepStats:
    """What one engine step did and how full the engine is after it."""

    num_running: int = 0
    num_waiting: int = 0
    num_batched_tokens: int = 0
    num_preempted: int = 0
    num_total_blocks: int = 0
    num_free_blocks: int = 0
    """Blocks that hold nothing anybody uses (cached ones included: they can be evicted)."""
    num_cached_blocks: int = 0
    """Those of the free ones whose content can still be found by a request."""
    num_shared_blocks: int = 0
    """Blocks that several sequences use."""
    num_tier_slots: int = 0
    """Pages for which there is room in `kv_ram` and `kv_disk`."""
    num_tier_pages: int = 0
    """Pages that are there."""
    prefix_cache_queries: int = 0
    """Tokens looked up since the start."""
    prefix_cache_hits: int = 0
    """Tokens found since the start."""
    constraint_steps: dict[Constraint, int] = field(default_factory=dict)
    """Steps since the start by what bound them."""
    num_preemptions: int = 0
    """Since the start, as everything below."""
    tier_hit_tokens: int = 0
    """Tokens that loaded pages spared: of `prefix_cache_hits`, and those that preempted sequences found again there."""
    num_tier_loads: int = 0
    """Pages loaded, those that failed included."""
    num_tier_saves: int = 0
    """Pages saved when the pool evicted them."""
    num_tier_failures: int = 0
    """Pages that were not what they should be, and were computed again."""
    num_steps: int = 0
    step_time_s: float = 0.0
    """Spent in steps, from deciding to learning."""
    num_computed_tokens: int = 0
    steps_by_tokens: dict[int, int] = field(default_factory=dict)
    """Steps by how many tokens they computed, rounded up to a power of two."""
    num_generation_tokens: int = 0
    num_first_tokens: int = 0
    first_token_time_s: float = 0.0
    """Arrival to first token, summed over the requests that have one."""


_TOTALS = (
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "tier_hit_tokens",
    "num_tier_loads",
    "num_tier_saves",
    "num_tier_failures",
    "num_steps",
    "step_time_s",
    "num_computed_tokens",
    "num_generation_tokens",
    "num_first_tokens",
    "first_token_time_s",
)
_TOTALS_BY_KIND = ("constraint_steps", "steps_by_tokens")


def continued(before: StepStats, stats: StepStats) -> StepStats:
    """The state of a core, its totals on top of those of cores that ended before it."""
    totals = {name: getattr(before, name) + getattr(stats, name) for name in _TOTALS}
    for name in _TOTALS_BY_KIND:
        old, new = getattr(before, name), getattr(stats, name)
        totals[name] = {kind: old.get(kind, 0) + new.get(kind, 0) for kind in {**old, **new}}
    return replace(stats, **totals)

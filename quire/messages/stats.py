"""Plain numbers about requests and steps; no metrics library here."""

from __future__ import annotations

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


@dataclass(slots=True)
class RequestEffort:
    """What it took to compute a request's prompt, and why it waited. Sent when it has changed, not with every token."""

    num_prefill_steps: int = 0
    """Steps in which prompt tokens were computed, or output tokens computed again after a preemption."""
    num_computed_tokens: int = 0
    """In those steps."""
    held_steps: dict[Constraint, int] = field(default_factory=dict)
    """Steps that went by while it was queued, by what bound them."""
    num_replays: int = 0
    """Times it went on in another core because its own had ended."""


@dataclass(slots=True)
class RequestStats:
    """When what happened to a request. Times are seconds of the core's monotonic clock, 0 until they happen."""

    arrived_at: float = 0.0
    scheduled_at: float = 0.0
    """First time it was given tokens to compute."""
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    num_generation_tokens: int = 0
    num_preemptions: int = 0


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
    prefix_cache_queries: int = 0
    """Tokens looked up since the start."""
    prefix_cache_hits: int = 0
    """Tokens found since the start."""
    constraint_steps: dict[Constraint, int] = field(default_factory=dict)
    """Steps since the start by what bound them."""
    num_preemptions: int = 0
    """Since the start, as everything below."""
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

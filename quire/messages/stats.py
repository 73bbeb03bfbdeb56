"""Plain numbers about requests and steps; no metrics library here."""

from __future__ import annotations

from dataclasses import dataclass


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
    prefix_cache_queries: int = 0
    """Tokens looked up since the start."""
    prefix_cache_hits: int = 0
    """Tokens found since the start."""

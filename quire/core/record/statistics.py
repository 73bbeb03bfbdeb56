"""What the steps of a scheduler have done: plain counts since the start."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.core.kv.block_manager import BlockManager
from quire.messages.stats import Constraint, RequestStats, StepStats
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs


@dataclass(slots=True)
class Totals:
    """Counts since the start."""

    constraint_steps: dict[Constraint, int] = field(default_factory=lambda: dict.fromkeys(Constraint, 0))
    num_preemptions: int = 0
    num_steps: int = 0
    steps_by_tokens: dict[int, int] = field(default_factory=dict)
    step_time_s: float = 0.0
    num_computed_tokens: int = 0
    num_generation_tokens: int = 0
    num_first_tokens: int = 0
    first_token_time_s: float = 0.0

    def add_step(self, plan: SchedulerOutputs, result: ModelRunnerOutput, step_s: float) -> None:
        """Count a step that took `step_s` seconds."""
        self.num_steps += 1
        self.step_time_s += step_s
        self.num_computed_tokens += plan.num_batched_tokens
        if plan.num_batched_tokens:
            bound = 1 << (plan.num_batched_tokens - 1).bit_length()
            self.steps_by_tokens[bound] = self.steps_by_tokens.get(bound, 0) + 1
        self.num_generation_tokens += sum(map(len, result.token_ids)) + sum(map(len, result.forks.values()))

    def add_first_token(self, stats: RequestStats) -> None:
        """Count a request's first token."""
        self.num_first_tokens += 1
        self.first_token_time_s += stats.first_token_at - stats.arrived_at

    def after(self, plan: SchedulerOutputs, blocks: BlockManager, num_running: int, num_waiting: int) -> StepStats:
        """How full the engine is after a step, and what it has done."""
        pool = blocks.pool
        stats = StepStats(
            num_running=num_running,
            num_waiting=num_waiting,
            num_batched_tokens=plan.num_batched_tokens,
            num_preempted=len(plan.preempted_seq_ids),
            num_total_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_evictable,
            num_shared_blocks=pool.num_shared,
            prefix_cache_queries=blocks.num_queried_tokens,
            prefix_cache_hits=blocks.num_hit_tokens,
            constraint_steps=dict(self.constraint_steps),
            num_preemptions=self.num_preemptions,
            num_steps=self.num_steps,
            step_time_s=self.step_time_s,
            num_computed_tokens=self.num_computed_tokens,
            steps_by_tokens=dict(self.steps_by_tokens),
            num_generation_tokens=self.num_generation_tokens,
            num_first_tokens=self.num_first_tokens,
            first_token_time_s=self.first_token_time_s,
        )
        tiers = blocks.tiers
        if tiers is not None:
            stats.num_tier_slots, stats.num_tier_pages = tiers.num_slots, tiers.num_pages
            stats.tier_hit_tokens, stats.num_tier_failures = tiers.num_hit_tokens, tiers.num_failures
            stats.num_tier_loads, stats.num_tier_saves = tiers.num_loads, tiers.num_saves
        return stats

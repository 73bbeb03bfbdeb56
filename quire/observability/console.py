"""One status line every few seconds while there is work: what runs, how fast, and what keeps it from being more."""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.log import get_logger
from quire.messages.stats import Constraint, StepStats

log = get_logger(__name__)


class StatusLine:
    """Turns the running totals of a core into rates. `tick` it after every step."""

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._since = clock()
        self._before = StepStats()

    def resume(self, stats: Callable[[], StepStats]) -> None:
        """Work comes to an idle core: a long pause before it is no part of the next line."""
        now = self._clock()
        if now - self._since >= self._interval_s:
            self._before, self._since = stats(), now

    def tick(self, stats: Callable[[], StepStats]) -> None:
        """Log a line if one is due; `stats` is only called then."""
        now = self._clock()
        if now - self._since >= self._interval_s:
            after = stats()
            log.info("%s", status_line(self._before, after, now - self._since))
            self._before, self._since = after, now


def status_line(before: StepStats, after: StepStats, elapsed_s: float) -> str:
    """What happened between two states of one core."""
    num_output = after.num_generation_tokens - before.num_generation_tokens
    num_decoded = num_output - (after.num_first_tokens - before.num_first_tokens)
    num_input = max(0, after.num_computed_tokens - before.num_computed_tokens - num_decoded)
    used = after.num_total_blocks - after.num_free_blocks
    queries = after.prefix_cache_queries - before.prefix_cache_queries
    hits = after.prefix_cache_hits - before.prefix_cache_hits
    hit_rate = f"{hits / queries:.0%}" if queries else "-"
    return (
        f"running={after.num_running} waiting={after.num_waiting} in={num_input / elapsed_s:.0f} tok/s "
        f"out={num_output / elapsed_s:.0f} tok/s kv={used / max(after.num_total_blocks, 1):.0%} "
        f"prefix_hits={hit_rate} preempted={after.num_preemptions - before.num_preemptions} "
        f"bound by: {binding_constraint(before, after)}"
    )


def binding_constraint(before: StepStats, after: StepStats) -> Constraint:
    """What bound most of the steps between two states."""
    steps = {name: after.constraint_steps.get(name, 0) - before.constraint_steps.get(name, 0) for name in Constraint}
    return max(Constraint, key=lambda name: steps[name])

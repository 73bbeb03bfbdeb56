"""What `benchmarks.soak` measures: durations, and what a server holds."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field


class Times:
    """Durations in buckets 1 % wide, so that millions take no room."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        self._buckets[int(100 * math.log(seconds + 1e-9))] += 1

    def __len__(self) -> int:
        return self._buckets.total()

    def percentile_ms(self, percent: float) -> float:
        wanted = percent / 100 * len(self)
        reached = itertools.accumulate(self._buckets[bucket] for bucket in sorted(self._buckets))
        bucket = next(bucket for bucket, count in zip(sorted(self._buckets), reached, strict=True) if count >= wanted)
        return 1e3 * math.exp((bucket + 0.5) / 100)


@dataclass(slots=True)
class Half:
    """One half of the run."""

    seconds: float = 0.0
    first: Times = field(default_factory=Times)
    gaps: Times = field(default_factory=Times)
    requests: Times = field(default_factory=Times)


@dataclass(frozen=True, slots=True)
class Level:
    """What the server holds."""

    at: float
    memory_mib: dict[str, float]
    """Resident and proportional, of each process."""
    open: dict[str, int]
    """Descriptors, threads and tasks."""

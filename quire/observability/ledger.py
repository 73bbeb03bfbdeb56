"""Where the time and the memory of a start went, and how far it is: named stages that add up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.utils.process import memory_status


class Ledger:
    """Stages of a start and their seconds, in order."""

    def __init__(self, started_at: float | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        """`started_at` may lie before now, on the same clock: what passed since is charged to `interpreter`."""
        self.clock = clock
        self.started_at = clock() if started_at is None else started_at
        self.current = ""
        """The latest stage that began."""
        self.progress = 0
        """Grows while a long stage works, in units of that stage: bytes of weights, for example."""
        self.memory: dict[str, int] = {}
        """Bytes of memory of its own that the process took in each stage; files that are mapped do not count."""
        self.stages: dict[str, float] = {} if started_at is None else {"interpreter": clock() - started_at}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Charge the time and the memory of the block to a stage; the same name may be charged again."""
        self.current = name
        start, held = self.clock(), own_memory()
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + self.clock() - start
            self.memory[name] = self.memory.get(name, 0) + own_memory() - held

    @property
    def total_s(self) -> float:
        """Seconds since the ledger was opened."""
        return self.clock() - self.started_at

    def line(self) -> str:
        """For people: `0.84 s (imports 0.52, config 0.01, ...)`."""
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.stages.items())
        return f"{self.total_s:.2f} s ({parts})"


def own_memory() -> int:
    """Bytes that this process holds and shares with no file; 0 where the system does not say."""
    return memory_status().get("RssAnon", 0)

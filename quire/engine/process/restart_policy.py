"""How often a process is replaced, and what counts as hanging."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from quire.config.flags.knobs import knob, read_knobs

BACK_OFF_S = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Pause before the n-th restart in a window; the last one for all further ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """When to give up on a core. Times are seconds.

    Raises: ConfigError.
    """

    max_engine_restarts: int = knob(5, "Times the engine process is replaced in a window before giving up.", least=0)
    engine_restart_window: int = knob(600, "The window in which replacements count.", least=1)
    engine_restart_pause: int = knob(4, "Longest pause before a replacement; the first follows at once.", least=0)
    step_timeout: int = knob(60, "A step that takes longer, and ten times the longest so far, hangs.", least=1)

    startup_timeout: int = knob(
        300,
        "A start without progress for so long hangs; progress: a new stage, bytes read or written, modules imported.",
        least=1,
    )
    front_timeout: int = knob(
        30, "A front process that reads or answers nothing for so long is replaced, with its connections.", least=1
    )

    trace_dir: str | None = knob(
        None,
        "Directory for traces of the last steps before the engine process crashed or quarantined a request; the "
        "system's for temporary files when left out.",
    )

    def __post_init__(self) -> None:
        read_knobs(self)


class RestartBudget:
    """The restarts of one process: those in the current window, and those since it last worked."""

    def __init__(self, policy: RestartPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self.policy = policy
        self._clock = clock
        self._restarts: deque[float] = deque()
        self._num_in_a_row = 0

    def worked(self) -> None:
        """The process has become ready: restarts before this one count only as long as their window."""
        self._num_in_a_row = 0

    def __len__(self) -> int:
        now = self._clock()
        while self._restarts and now - self._restarts[0] > self.policy.engine_restart_window:
            self._restarts.popleft()
        return len(self._restarts)

    def spend(self) -> float | None:
        """Seconds to wait before the next restart, which is counted; None when none is left.

        Restarts in a row count however long they take: starts that hang would else be tried for ever.
        """
        count = max(len(self), self._num_in_a_row)
        if count >= self.policy.max_engine_restarts:
            return None
        self._num_in_a_row += 1
        self._restarts.append(self._clock())
        return min(BACK_OFF_S[min(count, len(BACK_OFF_S) - 1)], self.policy.engine_restart_pause)

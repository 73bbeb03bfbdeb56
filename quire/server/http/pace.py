"""`Pace`: a transfer that must make progress, or it is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LATE_S = 0.1
"""An event loop that is later than this has not seen what moved meanwhile: timers come before sockets."""


class Pace:
    """Looks at a transfer once in each window of time, and gives it up when too few bytes have moved in one.

    Windows instead of an average: bytes that came early must not pay for a stand-still later. A window in which the
    event loop stood still is longer by that time.
    """

    def __init__(self, window_s: float, rate: int, num_moved: Callable[[], int], give_up: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._window_s = window_s
        self._least = int(window_s * rate)
        self._num_moved = num_moved
        self._give_up = give_up
        self._timer: asyncio.TimerHandle | None = None
        self._left_s: float | None = None
        """What is left of the window of a transfer that is paused."""
        self._is_paused = False
        self._num_before = 0
        self._due_at = 0.0
        """When the window ends."""

    @property
    def is_running(self) -> bool:
        """Whether a transfer is being watched, paused or not."""
        return self._timer is not None or self._left_s is not None

    def start(self) -> None:
        """Begin a window now, whatever was watched before."""
        self.stop()
        self._num_before = self._num_moved()
        self._wait(self._window_s)

    def stop(self) -> None:
        """Watch nothing. Idempotent."""
        self._left_s = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def pause(self) -> None:
        """Stop the clock: this side makes the other one wait. Idempotent."""
        self._is_paused = True
        if self._timer is not None:
            left_s = self._timer.when() - self._loop.time()
            self.stop()
            self._left_s = max(0.0, left_s)

    def resume(self) -> None:
        """Let the clock go on. Idempotent."""
        self._is_paused = False
        if self._left_s is not None:
            left_s, self._left_s = self._left_s, None
            self._wait(left_s)

    def _wait(self, seconds: float) -> None:
        self._due_at = self._loop.time() + seconds
        if self._is_paused:
            self._left_s = seconds
        else:
            self._timer = self._loop.call_later(seconds, self._judge)

    def _judge(self) -> None:
        self._timer = None
        late_s = self._loop.time() - self._due_at
        if self._num_moved() - self._num_before >= self._least:
            self.start()
        elif late_s > LATE_S:
            self._wait(min(late_s, self._window_s))
        else:
            self._give_up()

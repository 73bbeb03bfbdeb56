"""`VirtualClock`: time that passes only when somebody says so."""

from __future__ import annotations


class VirtualClock:
    """Seconds since the start of a simulation; called like `time.monotonic`."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The present moment."""
        return self.now

    def wait_until(self, moment: float) -> None:
        """Let time pass; a moment that is over changes nothing."""
        self.now = max(self.now, moment)

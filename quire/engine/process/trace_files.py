"""Traces of cores that crashed or quarantined a request: private files, a bounded number of them."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from quire.log import get_logger
from quire.observability.chrome_trace import chrome_trace, encoded

log = get_logger(__name__)

MAX_FILES = 8
"""Kept of one server, of crashes and of quarantines each; a further one replaces the oldest."""
PAUSE_S = 60.0
"""Between two files that requests can cause."""


class TraceFiles:
    """Writes traces in a thread of its own, so that no restart waits for a disk."""

    def __init__(self, directory: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Without a directory it is the system's for temporary files."""
        self._directory = directory
        self._clock = clock
        self._crashes: deque[str] = deque()
        self._quarantines: deque[str] = deque()
        self._next_at = 0.0
        self._thread = ThreadPoolExecutor(1, "quire-traces")

    def crashed(self, memory: bytes, reason: str) -> None:
        """Write what a flight recorder held, unless that is nothing, and log where."""
        self._thread.submit(self._write, memory, reason, self._clock(), self._crashes)

    def quarantined(self, memory: bytes, reason: str) -> None:
        """The same, unless it was done a short while ago: requests can cause it."""
        if self._clock() >= self._next_at:
            self._next_at = self._clock() + PAUSE_S
            self._thread.submit(self._write, memory, reason, self._clock(), self._quarantines)

    def close(self) -> None:
        """Wait for what is being written. Idempotent."""
        self._thread.shutdown()

    def _write(self, memory: bytes, reason: str, now: float, kept: deque[str]) -> None:
        try:
            trace = chrome_trace(memory, now=now, reason=reason)
            if trace["otherData"]["num_steps"]:
                path = self._store(encoded(trace), kept)
                log.error("trace of the engine's last steps: %s (ui.perfetto.dev opens it; reason: %s)", path, reason)
        except OSError as error:
            log.error("the trace of the engine's last steps cannot be written: %s (--trace-dir)", error)
        except Exception:
            log.exception("the trace of the engine's last steps cannot be made")

    def _store(self, pieces: list[bytes], kept: deque[str]) -> str:
        """A new file that only this user can read."""
        if self._directory is not None:
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
        descriptor, path = tempfile.mkstemp(".json", "quire-trace-", self._directory)
        try:
            with open(descriptor, "wb") as file:
                file.writelines(pieces)
        except OSError:
            os.unlink(path)
            raise
        kept.append(path)
        if len(kept) > MAX_FILES:
            with contextlib.suppress(OSError):  # somebody has taken it away
                os.unlink(kept.popleft())
        return path

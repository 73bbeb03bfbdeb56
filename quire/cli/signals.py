"""What signals do to a command: they end it at once, except where an answer is being streamed.

Python turns SIGINT into an exception at any instruction. In the middle of an import that leaves the import lock held
and the process hangs. So no command waits for an exception: until it streams it has nothing to save.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SIGINT_STATUS = 128 + signal.SIGINT


def end_on_signals() -> None:
    """Have each end signal end the process with status 128 + its number; one that is ignored (nohup) stays so."""
    for number in END_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


@contextmanager
def interruptible() -> Iterator[None]:
    """Have Ctrl-C raise KeyboardInterrupt in this block, if it would end the process outside it."""
    outside = signal.getsignal(signal.SIGINT)
    if outside is not _end:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, outside)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)  # no clean-up that could wait for a lock: children end with this process

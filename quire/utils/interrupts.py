"""Ctrl-C in a program that uses quire as a library."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Raise the KeyboardInterrupt of a Ctrl-C at the end of the block instead of in it.

    In the middle of an import it would leave an import lock held or a half-imported module. Only Python's own handler
    is replaced: whoever has set another one decides what Ctrl-C does.
    """
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if came:
            raise KeyboardInterrupt
